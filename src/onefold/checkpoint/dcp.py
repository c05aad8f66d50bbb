"""Sharded models and their optimizers through torch.distributed.checkpoint (DCP): FSDP2 runs and
Onefold runs can load each other's checkpoints.

    Onefold run                                                FSDP2 run
    state = onefold.dcp_state_dict(model, optimizer)           m, o = get_state_dict(model, optimizer)
    dcp.save(state, checkpoint_id=folder)         == same ==   dcp.load({"model": m, "optimizer": o}, checkpoint_id=folder), set_state_dict
    dcp.load(state, checkpoint_id=folder)         == form ==   dcp.save({"model": m, "optimizer": o}, checkpoint_id=folder)

[Note: who writes what]

| state                                             | at stages 1 to 3                         | replicated (stage 0, one rank) |
|---------------------------------------------------|------------------------------------------|--------------------------------|
| parameters, in master precision                   | each rank its interval, as boxes         | DCP picks one rank per tensor  |
| optimizer state of the parameter's shape          | each rank its interval, as boxes         | DCP picks one rank per tensor  |
| of a matrix that is stepped whole, in any shape   | its owner, whole                         | DCP picks one rank per tensor  |
| its scalars; options of parameter groups; buffers | DCP picks one rank of those that have it | DCP picks one rank             |

A rank that holds no element of a parameter neither writes nor reads optimizer state for it. The
rank's optimizer never steps that parameter, so a `step` value held there would be stale.

DCP supports n-dimensional boxes only, so an interval is stored as one or more boxes:

    tensor [4, 6], elements [4, 21)      .  .  .  .  4  5      box at (0, 4), of [1, 2]
                                         6  7  8  9 10 11      box at (1, 0), of [2, 6]
                                        12 13 14 15 16 17
                                        18 19 20  .  .  .      box at (3, 0), of [1, 3]

An interval of a box of the tensor, as tensor parallelism leaves it to a rank, consists of boxes too.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NoReturn

import torch
from torch import nn
from torch.distributed.checkpoint import state_dict_saver
from torch.distributed.checkpoint.filesystem import SerializationFormat
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.optim import Optimizer

from onefold.checkpoint.apply import set_options
from onefold.checkpoint.errors import CheckpointError
from onefold.checkpoint.parts import groups_of
from onefold.checkpoint.saving import check_optimizers, optimizers_of
from onefold.checkpoint.together import Together
from onefold.layout.holders import BoxInterval, TensorBox, whole_region
from onefold.optim.faced_states import stepped_elsewhere, stored_as
from onefold.optim.states import OptimizerParts, meet, show_states
from onefold.optim.verdict import fresh_state
from onefold.runtime.flat import Entry
from onefold.runtime.hooks import engine_of
from onefold.runtime.parameters.parameter import disable_torch_function
from onefold.runtime.parts import HeldParts, MasterParts
from onefold.runtime.state.dicts import contents, takes_extra_state
from onefold.wording import few

_WRAPPERS = ("_checkpoint_wrapped_module.", "_orig_mod.")


def dcp_state_dict(
    model: nn.Module, optimizer: Optimizer | Sequence[Optimizer] | None = None
) -> dict[str, Any]:
    """Return the state dict of a sharded model for `torch.distributed.checkpoint.save`,
    `async_save` and `load`: {"model": ..., "optimizer": ...}.

    The two values are `Stateful`, with the keys of torch's `get_model_state_dict` and
    `get_optimizer_state_dict`. DCP reads and writes the ranks' own memory; nothing is gathered. The
    same dict can be used for a whole run.

        dcp.save(onefold.dcp_state_dict(model, optimizer), checkpoint_id="runs/a/step-100")
        dcp.load(onefold.dcp_state_dict(model, optimizer), checkpoint_id="runs/a/step-100")

    FSDP2 checkpoints load here, and FSDP2 loads checkpoints saved here, at any world size and
    stage. Values are bit-equal if dtypes agree and converted otherwise. The load creates missing
    optimizer state; of frozen parameters it reads only what the optimizer has already: freeze after
    the load. Other keys are possible: `{"net": state["model"]}`. DCP finds `Stateful` values only at
    the top level of the dict. For nested ones, call their `.state_dict()` before the load and
    `.load_state_dict()` with the same dict after it.

    DCP's own limits apply, as for FSDP2:

    - A tied parameter is written once for each of its names.
    - A stored part is read again for each box that needs some of it.
    - A key that is missing in the checkpoint stops the load, unless the load is given
      `planner=DefaultLoadPlanner(allow_partial_load=True)`.
    - Planners must flatten state dicts, as the default ones do.

    Args:
        model: the return value of `onefold.shard`.
        optimizer: one or several over parameters of `model`. Several are saved as one, as torch
            does. None leaves the key out.

    Raises:
        ValueError: `model` was not sharded.
        CheckpointError: (in the save or load) an optimizer's parameter does not belong to the
            model, or its state cannot be divided as the parameter is.
    """
    state: dict[str, Any] = {"model": ModelState(model)}
    if optimizer is not None:
        state["optimizer"] = OptimizerState(model, optimizers_of(optimizer))
    return state


class _State:
    """A part of a sharded model as DCP's `Stateful`: the base of `ModelState` and
    `OptimizerState`.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model, self.engine = model, engine_of(model)
        encoded = any(e.flat.spec.stored for e in self.engine.entries)
        if self.engine.on_disk or encoded or self.engine.recipe.moments not in (None, "fp32"):
            raise CheckpointError(
                "torch.distributed.checkpoint reads and writes tensors in memory, and this model's"
                " state is on NVMe, encoded, or in fewer bits: use onefold.save, then load that"
                " checkpoint with a recipe without offload, frozen= and moments=, and write it with"
                " dcp_state_dict."
            )

    def _check(self, optimizers: Sequence[Optimizer] = ()) -> None:
        self.engine.check_moment("dcp_state_dict")
        check_optimizers(optimizers)
        self.engine.settle()
        # A load writes to these tensors in place, and host-to-device copies may still read them
        self.engine.transfers.up.wait()

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise CheckpointError(
            f"{type(self).__name__} was to be pickled: torch.distributed.checkpoint finds it at the"
            ' top of its dict only, as in {"model": state["model"]}. Deeper, use its'
            " .state_dict() before saving or loading, and .load_state_dict(it) after loading."
        )


class ModelState(_State):
    """Parameters, persistent buffers and extra state under their names in the model."""

    def state_dict(self) -> dict[str, Any]:
        """Return {name: this rank's part}. Tensors alias the model's memory. A tied parameter is
        listed under each of its names. Collective on a mesh of several axes.
        """
        self._check()
        self.engine.buffers.refuse_own(self.model, "torch.distributed.checkpoint")
        with disable_torch_function(), torch.no_grad():
            out: dict[str, Any] = {}
            for name, (value, entry) in contents(self.engine, self.model).items():
                if entry is not None:
                    value = _leaf(entry, value)
                out[_clean(name)] = value.detach() if isinstance(value, torch.Tensor) else value
            return out

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Finish a load into the dict that `state_dict()` returned. Values of another such dict are
        copied.

        Raises:
            CheckpointError: a value is not this rank's part of that name, or no parameter, buffer
                or extra state of the model has that name.
        """
        self.engine.about_to_write()
        mine = self.state_dict()
        with disable_torch_function(), torch.no_grad():
            named = (self.model.named_parameters, self.model.named_buffers)
            places = {_clean(name) for each in named for name, _ in each(remove_duplicate=False)}
            modules = {_clean(name): m for name, m in takes_extra_state(self.model).items()}
            for name in (n for n in mine if n in state):
                if name in places:
                    _take(name, mine[name], state[name])
                elif name in modules:
                    modules[name].set_extra_state(state[name])
                else:
                    raise CheckpointError(
                        f"{name!r} is in the model's state dict, but is no parameter, buffer or"
                        " extra state of a module, so what was read has no place. Leave it out of"
                        " the dict that DCP loads, and set it yourself."
                    )
            self.engine.make_stale()
            self.engine.uninitialized.given(
                {name for name in (*places, *mine) if _clean(name) in state}
            )


class OptimizerState(_State):
    """The optimizers' state: {"state": {name: {key: part}}, "param_groups": [{option: value,
    "params": [names]}]}, with the groups of all optimizers in one list.
    """

    def __init__(self, model: nn.Module, optimizers: list[Optimizer]) -> None:
        super().__init__(model)
        self.optimizers = optimizers

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's part of the optimizers' state. Tensors alias the optimizers' memory.
        Collective: a state that cannot be saved is said on every rank.

        State that does not exist yet is created in the dict only, but for frozen parameters. It has
        the values after one step with zero gradients, with `step` reset to 0. The optimizers do not
        change.
        """
        self._check(self.optimizers)
        for optimizer in self.optimizers:
            meet(optimizer)
        state: dict[str, Any] = {}
        groups: list[dict[str, Any]] = []
        stateless: set[int] = set()  # groups whose parameters get no state
        # Only some ranks may have what cannot be saved, and the others would wait for them in DCP
        with Together.of(self.engine).each_rank(), disable_torch_function(), torch.no_grad():
            for parts, group, name, entry in self._parameters():
                if name in state:
                    raise CheckpointError(
                        f"parameter {name!r} is in two parameter groups or optimizers: DCP holds"
                        " one state for a name."
                    )
                if not _holds_some(parts, entry):
                    continue
                values = parts.optimizer.state.get(entry.param)
                if not values and entry.param.requires_grad and id(group) not in stateless:
                    values = _fresh(parts, group, entry)
                    stateless.update([] if values else [id(group)])
                if values:
                    state[name] = {k: _leaf(entry, value, k, parts) for k, value in values.items()}
            # Tensors are copied, not aliased: DCP loads groups by position, but the checkpoint's
            # groups may be in another order. `_take_options` matches them by their parameters.
            groups = [
                {k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in group.items()}
                | {"params": [_clean(entry.name) for entry in entries]}
                for _, group, entries in self._groups()
            ]
        return {"state": state, "param_groups": groups}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Finish a load into the dict that `state_dict()` returned: take over new state, scalars
        that are not tensors, and options of groups.

        Raises:
            CheckpointError: a group's parameters are in several of the checkpoint's groups or in
                none, or a value is not this rank's part.
        """
        self._check()
        self.engine.about_to_write()
        with disable_torch_function(), torch.no_grad():
            self._take_options(state["param_groups"])
            elsewhere: dict[Optimizer, list[Any]] = {each: [] for each in self.optimizers}
            for parts, _, name, entry in self._parameters():
                states = parts.optimizer.state
                if not _holds_some(parts, entry):
                    known = entry.param.requires_grad or states.get(entry.param)
                    if known and parts.owned(entry) is None:
                        elsewhere[parts.optimizer].append(entry.param)
                elif loaded := state["state"].get(name):
                    mine = states[entry.param]
                    for key, value in loaded.items():
                        if isinstance(mine.get(key), torch.Tensor):
                            _take(f"{name} ({key})", _leaf(entry, mine[key], key, parts), value)
                        else:
                            mine[key] = _local(entry, value, parts)
            for optimizer, params in elsewhere.items():
                show_states(optimizer)
                stepped_elsewhere(optimizer, params, loaded=True)

    def _groups(self) -> Iterator[tuple[Optimizer, dict[str, Any], list[Entry]]]:
        known = {id(e.param): e for e in self.engine.entries}
        for optimizer in self.optimizers:
            yield from ((optimizer, *group) for group in groups_of(optimizer, known))

    def _parameters(self) -> Iterator[tuple[OptimizerParts, dict[str, Any], str, Entry]]:
        """Yield what the optimizers step. A tied parameter has its first name, as in torch."""
        for optimizer, group, entries in self._groups():
            parts = OptimizerParts(optimizer)
            yield from ((parts, group, _clean(entry.name), entry) for entry in entries)

    def _take_options(self, loaded: list[dict[str, Any]]) -> None:
        """Set each group's options from the loaded group that has the same parameters."""
        for _, group, entries in self._groups():
            here = {_clean(entry.name) for entry in entries}
            found = [saved for saved in loaded if not here.isdisjoint(saved["params"])]
            if here and len(found) != 1:
                raise CheckpointError(
                    f"a parameter group holds {few(map(repr, sorted(here)), 3)}, which the checkpoint has"
                    f" in {len(found)} groups. Give the optimizer the parameter groups that the"
                    " checkpoint was saved with; their order is free."
                )
            if found:
                set_options(group, found[0])


def _clean(name: str) -> str:
    """Return the name without the parts that module wrappers add, as torch's state dicts do."""
    for wrapper in _WRAPPERS:
        name = name.replace(wrapper, "")
    return name


def _holds_some(parts: HeldParts, entry: Entry) -> bool:
    """Whether this rank has the optimizer's state of (some of) a parameter."""
    a, b = parts.held(entry)
    return a < b or not entry.numel


def _leaf(entry: Entry, value: Any, key: str = "", parts: OptimizerParts | None = None) -> Any:
    """Return the parameter `entry`, or its optimizer state `key`, as a leaf for DCP: an interval, a
    whole tensor, or a value that is not a tensor. `parts`: of the state's optimizer.

    Raises:
        CheckpointError: the state is divided between ranks, but not shaped like the parameter.
    """
    whole = None if parts is None else parts.owned(entry)
    shape = entry.param.shape if whole is None else whole.matrix.shape
    alone = not entry.flat.divided or (whole is not None and entry.region is None)
    if isinstance(value, torch.Tensor):
        value = value.detach()
        if alone or value.dim() == 0:
            return value
        if value.shape == shape:
            if not entry.numel and entry.region is None:
                return value.view(entry.shape)
            start, _ = (parts or MasterParts()).held(entry)
            return DCPInterval(value.reshape(-1), entry.shape, start, entry.region)
        what = f"a tensor of shape {tuple(value.shape)}"
    elif alone or not isinstance(value, (list, tuple, Mapping)):
        return value
    else:
        what = f"a {type(value).__name__}"
    raise CheckpointError(
        f"the optimizer's {key!r} of parameter {entry.name!r} is {what}, where this rank holds"
        f" {entry.param.numel()} elements of it: how the whole is put together from the ranks'"
        " parts is not known. State that is shaped like its parameter, and scalars, can be saved"
        " at every stage; other state at stage 0, or where the optimizer steps whole matrices."
    )


def _local(entry: Entry, leaf: Any, parts: OptimizerParts) -> Any:
    """Return this rank's own value of a leaf: the reverse of `_leaf`."""
    if isinstance(leaf, DCPInterval):
        return leaf.local.view(parts.shape(entry))
    nothing = isinstance(leaf, torch.Tensor) and leaf.numel() == entry.numel == 0
    return leaf.view(parts.shape(entry)) if nothing else leaf


def _take(what: str, target: torch.Tensor, given: Any) -> None:
    """Copy a loaded value into `target`, unless DCP has loaded it there already."""
    given = torch.tensor(given) if isinstance(given, (int, float)) else given  # a step count
    into, value = (x.local if isinstance(x, DCPInterval) else x for x in (target, given))
    if _kind(target) != _kind(given):
        said = f"{what}: given {_kind(given)}, expected {_kind(target)}."
        raise CheckpointError(f"{said} Load into what state_dict() of the same object returned.")
    if value.data_ptr() != into.data_ptr():
        into.copy_(value)


def _kind(value: Any) -> str:
    if isinstance(value, torch.Tensor) and not isinstance(value, DCPInterval):
        return f"a tensor of shape {tuple(value.shape)}"
    return repr(value)


def _fresh(parts: OptimizerParts, group: dict[str, Any], entry: Entry) -> dict[str, Any]:
    """Return the state that the optimizer would give a parameter at its first step.

    Raises:
        CheckpointError: the optimizer's step failed, for instance because it needs a closure.
    """
    try:
        fresh = fresh_state(parts.optimizer, group, entry.param, parts.shape(entry))
        for key, value in fresh.items():
            if isinstance(value, torch.Tensor):
                fresh[key] = value.to(stored_as(parts.optimizer, entry, key, value.dtype)[key])
        return fresh
    except Exception as error:
        raise CheckpointError(
            f"the state of a fresh {type(parts.optimizer).__name__} could not be made by a step with"
            f" zero gradients ({type(error).__name__}: {error}). Take a training step before loading;"
            " its effect is overwritten."
        ) from error


# -- leaves ----------------------------------------------------------------------------------------


def _writer() -> Any:
    """Return the storage writer of the DCP save that is under way in this thread, if any. Leaves are not
    given it.
    """
    frame = sys._getframe(1)
    while frame is not None:
        if (
            frame.f_code.co_filename == state_dict_saver.__file__
            and "storage_writer" in frame.f_locals
        ):
            return frame.f_locals["storage_writer"]
        frame = frame.f_back  # type: ignore[assignment]
    return None


class _IntervalMemory:
    """The interval's tensor, in a wrapper that deep-copies only these elements. DCP's staging would
    otherwise copy the whole storage of which the tensor is a view.
    """

    __slots__ = ("data",)

    def __init__(self, data: torch.Tensor) -> None:
        self.data = data

    def __deepcopy__(self, memo: Any) -> _IntervalMemory:
        return _IntervalMemory(self.data.to("cpu", copy=True))


class DCPInterval(torch.Tensor):
    """Elements [start, start + len(local)) of a flattened tensor of `shape`, or of a flattened box
    of it. It has the shape of the whole tensor, but holds only `local`.

    It is a tensor subclass because DCP looks for shards in tensors only. It cannot be computed
    with.

    Args:
        local: [stop - start], contiguous. DCP saves from it and loads into it in place.
        shape: shape of the whole tensor.
        start: index of the first element in the flattened whole tensor, or box.
        region: the box; None for the whole tensor.
    """

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]
    _held: _IntervalMemory
    start: int
    region: TensorBox | None

    @staticmethod
    def __new__(
        cls: type[DCPInterval],
        local: torch.Tensor,
        shape: Sequence[int],
        start: int,
        region: TensorBox | None = None,
    ) -> DCPInterval:
        made = torch.Tensor._make_wrapper_subclass(
            cls, torch.Size(shape), dtype=local.dtype, device=local.device
        )
        made._held, made.start, made.region = _IntervalMemory(local), start, region
        return made

    @property
    def local(self) -> torch.Tensor:
        """The memory of the interval, [stop - start]."""
        return self._held.data

    def _boxes(self) -> list[TensorBox]:
        region = self.region or whole_region(self.size())
        return BoxInterval(region, self.start, self.start + self.local.numel()).boxes()

    # -- what DCP's planners call ------------------------------------------------------------------

    def __create_write_items__(self, fqn: str, _: Any) -> list[WriteItem]:
        chunks = self.__create_chunk_list__()
        writer = _writer()
        if (
            len(chunks) > 1
            and getattr(writer, "serialization_format", None) is SerializationFormat.SAFETENSORS
        ):
            raise CheckpointError(
                f"{type(writer).__name__} writes safetensors, of which torch keeps one piece of a tensor"
                f" for each file and drops the others without an error; {fqn!r} has {len(chunks)} on this"
                " rank. Use the default writer of torch.distributed.checkpoint, or onefold.export."
            )
        properties = TensorProperties.create_from_tensor(self.local)
        return [
            WriteItem(
                MetadataIndex(fqn, chunk.offsets),
                WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk, properties, self.size()),
            )
            for chunk in chunks
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [
            ChunkStorageMetadata(torch.Size(box.offset), torch.Size(box.shape))
            for box in self._boxes()
        ]

    def __get_tensor_shard__(self, index: MetadataIndex) -> torch.Tensor:
        at = 0
        for box in self._boxes():
            if index.offset is not None and tuple(index.offset) == box.offset:
                return self.local[at : at + box.numel].view(box.shape)
            at += box.numel
        raise CheckpointError(
            f"the planner asked for the part of {index.fqn!r} at {index.offset}; this rank holds"
            f" {self!r}, whose parts begin at {[list(box.offset) for box in self._boxes()]}. A"
            " planner of your own must plan with the chunks that __create_chunk_list__ of the"
            " tensor names."
        )

    # -- what DCP's stagers call -------------------------------------------------------------------

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        me, device = args[0], (kwargs or {}).get("device")
        aten = torch.ops.aten
        if func in (aten.detach.default, aten.alias.default):
            return me._like(me.local)
        if func in (aten.new_empty.default, aten.empty_like.default, aten.zeros_like.default):
            return me._like(torch.zeros_like(me.local, device=device))
        if func is aten.clone.default:
            return me._like(me.local.clone())
        if func is aten.copy_.default and isinstance(args[1], DCPInterval):
            me.local.copy_(args[1].local)
            return me
        raise CheckpointError(
            f"{func} was called on {me!r}. It stands for a part of a tensor, for"
            " torch.distributed.checkpoint to save and to load; nothing can be computed with it."
            " `.local` is the part itself, one-dimensional."
        )

    def _like(self, local: torch.Tensor) -> DCPInterval:
        return DCPInterval(local, self.size(), self.start, self.region)

    def __deepcopy__(self, memo: Any) -> DCPInterval:
        return self._like(self.local.clone())

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        box = self.region
        where = "" if box is None else f"the box at {box.offset} of {box.shape} of "
        return (
            f"elements {self.start} to {self.start + self.local.numel()} of {where}a tensor of shape"
            f" {tuple(self.size())}"
        )

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise CheckpointError(
            f"{self!r} was to be pickled, which would save this rank's part under the name of the"
            " whole. Save it by torch.distributed.checkpoint.save, or async_save in a thread (not"
            " in a process), with a planner that flattens state dicts (the default)."
        )
