"""`onefold.shard`, `onefold.unshard`, and the makers of an engine's parts."""

from __future__ import annotations

import contextlib
import logging
import os
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from onefold.comm import Group
from onefold.comm.communicators import mesh_of, note_exit, one_axis
from onefold.device import default_device, with_index
from onefold.offload.activations import ActivationStore
from onefold.offload.step import ApartStepper
from onefold.offload.storage import STORAGES, preflight
from onefold.offload.transfers import Transfers
from onefold.optim.states import met
from onefold.optim.steps import install_step_hooks, remove_step_hooks
from onefold.optim.whole import WholeStep
from onefold.quant.codecs import CODECS
from onefold.quant.encoded import Encoded, EncodedGather, EncodedStorage
from onefold.recipe import Recipe
from onefold.runtime.engine import Activations, Engine
from onefold.runtime.flat import Entry, Flat, declare
from onefold.runtime.gather import Gather
from onefold.runtime.hooks import engine_of, engines, guard, install
from onefold.runtime.hops import Hop, Pairwise, Rows
from onefold.runtime.parameters.parameter import ShardedParameter, disable_torch_function
from onefold.runtime.parts import whole_masters
from onefold.runtime.state.checks import (
    compare_copies,
    compare_ranks,
    mark_partial,
    refuse_arguments,
    refuse_max_norm,
    refuse_uneven_groups,
    with_replicas,
)
from onefold.runtime.state.start import fetch, lay_out, materialize, modules_of, notes
from onefold.runtime.storage import Storage
from onefold.runtime.units import find_units


def shard(
    module: nn.Module,
    recipe: Recipe,
    *,
    group: Any = None,
    mesh: Any = None,
    data: Sequence[str] | str | None = None,
    partial: Sequence[str] | Callable[[str], bool] | None = None,
    units: Sequence[str | type] | None = None,
    init: Callable[[nn.Module], object] | None = None,
    device: torch.device | str | None = None,
    weights: str | os.PathLike[str] | None = None,
) -> nn.Module:
    """Divide a model's training state among the ranks by the recipe, in place. Collective. Returns
    the module.

    Then train as usual: `module.parameters()` are the tensors that this rank's optimizer steps;
    whole parameters exist only while the model computes with them. All ranks start from rank 0's
    weights. Parameters stay the same objects, so an optimizer may be made before or after (after,
    if the model is on the meta device).

    Args:
        module: any nn.Module. A module (partly) on the meta device gets memory unit by unit, never
            the whole model at once.
        recipe: for instance `Recipe.zero(stage=3)`.
        group: a ProcessGroup or a one-dimensional DeviceMesh; None for all ranks, or for a single
            process.
        mesh: in place of `group`, a DeviceMesh of several axes: all ranks that run this module. So
            the model may have DTensors among its parameters, as `parallelize_module` makes them.
        data: the axes of the mesh whose ranks compute with different samples or tokens (data,
            context and expert parallelism); along the others (tensor parallelism) they are the
            same. An axis `dp_replicate` among them gives hybrid sharding: state is divided inside
            each replica.
        partial: names of plain parameters (or a function of the name) of which ranks with the same
            data have parts of the gradient, to be added up. Others have the same gradient there. A
            DTensor's gradient says it by itself.
        units: names or classes of the modules that become units; None finds the repeated block.
        init: a function that initializes one module in place (called for modules on the meta
            device).
        device: where to compute; None keeps the module's device (for meta modules: the accelerator
            if there is one, else the CPU). Parameters on other devices are moved unit by unit.
        weights: a Hugging Face folder (safetensors). Each rank reads only the bytes that it will
            own; these parameters are not initialized first. Others keep their values, or are
            initialized by `init` if they are on the meta device.

    Raises:
        ValueError: an argument is invalid; the message says what to change.
    """
    refuse_arguments(module, recipe, units, init, group, mesh, data)
    ranks = one_axis(group) if mesh is None else mesh_of(mesh, data)
    recipe = with_replicas(recipe, ranks)
    where = _device(module, device, at_once=ranks.size == 1)
    incoming, names = None, set[str]()
    with contextlib.ExitStack() as undo:  # if anything below raises
        if weights is not None:
            from onefold.pretrained.weights import load_shards, materialize_adapters, opened_by_all

            materialize_adapters(module, where)
        specs = find_units(module, units if units is not None else recipe.units)
        mark_partial(specs, partial, ranks)
        refuse_max_norm(module, ranks.size == 1)
        all_ranks = Group.over(ranks, where, recipe.stall_timeout, recipe.inner)
        undo.callback(all_ranks.close)
        engine = Engine(specs, recipe, all_ranks, where, Capabilities())
        undo.callback(_close, engine)
        # What the ranks must have alike, before anything is laid out
        values = compare_ranks(engine, module, recipe, specs, weights is not None)
        preflight(engine)
        if weights is not None:
            incoming = opened_by_all(engine, weights, module, init is not None)
            undo.callback(incoming.close)
            names = incoming.names()
        compare_copies(engine, names)
        refuse_uneven_groups(engine)
        # Values, unit by unit
        bound = list(zip(specs, engine.units, strict=True))
        for spec, unit in bound:
            fetch(found.param for found in spec.found)
            materialize(spec, specs, where, init, module, values, names)
            lay_out(engine, unit, names)
        engine.buffers.find(module)
        engine.buffers.start()
        if values:
            unset = engine.uninitialized
            unset.note(engine.entries, module)
            unset.given(names)
            unset.look()
        # Everything is there: what follows passes, steps, and the model's end
        engine.reduce.follow_trainable(engine.flats)
        engine.memory.reset_peak()
        if engine.mesh.several:
            from onefold.parallel.marks import Marks

            engine.reduce.marks = Marks(engine)
        # An unsharded model on one rank needs hooks only to offload activations, or if something has
        # no value yet
        if not engine.unsharded or recipe.offload_activations is not None or engine.uninitialized:
            for spec, unit in bound:
                install(engine, unit, spec.module)
            for _, inner in modules_of(specs[0], specs)[1:]:
                install(engine, engine.units[0], inner, part=True)
        guard(engine, module)
        install_step_hooks(engine)
        if engine.rank == 0:
            sizes = [spec.trained for spec in specs]
            for note in notes(engine, sizes, device is not None):
                logging.getLogger("onefold").warning(note)
        if incoming is not None:
            load_shards(engine, module, incoming)
        engines[module] = engine
        engine.finalizer = weakref.finalize(module, _close, engine)
        undo.pop_all()
    note_exit()
    engine.make_stale()
    engine.traffic.reset()
    return module


def unshard(module: nn.Module) -> nn.Module:
    """Make the model a plain module of whole parameters, in master precision and without gradients.
    Collective. Return it.

    To change the structure of a sharded model (another head, other ties, more tokens), unshard it,
    change it on every rank alike, and `shard` it again. Parameters stay the same objects. Optimizers
    keep them but lose their states: make a new one, or save a checkpoint before and load it.

    Raises:
        ValueError: this recipe does not support it (offloaded, encoded, DTensors).
        RuntimeError: it was called inside a pass or another context, gradients wait to be reduced, or
            something has no value yet.
    """
    engine = engine_of(module)
    _refuse_unless_possible(engine)
    engine.about_to_write()
    engine.transfers.check()
    engine.uninitialized.refuse("unshard() would leave")
    for optimizer in list(met):  # what they hold is of this rank's parts
        for entry in engine.entries:
            optimizer.state.pop(entry.param, None)
    _make_plain(engine)
    del engines[module]
    engine.finalizer()  # now, and not again
    return module


def _refuse_unless_possible(engine: Engine) -> None:
    """Raise if this model cannot be made whole now, with the same error on every rank."""
    flats = engine.flats
    inside = engine.in_any_pass() or engine.full_params_depth or engine.gather.kept
    if inside or any(flat.waits for flat in flats):
        raise RuntimeError(
            "unshard was called inside a pass of the model, full_params or keep_gathered, or while"
            " gradients kept under no_sync wait to be reduced: call it outside, after"
            " optimizer.step()."
        )
    encoded, boxes = (flat.spec.stored for flat in flats), (e.box for e in engine.entries)
    if engine.offloaded_flats or any(encoded) or any(boxes):
        raise ValueError(
            "onefold.unshard does not work with parameters or optimizer states on the host or on NVMe,"
            " frozen weights that are kept encoded, or DTensors. Change the structure before shard(),"
            " or export the model, build the new one and load what fits (onefold.export, then"
            " shard(..., weights=folder))."
        )


def _make_plain(engine: Engine) -> None:
    """Give the parameters their whole values, and remove everything of the engine from them, and its
    hooks from the modules. Collective. If memory runs out, the model is as it was.
    """
    with disable_torch_function(), torch.no_grad():
        wholes: list[tuple[Entry, torch.Tensor]] = []
        for flat in (flat for flat in engine.flats if not flat.unsharded):
            full = whole_masters(engine, flat)
            wholes += [(entry, flat.view(full, entry).clone()) for entry in flat.entries]
        # What needs memory is done: from here on the model changes
        for entry, whole in wholes:
            leaf, param = entry.compute, entry.param
            param._backward_hooks, leaf._backward_hooks = leaf._backward_hooks, None
            param.grad = None
            param.data = whole
            _unwrap(param)
            if param.dtype != entry.declared:
                declare(param, entry.declared)
        for handle in engine.handles:
            handle.remove()
        engine.handles.clear()


def _unwrap(param: nn.Parameter) -> None:
    for key in [key for key in param.__dict__ if key == "onefold" or key.startswith("_onefold")]:
        if key != "_onefold_wire":  # of the caller of shard(), which may be called again
            del param.__dict__[key]
    if isinstance(param, ShardedParameter):  # a subclass was made of the original's class
        kind: Any = type(param)
        plain: Any = nn.Parameter if kind is ShardedParameter else kind.__bases__[1]
        param.__class__ = plain


@contextlib.contextmanager
def no_sync(module: nn.Module) -> Iterator[None]:
    """Context for micro-batches before the last of a step: gradients that the recipe reduces at the
    boundary stay local.

    Stages that shard gradients still reduce them in every micro-batch, unless the recipe says
    reduce_at="boundary".
    """
    with engine_of(module).unsynced():
        yield


class Capabilities:
    """The makers of an engine's parts, see runtime/engine.py."""

    transfers = Transfers
    codec = staticmethod(CODECS.__getitem__)

    def storage(self, flat: Flat, engine: Engine) -> Storage:
        if flat.spec.stored:
            return EncodedStorage(flat)
        if (tiers := flat.spec.tiers) is not None:
            return STORAGES[tiers.optimizer](flat, engine)
        return Storage(flat)

    def gather(self, flat: Flat, engine: Engine) -> Gather:
        if flat.spec.gather_codec is None:
            return Gather(flat, engine)
        return EncodedGather(flat, engine)

    def hop(self, flat: Flat, at: int, engine: Engine) -> Hop:
        hop = flat.spec.hops[at]
        if flat.spec.encodes(hop):
            return Encoded(flat, at, engine)
        made = Pairwise if flat.spec.added_by(hop) == "pairwise" else Rows
        return made(flat, at, engine)

    def steppers(self, engine: Engine) -> tuple[WholeStep, ApartStepper]:
        """Return who steps the shards, in the order in which they are asked: see runtime/stepper.py. The
        last may step in the backward pass too.
        """
        # The first takes no shards on disks, and those on the host before the stepper of all others there
        return WholeStep(engine), ApartStepper(engine)

    def activations(self, engine: Engine) -> Activations:
        if engine.recipe.offload_activations is None:
            return Activations()
        return ActivationStore(engine)


def _device(module: nn.Module, device: torch.device | str | None, at_once: bool) -> torch.device:
    """Return the device to compute on, and move buffers there.

    With `at_once` parameters are moved too. Else each is moved when its unit is laid out, so that
    the device never holds the whole model.
    """
    devices = {p.device for p in module.parameters() if not p.is_meta}
    if device is not None:
        where = with_index(device)
        if (devices | {b.device for b in module.buffers() if not b.is_meta}) - {where}:
            for param in () if at_once else module.parameters():
                param.grad = None  # laying out drops it; `_apply` would move it first

            def moved(t: torch.Tensor) -> torch.Tensor:
                stays = t.is_meta or (not at_once and isinstance(t, nn.Parameter))
                return t if stays else t.to(where)

            module._apply(moved)
        return where
    if len(devices) > 1:
        raise ValueError(
            f"the model's parameters lie on {', '.join(map(str, sorted(devices, key=str)))}: "
            "move it to one device, or give shard() a device."
        )
    return with_index(devices.pop()) if devices else default_device()


def _close(engine: Engine) -> None:
    remove_step_hooks(engine)
    engine.close()
