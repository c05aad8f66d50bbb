"""What `shard()` compares among the ranks and refuses before it lays anything out."""

from __future__ import annotations

import difflib
import hashlib
import sys
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

from torch import nn

from onefold.comm.communicators import REPLICATE
from onefold.layout.holders import Mesh
from onefold.recipe import Recipe
from onefold.recipe.core import OPTIONS
from onefold.recipe.rows import GROUP, NODE
from onefold.runtime.boxes import is_dtensor, local_of
from onefold.runtime.buffers import unlike
from onefold.runtime.engine import Engine
from onefold.runtime.hooks import is_sharded
from onefold.runtime.parameters.parameter import ShardedParameter
from onefold.runtime.parts import tell_all
from onefold.runtime.state.start import KEEPER, has_meta
from onefold.runtime.uninitialized import value_of
from onefold.runtime.units import UnitSpec
from onefold.wording import few


def refuse_arguments(
    module: nn.Module,
    recipe: Recipe,
    units: Sequence[str | type] | None,
    init: Callable[[nn.Module], object] | None,
    group: Any,
    mesh: Any,
    data: Any,
) -> None:
    """Raise ValueError for arguments of `shard()` that are invalid by themselves."""
    if not isinstance(module, nn.Module):
        raise ValueError(f"shard() was given {type(module).__name__}, expected a torch.nn.Module.")
    OPTIONS["units"].read(units)
    if init is not None and not callable(init):
        raise ValueError(
            f"init={init!r}: expected a function that initializes one module in place, or None."
        )
    if mesh is not None and group is not None:
        raise ValueError(
            "shard() was given both group=... and mesh=...: a mesh names all ranks that run this"
            " module, so leave group out."
        )
    if mesh is None and data is not None:
        raise ValueError(
            f"data={data!r} names axes of a mesh, and shard() was given none: give mesh=..., the"
            " DeviceMesh of all ranks that run this module."
        )
    if not isinstance(recipe, Recipe):
        raise ValueError(
            f"shard() was given {recipe!r} as recipe, expected a Recipe such as"
            " onefold.Recipe.zero(stage=3)."
        )
    if is_sharded(module):
        raise ValueError(
            "this module is sharded already; shard a fresh one, or use onefold.engine_of(module)."
        )
    fsdp: Any = getattr(sys.modules.get("torch.distributed.fsdp"), "FSDPModule", ())
    for name, inner in module.named_modules():
        if isinstance(inner, fsdp):
            raise ValueError(
                f"module {name or '(the model)'!r} was given to fully_shard, which divides the same"
                " parameters as shard() does. Leave fully_shard out."
            )
        if is_sharded(inner) or any(
            isinstance(p, ShardedParameter) for p in inner._parameters.values()
        ):
            raise ValueError(
                f"module {name!r} inside this model belongs to another sharded model already: shard"
                " the whole model once, alone."
            )
    for name, param in module.named_parameters() if mesh is None else ():
        if is_dtensor(param):
            placed: Any = param
            raise ValueError(
                f"parameter {name!r} is a DTensor ({', '.join(map(str, placed.placements))}), as"
                " tensor and expert parallelism make them. Give shard() the mesh=... of all ranks"
                " that run this module, and data=(...), the names of its axes that carry different"
                " data."
            )
    if left_out := sorted(getattr(module, "_ddp_params_and_buffers_to_ignore", ())):
        raise ValueError(
            f"this module asks DDP to leave out {few(map(repr, left_out), 3)}"
            " (_ddp_params_and_buffers_to_ignore), and Onefold divides every parameter. Delete that"
            " attribute if they are to be as the others, or hold what each rank keeps for itself"
            " outside the module."
        )


def with_replicas(recipe: Recipe, ranks: Mesh) -> Recipe:
    """Return the recipe with state divided inside each replica (HSDP), if the mesh names an axis of
    replicas.

    Raises:
        ValueError: the recipe names groups of another size.
    """
    sizes = dict(zip(ranks.names, ranks.sizes, strict=True))
    replicas = sizes.get(REPLICATE, 1) if REPLICATE in ranks.data else 1
    if replicas == 1 or recipe.stage == 0:
        return recipe
    each = ranks.data_size // replicas
    divides = recipe.parameters.over == GROUP
    if recipe.inner not in (None, each, NODE if divides else None):
        raise ValueError(
            f"the recipe names groups ({recipe.inner!r}), and the mesh has {replicas} replicas of"
            f" {each} data ranks ({REPLICATE}), which are the groups. Leave the recipe's group out, or"
            " make it the same."
        )
    if not divides:
        return recipe.replace(shard_group=each, group=None)
    return recipe.in_groups_of(each)


def refuse_uneven_groups(engine: Engine) -> None:
    """Raise ValueError if state is divided inside groups, and some parameters have no such groups."""
    rows = (engine.recipe.parameters, engine.recipe.gradients, engine.recipe.optimizer)
    if not any(row.over == GROUP for row in rows):
        return
    for flat in engine.flats:
        if flat.group.topology.outer != engine.group.topology.outer:
            raise ValueError(
                f"{flat.entries[0].slot.name!r} is held by ranks {flat.group.name}, which lie in"
                f" {flat.group.topology.outer} of the {engine.group.topology.outer} groups that state"
                " is divided in. Experts beside hybrid sharding need an expert axis inside each"
                " replica: name dp_replicate first, and divide experts over the other axes."
            )


def mark_partial(
    specs: Iterable[UnitSpec], partial: Sequence[str] | Callable[[str], bool] | None, ranks: Mesh
) -> None:
    """Set `Found.partial` by the argument of `shard()`.

    Raises:
        ValueError: a name is no parameter's, a DTensor's, or ranks have no axis to add over.
    """
    found = {name: f for spec in specs for f in spec.found for name in f.names}
    if partial is None:
        return
    if callable(partial):
        chosen = [name for name in found if partial(name)]
    else:
        chosen = [partial] if isinstance(partial, str) else list(partial)
        if unknown := [name for name in chosen if name not in found]:
            near = difflib.get_close_matches(unknown[0], found, 1)
            raise ValueError(
                f"partial names {unknown[0]!r}, which is no parameter of this model"
                + (f". Did you mean {near[0]!r}?" if near else ".")
            )
    if chosen and not ranks.several:
        raise ValueError(
            f"partial names {chosen[0]!r}, and no two ranks have the same data: every axis of"
            f" {ranks.describe()} is among data. Name in data only the axes that carry different"
            " data."
        )
    for name in chosen:
        if is_dtensor(found[name].param):
            raise ValueError(
                f"partial names {name!r}, which is a DTensor: its gradient says by itself whether"
                " it is partial. Leave it out."
            )
        found[name].partial = True


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


def compare_ranks(
    engine: Engine, module: nn.Module, recipe: Recipe, specs: list[UnitSpec], weights: bool
) -> bool:
    """Raise on every rank if the ranks were given different recipes or models. Returns whether rank
    0's model is on the meta device, so that its weights must be initialized. Collective.
    """
    compared = {
        "recipes": (recipe.stage, recipe.given),
        "parameters (names, shapes, dtypes, frozen, partial)": [
            (f.names, tuple(f.param.shape), f.param.dtype, f.param.requires_grad, f.partial)
            for s in specs
            for f in s.found
        ],
        "units": [s.name for s in specs],
        "weights": weights,
    }
    digests = {k: hashlib.sha256(repr(v).encode()).hexdigest() for k, v in compared.items()}
    boxes = [e for e in engine.entries if e.flat.in_boxes]
    meta = {e.name: e.param.is_meta for e in boxes if e.flat.rank == 0}
    said = tell_all(engine, "shard()", (digests, has_meta(module), meta))
    ranks = sorted(engine.group.ranks)
    for name in compared:
        others = [
            f"rank {r}"
            for r, (theirs, *_) in zip(ranks, said, strict=False)
            if theirs[name] != said[0][0][name]
        ]
        if others:
            raise ValueError(
                f"shard() was given different {name} on rank {ranks[0]} and on {', '.join(others)}."
                " Every rank must shard the same model by the same recipe (weights may differ: rank"
                " 0's are taken)."
            )
    here = said[0][2]  # rank 0 is the first holder of a part of each
    if apart := [name for *_, there in said for name in there if there[name] != here[name]]:
        raise ValueError(
            f"the DTensor {apart[0]!r} is on the meta device on some ranks and has values on others,"
            " which have only their own parts of them. Build the model on the meta device on every"
            " rank, or on none."
        )
    for entry in boxes:
        assert entry.box is not None
        entry.box.on_meta = here.get(entry.name, entry.param.is_meta)  # a simulated rank is alone
    return bool(said[0][1])


def compare_copies(engine: Engine, incoming: Collection[str]) -> None:
    """Raise ValueError on every rank if ranks with rank 0's data have other values of a parameter that
    all ranks hold: it may be a part, as of layers written for tensor parallelism without DTensors.
    Collective on a mesh of several axes. `incoming`: names of parameters that will be loaded.
    """
    group, mesh = engine.group, engine.mesh
    if group.alone or not mesh.several:
        return
    data_of = mesh.data_of
    mine = data_of[group.ranks[group.rank]] == data_of[min(mesh.ranks)]
    entries = [e for e in engine.entries if not e.flat.in_boxes]
    values = [
        None if not mine or e.name in incoming or KEEPER in e.param.__dict__ else value_of(e)
        for e in entries
    ]
    apart = unlike(group, [None if v is None else local_of(v.detach()) for v in values])
    if names := [e.name for e, other in zip(entries, apart, strict=True) if other]:
        axes = [n for n in mesh.names if n not in mesh.data]
        along = " and ".join(map(repr, axes))
        raise ValueError(
            f"ranks that are apart along {along} only have different values of"
            f" {few(map(repr, names), 3)}, which are no DTensors: shard() would take rank"
            " 0's for all. If all ranks are to hold the same, start them alike: by the same seed on"
            f" ranks along {along}, or on the meta device. If each has its own part, say so:"
            f" layer.weight = nn.Parameter(DTensor.from_local(part, mesh[{axes[0]!r}], [Shard(dim)]))"
            " before shard(), and compute with layer.weight.to_local()."
        )
