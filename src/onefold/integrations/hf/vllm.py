"""TRL's weights for vLLM (`use_vllm=True` of GRPO and RLOO), streamed from a sharded model.

every rank   onefold.stream_params, a bucket at a time, adapters added as it goes
server       rank 0 sends what comes to the server; the others only take part
colocate     every rank hands what comes to the engine in its own process
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn

import onefold
from onefold.pretrained.merged import Merging
from onefold.runtime.registry import is_sharded

#: TRL's method that gives (name, whole tensor) of each parameter, for the engine.
_HOOK = "_iter_named_params"


def refuse_without_hook() -> None:
    """Raise NotImplementedError if this TRL has no place to give whole tensors to vLLM."""
    try:
        from trl.generation.vllm_generation import VLLMGeneration
    except ImportError:
        known = False
    else:
        known = hasattr(VLLMGeneration, _HOOK)
    if not known:
        raise NotImplementedError(
            f"use_vllm=True: this TRL has no VLLMGeneration.{_HOOK}, through which whole weights"
            " reach vLLM: install TRL 1.16, or leave use_vllm out, and the ranks that train"
            " generate themselves."
        )


class StreamsWeights:
    """What TRL's VLLMGeneration becomes, see `connect`.

    Attributes:
        onefold_bucket: bytes of whole tensors at a time.
    """

    model: Any
    onefold_bucket: int | str

    def _iter_named_params(self) -> Iterator[tuple[str, Tensor]]:
        """Each parameter of the model, whole, by the base model's name. Collective: every rank
        goes through all.
        """
        if not is_sharded(self.model):
            yield from super()._iter_named_params()  # type: ignore[misc]
            return
        adapted = bool(getattr(self.model, "peft_config", None))
        parameters = _names(self.model)
        for name, whole in onefold.stream_params(
            self.model, self.onefold_bucket, merge_adapters=adapted
        ):
            if name in parameters:  # buffers are the engine's own
                yield name, whole


def connect(trainer: Any, bucket: int | str) -> None:
    """Make a trainer's vLLM take its weights from the sharded model.

    Raises:
        NotImplementedError: the trainer has another way to vLLM.
    """
    generation = getattr(trainer, "vllm_generation", None)
    if generation is None or not hasattr(type(generation), _HOOK):
        raise NotImplementedError(
            f"use_vllm=True: {type(trainer).__name__} does not send its weights by TRL's"
            " VLLMGeneration: leave use_vllm out, and the ranks that train generate themselves."
        )
    kind = type(generation)
    generation.__class__ = type(f"Streaming{kind.__name__}", (StreamsWeights, kind), {})
    generation.onefold_bucket = bucket


def _names(model: nn.Module) -> set[str]:
    """Of parameters, as `stream_params` calls them: those of the base model."""
    own = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    if not getattr(model, "peft_config", None):
        return own
    return {plain for name, plain in Merging.of(model).names.items() if name in own}
