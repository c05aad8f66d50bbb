"""Reads and writes of `.grad` and `.data` of a sharded parameter, and the counts of writes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from onefold.runtime.parameters.interval import (
    IntervalSpec,
    ShardedParameterError,
    disable_torch_function,
    dispatches,
    dress,
    entry_of,
    get_grad,
    over,
    set_grad,
    shape_of,
    spec_of,
    tensors_among,
)
from onefold.runtime.parameters.operators import of_shape, part_of, unreduced_error
from onefold.runtime.parameters.schema import operator_of, words

if TYPE_CHECKING:
    from onefold.runtime.flat import Entry
    from onefold.runtime.parameters.parameter import ShardInfo
    from onefold.runtime.resources import Progress


# -- without memory --------------------------------------------------------------------------------
#
# Storageless tensors: a shape and a dtype without memory. They stand for elements that are stored
# on NVMe or encoded.
#
# A kernel that is given a tensor without memory may read address 0. So user code only sees them as a
# `Storageless`, which answers questions about its shape and raises an explanation otherwise.


class StoragelessError(RuntimeError):
    """Elements on NVMe, or encoded ones, were used as if they were in memory."""


def storageless(like: torch.Tensor, what: str) -> torch.Tensor:
    """Return a storageless tensor with the shape, dtype and device of `like`. `what` describes it
    in messages.
    """
    out = torch.empty_like(like.detach())
    out.untyped_storage().resize_(0)
    return seen_storageless(out, what, spec_of(like))


def seen_storageless(t: torch.Tensor, what: str, spec: IntervalSpec | None = None) -> torch.Tensor:
    """Return the storageless tensor `t` as a `Storageless`, which user code may see. With a `spec`
    it shows the shape of the whole.
    """
    if dispatches(type(t)):
        seen: Any = t
        seen.__class__ = over(Storageless, type(t))
    else:
        seen = t.as_subclass(Storageless)
    seen.what, seen.spec = what, spec
    return seen


def is_storageless(t: torch.Tensor) -> bool:
    """Whether `t` should have memory and has none."""
    return t.numel() > 0 and t.device.type != "meta" and t.untyped_storage().nbytes() == 0


def storageless_error(func: Any, what: str) -> StoragelessError:
    """Return the error for code that computes with something storageless."""
    return StoragelessError(
        f"{getattr(func, '__name__', func)} was given {what}, whose elements are stored on NVMe or"
        " encoded. Read a parameter with `parameter.onefold.gather()` (on every rank), write with"
        " `onefold.full_params(model, write=True)`, clip with onefold.clip_grad_norm_, drop"
        " gradients with zero_grad() (set_to_none=True, its default); offload_gradients='cpu'"
        " keeps gradients in memory."
    )


class Storageless(torch.Tensor):
    """See the docstring of this module."""

    what: str = "a tensor"
    spec: IntervalSpec | None = None

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        first, kwargs = args[0] if args else None, kwargs or {}
        op = operator_of(func)
        if op.run is of_shape and isinstance(first, Storageless) and first.spec is not None:
            return func(first.spec.stand_in(first.dtype), *args[1:], **kwargs)
        if needs_no_elements(func):
            with disable_torch_function():
                return func(*args, **kwargs)
        if op.name in _MADE_WITHOUT and isinstance(first, Storageless):
            with disable_torch_function():
                made = func(*args, **kwargs)
            return seen_storageless(made, first.what, first.spec)
        what = next(
            (t.what for t in tensors_among((args, kwargs)) if isinstance(t, Storageless)), ""
        )
        raise storageless_error(func, what or "a tensor")

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"Storageless({self.what}, on NVMe or encoded)"


def needs_no_elements(func: Any) -> bool:
    """Whether `func` needs no elements of a tensor, and returns none of them."""
    op = operator_of(func)
    return op.asks or op.name in _SETS


_SETS = words("grad__set__ requires_grad__set__ register_hook register_post_accumulate_grad_hook")
#: Functions whose result has the elements of their argument, so that it may be storageless too.
_MADE_WITHOUT = frozenset(("data", "detach"))


class StatePlace(torch.Tensor):
    """A placeholder in `optimizer.state` for a state on NVMe. Copying or pickling it raises, since
    the copy would not hold the state. With a `spec` it shows the shape of the whole to user code.
    """

    spec: IntervalSpec | None = None

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        first, kwargs = args[0] if args else None, kwargs or {}
        with disable_torch_function():
            spec = first.spec if isinstance(first, StatePlace) else None
            if spec is not None and operator_of(func).run is of_shape:
                args = (spec.stand_in(args[0].dtype), *args[1:])
            return func(*args, **kwargs)

    @staticmethod
    def of(shape: Any, dtype: torch.dtype) -> StatePlace:
        place: Any = torch.empty(shape, dtype=dtype, device="meta")
        if dispatches(type(place)):  # a fake tensor keeps its class
            place.__class__ = over(StatePlace, type(place))
            return place
        return place.as_subclass(StatePlace)

    def to(self, *args: Any, **kwargs: Any) -> Any:
        raise _elsewhere()

    def __deepcopy__(self, memo: Any) -> Any:
        raise _elsewhere()

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise _elsewhere()


def _elsewhere() -> StoragelessError:
    return StoragelessError(
        "a state of the optimizer was to be copied or pickled, and it is stored on NVMe:"
        " this is a place for it only. optimizer.state_dict() brings the whole to"
        " rank 0's host; onefold.save and onefold.load write and read it at any stage and tier."
    )


# -- `.grad` and `.data` ---------------------------------------------------------------------------
#
# Reads and writes of `.grad` and `.data` of a sharded parameter by code outside the engine.


def wait_before_write(param: Any, seen: bool) -> None:
    """See `MasterAccess.wait_before_write`."""
    entry = entry_of(param)
    if entry is not None and (engine := entry.engine()) is not None:
        engine.masters.wait_before_write(entry.flat, seen)


def seen_grad(param: Any) -> torch.Tensor | None:
    """Return `.grad` as code outside an optimizer's step sees it: an interval with the whole's
    shape.

    A rank that owns no element of a parameter has no gradient of it. If other ranks have one, this
    rank sees an empty interval: code such as gradient clipping then runs the same collectives on
    all ranks.
    """
    grad, spec = get_grad(param), spec_of(param)
    entry = entry_of(param)
    storage = getattr(entry.flat, "storage", None) if entry is not None else None
    if storage is not None:
        storage.gradient_seen(entry)
    if grad is None and entry is not None and (found := _waiting(entry)) is not None:
        return _seen_waiting(entry, spec, *found)
    if spec is None:
        return grad
    if grad is None:
        if entry is None or not entry.graded_elsewhere:
            return None
        if entry.flat.storage.gradients_on_disk:
            return storageless(param, f"the gradient of {spec.name!r}")
        return dress(torch.empty(0, dtype=param.dtype, device=param.device), spec.of("grad"))
    if isinstance(grad, Storageless):
        return grad
    return dress(grad.detach(), spec.of("grad"))


def _waiting(entry: Entry) -> tuple[torch.Tensor, torch.Tensor] | None:
    """See `Reducer.waiting`."""
    if not entry.filled and entry.flat.held is None:
        return None
    engine = entry.engine()
    return None if engine is None else engine.reduce.waiting(entry)


def _seen_waiting(
    entry: Entry, spec: IntervalSpec | None, whole: torch.Tensor, own: torch.Tensor
) -> torch.Tensor:
    """Return what `.grad` shows of a gradient that waits for the boundary under no_sync."""
    engine = entry.engine()
    assert engine is not None
    if entry.flat.storage.offloaded:  # it is on the device, and its parameter is not
        return storageless(entry.param, f"the unreduced gradient of {entry.slot.name!r}")
    if spec is None:
        # `.data` has a version counter of its own, which tells whether the user wrote to it
        return engine.reduce.shown.setdefault(entry, own.data.view(entry.param.shape))
    spec = IntervalSpec(spec.owners, spec.name, spec.first, spec.shape, whole, "grad", spec.box)
    return dress(own.detach(), spec)


_nothing = torch.empty(0, device="cpu")


def dropped_grad(param: Any) -> torch.Tensor | None:
    """Return `.grad` for code that only drops it: the plain tensor, without an interval around it.
    Of a gradient that waits for the boundary, that is this rank's whole.

    If other ranks have a gradient and this one owns no element, that is an arbitrary empty tensor:
    the code must see that there is something to drop.
    """
    own: torch.Tensor | None = get_grad(param)
    entry = entry_of(param) if own is None else None
    if entry is not None and (found := _waiting(entry)) is not None:
        return found[0]
    return own if entry is None or not entry.graded_elsewhere else _nothing


def give_grad(param: Any, value: torch.Tensor | None) -> None:
    spec, entry = spec_of(param), entry_of(param)
    elsewhere = spec is not None and spec.start == spec.stop
    absent = value is None or isinstance(value, Storageless)
    if entry is not None and _waiting(entry) is not None:
        if value is not None:
            raise unreduced_error("`.grad =`", entry.slot.name)
        entry.engine().reduce.forget(entry)  # type: ignore[union-attr]
    # Every rank checks, also one that has no element of the parameter
    if spec is not None and value is not None and not absent and shape_of(value) != spec.shape:
        raise spec.of("grad").mismatch(value)
    if entry is not None and (spec is not None or value is None):
        entry.graded_elsewhere = value is not None and elsewhere
    if value is None or absent:
        set_grad(param, value)
    elif spec is None:
        # What was made like the parameter has the dtype that it shows
        declared = param.__dict__["_onefold_declared"]
        set_grad(param, value.to(param.dtype) if value.dtype == declared else value)
    elif elsewhere:
        set_grad(param, None)
    else:
        set_grad(param, _local_of(value, spec).to(param.dtype))


def give_data(param: Any, value: torch.Tensor) -> None:
    """Run `param.data = value`: copy the values. The parameter keeps its memory, which the engine
    refers to. See [Note: old data].

    Raises:
        ShardedParameterError: `value` has another shape, dtype or device.
    """
    info: ShardInfo = param.__dict__["onefold"]
    if (
        value.dtype not in (param.dtype, param.__dict__["_onefold_declared"])
        or value.device != param.device
    ):
        raise ShardedParameterError(
            f"parameter {info.name!r}, in {param.dtype} on {param.device}, was given data of"
            f" {value.dtype} on {value.device}: the model was moved or cast after shard() (.to(),"
            " .half(), .cuda(), assigning .data). Do that before shard(), or give shard() a device"
            " and the recipe a precision."
        )
    wait_before_write(param, seen=False)
    spec = spec_of(param)
    with torch.no_grad():
        local = value if spec is None else _local_of(value, spec)
        if spec is None and tuple(value.shape) != tuple(info.shape):
            raise ShardedParameterError(
                f"parameter {info.name!r} of shape {tuple(info.shape)} was given data of shape"
                f" {tuple(value.shape)}, expected the same."
            )
        # The master may have more bits than `value`, which is in the declared dtype. Where `value`
        # equals the rounded master, the master stays: assigning back what was read changes nothing
        if local.dtype != param.dtype:
            local = torch.where(local == param.to(local.dtype), param, local.to(param.dtype))
        given_out = param.__dict__.get("_onefold_given_out")
        # A rank without elements of the parameter decides as the others do: the write counters must
        # agree on all ranks.
        same = (
            local.data_ptr() == param.data_ptr()
            if local.numel()
            else given_out is not None and value.__dict__.get("_onefold_given_out") is given_out
        )
        if not same:
            if given_out is not None:
                local = (
                    local.clone()
                    if local.untyped_storage().data_ptr() == param.untyped_storage().data_ptr()
                    else local
                )
                given_out.move_away(param)
            param.copy_(local)


def give_whole(entry: Entry, whole: torch.Tensor, value: torch.Tensor) -> None:
    """Run `param.data = value` in a forward pass, by code outside the unit that owns the parameter.

    The value goes to the whole parameter; runtime/refresh.py copies it to the masters.

    Raises:
        ShardedParameterError: `value` has another shape, dtype or device.
    """
    if (spec := spec_of(value)) is not None:
        value = spec.gather(value.detach(), "`.data =`")
    now, given = ((tuple(t.shape), t.dtype, t.device) for t in (whole, value))
    if now != given:
        raise ShardedParameterError(
            f"parameter {entry.slot.name!r} was given data of shape {given[0]} in {given[1]} on"
            f" {given[2]} in a forward pass, expected shape {now[0]} in {now[1]} on {now[2]}. To"
            " change its shape or dtype assign between onefold.unshard(model) and a new shard()."
        )
    whole.data = value.detach()


def _local_of(value: torch.Tensor, spec: IntervalSpec) -> torch.Tensor:
    """Return this rank's elements of `value`, an interval or a plain tensor of the whole's shape.
    An interval of another cut is gathered, which is collective.

    Raises:
        ShardedParameterError: `value` has another shape.
    """
    if shape_of(value) != spec.shape:
        raise spec.mismatch(value)
    local = part_of(value, spec).detach()
    return local if spec_of(value) is not None else local.clone()


def seen_data(param: Any) -> torch.Tensor:
    """Return `.data`. Writes through it do not raise the parameter's own version counter, so all
    tensors that are given out share another one, which `written` reads.
    """
    now, known = param.data, param.__dict__.get("_onefold_data")
    if (
        known is None
        or known.dtype != now.dtype
        or (known.data_ptr(), known.shape) != (now.data_ptr(), now.shape)
    ):
        # Keep the count of the previous view
        param.__dict__["_onefold_written"] = written(param) - param._version
        param.__dict__["_onefold_data"] = known = now
    return known.detach()


def written(param: torch.Tensor) -> int:
    """Return how often the memory of an optimizer's parameter was written to, by torch's version
    counters. Writes through `.data` count too.
    """
    known = param.__dict__.get("_onefold_data")
    through = 0 if known is None else known._version + param.__dict__["_onefold_written"]
    return param._version + through


# -- counts of writes ------------------------------------------------------------------------------
#
# Which parameters have been written to since a forward pass computed with them.
#
#     forward A   step   backward A     an error, as in plain PyTorch: the weights that A's gradients need are overwritten
#     forward A   backward A   step     the usual order
#     forward A, forward B   step over B's parameters   backward A     fine
#
# Autograd's version counters do not notice this: an optimizer writes to the masters, but a backward
# pass reads the flat buffers that are gathered or copied from them.
#
# Each forward pass stores one number, the count of writes when it began. If the count has changed
# when its backward pass begins, the backward pass walks up the graph from the pass's output, and
# raises if it meets a parameter whose values have been overwritten. Not every write overwrites:
# copies in another dtype keep the old values until they are refreshed, and an optimizer writes only
# to the parameters that it steps.


class WriteCounters:
    """Counts the writes to an engine's masters. `entry.last_write` is the number of the last write
    to that entry.
    """

    def __init__(self, entries: Sequence[Entry], progress: Progress) -> None:
        self._entries = entries  # the engine's own list, which it clears when it closes
        self.progress = progress
        # Parameters that got a gradient on some rank since they were last stepped
        self.graded: set[int] = set()

    def stepped(self, entries: Sequence[Entry]) -> list[Entry]:
        """Count a step of an optimizer over `entries` as a write to those with a gradient.

        For an entry of which this rank owns no element, a gradient on any other rank counts.
        Returns such entries that the other ranks have stepped.
        """
        self.progress.writes += 1
        others: list[Entry] = []
        for entry in entries:
            graded = entry.number in self.graded
            if get_grad(entry.param) is not None:
                entry.last_write = self.progress.writes
            elif (graded or entry.graded_elsewhere) and self._is_others(entry):
                entry.last_write = self.progress.writes
                # A step of offloaded shards has dropped their gradients by now
                if entry.graded_elsewhere or entry.flat.storage.offloaded:
                    others.append(entry)
            self.graded.discard(entry.number)
        for flat in {entry.flat: None for entry in entries}:
            # All ranks alike, also one that owns nothing of it and so has no counter to go by
            if flat.travels or any(
                entry.last_write == self.progress.writes for entry in flat.entries
            ):
                flat.bumps += 1
        return others

    @staticmethod
    def _is_others(entry: Entry) -> bool:
        """Whether this rank owns no element of `entry`, and so never has a gradient of it."""
        a, b = entry.flat.local(entry)
        return a == b

    def all_of(self, entries: Iterable[Entry]) -> None:
        """Count a write to the masters of all `entries`."""
        self.progress.writes += 1
        for entry in entries:
            entry.last_write = self.progress.writes
            entry.flat.bumps += 1

    def refuse_if_computed_with(self, since: int) -> None:
        """Check the parameters upstream of the current autograd node. Called in a hook of a
        backward pass.

        Raises:
            RuntimeError: a parameter among them was overwritten after write number `since`.
        """
        written = {
            id(e.compute): e
            for e in self._entries
            if e.last_write > since and e.flat.overwritten_since(e.last_write)
        }
        node = torch._C._current_autograd_node()
        found = _leaves(node, written) if written and node is not None else []
        if found:
            others = f" and {len(found) - 1} others have" if len(found) > 1 else " has"
            raise RuntimeError(
                "backward() of a forward pass that ran before optimizer.step(), or before another"
                f" write to the parameters: {found[0]!r}{others} changed since, so the gradients"
                " would be wrong. Call backward() before step(), or run the forward pass again."
            )


def _leaves(start: Any, wanted: dict[int, Entry]) -> list[str]:
    """Return the names of the parameters in `wanted` (by the id of the whole parameter) that the
    graph upstream of `start` reaches.
    """
    found, seen, todo = [], {start}, [start]
    while todo:
        node = todo.pop()
        if (entry := wanted.get(id(getattr(node, "variable", None)))) is not None:
            found.append(entry.slot.name)
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                todo.append(following)
    return sorted(found)
