"""Reads and writes of `.grad` and `.data` of a sharded parameter, and the counts of writes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from onefold.runtime.differentiate import in_autograd, mapped
from onefold.runtime.open_passes import here, in_forward
from onefold.runtime.parameters.interval import (
    IntervalSpec,
    ShardedParameterError,
    disable_torch_function,
    dress,
    entry_of,
    get_grad,
    over,
    owner_of,
    set_grad,
    shape_of,
    spec_of,
)
from onefold.runtime.parameters.operators import of_shape, part_of, unreduced_error, whole_of
from onefold.runtime.parameters.schema import operator_of, words

if TYPE_CHECKING:
    from onefold.runtime.engine import Engine
    from onefold.runtime.flat import Entry


# -- without memory --------------------------------------------------------------------------------


class StoragelessError(RuntimeError):
    """Elements on NVMe, or encoded ones, were used as if they were in memory."""


class Elsewhere(torch.Tensor):
    """A tensor with a shape and a dtype, whose elements are elsewhere: on NVMe, encoded, or not
    gathered (`Released`).

    A kernel that is given a tensor without memory may read address 0. So this answers questions that
    need no elements, and brings the elements, or raises, for all others. With a `spec` it shows the
    shape of the whole.
    """

    what = "a tensor"
    spec: IntervalSpec | None = None

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        op, kwargs = operator_of(func), kwargs or {}
        if op.asks or op.name in _SETS or func in CALLS:  # autograd knows them by their nodes
            with disable_torch_function():
                if op.run is of_shape and (spec := getattr(args[0], "spec", None)) is not None:
                    args = (spec.stand_in(args[0].dtype), *args[1:])
                return func(*args, **kwargs)
        args, kwargs = mapped(
            (args, kwargs), lambda t: t.bring(func) if isinstance(t, Elsewhere) else t
        )
        return func(*args, **kwargs)

    def bring(self, func: Any) -> torch.Tensor:
        """Return the elements, which `func` asks for."""
        raise storageless_error(func, self.what)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"Elsewhere({self.what}, on NVMe or encoded)"


#: Functions that take parameters as `inputs`.
CALLS = {torch.autograd.grad, torch.autograd.backward}
_SETS = words("grad__set__ requires_grad__set__ register_hook register_post_accumulate_grad_hook")


def elsewhere(t: torch.Tensor, what: str, spec: IntervalSpec | None = None) -> Elsewhere:
    """Make `t`, a fresh tensor without memory, an `Elsewhere`. `what` describes it in messages."""
    t.__class__ = over(Elsewhere, type(t))
    t.what, t.spec = what, spec  # type: ignore[attr-defined]
    return t  # type: ignore[return-value]


def storageless(like: torch.Tensor, what: str) -> Elsewhere:
    """Return an `Elsewhere` with the shape, dtype and device of `like`."""
    out = torch.empty_like(like.detach())
    out.untyped_storage().resize_(0)
    return elsewhere(out, what, spec_of(like))


def state_place(shape: Any, dtype: torch.dtype) -> Elsewhere:
    """Return what stands in `optimizer.state` for a state on NVMe."""
    return elsewhere(torch.empty(shape, dtype=dtype, device="meta"), "a state of the optimizer")


def storageless_error(func: Any, what: str) -> StoragelessError:
    """Return the error for code that computes with something storageless."""
    return StoragelessError(
        f"{getattr(func, '__name__', func)} was given {what}, whose elements are stored on NVMe or"
        " encoded. Read a parameter with `parameter.onefold.gather()` (on every rank), write with"
        " `onefold.full_params(model, write=True)`, clip with onefold.clip_grad_norm_, drop"
        " gradients with zero_grad() (set_to_none=True, its default); offload_gradients='cpu'"
        " keeps gradients in memory. optimizer.state_dict() brings states to rank 0's host, and"
        " onefold.save and onefold.load write and read them at any stage and tier."
    )


# -- `.grad` and `.data` ---------------------------------------------------------------------------
#
# Reads and writes of `.grad` and `.data` of a sharded parameter by code outside the engine.


def wait_before_write(t: Any, seen: bool = False) -> None:
    """See `Engine.wait_before_write`. `t`: a sharded parameter or an interval."""
    entry, spec = entry_of(t), spec_of(t)
    engine, flat = owner_of(t)[1], entry and entry.flat
    if entry is None and spec is not None:
        engine, flat = spec.owners.engine, spec.owners.flat()
    if engine is not None and flat is not None:
        engine.wait_before_write(flat, seen)


def arriving(param: Any) -> Entry | None:
    """Return the entry of a sharded parameter if its gradient of the backward pass under way lies on
    the leaf: a hook may read it, and write to it.
    """
    entry = entry_of(param) if in_autograd() else None
    return entry if entry is not None and get_grad(entry.compute) is not None else None


def seen_grad(param: Any) -> torch.Tensor | None:
    """Return `.grad` as code outside an optimizer's step sees it: an interval with the whole's
    shape.

    A rank that owns no element of a parameter has no gradient of it. If other ranks have one, this
    rank sees an empty interval: code such as gradient clipping then runs the same collectives on
    all ranks.

    Code that only drops it gets a plain tensor: of a gradient that waits for the boundary, this rank's
    whole; if only other ranks have one, any tensor that shows that there is something to drop.
    """
    grad: torch.Tensor | None = get_grad(param)
    if here.drops_gradients and grad is not None:
        return grad
    if (entry := arriving(param)) is not None:
        return get_grad(entry.compute)
    spec, entry = spec_of(param), entry_of(param)
    found = _waiting(entry) if grad is None and entry is not None else None
    if here.drops_gradients and found is not None:
        return found[0]
    if here.drops_gradients:
        return _nothing if entry is not None and entry.graded_elsewhere else None
    storage: Any = getattr(entry and entry.flat, "storage", None)  # None: the model is gone
    if storage is not None:
        storage.gradient_seen(entry)
    if entry is not None and found is not None:
        return _seen_waiting(entry, spec, *found)
    if grad is None and spec is not None and entry is not None and entry.graded_elsewhere:
        if storage.gradients_on_disk:
            return storageless(param, f"the gradient of {spec.name!r}")
        grad = torch.empty(0, dtype=param.dtype, device=param.device)
    if grad is None or spec is None or isinstance(grad, Elsewhere):
        return grad
    return dress(grad.detach(), spec.of("grad"))


def _waiting(entry: Entry) -> tuple[torch.Tensor, torch.Tensor] | None:
    """See `Reducer.waiting`."""
    if entry.number not in entry.flat.filled and entry.flat.held is None:
        return None
    engine = entry.engine()
    return None if engine is None else engine.reduce.waiting(entry)


def _seen_waiting(
    entry: Entry, spec: IntervalSpec | None, whole: torch.Tensor, own: torch.Tensor
) -> torch.Tensor:
    """Return what `.grad` shows of a gradient that waits for the boundary under no_sync."""
    if entry.flat.storage.offloaded:  # it is on the device, and its parameter is not
        return storageless(entry.param, f"the unreduced gradient of {entry.slot.name!r}")
    if spec is not None:
        return dress(own.detach(), replace(spec, unreduced=whole, role="grad"))
    # `.data` has a version counter of its own, which tells whether the user wrote to it
    engine: Any = entry.engine()
    shown: torch.Tensor = engine.reduce.shown.setdefault(entry, own.data.view(entry.param.shape))
    return shown


_nothing = torch.empty(0, device="cpu")


def give_grad(param: Any, value: torch.Tensor | None) -> None:
    if (entry := arriving(param)) is not None:
        return set_grad(entry.compute, value)
    spec, entry = spec_of(param), entry_of(param)
    empty = spec is not None and spec.start == spec.stop
    if entry is not None and _waiting(entry) is not None:
        if value is not None:
            raise unreduced_error("`.grad =`", entry.slot.name)
        entry.engine().reduce.forget(entry)  # type: ignore[union-attr]
    given = value
    if value is not None and not isinstance(value, Elsewhere):
        if spec is None:
            # What was made like the parameter has the dtype that it shows
            declared = param.__dict__["onefold"].declared
            given = value.to(param.dtype) if value.dtype == declared else value
        elif shape_of(value) != spec.shape:  # every rank checks, also one that has no element of it
            raise spec.of("grad").mismatch(value)
        else:
            part = part_of(value, spec).detach()
            # A slice of a whole would keep the whole alive
            given = None if empty else part.to(param.dtype, copy=spec_of(value) is None)
    if entry is not None:
        entry.graded_elsewhere = value is not None and empty
    set_grad(param, given)


def give_data(param: Any, value: torch.Tensor) -> None:
    """Run `param.data = value`: copy the values. The parameter keeps its memory, which the engine
    refers to. See [Note: old data].

    In a forward pass of its model the value goes to the whole parameter; runtime/passes.py copies it
    to the masters.

    Raises:
        ShardedParameterError: `value` has another shape, dtype or device.
    """
    entry, engine = owner_of(param)
    spec, info = spec_of(param), param.__dict__["onefold"]
    whole = (
        engine.passes.use(entry)
        if engine is not None and in_forward() and engine.computing
        else None
    )
    into: Any = param if whole is None else whole
    shape = shape_of(value)
    dtypes = into.dtype, into.dtype if whole is not None else param.__dict__["onefold"].declared
    if shape != info.shape or value.dtype not in dtypes or value.device != into.device:
        raise ShardedParameterError(
            f"parameter {info.name!r} of shape {tuple(info.shape)}, {into.dtype}, {into.device}, was"
            f" given data of shape {tuple(shape)}, {value.dtype}, {value.device}: the"
            " model was changed, moved or cast after shard() (assigning .data, .to(), .half(),"
            " .cuda()). Do that before shard(), or give shard() a device and the recipe a precision;"
            " another shape between onefold.unshard(model) and a new shard()."
        )
    with torch.no_grad():
        if whole is not None:
            whole.data = whole_of(value, ".data =").detach()
            return
        if any(value is t for t in given_out(param)):
            return  # on every rank, as copies of it are made anew on all of them or on none
        wait_before_write(param)
        local = value if spec is None else part_of(value, spec)
        # The master may have more bits than `value`, which is in the declared dtype. Where `value`
        # equals the rounded master, the master stays: assigning back what was read changes nothing
        if local.dtype != param.dtype:
            local = torch.where(local == param.to(local.dtype), param, local.to(param.dtype))
        if now := given_out(param):
            kept = param.detach().clone()
            for old in now:
                old.data = kept
        param.copy_(local)


def given_out(param: Any) -> list[torch.Tensor]:
    """Return the live tensors that `.data` and `detach()` of a parameter have returned.

    [Note: old data] In PyTorch `old = p.data; p.data = other` leaves `old` unchanged: it keeps the
    parameter's former memory. Here a parameter keeps its memory and copies the new values into it.
    Before that, tensors given out earlier are moved to a copy of the old values. Scripts that
    evaluate with averaged weights and then assign `old` back rely on it.
    """
    return [t for ref in param.__dict__["onefold"].given if (t := ref()) is not None]


def seen_data(param: Any) -> torch.Tensor:
    """Return `.data`. Writes through it do not raise the parameter's own version counter, so all
    tensors that are given out share another one, which `written` reads.
    """
    now, info = param.data, param.__dict__["onefold"]
    known = info.alias
    if (
        known is None
        or known.dtype != now.dtype
        or (known.data_ptr(), known.shape) != (now.data_ptr(), now.shape)
    ):
        # Keep the count of the previous view
        info.written, info.alias = written(param) - param._version, now
    return info.alias.detach()


def written(param: torch.Tensor) -> int:
    """Return how often the memory of an optimizer's parameter was written to, by torch's version
    counters. Writes through `.data` count too.
    """
    info = param.__dict__.get("onefold")
    through = 0 if info is None or info.alias is None else info.alias._version + info.written
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


def count_step(engine: Engine, entries: Sequence[Entry]) -> list[Entry]:
    """Count a step of an optimizer over `entries` as a write to those with a gradient.

    For an entry of which this rank owns no element, a gradient on any other rank counts.
    Returns such entries that the other ranks have stepped.
    """
    engine.writes += 1
    others: list[Entry] = []
    for entry in entries:
        elsewhere = entry.graded_elsewhere or entry in engine.stepped_early
        if elsewhere or get_grad(entry.param) is not None:
            entry.last_write = engine.writes
        if elsewhere:
            others.append(entry)
    engine.stepped_early.difference_update(entries)
    for flat in {entry.flat: None for entry in entries}:
        # All ranks alike, also one that owns nothing of it and so has no counter to go by
        if flat.travels or any(entry.last_write == engine.writes for entry in flat.entries):
            flat.bumps += 1
    return others


def count_writes(engine: Engine, entries: Iterable[Entry]) -> None:
    """Count a write to the masters of all `entries`."""
    engine.writes += 1
    for entry in entries:
        entry.last_write = engine.writes
        entry.flat.bumps += 1


def refuse_if_computed_with(engine: Engine, since: int) -> None:
    """Check the parameters upstream of the current autograd node. Called in a hook of a
    backward pass.

    Raises:
        RuntimeError: a parameter among them was overwritten after write number `since`.
    """
    written = {
        id(e.compute): e.slot.name
        for e in engine.entries
        if e.last_write > since and e.flat.overwritten_since(e.last_write)
    }
    start: Any = torch._C._current_autograd_node()
    found, seen, todo = list[str](), {start}, [start] if written else []
    while todo:
        node = todo.pop()
        if (name := written.get(id(getattr(node, "variable", None)))) is not None:
            found.append(name)
        upstream = {n for n, _ in node.next_functions if n is not None} - seen
        seen |= upstream
        todo += upstream
    if found:
        others = f" and {len(found) - 1} others have" if len(found) > 1 else " has"
        raise RuntimeError(
            "backward() of a forward pass that ran before optimizer.step(), or before another"
            f" write to the parameters: {min(found)!r}{others} changed since, so the gradients"
            " would be wrong. Call backward() before step(), or run the forward pass again."
        )
