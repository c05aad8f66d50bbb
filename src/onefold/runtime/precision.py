"""What a run computes in where the recipe does not say: each parameter's own dtype."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from onefold.runtime.engine import Engine

_NARROW = (torch.bfloat16, torch.float16)


def precision_notes(engine: Engine) -> list[str]:
    """A sentence about the 16-bit weights that train, where the recipe takes the model as it is;
    the list is empty without any.
    """
    recipe = engine.recipe
    flats = [
        flat for unit in engine.units for flat in unit.flats if any(e.active for e in flat.entries)
    ]
    narrow = [flat for flat in flats if flat.dtypes.compute in _NARROW]
    if recipe.compute_dtype is not None or not narrow:
        return []
    names = " and ".join(
        _short(dtype) for dtype in dict.fromkeys(flat.dtypes.compute for flat in flats)
    )
    masters = recipe.master_dtype
    numel = sum(e.slot.numel for flat in narrow for e in flat.entries if e.active)
    mended = "" if masters in _NARROW else ", or master_dtype='bf16' to step them as they are"
    return [
        f"precision=None computes as the model is, in {names}. {numel:,} weights of 16 bits are"
        f" trained, with master weights in {_short(masters)}. Give precision='fp32' to compute in"
        f" fp32{mended}."
    ]


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
