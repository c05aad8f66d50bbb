"""What several host libraries need: a recipe in the host's precision, and weights for vLLM.

TRL's GRPO and RLOO with `use_vllm=True` send weights from a sharded model to vLLM:

every rank   runs onefold.stream_params, one bucket at a time, with adapters merged
server       rank 0 sends the tensors to the server; the other ranks only take part
colocate     every rank gives the tensors to the engine in its own process

`connect` sets this up for a trainer with `onefold.hf.TrainerMixin`. Where the name `deepspeed` is
served, `stream_under_the_name` replaces the method of TRL that would gather through that name.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

import onefold
from onefold.pretrained.merged import Merging
from onefold.recipe import COMPUTE_DTYPES, Recipe
from onefold.runtime.hooks import is_sharded

#: TRL's method that yields (name, whole tensor) of each parameter for vLLM.
_HOOK = "_iter_named_params"
_MODULE = "trl.generation.vllm_generation"
#: Bytes of whole tensors that are gathered at a time, where the name `deepspeed` is served.
BUCKET: int | str = "1GB"


def in_precision(recipe: Recipe, dtype: torch.dtype | None, asked: str) -> Recipe:
    """Return the recipe with the precision that a host asks for: parameters are gathered and compute
    in `dtype`, as with `Recipe.zero(..., precision=)`. None asks for none.

    Args:
        asked: what the user has written, for messages.

    Raises:
        ValueError: the recipe names another precision.
    """
    own, names = recipe.parameters.dtype, {of: name for name, of in COMPUTE_DTYPES.items()}
    if dtype is None or own == dtype:
        return recipe
    if own is not None:
        raise ValueError(
            f"{asked} computes in {names[dtype]}, and the recipe in"
            f" {str(own).removeprefix('torch.')}: leave one of them out."
        )
    return recipe.replace(precision=names[dtype])


def refuse_without_hook() -> None:
    """Raise NotImplementedError if this version of TRL lacks the method that Onefold replaces."""
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
    """Mixed into a trainer's VLLMGeneration; see `connect`.

    Attributes:
        onefold_bucket: bytes of whole tensors that are gathered at a time.
    """

    model: Any
    onefold_bucket: int | str

    def _iter_named_params(self) -> Iterator[tuple[str, Tensor]]:
        """Yield each parameter, whole, under the base model's name. Collective: every rank must
        iterate to the end.
        """
        if not is_sharded(self.model):
            yield from super()._iter_named_params()  # type: ignore[misc]
            return
        yield from _weights(self.model, self.onefold_bucket)


def connect(trainer: Any, bucket: int | str) -> None:
    """Make a trainer stream the sharded model's weights to vLLM.

    Raises:
        NotImplementedError: the trainer does not send its weights by TRL's VLLMGeneration.
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


def stream_under_the_name() -> None:
    """Make TRL's VLLMGeneration stream the weights of models that Onefold has sharded.

    With DeepSpeed, TRL would gather the whole of a model with adapters at once, to merge them.
    """
    kind = getattr(sys.modules.get(_MODULE), "VLLMGeneration", None)
    plain = getattr(kind, _HOOK, None)
    if kind is None or plain is None or hasattr(plain, "onefold_bucket"):
        return

    def _iter_named_params(self: Any) -> Iterator[tuple[str, Tensor]]:
        if is_sharded(self.model):
            return _weights(self.model, BUCKET)
        return plain(self)

    _iter_named_params.onefold_bucket = BUCKET  # type: ignore[attr-defined]
    setattr(kind, _HOOK, _iter_named_params)


def _weights(model: nn.Module, bucket: int | str) -> Iterator[tuple[str, Tensor]]:
    adapted = bool(getattr(model, "peft_config", None))
    parameters = _names(model)
    for name, whole in onefold.stream_params(model, bucket, merge_adapters=adapted):
        if name in parameters:  # vLLM keeps its own buffers
            yield name, whole


def _names(model: nn.Module) -> set[str]:
    """Return the names of parameters as `stream_params` yields them: the base model's names."""
    own = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    if not getattr(model, "peft_config", None):
        return own
    return {plain for name, plain in Merging.of(model).names.items() if name in own}
