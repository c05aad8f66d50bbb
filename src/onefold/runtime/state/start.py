"""What `shard()` compares among the ranks and refuses before it lays anything out, and the notes that
it logs at the end.
"""

from __future__ import annotations

import hashlib

import torch
from torch import nn

from onefold.comm import CollectiveContext
from onefold.recipe import Recipe
from onefold.recipe.rows import FLAT, GROUP, NATIVE
from onefold.runtime.engine import Engine
from onefold.runtime.state.materialize import has_meta
from onefold.runtime.units import UnitSpec

_START = CollectiveContext("control", "(start)", 0, "state")


def refuse_max_norm(module: nn.Module, alone: bool) -> None:
    """Raise ValueError for embeddings with max_norm: it changes the rows that a rank looks up."""
    for name, inner in module.named_modules() if not alone else ():
        if isinstance(inner, (nn.Embedding, nn.EmbeddingBag)) and inner.max_norm is not None:
            raise ValueError(
                f"{name!r} has max_norm={inner.max_norm}: it renormalizes the rows that a rank"
                " looks up, in its forward pass, so that ranks would come to have different"
                " weights. Leave max_norm out and renormalize after optimizer.step(), under"
                " torch.no_grad(): `w.mul_((max_norm / w.norm(dim=1,"
                " keepdim=True)).clamp(max=1))`."
            )


def compare_ranks(engine: Engine, recipe: Recipe, specs: list[UnitSpec], weights: bool) -> None:
    """Raise on every rank if the ranks were given different recipes or models."""
    found = [
        (f.names, tuple(f.param.shape), f.param.dtype, f.param.requires_grad)
        for s in specs
        for f in s.found
    ]
    parts = {
        "recipes": [
            getattr(recipe, name) for name in Recipe.__dataclass_fields__ if name != "notes"
        ],
        "parameter names": [names for names, *_ in found],
        "parameter shapes": [shape for _, shape, *_ in found],
        "parameter dtypes": [dtype for *_, dtype, _ in found],
        "frozen parameters": [trainable for *_, trainable in found],
        "units": [s.name for s in specs],
        "weights": weights,
    }
    digest = b"".join(hashlib.sha256(repr(part).encode()).digest()[:8] for part in parts.values())
    payload = torch.frombuffer(bytearray(digest), dtype=torch.uint8)
    said = [bytes(p.tolist()) for p in engine.group.exchange_control(payload, _START)]
    for at, name in enumerate(parts):
        cut = slice(8 * at, 8 * at + 8)
        others = [
            engine.group.ranks[r] for r, digests in enumerate(said) if digests[cut] != said[0][cut]
        ]
        if others:
            raise ValueError(
                f"shard() was given different {name} on rank {engine.group.ranks[0]} and on"
                f" {', '.join(f'rank {r}' for r in others)}. Every rank must shard the same model"
                " by the same recipe (weights may differ: rank 0's are taken)."
            )


def rank_0_needs_values(engine: Engine, module: nn.Module) -> bool:
    """Whether rank 0's model is on the meta device, so that its weights must be initialized. Every
    rank gets the same answer. Collective.
    """
    mine = has_meta(module)
    payload = torch.tensor([mine], dtype=torch.uint8, device="cpu")
    return bool(engine.group.exchange_control(payload, _START)[0].item())


# -- notes for the user ----------------------------------------------------------------------------
#
# Notes for the user at the start: what the recipe left open, and which of its options have no
# effect.


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


def flat_notes(engine: Engine) -> list[str]:
    """Return sentences about exchanges that are flat over nodes: why they are, and who adds
    gradients up then.
    """
    group, recipe = engine.group, engine.recipe
    said = [group.flat_note] if group.flat_note else []
    if engine.decides_sums and recipe.reduce == NATIVE:
        said.append(
            "gradients are added by the backend, in the dtype of the wire (reduce='native'), since"
            f" exchanges are flat over {len(set(group.nodes))} hosts: in rank order they would send"
            f" up to {max(map(group.nodes.count, set(group.nodes)))} times the bytes between them."
            " Give reduce='ordered' for the same bits at every stage."
        )
    return said


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
        node = "all are on one node, by the launcher (LOCAL_WORLD_SIZE) or by their hosts"
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
