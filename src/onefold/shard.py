"""`onefold.shard` and the functions for sharded models that belong to it."""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from onefold.comm import Group
from onefold.comm.communicators import members, mesh_of, note_exit, one_axis
from onefold.device import default_device, with_index
from onefold.layout import Tiers
from onefold.layout.holders import Mesh
from onefold.offload.nvme_storage import preflight
from onefold.optim import (
    across_stages,
    clip_grad_norm,
    install_step_hooks,
    remove_step_hooks,
)
from onefold.quant.moment_packing import require_torchao
from onefold.recipe import Recipe, Tier
from onefold.recipe.options import bytes_of
from onefold.recipe.rows import NATIVE
from onefold.runtime.engine import Engine
from onefold.runtime.flat import Flat
from onefold.runtime.gather_paths import Gather
from onefold.runtime.hooks import (
    engine_of,
    guard_state_dict,
    guard_uninitialized,
    install,
    register,
)
from onefold.runtime.hops import Hop, Native, Pairwise, Rows, Simulated
from onefold.runtime.parts import tell_all
from onefold.runtime.resources import Activations
from onefold.runtime.state import dicts as state_dicts
from onefold.runtime.state import start as state_start
from onefold.runtime.state.checks import (
    compare_copies,
    compare_ranks,
    mark_partial,
    refuse_arguments,
    refuse_max_norm,
    refuse_uneven_groups,
    with_replicas,
)
from onefold.runtime.state.start import (
    fetch,
    has_meta,
    materialize,
    modules_of,
    tie,
)
from onefold.runtime.stepper import Stepper, Steppers
from onefold.runtime.storage import DeviceStorage, Storage
from onefold.runtime.uninitialized import is_blank, is_marked, without_value
from onefold.runtime.unit import Unit
from onefold.runtime.units import UnitSpec, find_units

if TYPE_CHECKING:
    from onefold.offload.transfers import Transfers
    from onefold.pretrained.weights import Weights
    from onefold.quant.codecs import Codec


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
    if recipe.block:
        require_torchao(f"moments={recipe.moments!r}")
    ranks = _ranks(group, mesh, data)
    recipe = with_replicas(recipe, ranks)
    where = _device(module, device, at_once=ranks.size == 1)
    wanted = units if units is not None else recipe.units
    incoming = _open(weights, module, where, init)
    with contextlib.ExitStack() as undo:  # if anything below raises
        engine, specs = _laid_out(
            module, recipe, ranks, partial, wanted, init, where, incoming, undo
        )
        engine.buffers.find(module)
        engine.buffers.start(engine)
        _note_uninitialized(engine, specs, module, incoming.names if incoming else ())
        engine.start(_steppers(engine))
        if engine.mesh.several:
            from onefold.parallel.marks import Marks

            engine.reduce.marks = Marks(engine)
        _install_hooks(engine, specs, module)
        install_step_hooks(engine)
        if engine.rank == 0:
            sizes = [spec.trained for spec in specs]
            for note in state_start.notes(engine, sizes, device is not None):
                logging.getLogger("onefold").warning(note)
        if incoming is not None:
            with contextlib.closing(incoming):
                incoming.load_shards(engine, module)
        register(module, engine)
        engine.finalizer = weakref.finalize(module, _close, engine)
        undo.pop_all()
    note_exit()
    engine.make_stale()
    engine.traffic.reset()
    return module


def _ranks(group: Any, mesh: Any, data: Sequence[str] | str | None) -> Mesh:
    """Return the ranks that `shard()` is called on, by their axes."""
    if mesh is not None:
        return mesh_of(mesh, data)
    given, numbers = members(group)
    return one_axis(numbers, given)


def _laid_out(
    module: nn.Module,
    recipe: Recipe,
    ranks: Mesh,
    partial: Sequence[str] | Callable[[str], bool] | None,
    wanted: Sequence[str | type] | None,
    init: Callable[[nn.Module], object] | None,
    where: torch.device,
    incoming: Weights | None,
    undo: contextlib.ExitStack,
) -> tuple[Engine, list[UnitSpec]]:
    """Return the engine of the model, whose units have their flat buffers and values, and what they
    were made of. `undo` closes what is made here.
    """
    names = set(incoming.names) if incoming else set()
    specs = find_units(module, wanted)
    alone = ranks.size == 1
    mark_partial(specs, partial, ranks)
    refuse_max_norm(module, alone)
    # With offloading, units are materialized and offloaded one by one, never all at once
    stays = recipe.parameters.tier is Tier.DEVICE and recipe.optimizer.tier is Tier.DEVICE
    if alone and stays and has_meta(module) and (incoming is None or incoming.error is None):
        for spec in specs:
            materialize(spec, specs, where, init, module, True, names, memory=True)
        tie(specs)
        specs = find_units(module, wanted)
    group = Group.over(
        ranks.group if ranks.plain else ranks, where, recipe.stall_timeout, recipe.inner
    )
    undo.callback(group.close)
    engine = Engine(specs, recipe, group, where, Capabilities(), ranks)
    undo.callback(_close, engine)
    values = compare_ranks(engine, module, recipe, specs, incoming is not None)
    preflight(engine)
    if incoming is not None:
        incoming.settle(engine)
    compare_copies(engine, names)
    refuse_uneven_groups(engine)
    for spec, unit in zip(specs, engine.units, strict=True):
        fetch(found.param for found in spec.found)
        materialize(spec, specs, where, init, module, values, names)
        without: set[str] = set()
        if values or engine.world_size == 1:
            without = without_value(engine, unit, names)
        state_start.lay_out(engine, unit, names | without)
        for entry in unit.entries:
            if entry.name in without:
                engine.uninitialized.add(entry.names, unit, functools.partial(is_blank, entry))
    return engine, specs


def _install_hooks(engine: Engine, specs: list[UnitSpec], module: nn.Module) -> None:
    # An unsharded model on one rank needs hooks only to offload activations
    if engine.unsharded and engine.recipe.offload_activations is None:
        return
    for spec, unit in zip(specs, engine.units, strict=True):
        install(engine, unit, spec.module)
    for _, inner in modules_of(specs[0], specs)[1:]:
        install(engine, engine.units[0], inner, part=True)
    for part in module.modules():
        guard_state_dict(engine, part)


def clip_grad_norm_(
    module: nn.Module | Sequence[nn.Module],
    max_norm: float,
    norm_type: float = 2.0,
    *,
    group: Any = None,
) -> torch.Tensor:
    """Scale all gradients so that their global norm is at most `max_norm`. Collective. Returns the
    norm before scaling, on every rank. Each element counts once, whatever axes of a mesh it is
    divided or replicated over.

    Args:
        module: the model; or a list of the stages of a pipeline that this rank has, each sharded by
            itself. Then the norm is over all stages of all ranks, and every rank must call it.
        group: with a list, the process group of the ranks of all stages; None for all ranks.

    Raises:
        ValueError: `max_norm` is not a number from 0 up (infinity only measures), or `norm_type` is
            not a number above 0.
    """
    if isinstance(module, nn.Module):
        return clip_grad_norm([engine_of(module)], max_norm, norm_type)
    engines = [engine_of(stage) for stage in module]
    if not engines:
        raise ValueError(
            "clip_grad_norm_() was given no stage: give the list of those on this rank."
        )
    return clip_grad_norm(engines, max_norm, norm_type, across_stages(engines, group))


@contextlib.contextmanager
def full_params(module: nn.Module, write: bool = False) -> Iterator[nn.Module]:
    """Context in which the model has whole parameters in master precision, to read, evaluate or
    generate with. Collective.

    They take no gradients. With `write=True`, rank 0's changes are kept on exit, for every rank.
    """
    with state_start.full_params(engine_of(module), write):
        yield module


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
    with state_start.keep_gathered(
        engine_of(module), None if limit is None else bytes_of("limit", limit)
    ):
        yield module


def full_state_dict(module: nn.Module) -> dict[str, torch.Tensor]:
    """Return the whole state dict in master precision on rank 0's host, gathered one parameter at a
    time; {} on other ranks. Collective.
    """
    return state_dicts.full_state_dict(engine_of(module), module)


def load_full_state_dict(
    module: nn.Module, state_dict: Mapping[str, torch.Tensor] | None, strict: bool = True
) -> tuple[list[str], list[str]]:
    """Load rank 0's whole state dict (other ranks may give None). Collective. Returns the missing
    and the unexpected names.

    Raises:
        ValueError: on every rank, if rank 0 gave no dict of tensors, if shapes differ, or if names
            differ and `strict` is True.
    """
    return state_dicts.load_full_state_dict(engine_of(module), module, state_dict, strict)


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
    """The makers of an engine's parts, see runtime/resources.py. Parts outside the core are imported
    when a recipe first needs them.
    """

    def storage(self, flat: Flat, tiers: Tiers | None, encoded: bool, engine: Engine) -> Storage:
        if encoded:
            from onefold.quant.encoded_storage import EncodedStorage

            return EncodedStorage(flat, self.codec(engine.recipe.frozen or ""))
        if tiers is not None:
            from onefold.offload.nvme_storage import STORAGES

            return STORAGES[tiers.optimizer](flat, tiers, engine)
        return DeviceStorage(flat)

    def gather(self, flat: Flat, engine: Engine) -> Gather:
        if flat.spec.gather_codec is None:
            return Gather(flat, engine)
        from onefold.quant.gather_paths import EncodedGather

        recipe = engine.recipe
        name = recipe.frozen if flat.spec.stored else recipe.parameters.codec
        return EncodedGather(flat, engine, self.codec(name or ""))

    def hop(self, flat: Flat, at: int, engine: Engine) -> Hop:
        group = flat.group  # its levels are like it
        if flat.spec.encodes(flat.spec.hops[at]) and not group.alone:
            from onefold.quant.hops import Encoded

            return Encoded(flat, at, engine, self.codec(engine.recipe.gradients.codec or ""))
        if engine.recipe.reduce == NATIVE and flat.spec.hops[at].size > 1:
            return Native(flat, at, engine)
        if group.native and flat.spec.hops[at].size > 1:
            return Rows(flat, at, engine)
        return (Simulated if group.stands_for_all else Pairwise)(flat, at, engine)

    def activations(
        self, units: list[Unit], engine: Engine, gathered: dict[int, tuple[Unit, Flat]]
    ) -> Activations:
        if engine.recipe.offload_activations is None:
            return Activations()
        from onefold.offload.engine_activations import HostActivations

        return HostActivations(units, engine, gathered)

    def codec(self, name: str) -> Codec:
        from onefold.quant.codecs import CODECS

        return CODECS[name]

    def transfers(self, *about: Any) -> Transfers:
        from onefold.offload.transfers import Transfers

        return Transfers(*about)


def _open(
    weights: str | os.PathLike[str] | None, module: nn.Module, device: torch.device, init: Any
) -> Weights | None:
    if weights is None:
        return None
    from onefold.pretrained.weights import Weights

    return Weights(weights, module, device, makes_up=init is not None)


def _note_uninitialized(
    engine: Engine, specs: list[UnitSpec], module: nn.Module, incoming: Collection[str]
) -> None:
    """Record rank 0's buffers that have no value, beside the parameters that were found before, and
    guard against their use: see runtime/uninitialized.py. Collective.
    """
    inside = {
        f"{name}.{key}" if name else key: (unit, functools.partial(_no_value, owner._buffers, key))
        for spec, unit in zip(specs, engine.units, strict=True)
        for name, owner in modules_of(spec, specs)
        for key in owner._buffers
    }
    mine = [name for name, (_, has_none) in inside.items() if has_none()]
    for name in tell_all(engine, "shard()", mine)[0]:
        engine.uninitialized.add([name], *inside[name])
    engine.uninitialized.given(incoming)
    if engine.uninitialized:
        guard_uninitialized(engine, module)


def _no_value(table: dict[str, torch.Tensor | None], key: str) -> bool:
    """Whether a buffer, in its module's table, has no value."""
    buffer = table.get(key)
    return buffer is not None and is_marked(buffer)


def _device(module: nn.Module, device: torch.device | str | None, at_once: bool) -> torch.device:
    """Return the device to compute on, and move buffers there.

    With `at_once` parameters are moved too. Else each is moved when its unit is laid out, so that
    the device never holds the whole model.
    """
    devices = {p.device for p in module.parameters() if not p.is_meta}
    if device is not None:
        where = with_index(device)
        if devices - {where} and at_once:
            module.to(where)
        elif devices - {where}:
            for param in module.parameters():
                param.grad = None  # laying out drops it; `_apply` would move it first
            module._apply(lambda t: t if isinstance(t, nn.Parameter) else t.to(where))
        return where
    if len(devices) > 1:
        raise ValueError(
            f"the model's parameters lie on {', '.join(map(str, sorted(devices, key=str)))}: "
            "move it to one device, or give shard() a device."
        )
    return with_index(devices.pop()) if devices else default_device()


def _steppers(engine: Engine) -> Steppers:
    """Return who steps the shards, in the order in which they are asked: see runtime/stepper.py."""
    from onefold.optim.whole import WholeStep
    from onefold.quant.stepper import LowBitStepper

    apart: list[Stepper] = [LowBitStepper(engine)]
    if engine.offloaded_flats:
        from onefold.offload.stepper import OffloadStepper

        # First: before anything is stepped, the ranks agree that no disk has failed
        apart.insert(0, OffloadStepper(engine))
    # It takes no shards on disks, and those on the host before the stepper of all others there
    return Steppers([WholeStep(engine), *apart])


def _close(engine: Engine) -> None:
    remove_step_hooks(engine)
    engine.close()
