"""What several host libraries need: a recipe in the host's precision, and weights for vLLM.

TRL's GRPO and RLOO with `use_vllm=True` send weights from a sharded model to vLLM:

every rank   runs onefold.stream_params, one unit at a time, with adapters merged
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
from onefold.recipe import COMPUTE_DTYPES, Recipe
from onefold.runtime.hooks import is_sharded

#: TRL's method that yields (name, whole tensor) of each parameter for vLLM.
_HOOK = "_iter_named_params"
_MODULE = "trl.generation.vllm_generation"


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


def connect(trainer: Any) -> None:
    """Make a trainer stream the sharded model's weights to vLLM.

    Raises:
        NotImplementedError: the trainer does not send its weights by TRL's VLLMGeneration.
    """
    kind = type(getattr(trainer, "vllm_generation", None))
    if not hasattr(kind, _HOOK):
        raise NotImplementedError(
            f"use_vllm=True: {type(trainer).__name__} does not send its weights by TRL's"
            " VLLMGeneration: leave use_vllm out, and the ranks that train generate themselves."
        )
    _stream(kind)


def stream_under_the_name() -> None:
    """Make TRL stream weights where the name `deepspeed` is served.

    With DeepSpeed, TRL would gather the whole of a model with adapters at once, to merge them.
    """
    if kind := getattr(sys.modules.get(_MODULE), "VLLMGeneration", None):
        _stream(kind)


def _stream(kind: Any) -> None:
    """Make this class of TRL stream the weights of models that Onefold has sharded."""
    plain = getattr(kind, _HOOK, None)
    if plain is None or hasattr(plain, "onefold"):
        return

    def _iter_named_params(self: Any) -> Iterator[tuple[str, Tensor]]:
        return _weights(self.model) if is_sharded(self.model) else plain(self)

    _iter_named_params.onefold = True  # type: ignore[attr-defined]
    setattr(kind, _HOOK, _iter_named_params)


def _weights(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    # vLLM keeps its own buffers
    adapted = bool(getattr(model, "peft_config", None))
    return onefold.stream_params(model, merge_adapters=adapted, buffers=False)
