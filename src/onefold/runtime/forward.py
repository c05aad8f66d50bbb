"""The forward passes of one engine: what happens when a unit's module is called and returns.

    a module is called                       `enter`            acquire the unit's parameters; the outermost begins a pass over the model
    it returns, or raises                    `leave`, `abort`   release them; the outermost ends the pass
    its code uses another unit's parameter   `use`              acquire that unit too, until the pass ends

A recomputation inside a backward pass comes here too, but does not count as a pass of its own.
"""

from __future__ import annotations

import copy
import dataclasses
import sys
from collections.abc import Callable, Mapping, Sequence
from types import FrameType
from typing import Any

import torch

from onefold.memory import storage_of
from onefold.runtime.backward import Backward
from onefold.runtime.boxes import local_of
from onefold.runtime.buffers import (
    Buffers,
    check_in_place,
    check_not_wrapped,
    modules_in,
    refuse_changes,
)
from onefold.runtime.differentiate import (
    TRANSFORMS,
    in_autograd,
    keep_hooks_from_compiler,
    refuse_cuda_graphs,
    tensors_in,
)
from onefold.runtime.flat import Entry
from onefold.runtime.gather import Gatherer, Recorded
from onefold.runtime.open_passes import OpenPass, here, still_open
from onefold.runtime.parameters.in_pass import put, take_back
from onefold.runtime.parameters.parameter import disable_torch_function
from onefold.runtime.parameters.values import ForwardPass, WriteCounters
from onefold.runtime.pending_gradients import follow_trainable
from onefold.runtime.reduce import Reducer
from onefold.runtime.refresh import FIRST, Copies, keep_writes, refresh
from onefold.runtime.resources import Activations, Resources, Spans
from onefold.runtime.uninitialized import Uninitialized
from onefold.runtime.unit import State, Unit


@dataclasses.dataclass(slots=True)
class _Borrowed:
    """A unit whose parameters code outside its module has used in a pass.

    [Note: kept by hand] Code may keep a whole parameter for its backward pass without saving it for
    backward: `ctx.weight = weight` in a Function, or the arguments of a checkpoint. Autograd tells
    nobody of it. So a unit that was borrowed, and of which nothing was saved since, is gathered
    when the backward pass reaches the output of the pass, and stays until its gradients have come.
    An embedding whose module was called is not: its backward pass reads no weight, and the usual
    reason to read the weight is its dtype.

    Attributes:
        saved_before: `saved_apart` of the unit when it was borrowed.
        kept: code has got the parameter itself.
    """

    unit: Unit
    saved_before: int
    kept: bool = False


class Forward:
    """See this module.

    Attributes:
        stack: open forward passes of units, the innermost last. A pass is taken from it when all of
            it is done, so that one that was interrupted is ended again.
        raised_in: (unit, phase) of the last pass that raised.
    """

    def __init__(
        self,
        units: Sequence[Unit],
        resources: Resources,
        gather: Gatherer,
        reduce: Reducer,
        backward: Backward,
        copies: Copies,
        activations: Activations,
        buffers: Buffers,
        uninitialized: Uninitialized,
        write_counters: WriteCounters,
        spans: Spans,
        stack: list[OpenPass],
    ) -> None:
        self.units, self.resources, self.progress = units, resources, resources.progress
        self.run_ahead = resources.group.run_ahead
        self.gather, self.reduce, self.backward = gather, reduce, backward
        self.copies, self.activations, self.buffers = copies, activations, buffers
        self.uninitialized, self.spans = uninitialized, spans
        self.write_counters, self.stack = write_counters, stack
        self.raised_in: tuple[str, str] | None = None
        # Units whose parameters other modules used in this pass, and those whose module was called
        self._borrowed: dict[int, _Borrowed] = {}
        self._entered: set[int] = set()
        self._current = ForwardPass(write_counters)
        self._recorded: Recorded | None = None  # of the pass under way
        self._over_model = False
        # The modules that shard() found, and the last step in which they were compared
        root = units[0].module()
        self._modules, self._compared = [] if root is None else modules_in(root), -1

    def enter(self, unit: Unit, call: FrameType, part: bool = False) -> bool:
        """Begin the forward pass of a unit's module. Returns True if this begins a pass over the
        model, whose inputs are to be cast.

        `call`: the frame of the module's call. `part`: the caller called a part of the unit's module
        by itself, not the module.
        """
        with disable_torch_function():
            if not still_open(self.stack, call):
                still_open(here.passes, call)  # of other models
            recompute, first = in_autograd(), not self.stack
            this = OpenPass(unit, recompute, call, self)
            this.beside.append(this)
            self.stack.append(this)
            outermost = first and not recompute
            if outermost:
                self._recorded = Recorded()
                self._begin_pass(this, is_root=unit.index == 0 and not part)
            if first:
                self._current = ForwardPass(self.write_counters)
            self._entered.add(unit.index)
            self.spans.enter()
            # In one statement: Ctrl-C may come between two
            unit.in_use, this.in_use = unit.in_use + 1, True
            if recompute:
                self.backward.event()
            elif torch.is_grad_enabled() or self.progress.graded:
                # A re-entrant checkpoint runs its part of the pass without gradients
                unit.calls += 1
            if self.uninitialized:
                self.uninitialized.refuse(f"the forward pass of {unit.name!r} uses", unit=unit)
            if self.run_ahead is not None:
                self.run_ahead.comes(unit.index, self.progress.phase, again=not recompute)
            self.gather.acquire(unit, backward=recompute)
            if recompute:
                unit.recomputing = self.gather.reached
            if unit.in_use == 1:
                swap_in(unit)
            return outermost

    def leave(self, this: OpenPass, output: Any) -> Any:
        """End the forward pass of a unit's module after it has returned `output`. Returns the
        output with copies of the tensors that lie in gathered buffers.
        """
        unit, recompute, outermost = this.unit, this.recompute, this.outermost
        with disable_torch_function():
            self._no_longer_uses(this, keep=self.resources.memory.record)
            if outermost:
                output = copied_out(output, self.gather.by_storage)
            if torch.is_grad_enabled():
                if outermost and self._recorded is not None:
                    self._recorded.by_hand = self._kept_by_hand()
                self._watch(unit, output, root=this is self.stack[0])
            if not unit.in_use and not recompute:
                self._keep_writes(unit)
            if outermost:  # other modules may have written to these after their own forward
                for borrowed in self._borrowed.values():
                    self._keep_writes(borrowed.unit)
            if not unit.in_use and (not recompute or unit.looks_up_only):
                self.gather.after_forward(unit, output)
            if outermost:
                self._end_pass(this, aborted=False)
            self._close(this)
            return output

    def pass_of(self, call: FrameType) -> OpenPass | None:
        """Return the open pass whose module's call has this frame; None if it began none."""
        for this in reversed(self.stack):
            if this.call is call:
                if this is not self.stack[-1]:
                    still_open(self.stack)
                return this
        return None

    def _keep_writes(self, unit: Unit) -> None:
        # What is gathered from ranks that are not there is no value to compare with
        if unit.state is State.GATHERED and not self.resources.group.stands_for_all:
            # The host is about to compare values, and would wait for a missing rank without a limit
            if self.run_ahead is not None and any(flat.compared < FIRST for flat in unit.flats):
                self.run_ahead.settle()
            with torch.no_grad():
                keep_writes(unit)

    def abort(self, this: OpenPass) -> None:
        """Clean up after the forward pass of a unit's module raised."""
        with disable_torch_function():
            # The innermost unit comes first
            self.raised_in = self.raised_in or (this.unit.name, self.progress.phase)
            self._no_longer_uses(this, keep=False)
            if this.outermost:
                if this.beside is not here.passes:  # hooks on saved tensors are a thread's own
                    self.gather.hooks = self.activations.hooks = None
                try:
                    self._end_pass(this, aborted=True)
                except Exception:
                    self._close(this)
                    raise
            self._close(this)

    def _close(self, this: OpenPass) -> None:
        for passes in (self.stack, this.beside):
            if passes and passes[-1] is this:
                passes.pop()
            elif this in passes:  # another thread's began later
                passes.remove(this)

    def _no_longer_uses(self, this: OpenPass, keep: bool) -> None:
        unit = this.unit
        if this.in_use:
            if unit.in_use == 1:
                swap_out(unit)
            unit.in_use, this.in_use = unit.in_use - 1, False
            self.spans.leave(unit.name, self.progress.phase, keep)

    def _begin_pass(self, this: OpenPass, is_root: bool) -> None:
        if self.progress.backward_open:  # a backward pass raised before it came to its end
            self.backward.reset()
        if self.progress.follower is not None:
            self.progress.follower.forward_begins()
        self.uninitialized.look()
        self._over_model, self.raised_in = is_root, None
        self._entered.clear()
        self.progress.graded = torch.is_grad_enabled()
        self.resources.transfers.check()
        self.resources.memory.look()
        self.resources.transfers.host.look()
        check_in_place(self.units)
        root = self.units[0].module()
        early = self.progress.step_count < 2  # most changes of a model and wrappers come by now
        if early and self._compared < self.progress.step_count and root is not None:
            self._compared = self.progress.step_count
            if (now := modules_in(root)) != self._modules:
                refuse_changes(root, [e for u in self.units for e in u.entries], "a pass")
                self._modules = now
                self.buffers.find(root)
        if early:
            check_not_wrapped(root)
            if self.gather.sharded:
                refuse_cuda_graphs(root, self.resources.device)
        # Before `follow_trainable`: it must see what was trainable when the optimizer stepped
        self.copies.look_for_writes()
        # A pass without gradients in between (a reference pass with adapters off) must not change
        # what the open graphs rely on
        if torch.is_grad_enabled() or self.progress.open_graphs == 0:
            follow_trainable(self.reduce)
        if (
            torch.is_grad_enabled()
            and self.progress.open_graphs == 0
            and not self.progress.outside_graphs
        ):
            for u in self.units:
                u.calls = 0
        this.outermost = True  # from here on there is something to end
        self.activations.begin_forward()  # first: the gatherer's hooks call the hooks set here
        self.gather.begin_forward(self._over_model)
        refresh(self.gather)
        if self._over_model:
            self.buffers.before_pass(self.resources)

    def _end_pass(self, this: OpenPass, aborted: bool) -> None:
        self._borrowed.clear()
        if this.beside == [this]:
            take_back()
        for flat in (f for u in self.units for f in u.flats) if aborted else ():
            flat.before_data.clear()
        self.gather.end_forward(aborted)
        if self._over_model and not aborted:
            self.buffers.after_pass(torch.is_grad_enabled() and self.progress.sync)
        self.activations.end_forward()
        self.resources.masters.after_pass()
        if torch.is_grad_enabled() and not aborted:
            self.progress.open_graphs += 1
            self.progress.root_graphs += self._over_model
            self._current.open, self._current.of_root = True, self._over_model
        recorded, self._recorded = self._recorded, None
        if recorded is not None:
            self.gather.release_when_gone(recorded)

    def use(self, entry: Entry, keeps: bool = False) -> torch.Tensor:
        """Return the whole parameter for code in a forward pass whose unit does not own it. See
        runtime/parameters/parameter.py.

        `keeps`: the code gets the parameter itself (runtime/parameters/in_pass.py), so it must stay
        whole until the pass ends, also if its own module is called in between.
        """
        unit = self.reduce.unit_of[entry.number]
        if self.uninitialized:
            self.uninitialized.refuse("a forward pass uses", entry.names)
        recompute = in_autograd()
        if recompute:
            self.backward.event()
        elif (torch.is_grad_enabled() or self.progress.graded) and not unit.used:
            unit.calls += 1
        self.gather.acquire(unit, backward=recompute)
        if recompute:
            # Recomputed by a checkpoint inside the unit's module, which the unit's hooks do not see
            unit.recomputing = self.gather.reached
        elif unit.index not in self._borrowed:
            self._borrowed[unit.index] = _Borrowed(unit, unit.saved_apart)
        if keeps and not unit.in_use:
            unit.borrowed = True
            if not recompute:
                self._borrowed[unit.index].kept = True
        return entry.compute

    def _kept_by_hand(self) -> list[Unit]:
        """Return the units to gather when the backward pass begins. See [Note: kept by hand]."""
        return [
            b.unit
            for b in self._borrowed.values()
            if b.kept
            and not b.unit.resident
            and b.unit.saved_apart == b.saved_before
            and not (b.unit.looks_up_only and b.unit.index in self._entered)
        ]

    def _watch(self, unit: Unit, output: Any, root: bool) -> None:
        """Hook the unit's output, so that the engine hears when the backward pass reaches it: early
        enough to gather ahead of use.
        """
        early = not unit.resident and not unit.looks_up_only
        if not root and not early:
            return

        current_pass, recorded = self._current, self._recorded

        def backward_reached(_: torch.Tensor, recorded: Recorded | None = recorded) -> None:
            if self.progress.closed:
                return
            self.gather.reached += 1
            current_pass.backward_reached(root)
            if root and current_pass.open:
                self.backward.reached.append(current_pass)
            with disable_torch_function():
                self.backward.event()
                if self.run_ahead is not None:
                    self.run_ahead.comes(unit.index, "backward")
                if early and not self.gather.is_done(unit):
                    self.gather.acquire(unit, backward=True)
                for kept in recorded.by_hand if root and recorded is not None else ():
                    if not self.gather.is_done(kept):
                        kept.by_hand = True
                        self.gather.acquire(kept, backward=True)

        for t in tensors_in(output):
            if t.grad_fn is not None:  # a leaf would keep the hook of every pass
                t.register_hook(backward_reached)


keep_hooks_from_compiler(Forward._watch)


# -- outputs that lie in gathered buffers ----------------------------------------------------------
#
# Outputs of a pass over the model must not lie in gathered buffers: when a buffer is released, the
# parameters that point at it become empty.
#
# A module may return its weight, or a view of it. The outermost pass returns a copy instead. The copy
# is part of the graph, so gradients flow through it.


def copied_out(output: Any, buffers: Mapping[int, Any]) -> Any:
    """Return `output` with each tensor that lies in one of `buffers` (by storage) replaced by a
    copy. If there is none, return the same object.
    """

    def gathered(t: torch.Tensor) -> bool:
        t = local_of(t)
        return t.layout is torch.strided and storage_of(t) in buffers

    if not buffers or not any(gathered(t) for t in tensors_in(output)):
        return output
    known: dict[int, torch.Tensor] = {}  # one copy for each object, however often it occurs

    def own(t: torch.Tensor) -> torch.Tensor:
        return known.setdefault(id(t), t.clone()) if gathered(t) else t

    return _mapped(output, own)


def _mapped(value: Any, change: Callable[[torch.Tensor], torch.Tensor], depth: int = 4) -> Any:
    if isinstance(value, torch.Tensor):
        return change(value)
    if value is None or depth == 0 or isinstance(value, (str, bytes, int, float)):
        return value
    if isinstance(value, (list, tuple, set)):
        items = [_mapped(v, change, depth - 1) for v in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    if type(value) is dict:
        return {k: _mapped(v, change, depth - 1) for k, v in value.items()}
    if isinstance(value, dict):  # a model output of transformers: items that are attributes too
        out = copy.copy(value)
        for k, v in value.items():
            out[k] = _mapped(v, change, depth - 1)
        return out
    if hasattr(value, "__dict__"):
        frozen = dataclasses.is_dataclass(value)
        out = copy.copy(value)
        for k, v in vars(value).items():
            (object.__setattr__ if frozen else setattr)(out, k, _mapped(v, change, depth - 1))
        return out
    return value


# -- torch.func ------------------------------------------------------------------------------------
#
# Other tensors in the parameters' places: `torch.func.functional_call` puts them there for one
# call. Replacing a parameter for good is refused.


def swap_in(unit: Unit) -> None:
    """Let the module see the whole parameters of `unit`. Tensors that `functional_call` has put in
    their places stay for the call.

    Raises:
        RuntimeError: other code has put a tensor in a parameter's place, which would be ignored.
        ValueError: functional_call was given a tensor of another shape than the whole parameter.
    """
    for flat in unit.flats:
        flat.swapped_in = True
        for entry in flat.entries:
            if (place := entry.only_place) is not None and place[0].get(place[1]) is entry.param:
                put(place[0], place[1], entry.compute)
                continue
            others = [
                t
                for parameters, attribute, _ in entry.places
                if (t := parameters.get(attribute)) is not entry.param
            ]
            if others:
                _look_at(entry, others)
            flat.swap(entry, entry.compute, instead_of=entry.param)


def swap_out(unit: Unit) -> None:
    """Let the module show the optimizer's parameters again."""
    for flat in unit.flats:
        flat.swapped_in = False
        for entry in flat.entries:
            if (place := entry.only_place) is None:
                flat.swap(entry, entry.param, instead_of=entry.compute)
            elif place[0].get(place[1]) is entry.compute:
                put(place[0], place[1], entry.param)


def _look_at(entry: Entry, others: list[Any]) -> None:
    name, shape = entry.slot.name, tuple(entry.slot.shape)
    if any(t is None for t in others) or not _in_functional_call():
        raise RuntimeError(
            f"parameter {name!r} was replaced after shard() (assigned or removed). Write into it"
            " instead: `with onefold.full_params(model, write=True):` for values; for another"
            " structure assign between onefold.unshard(model) and a new shard(), or before shard()."
        )
    if any(recurrent is not None for _, _, recurrent in entry.places):
        raise ValueError(
            f"functional_call was given a tensor for {name!r}, a weight of a recurrent layer. The"
            " layer keeps a list of its weights besides, and would compute with the old one. Leave"
            " it out."
        )
    for t in others:
        if tuple(t.shape) != shape:
            raise ValueError(
                f"functional_call was given a tensor of shape {tuple(t.shape)} for {name!r},"
                f" expected the whole parameter's {shape}. torch.func.grad, vmap and the like see"
                f" this rank's interval of a sharded parameter. {TRANSFORMS}"
            )


def _in_functional_call() -> bool:
    """Return whether `torch.func.functional_call` is running.

    It writes to `module._parameters` (torch/nn/utils/_named_member_accessor.py, `swap_tensor`) as
    other code may that replaces a parameter for good, and sets no flag.
    """
    frame: Any = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_filename == torch.nn.utils.stateless.__file__:
            return True
        frame = frame.f_back
    return False
