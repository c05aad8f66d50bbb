"""The values that a model starts with, and whole values between passes."""

from __future__ import annotations

import contextlib
import fnmatch
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from functools import partial
from typing import Protocol

import torch
from torch import nn

from onefold.comm.communicators import flat_note
from onefold.device import default_device, device_count
from onefold.memory import GATHERED
from onefold.recipe import Recipe
from onefold.recipe.rows import FLAT, GROUP, NATIVE
from onefold.runtime.boxes import is_dtensor, local_of
from onefold.runtime.engine import Engine
from onefold.runtime.flat import Entry, Flat
from onefold.runtime.parameters.parameter import disable_torch_function
from onefold.runtime.parts import (
    MasterParts,
    from_first,
    master_items,
    rewrite_masters,
    whole_masters,
    within_holders,
)
from onefold.runtime.refresh import refresh
from onefold.runtime.uninitialized import fill_blank, is_marked, mark, value_of
from onefold.runtime.unit import Unit
from onefold.runtime.units import UnitSpec, offload_notes

# -- notes for the user ----------------------------------------------------------------------------
#
# Notes for the user at the start: what the recipe left open, and which of its options have no
# effect.


_NARROW = (torch.bfloat16, torch.float16)


def notes(engine: Engine, sizes: Sequence[int], device_given: bool) -> Iterator[str]:
    """Yield what the user is told at the start. `sizes`: trained elements in each unit."""
    recipe, group = engine.recipe, engine.group
    yield from recipe.notes
    yield from _precision_notes(recipe, engine.flats)
    names = [name for entry in engine.entries for name in entry.names]
    for pattern in recipe.whole if names and recipe.whole not in (None, True, False) else ():
        if not any(fnmatch.fnmatchcase(name, pattern) for name in names):  # or of another stage
            yield (
                f"whole={pattern!r} matches no parameter of this model, so no group is stepped whole by"
                f" it. Its first parameter is {names[0]!r}."
            )
    yield from offload_notes(sizes, recipe, engine.world_size)
    if "tp" in engine.mesh.data and any(e.box is not None for e in engine.entries):
        yield (
            f"data={engine.mesh.data} names the axis 'tp', along which gradients are then divided"
            " by its size, as those of other data. Under tensor parallelism leave it out of data; a"
            " mesh of (1, n) ranks with mesh_dim_names=('dp', 'tp') and data='dp' has no other data."
        )
    if group.shared.inner is None and group.flat_over_nodes:
        yield flat_note(group.ranks, group.nodes)
    if engine.decides_sums and recipe.reduce == NATIVE:
        yield (
            "gradients are added by the backend, in the dtype of the wire (reduce='native'), since"
            f" exchanges are flat over {len(set(group.nodes))} hosts: in rank order they would send"
            f" up to {max(map(group.nodes.count, set(group.nodes)))} times the bytes between them."
            " Give reduce='ordered' for the same bits at every stage."
        )
    rows = (recipe.parameters, recipe.gradients, recipe.optimizer)
    travels = {
        f"gather_codec={recipe.parameters.codec!r}": recipe.parameters.codec,
        f"reduce_codec={recipe.gradients.codec!r}": recipe.gradients.codec,
        "a division inside groups": any(row.over == GROUP for row in rows),
        f"reduce={NATIVE!r}": recipe.reduce == NATIVE,
    }
    idle = [name for name, given in travels.items() if given]
    if idle and engine.world_size == 1:
        yield f"{' and '.join(idle)}: no effect on one rank, from which nothing travels."
    # Only if the user named a group: the default takes nodes as groups, or does without groups.
    if recipe.inner not in (None, FLAT) and group.topology.outer == 1 < engine.world_size:
        node = "all are on one node, by the launcher (LOCAL_WORLD_SIZE) or by their hosts"
        why = node if recipe.inner == "node" else "they are all"
        yield (
            f"group={recipe.inner!r} makes one group of the {engine.world_size} ranks ({why}):"
            " nothing is divided inside groups only."
        )
    if recipe.frozen and not any(flat.storage.encoded for flat in engine.flats):
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


def _precision_notes(recipe: Recipe, flats: Sequence[Flat]) -> Iterator[str]:
    """Yield a sentence about the 16-bit weights that are trained, if the recipe takes the model's
    dtypes as they are.
    """
    trained = [flat for flat in flats if any(e.active for e in flat.entries)]
    narrow = [flat for flat in trained if flat.dtypes.compute in _NARROW]
    if recipe.compute_dtype is None and narrow:
        names = map(_short, dict.fromkeys(flat.dtypes.compute for flat in trained))
        masters = recipe.masters_dtype
        numel = sum(e.slot.numel for flat in narrow for e in flat.entries if e.active)
        mended = "" if masters in _NARROW else ", or master_dtype='bf16' to step them as they are"
        yield (
            f"precision=None computes as the model is, in {' and '.join(names)}. {numel:,} weights of"
            f" 16 bits are trained, with master weights in {_short(masters)}. Give precision='fp32'"
            f" to compute in fp32{mended}."
        )


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


# -- values ----------------------------------------------------------------------------------------
#
# Whole parameters outside a forward pass: `lay_out` divides rank 0's among the ranks;
# `full_params` shows them to be read and changed. All are collective: every rank calls them.


@contextlib.contextmanager
def full_params(engine: Engine, write: bool) -> Iterator[None]:
    """Put whole parameters in master precision in place of the sharded ones, inside the context.
    See `onefold.full_params`.
    """
    if engine.stack:
        raise RuntimeError(
            "full_params was entered inside a forward pass of the model; enter it outside."
        )
    if write:
        engine.masters.about_to_write()
    elif engine.uninitialized and not engine.full_params_depth:
        engine.uninitialized.look()
        engine.uninitialized.refuse("full_params() would show")
    if engine.full_params_depth:  # nested: the outer one has gathered
        if write and not engine.full_params_write:
            raise RuntimeError(
                "full_params(write=True) was entered inside full_params(); give write=True to the"
                " outer one."
            )
        yield
        return
    if not engine.unsharded:
        engine.refuse_changes("full_params")
    wholes: list[tuple[Flat, torch.Tensor]] = []
    shown: list[tuple[Entry, nn.Parameter, torch.Tensor]] = []
    wrong = None

    def back() -> None:
        engine.full_params_depth = 0
        with disable_torch_function():
            for entry in (e for flat, _ in wholes for e in flat.entries):
                entry.flat.swap(entry, entry.param)

    try:
        try:
            with disable_torch_function():
                for flat in (f for f in engine.flats if not f.unsharded):
                    full = whole_masters(engine, flat)
                    wholes.append((flat, full))
                    engine.memory.add(GATHERED, full.nbytes, flat.unit_name)
                    shown += [(entry, *_show(entry, full)) for entry in flat.entries]
            engine.full_params_depth, engine.full_params_write = 1, write
            yield
        finally:
            entered, engine.full_params_depth = engine.full_params_depth, 0
            with disable_torch_function(), torch.no_grad():
                try:
                    wrong = _take_over(shown) if entered and write else None
                finally:  # first of all, the model is as it was: what follows needs memory
                    shown.clear()
                    back()
                    for flat, full in wholes:
                        engine.memory.add(GATHERED, -full.nbytes, flat.unit_name)
                if write and entered:
                    try:
                        for flat, full in wholes:
                            rewrite_masters(engine, flat, full)
                    finally:
                        engine.make_stale()
                    engine.uninitialized.look()
            if wrong:
                raise ValueError(wrong)
    finally:
        back()  # again: Ctrl-C may have come during the first


def _show(entry: Entry, full: torch.Tensor) -> tuple[nn.Parameter, torch.Tensor]:
    """Let the modules see a whole parameter. Returns (what they see, its memory in `full`)."""
    whole = entry.flat.view(full, entry)
    seen = whole if entry.box is None else entry.box.over(whole)
    stand_in = nn.Parameter(seen, requires_grad=False)
    entry.flat.swap(entry, stand_in)
    return stand_in, whole


def _take_over(shown: list[tuple[Entry, nn.Parameter, torch.Tensor]]) -> str | None:
    """Copy whole parameters that the user has given other memory (`p.data = value`), or replaced,
    back to the memory they had. Returns a complaint if a shape does not fit.
    """
    wrong = None
    for entry, stand_in, whole in shown:
        placed = [
            found
            for places, attribute, _ in entry.places
            if (found := places.get(attribute)) is not None
        ]
        param = local_of(next((p for p in placed if p is not stand_in), stand_in))
        if param.data_ptr() != whole.data_ptr():
            if param.shape == whole.shape:
                whole.copy_(param)
            else:
                wrong = wrong or (
                    f"inside full_params(write=True) parameter {entry.slot.name!r} of shape"
                    f" {tuple(whole.shape)} was given data of shape {tuple(param.shape)}. Another"
                    " shape is given between onefold.unshard(model) and a new shard()."
                )
    return wrong


def lay_out(engine: Engine, unit: Unit, incoming: Collection[str] = ()) -> None:
    """Build the unit's flat buffers from rank 0's weights; from those of the first holder of each
    box, where ranks hold boxes. Parameters named in `incoming` are filled with NaN until they are
    loaded.
    """
    with disable_torch_function(), torch.no_grad():
        for flat in (flat for flat in unit.flats if not flat.unsharded):
            flat.build(partial(_fill, engine, flat, incoming), engine.device)


def _fill(engine: Engine, flat: Flat, incoming: Collection[str], master: torch.Tensor) -> None:
    """Put the first values into `master`, [owned]."""
    master.zero_()
    parts = MasterParts((flat, master))
    for item in master_items(flat.entries):
        if item.name not in incoming:
            source = value_of(item.entry)
            if source is None:  # it has no elements, or another rank has the value
                source = item.entry.places[0][0][item.entry.places[0][1]]
            # A global tensor on rank 0, as `materialize` makes them; or each holder's own part
            move = within_holders if is_dtensor(source) else from_first
            move(engine, parts, item, None if source is None else local_of(source.detach()))
        elif not flat.storage.encoded:
            fill_blank(master[item.entry.here])


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
    memory: bool = False,
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
        memory: give the parameters that are loaded, or not initialized, memory of their own.
    """
    for name, module in modules_of(spec, others):
        dot = f"{name}." if name else ""
        buffers = {key: b for key, b in module._buffers.items() if b is not None and b.is_meta}
        ours = {key: p for key, p in module._parameters.items() if p is not None and p.is_meta}
        later = {key: p for key, p in ours.items() if dot + key in incoming}
        # Whether the module has parameters with values, which the initializer would overwrite
        there = any(p is not None and not p.is_meta for p in module._parameters.values())
        how = _initializer(module, init, root) if values else None
        runs = how is not None and (len(later) < len(ours) or (bool(buffers) and not there))
        for key, buffer in buffers.items():
            module._buffers[key] = mark(torch.empty_like(buffer, device=device))
        for key in ours.keys() - later.keys() if runs or (values and memory) else ():
            _put(module, key, mark(_empty(ours[key], device)))
        if how is not None and runs:
            with torch.no_grad():
                how()
        for key, param in later.items() if memory else ():
            _put(module, key, _empty(param, device))


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


def _put(module: nn.Module, key: str, param: nn.Parameter | None) -> None:
    # An RNN also keeps a list of its parameters, which it updates on assignment
    if isinstance(module, nn.RNNBase):
        setattr(module, key, param)
    else:
        module._parameters[key] = param


def _initializer(
    module: nn.Module, init: Init | None, root: nn.Module
) -> Callable[[], object] | None:
    """Return the function that initializes the module's own tensors; None if there is none."""
    own_way: Callable[[], object] | None = getattr(module, "reset_parameters", None)
    how = init or getattr(root, "_init_weights", None)
    if init is None and own_way is not None:
        return own_way
    return partial(how, module) if how is not None else None


def tie(specs: Iterable[UnitSpec]) -> None:
    """Tie parameters again that were one object before `materialize`, which made a new one for each
    module that refers to it.
    """
    for spec in specs:
        for found in spec.found:
            tensors = [module._parameters[key] for module, key in found.places]
            whole = next((t for t in tensors if t is not None and not is_marked(t)), tensors[0])
            for module, attribute in found.places:
                if module._parameters[attribute] is not whole:
                    _put(module, attribute, whole)


# -- values that another object keeps --------------------------------------------------------------
#
# The keeper of a parameter's values is an attribute of the parameter, named by `KEEPER`. `shard` asks
# it for a unit's values just before it lays out the unit, so no rank holds more than one unit of them.


#: The attribute of a parameter that refers to its keeper.
KEEPER = "_onefold_keeper"


class Keeper(Protocol):
    """An object that keeps the values of parameters which no engine has laid out yet."""

    def give_up(self, params: Sequence[nn.Parameter]) -> None:
        """Make the parameters whole on every rank, with rank 0's values, and forget them.
        Collective.
        """


def fetch(params: Iterable[nn.Parameter]) -> None:
    """Make those parameters whole that have a keeper; the others stay as they are. Collective if
    any has one.
    """
    kept: dict[int, tuple[Keeper, list[nn.Parameter]]] = {}
    for param in params:
        keeper = param.__dict__.get(KEEPER)
        if keeper is not None:
            kept.setdefault(id(keeper), (keeper, []))[1].append(param)
    for keeper, held in kept.values():
        keeper.give_up(held)


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


def fitting(engine: Engine, limit: int | None) -> list[Unit]:
    """Return the units that stay gathered: those that fit under `limit` bytes, taken in the agreed
    order of the forward pass, which is the same on every rank.
    """
    chosen, left = [], limit
    for unit in engine.gather.forward.units:
        if left is None or unit.gathered_bytes <= left:
            chosen.append(unit)
            left = None if left is None else left - unit.gathered_bytes
    return chosen


@contextlib.contextmanager
def keep_gathered(engine: Engine, limit: int | None) -> Iterator[None]:
    """See `onefold.keep_gathered`.

    Raises:
        RuntimeError: it was entered inside a pass, or inside `keep_gathered` of the same model.
    """
    gather = engine.gather
    if engine.in_any_pass():
        raise RuntimeError(
            "keep_gathered was entered inside a pass of the model; enter it outside."
        )
    if gather.kept and not gather.holding:
        raise RuntimeError(
            "keep_gathered was entered inside keep_gathered of the same model; leave the outer one"
            " first."
        )
    gather.keep(fitting(engine, limit), holding=False)
    try:
        with disable_torch_function(), torch.no_grad():
            engine.transfers.check()
            refresh(gather, engine.units)
            gather.gather_kept()
            for unit in gather.kept:
                gather.wait(unit)
        yield
    finally:
        if not engine.closed:
            with disable_torch_function():
                gather.let_go()
