"""The values that a model starts with, and whole values between passes."""

from __future__ import annotations

import contextlib
import fnmatch
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from onefold.comm.communicators import flat_note
from onefold.device import default_device, device_count
from onefold.memory import GATHERED
from onefold.recipe.options import bytes_of
from onefold.recipe.rows import FLAT, NATIVE
from onefold.runtime.boxes import is_dtensor, local_of
from onefold.runtime.engine import Engine
from onefold.runtime.flat import Entry, Flat, Unit
from onefold.runtime.hooks import engine_of
from onefold.runtime.parameters.parameter import disable_torch_function, put
from onefold.runtime.parts import (
    MasterParts,
    from_first,
    master_items,
    whole_masters,
    within_holders,
)
from onefold.runtime.uninitialized import fill_blank, mark, value_of
from onefold.runtime.units import UnitSpec, offload_notes

# -- notes for the user ----------------------------------------------------------------------------
#
# Notes for the user at the start: what the recipe left open, and which of its options have no
# effect.


def notes(engine: Engine, sizes: Sequence[int], device_given: bool) -> Iterator[str]:
    """Yield what the user is told at the start. `sizes`: trained elements in each unit."""
    recipe, group = engine.recipe, engine.group
    yield from recipe.notes
    trained = [f.dtypes.compute for f in engine.flats if any(e.active for e in f.entries)]
    if recipe.parameters.dtype is None and (narrow := [d for d in trained if d.itemsize < 4]):
        yield (
            f"precision=None computes as the model is: weights that are trained are in {narrow[0]}, with"
            f" master weights in {recipe.optimizer.dtype}. Give precision='fp32' to compute in fp32."
        )
    names = [name for entry in engine.entries for name in entry.names]
    for pattern in recipe.whole if names and recipe.whole not in (None, True, False) else ():
        if not any(fnmatch.fnmatchcase(name, pattern) for name in names):  # or of another stage
            yield (
                f"whole={pattern!r} matches no parameter of this model, so no group is stepped whole by"
                f" it. Its first parameter is {names[0]!r}."
            )
    yield from offload_notes(sizes, recipe, group.topology)
    if "tp" in engine.mesh.data and any(e.box is not None for e in engine.entries):
        yield (
            f"data={engine.mesh.data} names the axis 'tp', along which gradients are then divided"
            " by its size, as those of other data. Under tensor parallelism leave it out of data; a"
            " mesh of (1, n) ranks with mesh_dim_names=('dp', 'tp') and data='dp' has no other data."
        )
    if group.shared.inner is None and group.flat_over_nodes:
        yield flat_note(group.ranks, group.nodes)
    if engine.asked.reduce is None and recipe.reduce == NATIVE:
        yield (
            "gradients are added by the backend, in the dtype of the wire (reduce='native'), since"
            f" exchanges are flat over {len(set(group.nodes))} hosts: in rank order they would send"
            f" up to {max(map(group.nodes.count, set(group.nodes)))} times the bytes between them."
            " Give reduce='ordered' for the same bits at every stage."
        )
    # Only if the user named a group: the default takes nodes as groups, or does without groups.
    if recipe.inner not in (None, FLAT) and group.topology.outer == 1 < engine.world_size:
        node = "all are on one node, by the launcher (LOCAL_WORLD_SIZE) or by their hosts"
        why = node if recipe.inner == "node" else "they are all"
        yield (
            f"group={recipe.inner!r} makes one group of the {engine.world_size} ranks ({why}):"
            " nothing is divided inside groups only."
        )
    if recipe.frozen and not any(flat.spec.stored for flat in engine.flats):
        yield (
            f"frozen={recipe.frozen!r} has no effect: no matrix but embeddings was frozen when"
            " shard() was called."
        )
    if engine.device.type == "cpu" and not device_given and (count := device_count()):
        kind = default_device().type
        yield (
            f"the model is on the CPU, and trains there: torch finds {count} {kind} device"
            f"{'s' if count > 1 else ''} here. To use {'them' if count > 1 else 'it'}, call"
            f" torch.{kind}.set_device(int(os.environ['LOCAL_RANK'])), give"
            f" shard(..., device={kind!r}), and move batches there. device='cpu' says that the CPU is"
            " meant."
        )
    yield from engine.uninitialized.notes()


# -- values ----------------------------------------------------------------------------------------
#
# Whole parameters outside a forward pass: `lay_out` divides rank 0's among the ranks;
# `full_params` shows them to be read and changed. All are collective: every rank calls them.


@contextlib.contextmanager
def showing(engine: Engine, shown: Mapping[Entry, nn.Parameter]) -> Iterator[None]:
    """Let the modules hold other parameters inside, with which `state_dict()` and passes work as those
    of a plain model do.
    """
    before = engine.full_params_depth, engine.full_params_write
    # With one rank, code may have put something else there, which stays
    places = [
        (entry, *place)
        for entry in shown
        for place in entry.places
        if not entry.flat.unsharded or place[0][place[1]] is entry.param
    ]

    def back() -> None:
        engine.full_params_depth, engine.full_params_write = before
        with disable_torch_function():
            for entry, *place in places:
                put(*place, entry.param)

    try:
        try:
            with disable_torch_function():
                for entry, *place in places:
                    put(*place, shown[entry])
            engine.full_params_depth += 1
            yield
        finally:
            back()
    finally:
        back()  # again: Ctrl-C may have come during the first


@contextlib.contextmanager
def full_params(module: nn.Module, write: bool = False) -> Iterator[nn.Module]:
    """Context in which the model has whole parameters in master precision, to read, evaluate or
    generate with. Collective.

    They take no gradients. With `write=True`, rank 0's changes are kept on exit, for every rank.
    """
    engine = engine_of(module)
    if write:
        engine.about_to_write()
    elif engine.uninitialized and not engine.full_params_depth:
        engine.uninitialized.refuse("full_params() would show")
    if engine.full_params_depth:  # nested: the outer one has gathered
        if write and not engine.full_params_write:
            raise RuntimeError(
                "full_params(write=True) was entered inside full_params(); give write=True to the"
                " outer one."
            )
        yield module
        return
    if not engine.unsharded:
        engine.check_moment("full_params")
    wholes: dict[Flat, torch.Tensor] = {}
    shown: dict[Entry, nn.Parameter] = {}
    wrong = ""
    try:
        with disable_torch_function():
            for flat in (f for f in engine.flats if not f.unsharded):
                full = wholes[flat] = whole_masters(engine, flat)
                engine.memory.add(GATHERED, full.nbytes, flat.unit_name)
                for entry in flat.entries:
                    whole = flat.view(full, entry)
                    seen = whole if entry.box is None else entry.box.over(whole)
                    shown[entry] = nn.Parameter(seen, requires_grad=False)
        with showing(engine, shown):
            engine.full_params_write = write
            try:
                yield module
            finally:
                if write:
                    wrong = _keep(engine, shown, wholes)
    finally:
        shown.clear()
        for flat, full in wholes.items():
            engine.memory.add(GATHERED, -full.nbytes, flat.unit_name)
    if wrong:  # not in place of an error that the code inside has raised
        raise ValueError(wrong)


def _keep(
    engine: Engine, shown: Mapping[Entry, nn.Parameter], wholes: Mapping[Flat, torch.Tensor]
) -> str:
    """Write what rank 0 has made of whole parameters into the masters of all ranks. Returns what is
    wrong, in words: one was given another shape. It stays as it is.
    """
    parts, wrong = MasterParts(), ""
    with disable_torch_function(), torch.no_grad():
        try:
            for item in master_items(shown):
                new, shape = _given(item.entry, shown[item.entry]), item.entry.slot.shape
                if tuple(new.shape) != shape:
                    wrong = wrong or (
                        f"inside full_params(write=True) parameter {item.name!r} of shape"
                        f" {shape} was given data of shape {tuple(new.shape)}. Another shape"
                        " is given between onefold.unshard(model) and a new shard()."
                    )
                    new = item.entry.flat.view(wholes[item.entry.flat], item.entry)
                within_holders(engine, parts, item, new)
            parts.finish()
        finally:
            engine.make_stale()
    engine.uninitialized.look()
    return wrong


def _given(entry: Entry, stand_in: nn.Parameter) -> torch.Tensor:
    """Return what the user has put in the place of a whole parameter, or into it: with `p.data =` it
    has other memory.
    """
    placed = [places.get(attribute) for places, attribute in entry.places]
    others = (p for p in placed if p is not None and p is not stand_in)
    return local_of(next(others, stand_in)).detach()


def lay_out(engine: Engine, unit: Unit, incoming: Collection[str] = ()) -> None:
    """Build the unit's flat buffers from rank 0's weights; from those of the first holder of each
    box, where ranks hold boxes. What has no value there is filled with NaN on all ranks, and so are
    parameters named in `incoming`, until they are loaded.
    """
    with disable_torch_function(), torch.no_grad():
        for flat in unit.flats:
            if not flat.unsharded:
                flat.build(partial(_fill, engine, flat, incoming), engine.device)
                continue
            for entry in (e for e in flat.entries if e.param.is_meta):
                value: Any = value_of(entry)
                if value is None:
                    value = _empty(entry.param, engine.device)
                    fill_blank(value)
                value.__dict__.update(entry.param.__dict__)
                entry.param = entry.compute = entry.local = entry.released = value
                flat.swap(entry, value)


def _fill(engine: Engine, flat: Flat, incoming: Collection[str], master: torch.Tensor) -> None:
    """Put the first values into `master`, [owned]."""
    master.zero_()
    parts = MasterParts({flat: master})
    for item in master_items(flat.entries):
        encoded, source = flat.spec.stored, value_of(item.entry)
        if item.name in incoming:
            if not encoded:
                fill_blank(master[item.entry.here])
            continue
        if source is None and flat.rank == 0:
            source = torch.zeros(item.shape, dtype=item.dtype, device=engine.device)
            if encoded:
                engine.uninitialized.encoded.add(item.name)
            else:
                fill_blank(source)
        # A global tensor on rank 0, as `materialize` makes them; or each first holder's own part
        move = from_first if item.box is None or item.box.on_meta else within_holders
        move(engine, parts, item, None if source is None else local_of(source.detach()))


# -- from the meta device --------------------------------------------------------------------------
#
# Models built on the meta device: memory and values unit by unit, never all at once.


Init = Callable[[nn.Module], object]


def modules_of(spec: UnitSpec, others: Iterable[UnitSpec]) -> list[tuple[str, nn.Module]]:
    """The modules of a unit that are not inside another unit, with their dotted names."""
    outside = {other.module for other in others if other is not spec}
    return list(spec.module.named_modules(outside, spec.name))


def has_meta(module: nn.Module) -> bool:
    return any(t.is_meta for t in (*module.parameters(), *module.buffers()))


def materialize(
    spec: UnitSpec,
    others: Iterable[UnitSpec],
    device: torch.device,
    init: Init | None,
    root: nn.Module,
    values: bool,
    incoming: Collection[str] = (),
) -> None:
    """Give the unit's own meta tensors memory on `device`, and initialize them if `values`.

    Initial values come from `init(module)`, else from the module's `reset_parameters()`, else from
    the root's `_init_weights(module)`, which transformers models have. A parameter that nothing
    initializes stays on the meta device, or is marked, as such buffers are
    (runtime/uninitialized.py).

    Args:
        values: False if another rank has the values; only buffers then get memory.
        incoming: names of parameters that will be loaded. They stay on the meta device while the
            initializer runs, so that no value is made for them.
    """
    for name, module in modules_of(spec, others):
        dot = f"{name}." if name else ""
        there = {key: p for key, p in module._parameters.items() if p is not None}
        fresh = {key: p for key, p in there.items() if p.is_meta and dot + key not in incoming}
        unset = {key: b for key, b in module._buffers.items() if b is not None and b.is_meta}
        # For buffers alone none runs that would overwrite parameters with values
        runs = fresh or (unset and all(p.is_meta for p in there.values()))
        for key, buffer in unset.items():
            module._buffers[key] = mark(torch.empty_like(buffer, device=device))
        how = _initializer(module, init, root) if values and runs else None
        if how is not None:
            for key, param in fresh.items():
                module._parameters[key] = mark(_empty(param, device))
            with torch.no_grad():
                how()


def _empty(like: nn.Parameter, device: torch.device) -> nn.Parameter:
    """Return a parameter with memory. In place of a DTensor it is plain and of the global shape: it
    is initialized as in one process, and each rank takes its box.
    """
    memory = (
        torch.empty(like.shape, dtype=like.dtype, device=device)
        if is_dtensor(like)
        else torch.empty_like(like, device=device)
    )
    param = nn.Parameter(memory, requires_grad=like.requires_grad)
    # The same dicts, so that the handles that the user holds still remove hooks
    param._backward_hooks = like._backward_hooks
    if like._post_accumulate_grad_hooks is not None:
        param._post_accumulate_grad_hooks = like._post_accumulate_grad_hooks
    return param


def _initializer(
    module: nn.Module, init: Init | None, root: nn.Module
) -> Callable[[], object] | None:
    """Return the function that initializes the module's own tensors; None if there is none."""
    own_way: Callable[[], object] | None = getattr(module, "reset_parameters", None)
    how = init or getattr(root, "_init_weights", None)
    if init is None and own_way is not None:
        return own_way
    return partial(how, module) if how is not None else None


# -- values that other code keeps --------------------------------------------------------------------


#: The attribute of a parameter whose values other code keeps: a function that makes a list of such
#: parameters whole on every rank, with rank 0's values, and forgets them. Collective.
KEEPER = "_onefold_keeper"


def fetch(params: Iterable[nn.Parameter]) -> None:
    """Make those parameters whole that have a keeper (the same one); the others stay as they are.
    Collective if any has one. `shard` calls it just before it lays out a unit, so no rank holds more
    than one unit of them.
    """
    kept = [param for param in params if KEEPER in param.__dict__]
    if kept:
        kept[0].__dict__[KEEPER](kept)


# -- keep gathered ---------------------------------------------------------------------------------
#
# Units that stay gathered between passes without gradients: `onefold.keep_gathered`.
#
#     enter        pass    pass    pass with gradients    pass              leave
#     gather all   ·       ·       release                gather all again  release
#
# They are also released when their masters are written to (an optimizer step, a load, a write); the
# next pass without gradients gathers them again. Units that do not fit under the limit are gathered
# and released in each pass as usual.


@contextlib.contextmanager
def keep_gathered(module: nn.Module, limit: int | str | None = None) -> Iterator[nn.Module]:
    """Context in which passes without gradients (generating, evaluating) keep units gathered, in
    the compute dtype. Collective.

    Units are gathered once and stay gathered, in the order of the forward pass, as many as fit into
    `limit`. The others are gathered and released in each pass as usual. Kept units are released on
    exit, before a pass with gradients, and when parameters change; the next pass without gradients
    gathers them again.

    If all units fit, ranks may run different numbers of passes inside. Else all ranks must run the
    same number (transformers: `generate(..., synced_gpus=True)`), or a `StallError` is raised.

    Args:
        limit: bytes on each rank, as a number or a text such as "8GB"; None for all units.

    Raises:
        ValueError: `limit` is not a number of bytes.
        RuntimeError: it was entered inside a pass of the model, or inside itself.
    """
    engine = engine_of(module)
    left = math.inf if limit is None else bytes_of("limit", limit)
    gather, units = engine.gather, list[Unit]()
    if engine.in_any_pass():
        raise RuntimeError(
            "keep_gathered was entered inside a pass of the model; enter it outside."
        )
    if gather.kept or gather.holding:
        outer = "onefold.parallel.unshard" if gather.holding else "keep_gathered"
        raise RuntimeError(
            f"keep_gathered was entered inside {outer} of the same model; leave that first."
        )
    for unit in gather.forward.units:  # in the order that is the same on every rank
        if unit.gathered_bytes <= left:
            units.append(unit)
            left -= unit.gathered_bytes
    try:
        with disable_torch_function(), torch.no_grad():
            gather.keep(units, holding=False)
        yield module
    finally:
        if not engine.closed:
            with disable_torch_function():
                gather.let_go()
