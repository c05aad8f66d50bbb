"""What several host libraries need: a recipe in the host's precision, and weights for vLLM.

TRL's GRPO and RLOO with `use_vllm=True` send weights from a sharded model to vLLM:

every rank   runs onefold.stream_params, one unit at a time, with adapters merged
server       rank 0 sends the tensors to the server; the other ranks only take part
colocate     every rank gives the tensors to the engine in its own process

`stream_to_vllm` sets this up for a trainer with `onefold.hf.TrainerMixin`, and where the name
`deepspeed` is served: through that name TRL would gather the whole of a model with adapters at once.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

import onefold
from onefold.recipe import COMPUTE_DTYPES, Recipe
from onefold.runtime.hooks import is_sharded

#: TRL's method that yields (name, whole tensor) of each parameter for vLLM.
_HOOK = "_iter_named_params"


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


def stream_to_vllm(kind: Any) -> bool:
    """Make TRL's VLLMGeneration stream the weights of models that Onefold has sharded. Returns whether
    this class sends weights by the method that is replaced.
    """
    plain = getattr(kind, _HOOK, None)
    if plain is None or hasattr(plain, "onefold"):
        return plain is not None

    def _iter_named_params(self: Any) -> Iterator[tuple[str, Tensor]]:
        model = self.model
        if not is_sharded(model):
            return plain(self)
        # vLLM keeps its own buffers
        adapted = bool(getattr(model, "peft_config", None))
        return onefold.stream_params(model, merge_adapters=adapted, buffers=False)

    _iter_named_params.onefold = True  # type: ignore[attr-defined]
    setattr(kind, _HOOK, _iter_named_params)
    return True
