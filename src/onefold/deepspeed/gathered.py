"""`zero.GatheredParameters`, for parameters with and without an engine.

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
"""

from __future__ import annotations

import contextlib
import weakref
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from types import MappingProxyType, TracebackType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from onefold.deepspeed import divided
from onefold.deepspeed.divided import EARLY, broadcast
from onefold.deepspeed.parameter_facts import (
    CHECKED,
    DEPTH,
    LOCAL,
    PASSES,
    SHOWN,
    alone,
    give_facts,
)
from onefold.deepspeed.rendezvous import leave, rendezvous
from onefold.runtime.engine import Engine
from onefold.runtime.flat import Entry
from onefold.runtime.hooks import engine_of
from onefold.runtime.parameters.interval import disable_torch_function, entry_of, owner_of
from onefold.runtime.parameters.parameter import ShardedParameter, bare, face
from onefold.runtime.parts import whole_masters

__all__ = [
    "GatheredParameters",
    "register_external_parameter",
    "unregister_external_parameter",
    "unwrap_model_for_generation",
]
_WRITTEN = "_onefold_written_inside"
_CALLED = "_onefold_gathered_by_a_call"
_NO_PARAMS: Mapping[str, nn.Parameter] = MappingProxyType({})


class _Early:
    """What a rank keeps of a parameter without an engine: its interval, shape and dtype."""

    def __init__(self, param: nn.Parameter) -> None:
        self.values, self.shape, self.dtype = divided.values_of(param), param.shape, param.dtype

    def put_back(self, param: nn.Parameter, source: int | None, written: bool) -> None:
        """Divide the parameter again.

        Args:
            source: the rank whose values are kept; None keeps no changes of this context.
            written: whether a nested context has written the parameter. Its changes are kept.
        """
        same = param.shape == self.shape and param.dtype == self.dtype
        if source is not None:
            divided.divide(param, source)
        elif written:
            divided.hold(param)
        elif same and self.values is not None:
            divided.hold(param, self.values)
        else:  # given another shape on every rank
            divided.divide(param, 0)


class GatheredParameters:
    """Make parameters whole on every rank inside the context. Collective.

    Args:
        params: a parameter, several, or a module. Those that are whole already are left alone.
        modifier_rank: the rank whose changes are kept on leaving; None keeps none.
        fwd_module: accepted; see `register_external_parameter`.
        enabled: False does nothing.

    Raises:
        ValueError: on leaving: a sharded parameter was given another shape.
        RuntimeError: `modifier_rank` inside a forward or backward pass of the model; on leaving: a
            parameter was changed without `modifier_rank`, and `enable_sanity_checks` is set.
        NotImplementedError: `modifier_rank` with parameters that are stored on NVMe or encoded.
    """

    def __init__(
        self,
        params: Any,
        modifier_rank: int | None = None,
        fwd_module: nn.Module | None = None,
        enabled: bool = True,
    ) -> None:
        self.modifier_rank = modifier_rank
        self._held: list[tuple[nn.Parameter, bool, Any]] = []
        self._wholes: list[Engine] = []
        self._params = _ordered(params, modifier_rank is not None) if enabled else []

    def __enter__(self) -> None:
        fresh: dict[Engine, list[Entry]] = {}
        for param in self._params:
            depth = param.__dict__.get(DEPTH, 0)  # if any, an outer context has gathered it
            param.__dict__[DEPTH] = depth + 1
            entry, engine = owner_of(param)
            if (
                depth or alone()
            ):  # on one rank nothing is gathered; `ds_status` tells of the context
                self._held.append((param, True, None))
            elif isinstance(param, ShardedParameter):
                fresh.setdefault(engine, []).append(entry)
            else:
                self._held.append((param, False, _Early(param)))
        early = [param for param, _, kept in self._held if isinstance(kept, _Early)]
        if early:
            rendezvous(lambda: f"GatheredParameters of {divided.shapes(early)} begins", early)
            for param, _, kept in self._held:
                if isinstance(kept, _Early) and kept.values is not None:
                    param.__dict__[LOCAL] = kept.values
            replaced = dict(zip(map(id, early), divided.gather(early), strict=True))
            for param, _, kept in self._held:
                if replaced.get(id(param)) and isinstance(kept, _Early) and kept.values is not None:
                    kept.values = divided.interval(param)  # the old one is out of date
        for engine, entries in fresh.items():
            self._gather(engine, entries)
        seen = (param for param, _, _ in self._held)
        self._checked = [(p, p._version) for p in seen if CHECKED in p.__dict__]

    def _gather(self, engine: Engine, entries: list[Entry]) -> None:
        """Turn sharded parameters into plain whole ones."""
        if self.modifier_rank is not None:
            _refuse_unwritable(entries)
        engine.uninitialized.look()
        all_of_it = len(entries) == len(engine.entries)
        # The parameters of one flat buffer are gathered together
        for flat in dict.fromkeys(entry.flat for entry in entries):
            full, wanted = whole_masters(engine, flat), [e for e in entries if e.flat is flat]
            for entry in wanted:
                engine.uninitialized.refuse("GatheredParameters would show", entry.names)
                whole = flat.view(full, entry)
                if all_of_it and self.modifier_rank is None:
                    whole = whole.to(flat.dtypes.compute)
                elif len(wanted) < len(flat.entries):
                    whole = whole.clone()
                with disable_torch_function():
                    local = entry.param.data
                    bare([entry.param])
                    entry.param.data = whole
                entry.param.__dict__[LOCAL] = local
                self._held.append((entry.param, False, local))
        if all_of_it:
            engine.full_params_depth += 1
            self._wholes.append(engine)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        held, self._held = self._held, []
        dropped = [p for p, version in self._checked if p._version != version]
        while self._wholes:
            self._wholes.pop().full_params_depth -= 1
        writes = self.modifier_rank is not None and error is None
        early = [param for param, _, kept in held if isinstance(kept, _Early)]
        if early and error is not None:
            leave(error)
        elif early and writes:
            rendezvous(lambda: f"GatheredParameters of {divided.shapes(early)} ends", [])
        with torch.no_grad():
            for param, nested, kept in held:
                param.__dict__[DEPTH] -= 1
                if writes and not isinstance(kept, _Early) and not alone():
                    broadcast(param.data, self.modifier_rank or 0)
                if nested:
                    param.__dict__[_WRITTEN] = writes or param.__dict__.get(_WRITTEN, False)
                    continue
                param.__dict__.pop(DEPTH)
                param.__dict__.pop(LOCAL, None)
                written = param.__dict__.pop(_WRITTEN, False)
                if isinstance(kept, _Early):
                    kept.put_back(param, self.modifier_rank if writes else None, written)
                else:
                    _put_back(param, kept, writes)
        if dropped and error is None and self.modifier_rank is None:
            raise RuntimeError(
                f"in-place modification of {divided.shapes(dropped)} inside GatheredParameters"
                " without modifier_rank, which keeps no change: give modifier_rank=0."
            )

    def close(self, modifier_rank: int | None) -> None:
        """Leave the context. The changes of `modifier_rank` are kept; None keeps none."""
        self.modifier_rank = modifier_rank
        if modifier_rank is not None:
            _refuse_unwritable([e for p, _, _ in self._held if (e := entry_of(p)) is not None])
        self.__exit__(None, None, None)


def all_gather(
    param: nn.Parameter, param_list: Sequence[nn.Parameter] | None = None, **options: Any
) -> None:
    """Make the parameters whole until `partition`. Collective."""
    for one in [param] if param_list is None else param_list:
        if _CALLED not in one.__dict__:
            context = one.__dict__[_CALLED] = GatheredParameters([one])
            context.__enter__()


def partition(
    param: nn.Parameter,
    param_list: Sequence[nn.Parameter] | None = None,
    has_been_updated: bool = False,
    **options: Any,
) -> None:
    """Undo `all_gather`. With `has_been_updated` the changes of rank 0 are kept. Collective."""
    for one in [param] if param_list is None else param_list:
        context = one.__dict__.pop(_CALLED, None)
        if context is not None:
            context.close(0 if has_been_updated else None)


SHOWN["all_gather"] = partial(partial, all_gather)
SHOWN["partition"] = partial(partial, partition)


def _listed(params: Any) -> Iterable[Any]:
    if isinstance(params, nn.Module):
        return params.parameters()
    return [params] if isinstance(params, Tensor) else params


def _ordered(params: Any, writes: bool) -> list[nn.Parameter]:
    """Return the parameters that some rank does not hold whole, each once; on one rank those that
    tell of it.

    The order is the same on all ranks, even if callers have collected them in a set.
    """
    found: dict[int, tuple[tuple[int, int], nn.Parameter]] = {}
    for p in _listed(params):
        own, key = getattr(p, "__dict__", {}), None
        entry, engine = owner_of(p)
        if alone():
            key = (0, own["ds_id"]) if "ds_id" in own else None
        elif engine is None:
            key = (0, own[EARLY].number) if EARLY in own else None
        elif engine.in_pass:
            if writes:
                raise RuntimeError(
                    f"GatheredParameters(modifier_rank=...) was given parameter"
                    f" {entry.slot.name!r} inside a pass of its model: change it outside."
                )
        elif isinstance(p, ShardedParameter) or own.get(DEPTH):
            key = (1, entry.number)
        if key is not None:
            found[id(p)] = (key, p)
    return [p for _, p in sorted(found.values(), key=lambda of: of[0])]


def _refuse_unwritable(entries: list[Entry]) -> None:
    for entry in entries:
        if not entry.flat.storage.in_place:
            raise NotImplementedError(
                f"GatheredParameters: parameter {entry.slot.name!r} is stored on NVMe or encoded, and"
                " cannot be changed there with modifier_rank: change it before initialize, or with"
                " onefold.full_params(model, write=True)."
            )


def _put_back(param: nn.Parameter, local: Tensor, writes: bool) -> None:
    whole = param.data
    param.data = local
    face([param])
    info: Any = param.onefold  # type: ignore[attr-defined]
    if not writes:
        return
    if whole.shape != info.shape:
        raise ValueError(
            f"GatheredParameters: parameter {info.name!r} of shape {tuple(info.shape)} was given"
            f" shape {tuple(whole.shape)}. Change shapes before initialize."
        )
    with disable_torch_function():
        held = param.dtype
    param.data = whole.to(held)


def register_external_parameter(module: nn.Module, parameter: nn.Parameter) -> None:
    """Do nothing: a parameter is gathered when any module's forward pass uses it."""


def unregister_external_parameter(module: nn.Module, parameter: nn.Parameter) -> None:
    """Do nothing; see `register_external_parameter`."""


# -- what callers do around generation ---------------------------------------------------------------


def mark(model: nn.Module) -> None:
    """Give the parameters of a model at stage 3 the attributes of parameter_facts.py."""
    params = [entry.param for entry in engine_of(model).entries]
    give_facts(params)
    if alone():
        _count_passes(model, params)
    for module in model.modules():
        module.__dict__["ds_external_parameters"] = tuple  # a call returns none
        module.__dict__["_external_params"] = _NO_PARAMS


def _count_passes(model: nn.Module, params: list[nn.Parameter]) -> None:
    """Let the parameters know whether a forward pass is under way. On one rank the engine has
    nothing to do in a pass, and does not know.
    """
    passes = [0]

    def begin(*_: Any) -> None:
        passes[0] += 1

    def end(*_: Any) -> None:
        passes[0] -= 1

    model.register_forward_pre_hook(begin)
    model.register_forward_hook(end, always_call=True)
    for param in params:
        param.__dict__[PASSES] = passes


class ParameterOffload:
    """The object that callers find as `optimizer.parameter_offload`. TRL removes DeepSpeed's hooks from
    the model before it generates inside `GatheredParameters`, and registers them again afterwards.
    Here a gathered model communicates nothing, so no hook has to be removed. As a context it does
    the same.

    Attributes:
        forward_hooks, backward_hooks: handles of hooks that TRL removes: one that does nothing.
    """

    forward_hooks: list[Any]
    backward_hooks: list[Any]

    def __init__(self, module: nn.Module) -> None:
        self.module = weakref.proxy(module)
        self._register_deepspeed_module()

    def __enter__(self) -> None:
        self.forward_hooks, self.backward_hooks = [], []

    def __exit__(self, *_: Any) -> None:
        self._register_deepspeed_module()

    def empty_partition_cache(self) -> None:
        """Do nothing: gathered weights are released after each use."""

    def _register_deepspeed_module(self, module: Any = None, count: Any = None) -> None:
        self.forward_hooks, self.backward_hooks = (
            [RemovableHandle(OrderedDict())],
            [RemovableHandle(OrderedDict())],
        )


@contextlib.contextmanager
def unwrap_model_for_generation(model: Any) -> Iterator[Any]:
    """Gather all parameters of an engine's model, in the compute dtype, so that `generate` inside
    sends nothing. Yields the engine. Collective; changes of the values are dropped.
    """
    offload = getattr(getattr(model, "optimizer", None), "parameter_offload", None)
    with GatheredParameters(model.parameters()), offload or contextlib.nullcontext():
        yield model
