"""Notes for the user at the start: what the recipe left open, and which of its options have no
effect.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from onefold.recipe.rows import FLAT, GROUP, NATIVE

if TYPE_CHECKING:
    from onefold.runtime.engine import Engine

_NARROW = (torch.bfloat16, torch.float16)


def precision_notes(engine: Engine) -> list[str]:
    """Return a sentence about the 16-bit weights that are trained, if the recipe takes the model's
    dtypes as they are. The list is empty if there are no such weights.
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


def idle_notes(engine: Engine) -> list[str]:
    """Return a sentence for each option that changes nothing in this run: about one rank, groups,
    or frozen weights.
    """
    recipe, said = engine.recipe, []
    divides = GROUP in (recipe.parameters.over, recipe.gradients.over, recipe.optimizer.over)
    if engine.world_size == 1:
        named = {"gather_codec": recipe.parameters.codec, "reduce_codec": recipe.gradients.codec}
        idle = [f"{name}={value!r}" for name, value in named.items() if value]
        idle += ["a division inside groups"] if divides else []
        idle += [f"reduce={NATIVE!r}"] if recipe.reduce == NATIVE else []
        if idle:
            said.append(f"{' and '.join(idle)}: no effect on one rank, from which nothing travels.")
    # Only if the user named a group: the default takes nodes as groups, or does without groups.
    if recipe.group not in (None, FLAT) and engine.group.topology.outer == 1 < engine.world_size:
        node = (
            "the launcher says that all are on one node, or that nodes are uneven, or nothing of"
            " nodes (LOCAL_WORLD_SIZE)"
        )
        why = node if recipe.group == "node" else "they are all"
        said.append(
            f"group={recipe.group!r} makes one group of the {engine.world_size} ranks ({why}):"
            " nothing is divided inside groups only."
        )
    if recipe.frozen and not any(
        flat.storage.encoded for unit in engine.units for flat in unit.flats
    ):
        said.append(
            f"frozen={recipe.frozen!r} has no effect: no matrix but embeddings was frozen when"
            " shard() was called."
        )
    return said


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
