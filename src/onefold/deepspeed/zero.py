"""`zero.Init`: every rank makes the model, and keeps its part of rank 0's values. And
`zero.GatheredParameters`, for parameters with and without an engine:

| a parameter                             | before      | inside `GatheredParameters`         |
|-----------------------------------------|-------------|-------------------------------------|
| made under `Init`, no engine yet        | an interval | whole, rank 0's values              |
| sharded by an engine                    | an interval | whole, in master precision          |
| sharded, given with all of its engine's | an interval | whole, in the compute dtype         |
| inside a pass of its own model          |             | unchanged: it is gathered when used |
| any other                               | whole       | unchanged                           |

With a `modifier_rank`, parameters are always gathered in master precision, and on leaving every
rank takes the values of that rank. Without one, changes are dropped, or raise on leaving if the
configuration has `enable_sanity_checks`. A forward pass inside communicates nothing if all
parameters of the model were given, so ranks may generate texts of different lengths.

The attributes `ds_*` that callers read from parameters, under `zero.Init` and at stage 3:

| attribute                              | is                                                                     |
|----------------------------------------|------------------------------------------------------------------------|
| ds_id                                  | the parameter's number, unique in the process, the same on all ranks   |
| ds_shape, ds_numel                     | those of the whole parameter                                           |
| ds_status                              | AVAILABLE where this code sees the whole parameter, else NOT_AVAILABLE |
| ds_tensor                              | this rank's elements, one-dimensional; writes to it are kept. Of a     |
|                                        | parameter on NVMe it has a shape only                                  |
| ds_persist                             | whether this rank keeps the whole parameter between passes             |
| ds_active_sub_modules                  | a set for callers; always empty here                                   |
| all_gather(), partition()              | `GatheredParameters` as calls: enter it, and leave it                  |

Parameters that were not made under `zero.Init`, and belong to no engine of stage 3, have none of
these attributes. On one rank nothing is divided. The status is NOT_AVAILABLE outside of
`GatheredParameters` there too, as in DeepSpeed, so that code behaves alike on every number of ranks.
"""

from __future__ import annotations

import contextlib
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import partial
from operator import attrgetter, methodcaller
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import ParametrizationList
from torch.utils.hooks import RemovableHandle

from onefold.deepspeed import divided
from onefold.deepspeed.access import VALUES, overwrite, piece
from onefold.deepspeed.divided import EARLY, agree, broadcast, leave
from onefold.deepspeed.meaning import DeepSpeedConfig
from onefold.deepspeed.utilities import get_world_size, join
from onefold.recipe import COMPUTE_DTYPES
from onefold.runtime.engine import Engine
from onefold.runtime.flat import Entry
from onefold.runtime.hooks import engine_of
from onefold.runtime.parameters.interval import disable_torch_function, entry_of, owner_of
from onefold.runtime.parameters.parameter import ShardedParameter, Whole, bare, face
from onefold.runtime.parameters.values import elsewhere
from onefold.runtime.parts import whole_masters

__all__ = [
    "GatheredParameters",
    "Init",
    "ZeroParamStatus",
    "register_external_parameter",
    "unregister_external_parameter",
    "unwrap_model_for_generation",
    "zero_wrapper_for_fp_tensor_constructor",
]
#: Bytes of parameters that a rank may hold whole while a model is made. A parameter above the limit
#: is the only whole one.
LIMIT = 64 << 20
#: References to the storage of a tensor that nobody else views: the tensor's own reference, and
#: that of the storage object through which `_is_free` counts.
_OWN_REFERENCES = 2
#: The attribute of a parameter for what is known of it while contexts have gathered it.
INSIDE = "_onefold_inside"
#: Whether a write in a context that drops it raises (`enable_sanity_checks`).
CHECKED = "_onefold_checked"
_CALLED = "_onefold_gathered_by_a_call"


class Init:
    """Make a model that no rank holds whole: each rank keeps an interval of rank 0's values.

    | while a model is made                          | on each rank                                   |
    |------------------------------------------------|------------------------------------------------|
    | a parameter is new                             | it stays whole                                 |
    | more than `LIMIT` bytes are whole              | all but the newest are divided                 |
    | code uses a divided parameter (as `apply` may) | it is gathered, and counts as new              |
    | rank 0 holds a view of a parameter             | it stays whole as long as the view exists      |
    | the context ends                               | all are divided, in the configuration's dtype  |

    Dividing and gathering are collective, so every rank must run the same code inside. Ranks that
    do different things raise (`divided.agree`). These parameters are never divided:

    - parameters of another class than `nn.Parameter`, and those on the meta device;
    - the sources of torch's parametrizations (weight_norm), because reading the computed weight
      would not gather them.

    divided.py lists what may be done with divided parameters. `initialize` takes them over unit by
    unit.

    Args:
        module: a model that exists already. It is treated as if it had been made inside.
        config_dict_or_path, config: the configuration. Only its precision and
            `enable_sanity_checks` are used; "auto" counts as not set.
        dtype: the dtype of parameters; None takes the configuration's, fp32 if it has none.
        enabled: False does nothing.
        ignored, others: mem_efficient_linear, remote_device, pin_memory, data_parallel_group, mpu and
            more are accepted without effect; the recipe says where state is stored.
    """

    def __init__(
        self,
        module: nn.Module | None = None,
        *ignored: Any,
        config_dict_or_path: Any = None,
        config: Any = None,
        enabled: bool = True,
        dtype: torch.dtype | None = None,
        **others: Any,
    ) -> None:
        self.enabled = enabled
        given = config_dict_or_path if config_dict_or_path is not None else config
        self.dtype, self._checks = dtype, False
        if given is not None:
            read = DeepSpeedConfig(given, ranks=0)
            self._checks = read.enable_sanity_checks
            if dtype is None:
                self.dtype = COMPUTE_DTYPES[read.precision] if read.precision else torch.float32
        self._made: dict[int, nn.Parameter] = {}
        self._modules: dict[int, nn.Module] = {}
        self._whole: list[nn.Parameter] = []
        self._stuck = 0
        self._register: Any = None
        if enabled:
            join(None)
            if module is not None:
                for param in module.parameters():
                    self._note(param)
                self._end()

    def __enter__(self) -> Init:
        # Of nested contexts, only the outermost does the work
        self.enabled = self.enabled and not divided.gathers
        if self.enabled:
            self._register = register = nn.Module.register_parameter

            def noted(module: nn.Module, name: str, param: nn.Parameter | None) -> None:
                register(module, name, param)
                self._modules[id(module)] = module
                if param is not None:
                    self._note(param, isinstance(module, ParametrizationList))

            nn.Module.register_parameter = noted  # type: ignore[method-assign, assignment]
            divided.gathers.append(self._gather)
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if self.enabled:
            nn.Module.register_parameter = self._register  # type: ignore[method-assign]
            divided.gathers.remove(self._gather)
            if error is None:
                self._end()
            elif not alone():
                leave(error)
            self._made, self._modules, self._whole = {}, {}, []

    def _note(self, param: nn.Parameter, stays: bool = False) -> None:
        """Note a parameter that a module has registered. With `stays` it is never divided."""
        if id(param) in self._made or EARLY in param.__dict__ or param.is_meta:
            return
        self._made[id(param)] = param
        give_facts([param])
        if not alone():
            divided.note(param, stays)
            self._add([param])

    def _gather(self, params: Sequence[nn.Parameter]) -> None:
        """Gather divided parameters that code uses while the model is made."""
        agree(f"a constructor reads or changes {divided.shapes(params)}", params=params)
        divided.gather(params)
        self._add(params)

    def _add(self, params: Sequence[nn.Parameter]) -> None:
        """Count `params` as whole; divide older ones if more than `LIMIT` bytes are whole now."""
        # An engine may have been made inside: it has taken its parameters over
        self._whole = [p for p in (*self._whole, *params) if entry_of(p) is None]
        if sum(_bytes(p) for p in self._whole) <= LIMIT + self._stuck:
            return
        # A constructor that holds a view of a parameter may still write through it. Rank 0 decides
        # for all, because its values are the ones that are kept.
        mine = [_is_free(p) for p in self._whole]
        free = agree("parameters are divided, to make others", mine, self._whole)
        last = {id(p) for p in params}
        kept = []
        for param, is_free in zip(self._whole, free, strict=True):
            if is_free and id(param) not in last:
                divided.divide(param, 0)
            else:
                kept.append(param)
        self._whole = kept
        self._stuck = sum(_bytes(p) for p in kept if id(p) not in last)

    def _end(self) -> None:
        """Divide the parameters that are still whole, and cast all."""
        # `to_empty` puts new parameters in the place of those on the meta device (skip_init)
        for module in self._modules.values():
            for param in module._parameters.values():
                if param is not None:
                    self._note(param, isinstance(module, ParametrizationList))
        made = [param for param in self._made.values() if entry_of(param) is None]
        give_facts(made, self._checks)
        if not alone():
            agree("the model has been made", params=made)
        for param in made:
            if isinstance(param, nn.parameter.UninitializedParameter):
                continue
            if not alone():
                divided.divide(param, 0)
            if self.dtype is not None and param.is_floating_point() and param.dtype != self.dtype:
                if (values := divided.values_of(param)) is None:
                    param.data = param.data.to(self.dtype)
                else:
                    divided.hide(param, values.to(self.dtype))


def _bytes(param: nn.Parameter) -> int:
    return param.numel() * param.itemsize if divided.can_divide(param) else 0


def _is_free(param: nn.Parameter) -> bool:
    """Whether no other tensor shares the parameter's storage."""
    if not divided.can_divide(param):
        return False
    references: int = torch._C._storage_Use_Count(param.untyped_storage()._cdata)
    return references <= _OWN_REFERENCES


def zero_wrapper_for_fp_tensor_constructor(fn: Any, target_fp_dtype: Any, *args: Any) -> Any:
    """Return `fn` unchanged: `Init` patches none of torch's constructors.

    The name exists because transformers reads and replaces it.
    """
    return fn


# -- GatheredParameters ------------------------------------------------------------------------------


@dataclass
class Inside:
    """What is known of a parameter while contexts have gathered it.

    Attributes:
        shape: its shape before.
        local: this rank's elements before; None if nobody divides it.
        depth: how many contexts have gathered it.
        kept: the values that the last one with `modifier_rank` has left; None without one.
        version: the parameter's version then.
    """

    shape: torch.Size
    local: Any = None
    depth: int = 0
    kept: Tensor | None = None
    version: int = 0

    def unchanged(self, param: nn.Parameter) -> bool:
        """Whether `local` is still this rank's part of a parameter without an engine."""
        if self.local is None or self.kept is not None:
            return False
        return (self.local.dtype, self.shape) == (param.dtype, param.shape)


class GatheredParameters:
    """Make parameters whole on every rank inside the context. Collective.

    Args:
        params: a parameter, several, or a module. Those that are whole already are left alone.
        modifier_rank: the rank whose changes are kept on leaving, counted in the group that
            `initialize` was given; None keeps none.
        fwd_module: accepted; see `register_external_parameter`.
        enabled: False does nothing.

    Raises:
        ValueError: on leaving: a sharded parameter was given another shape.
        RuntimeError: `modifier_rank` inside a forward or backward pass of the model; on leaving: a
            parameter was changed without `modifier_rank`, and `enable_sanity_checks` is set.
    """

    def __init__(
        self,
        params: Any,
        modifier_rank: int | None = None,
        fwd_module: nn.Module | None = None,
        enabled: bool = True,
    ) -> None:
        self.modifier_rank = modifier_rank
        self._params = _ordered(params, modifier_rank is not None) if enabled else []
        self._wholes: list[Engine] = []
        self._checked: list[tuple[nn.Parameter, int]] = []
        self._entered = False

    def __enter__(self) -> None:
        try:
            self._enter()
            self._entered = True
        except BaseException as error:
            self.__exit__(type(error), error, None)
            raise

    def _enter(self) -> None:
        early: list[nn.Parameter] = []
        fresh: dict[Engine, list[Entry]] = {}
        for param in self._params:
            inside = param.__dict__.setdefault(INSIDE, Inside(param.shape))
            inside.depth += 1
            entry, engine = owner_of(param)
            if inside.depth > 1:
                continue
            if isinstance(param, ShardedParameter):
                fresh.setdefault(engine, []).append(entry)
            elif not alone():
                early.append(param)
        if early:
            agree(f"GatheredParameters of {divided.shapes(early)} begins", params=early)
            divided.gather(early)
            for param in filter(divided.can_divide, early):
                param.__dict__[INSIDE].local = divided.interval(param)
        for engine, entries in fresh.items():
            self._gather(engine, entries)
        self._checked = [(p, p._version) for p in self._params if CHECKED in p.__dict__]

    def _gather(self, engine: Engine, entries: list[Entry]) -> None:
        """Turn sharded parameters into plain whole ones."""
        all_of_it = len(entries) == len(engine.entries)
        if engine.copying is not None:
            engine.copying()  # a save reads what the parameters hold
        # The parameters of one flat buffer are gathered together
        for flat in dict.fromkeys(entry.flat for entry in entries):
            full, wanted = whole_masters(engine, flat), [e for e in entries if e.flat is flat]
            for entry in wanted:
                engine.uninitialized.refuse("GatheredParameters would show", entry.names)
                whole, param = flat.view(full, entry), entry.param
                if all_of_it and self.modifier_rank is None:
                    whole = whole.to(flat.dtypes.compute)
                elif len(wanted) < len(flat.entries):
                    whole = whole.clone()
                with disable_torch_function():
                    param.__dict__[INSIDE].local = param.data
                    bare([param])
                    param.data = whole
        if all_of_it:
            engine.full_params_depth += 1
            self._wholes.append(engine)

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        dropped = [
            p
            for p, version in self._checked
            if p._version > max(version, p.__dict__[INSIDE].version)
        ]
        while self._wholes:
            self._wholes.pop().full_params_depth -= 1
        writes, source = self.modifier_rank is not None and error is None, self.modifier_rank or 0
        held = {param: param.__dict__[INSIDE] for param in self._params}
        early = [p for p, inside in held.items() if EARLY in p.__dict__ and inside.depth == 1]
        if early and self._entered and error is not None and self.modifier_rank is not None:
            leave(error)
        elif early and writes:
            agree(f"GatheredParameters of {divided.shapes(early)} ends")
        with torch.no_grad():
            for param, inside in held.items():
                inside.depth -= 1
                ends = not inside.depth
                if writes and not alone() and not (ends and EARLY in param.__dict__):
                    _, engine = owner_of(param)
                    broadcast(param.data, source, engine and engine.mesh.group)
                if writes:
                    inside.kept = param.data if ends else param.data.clone()
                    inside.version = param._version
                elif ends and inside.local is not None and inside.kept is not None:
                    param.data = inside.kept  # without later changes
                if not ends:
                    continue
                del param.__dict__[INSIDE]
                if EARLY not in param.__dict__:
                    if inside.local is not None:
                        whole, param.data = param.data, inside.local
                        face([param])
                        if inside.kept is not None:
                            overwrite(param, VALUES, piece(param, whole))
                elif not self._entered:  # alone: other ranks may still be gathering
                    if divided.can_divide(param):
                        divided.hide(param, divided.interval(param))
                elif inside.unchanged(param):
                    divided.hide(param, inside.local)
                else:  # also if it was given another shape everywhere
                    divided.divide(param, source)
        if dropped and error is None and self.modifier_rank is None:
            raise RuntimeError(
                f"in-place modification of {divided.shapes(dropped)} inside GatheredParameters"
                " without modifier_rank, which keeps no change: give modifier_rank=0."
            )


def all_gather(param: nn.Parameter, param_list: Any = None, **options: Any) -> None:
    """Make the parameters whole until `partition`. Collective."""
    for one in param_list or [param]:
        if _CALLED not in one.__dict__:
            context = GatheredParameters([one])
            context.__enter__()
            one.__dict__[_CALLED] = context


def partition(
    param: nn.Parameter, param_list: Any = None, has_been_updated: bool = False, **options: Any
) -> None:
    """Undo `all_gather`. With `has_been_updated` the changes of rank 0 are kept. Collective."""
    for one in param_list or [param]:
        if context := one.__dict__.pop(_CALLED, None):
            context.modifier_rank = 0 if has_been_updated else None
            context.__exit__(None, None, None)


def _ordered(params: Any, writes: bool) -> list[nn.Parameter]:
    """Return the parameters that some rank does not hold whole, each once; on one rank those that
    tell of it.

    The order is the same on all ranks, even if callers have collected them in a set.
    """
    listed: Any = [params] if isinstance(params, Tensor) else params
    found: dict[tuple[int, int], nn.Parameter] = {}
    for p in params.parameters() if isinstance(params, nn.Module) else listed:
        own, (entry, engine) = getattr(p, "__dict__", {}), owner_of(p)
        if engine is None:
            if EARLY in own or (alone() and "ds_id" in own):
                found[0, own["ds_id"]] = p
        elif engine.in_pass:
            if writes:
                raise RuntimeError(
                    f"GatheredParameters(modifier_rank=...) was given parameter"
                    f" {entry.slot.name!r} inside a pass of its model: change it outside."
                )
        elif isinstance(p, ShardedParameter) or INSIDE in own:
            found[1 + engine.number, entry.number] = p
    return [found[key] for key in sorted(found)]


def register_external_parameter(module: nn.Module, parameter: nn.Parameter) -> None:
    """Do nothing: a parameter is gathered when any module's forward pass uses it."""


unregister_external_parameter = register_external_parameter


# -- attributes of parameters ---------------------------------------------------------------------


class ZeroParamStatus(Enum):
    """The values of `param.ds_status`: whole, divided, being gathered."""

    AVAILABLE = 1
    NOT_AVAILABLE = 2
    INFLIGHT = 3


def give_facts(params: Iterable[nn.Parameter], checked: bool = False) -> None:
    """Give the parameters the attributes `ds_*`. All ranks give them in the same order. `checked`:
    the configuration enables sanity checks.
    """
    for name in SHOWN.keys() - vars(Tensor).keys():  # once in a process that uses it
        setattr(Tensor, name, property(partial(_read, name)))
    for param in params:
        own = param.__dict__
        own.setdefault("ds_id", next(divided.numbers))
        own.setdefault("ds_active_sub_modules", set())
        if checked:
            own[CHECKED] = True


def alone() -> bool:
    return get_world_size() == 1


def status_of(param: nn.Parameter) -> ZeroParamStatus:
    entry = entry_of(param)
    whole = isinstance(param, Whole) or INSIDE in param.__dict__
    if not (whole or alone() or isinstance(param, divided.DividedParameter)):
        whole = entry is None or not entry.flat.divided or entry.unit.in_use > 0
    return ZeroParamStatus.AVAILABLE if whole else ZeroParamStatus.NOT_AVAILABLE


def local_part(param: nn.Parameter) -> Tensor:
    """Return this rank's elements, in memory. Those on NVMe, or encoded ones, are an `Elsewhere`:
    it has a shape, and computing with it raises.
    """
    inside, entry = param.__dict__.get(INSIDE), entry_of(param)
    held = divided.values_of(param) if inside is None else inside.local
    if held is None:
        held = param if entry is None else entry.param
    with disable_torch_function():
        part = held.detach().as_subclass(Tensor).reshape(-1)
        if entry is not None and not entry.flat.storage.in_place:
            return elsewhere(part, f"ds_tensor of {entry.slot.name!r}")
        return part


def _persists(param: nn.Parameter) -> bool:
    entry = entry_of(param)
    if entry is not None:
        return alone() or not entry.flat.divided
    return not isinstance(param, divided.DividedParameter)


#: {attribute of torch's class of tensors: returns it for a parameter}
SHOWN: dict[str, Callable[[Any], Any]] = {
    "ds_shape": attrgetter("shape"),
    "ds_numel": methodcaller("numel"),
    "ds_status": status_of,
    "ds_tensor": local_part,
    "ds_persist": _persists,
    "all_gather": partial(partial, all_gather),
    "partition": partial(partial, partition),
}


def _read(name: str, tensor: Any) -> Any:
    # TRL's fused losses ask plain tensors, too: a parameter that was saved for the backward pass
    # comes back as a plain tensor, whole.
    if name == "ds_status" and not isinstance(tensor, nn.Parameter):
        return ZeroParamStatus.AVAILABLE
    if "ds_id" not in tensor.__dict__:
        raise AttributeError(
            f"{type(tensor).__name__!r} object has no attribute {name!r}: only parameters made under"
            " deepspeed.zero.Init, or of an engine at stage 3, have it."
        )
    return SHOWN[name](tensor)


# -- what callers do around generation ---------------------------------------------------------------


def mark(model: nn.Module, checked: bool) -> None:
    """Give the parameters of a model at stage 3 the attributes `ds_*`."""
    give_facts((entry.param for entry in engine_of(model).entries), checked)
    for module in model.modules():
        module.__dict__["ds_external_parameters"] = tuple  # a call returns none
        module.__dict__["_external_params"] = {}


class ParameterOffload:
    """The object that callers find as `optimizer.parameter_offload`. TRL removes DeepSpeed's hooks from
    the model before it generates inside `GatheredParameters`, and registers them again afterwards.
    Here a gathered model communicates nothing, so no hook has to be removed.

    Attributes:
        forward_hooks, backward_hooks: handles of hooks that TRL removes: one that does nothing.
    """

    forward_hooks: list[Any]
    backward_hooks: list[Any]

    def __init__(self, module: nn.Module) -> None:
        self.module = weakref.proxy(module)
        self._register_deepspeed_module()

    def empty_partition_cache(self) -> None:
        """Do nothing: gathered weights are released after each use."""

    def _register_deepspeed_module(self, *_: Any) -> None:
        self.forward_hooks = [RemovableHandle(OrderedDict())]
        self.backward_hooks = [RemovableHandle(OrderedDict())]


@contextlib.contextmanager
def unwrap_model_for_generation(model: Any) -> Iterator[Any]:
    """Gather all parameters of an engine's model, in the compute dtype, so that `generate` inside
    sends nothing. Yields the engine. Collective; changes of the values are dropped.
    """
    offload = getattr(getattr(model, "optimizer", None), "parameter_offload", None)
    offload = offload or ParameterOffload(model)
    with GatheredParameters(model.parameters()):
        offload.forward_hooks = offload.backward_hooks = []
        try:
            yield model
        finally:
            offload._register_deepspeed_module()
