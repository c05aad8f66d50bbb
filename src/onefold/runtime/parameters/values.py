"""Reads and writes of `.grad` and `.data` of a sharded parameter, hooks on its gradient, the counts of
writes, and tensors whose elements are elsewhere.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from onefold.runtime.differentiate import (
    in_autograd,
    in_forward,
    keep_hooks_from_compiler,
)
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
from onefold.runtime.parameters.operators import (
    Operator,
    part_of,
    whole_of,
)

if TYPE_CHECKING:
    from onefold.runtime.engine import Engine
    from onefold.runtime.flat import Entry


# -- elements that are elsewhere -------------------------------------------------------------------


class StoragelessError(RuntimeError):
    """Elements on NVMe, or encoded ones, were used as if they were in memory."""


class Elsewhere(torch.Tensor):
    """A tensor with a shape and a dtype, whose elements are elsewhere: on NVMe, encoded, not gathered
    (`Released`), or not reduced (`Unreduced`).

    A kernel that is given a tensor without memory may read address 0. So this answers questions that
    need no elements, and brings the elements, or raises, for all others (`dispatch` in parameter.py).
    With a spec it shows the shape of the whole.
    """

    _onefold_faced = True
    what = "a tensor"

    def bring(self, op: Operator, written: bool) -> torch.Tensor:
        """Return the elements, which `op` asks for, or writes to (`written`)."""
        raise storageless_error(op.name, self.what)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"Elsewhere({self.what}, without elements here)"


class Unreduced(Elsewhere):
    """A gradient that waits for the boundary, under no_sync: `value`, this rank's whole one, `own` what
    of it this rank steps. It can be dropped, and read where every rank has the whole parameter.
    """

    value: torch.Tensor
    own: torch.Tensor

    def bring(self, op: Operator, written: bool) -> torch.Tensor:
        zeroes = op.name in ("zero_", "_foreach_zero_")
        if not zeroes and (written or spec_of(self) is not None):
            raise unreduced_error(op.name, self.what)
        return self.value


def unreduced_error(what: str, name: str) -> ShardedParameterError:
    return ShardedParameterError(
        f"{what} was given the gradient of {name!r} under onefold.no_sync, where `.grad` shows this"
        " rank's unreduced part only. Look at gradients, and change them, after the last"
        " micro-batch. Dropping them is fine: optimizer.zero_grad(), or `.grad = None`."
    )


def elsewhere(
    t: torch.Tensor, what: str, spec: IntervalSpec | None = None, kind: type[Elsewhere] = Elsewhere
) -> Any:
    """Make `t`, a fresh tensor without memory, an `Elsewhere`. `what` describes it in messages."""
    t.__class__ = over(kind, type(t))
    t.__dict__ |= {"what": what, "_onefold_spec": spec}
    return t


def storageless(like: torch.Tensor, what: str, kind: type[Elsewhere] = Elsewhere) -> Any:
    """Return an `Elsewhere` with the shape, dtype and device of `like`."""
    out = torch.empty_like(like.detach())
    out.untyped_storage().resize_(0)
    return elsewhere(out, what, spec_of(like), kind)


def storageless_error(called: str, what: str) -> StoragelessError:
    """Return the error for code that computes with something storageless."""
    return StoragelessError(
        f"{called} was given {what}, whose elements are stored on NVMe or"
        " encoded. Read a parameter with `parameter.onefold.gather()` (on every rank), write with"
        " `onefold.full_params(model, write=True)`, clip with onefold.clip_grad_norm_, drop"
        " gradients with zero_grad() (set_to_none=True, its default); offload_gradients='cpu'"
        " keeps gradients in memory. optimizer.state_dict() brings states to rank 0's host, and"
        " onefold.save and onefold.load write and read them at any stage and tier."
    )


# -- `.grad` ---------------------------------------------------------------------------------------


def wait_before_write(t: Any, seen: bool = False) -> None:
    """See `Engine.wait_before_write`. `t`: a sharded parameter or an interval."""
    entry, spec = entry_of(t), spec_of(t)
    flat = entry.flat if entry is not None else None if spec is None else spec.flat()
    engine = None if flat is None else flat.engine()
    if flat is not None and engine is not None:
        engine.wait_before_write(flat, seen)


def arriving(param: Any) -> bool:
    """Whether the gradient of a sharded parameter, of the backward pass under way, lies on the leaf: a
    hook may read it, and write to it.
    """
    entry = entry_of(param) if in_autograd() else None
    return entry is not None and get_grad(entry.compute) is not None


def seen_grad(param: Any) -> torch.Tensor | None:
    """Return `.grad` as code outside an optimizer's step sees it: an interval with the whole's
    shape.

    A rank that owns no element of a parameter has no gradient of it. If other ranks have one, this
    rank sees an empty interval: code such as gradient clipping then runs the same collectives on
    all ranks.
    """
    with disable_torch_function():
        entry, engine = owner_of(param)
        if entry is not None:
            param = entry.param  # it may be the whole that was asked
            if arriving(param):
                return get_grad(entry.compute)
            entry.flat.storage.gradient_seen(entry)
        grad, spec = get_grad(param), spec_of(param)
        if grad is None and entry is not None:
            if (waiting := engine.reduce.waiting(entry)) is not None:
                shown: Unreduced = storageless(param, entry.slot.name, Unreduced)
                shown.value, shown.own = waiting
                shown.value = shown.value.view(param.shape) if spec is None else shown.value
                return shown
            if entry.graded_elsewhere:
                on_disk = entry.flat.storage.gradients_on_disk
                what = f"the gradient of {entry.slot.name!r}"
                grad = storageless(param, what) if on_disk else param.new_empty(0)
        if grad is None or spec is None or isinstance(grad, Elsewhere):
            return grad
        return dress(grad.detach(), spec.of("grad"))


def drop_waiting(params: Iterable[Any], to_none: bool) -> None:
    """Drop what is not in `.grad` of gradients that were set to None, or to zero: what waits for the
    boundary, and that only other ranks have one.
    """
    for entry, engine in map(owner_of, params):
        if entry is None:
            continue
        entry.graded_elsewhere = entry.graded_elsewhere and not to_none
        if entry.flat.waits and (waiting := engine.reduce.waiting(entry)) is not None:
            engine.reduce.forget(entry) if to_none else waiting[0].zero_()


def give_grad(param: Any, value: torch.Tensor | None) -> None:
    with disable_torch_function():
        entry, engine = owner_of(param)
        if entry is not None:
            param = entry.param
            if arriving(param):
                return set_grad(entry.compute, value)
        if value is None or entry is None:  # or the model is gone
            drop_waiting([param], to_none=True)
            return set_grad(param, value)
        if engine.reduce.waiting(entry) is not None:
            raise unreduced_error("`.grad =`", entry.slot.name)
        given: torch.Tensor | None = value
        spec = spec_of(param)
        empty = spec is not None and spec.start == spec.stop
        if isinstance(value, Elsewhere):
            pass
        elif spec is None:
            # What was made like the parameter has the dtype that it shows
            given = value.to(param.dtype) if value.dtype == entry.declared else value
        elif shape_of(value) != spec.shape:  # every rank checks, also one without elements
            raise spec.of("grad").mismatch(value)
        else:
            part = part_of(value, spec).detach()
            # A slice of a whole would keep the whole alive
            copied = part.to(param.dtype, copy=spec_of(value) is None)
            given = None if empty else copied
        entry.graded_elsewhere = empty
        set_grad(param, given)


# -- `.data` --------------------------------------------------------------------------------------


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
    shape, dtypes = shape_of(value), (into.dtype, info.declared)
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
            whole.data = whole_of(value, ".data =").detach().to(whole.dtype)
            return
        if any(value is t for t in given_out(param)):
            return  # on every rank, as copies of it are made anew on all of them or on none
        wait_before_write(param)
        local = value if spec is None else part_of(value, spec)
        local = refined(param, local)
        if now := given_out(param):
            kept = param.detach().clone()
            for old in now:
                old.data = kept
        param.copy_(local)


def refined(masters: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Return `values` in the dtype of the masters, which may have more bits. Where a value is the rounded
    master, the master stays: assigning back what was read changes nothing.
    """
    if values.dtype == masters.dtype:
        return values
    return torch.where(values == masters.to(values.dtype), masters, values.to(masters.dtype))


def given_out(param: Any) -> list[torch.Tensor]:
    """Return the live tensors that `.data` and `detach()` of a parameter have returned.

    [Note: old data] In PyTorch `old = p.data; p.data = other` leaves `old` unchanged: it keeps the
    parameter's former memory. Here a parameter keeps its memory and copies the new values into it.
    Before that, tensors given out earlier are moved to a copy of the old values. Scripts that
    evaluate with averaged weights and then assign `old` back rely on it.
    """
    return [t for ref in param.__dict__["onefold"].given if (t := ref()) is not None]


# -- hooks on gradients ----------------------------------------------------------------------------
#
# Gradient hooks that the user registers on a parameter, before or after `shard()`. They are called with
# this rank's whole gradient of this backward pass, before the reduction.
#
# | hook                                 | is called with                 | is registered on             | is called by      |
# |--------------------------------------|--------------------------------|------------------------------|-------------------|
# | `register_hook`                      | the gradient                   | the leaf that autograd knows | autograd          |
# | `register_post_accumulate_grad_hook` | the parameter that users hold  | that parameter               | `hook_gradient`   |
#
# While a gradient lies on the leaf, as when a hook of the second kind runs, its parameter is whole:
# `.grad` reads and writes that gradient, and the values are gathered on first use. A hook must not write
# to the values: they would differ between ranks, because each rank's gradient is its own.

_T: Any = torch.Tensor
IN_BACKWARD = (
    "inside a backward pass the gradients are this rank's own: they are not reduced yet, so every"
    " rank would step to something else. Use the ordinary order (backward(), then"
    " optimizer.step()), or, to free gradients while the backward pass runs, Recipe.zero(...,"
    " step_in_backward=True) with the optimizer's states offloaded."
)


def register_hook(param: Any, hook: Any) -> Any:
    """Register a hook on the gradient of a sharded parameter. Returns the handle."""
    entry = entry_of(param)
    if entry is None or not param.requires_grad:
        return _T.register_hook(param, hook)  # torch says why not
    leaf: Any = entry.compute
    leaf.requires_grad = True  # the engine follows at the next pass
    return _T.register_hook(leaf, hook)


def call_hooks(entry: Entry, engine: Engine) -> None:
    """Call the hooks that users have registered on a parameter whose gradient lies on its leaf.

    Raises:
        ShardedParameterError: one of them wrote to the parameter.
    """
    param: Any = entry.param
    with disable_torch_function():
        post = param._post_accumulate_grad_hooks
    if not post:
        return
    hooks = tuple(post.values())
    engine.passes.event(True)
    counted = param, entry.compute
    before = [t._version for t in counted]
    for hook in hooks:
        hook(param)
    if [t._version for t in counted] != before:
        raise ShardedParameterError(
            f"a gradient hook wrote to parameter {entry.slot.name!r}, but {IN_BACKWARD}"
        )


def hook_gradient(entry: Entry) -> None:
    """When the gradient of `entry` lies on its leaf, call the users' hooks and let the engine know. Let
    a backward pass raise that accumulates a gradient into the optimizer's parameter itself.

    Autograd knows the whole parameter. It comes to the other one only if code has given that to an
    autograd Function or the like, which computes with a tensor's memory: with this rank's elements
    at most. Nothing would reduce that gradient.
    """
    known = weakref.ref(entry)

    def arrived(_: torch.Tensor) -> None:
        if (e := known()) is not None and (engine := e.engine()) is not None:
            if e.box is not None:
                with disable_torch_function(), torch.no_grad():
                    e.box.settle(e.compute)
            call_hooks(e, engine)
            engine.reduce.arrived(e)

    def refuse(_: Any) -> None:
        e = known()
        if e is not None and e.engine() is not None and getattr(e.param, "_onefold_faced", False):
            raise ShardedParameterError(
                f"parameter {e.slot.name!r} was given to an autograd Function, or to other code that"
                " computes with a tensor's memory: its gradient would not be reduced. In the forward"
                " pass read it as an attribute of its module (`module.weight`), which is the whole"
                " there; elsewhere give the code `parameter.clone()`."
            )

    # Its own method would register on the optimizer's object (`Whole`)
    _T.register_post_accumulate_grad_hook(entry.compute, arrived)
    with disable_torch_function(), torch.enable_grad():
        # The parameter refers to this node weakly: the entry keeps it
        entry.accumulates = torch.autograd.graph.get_gradient_edge(entry.param).node
        entry.accumulates.register_prehook(refuse)


keep_hooks_from_compiler(hook_gradient)


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
# raises if it meets a parameter whose values have been overwritten. An optimizer writes only to the
# parameters that it steps. (Autograd itself knows of writes to unsharded parameters.)


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
        if e.last_write > since and not e.flat.unsharded
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
