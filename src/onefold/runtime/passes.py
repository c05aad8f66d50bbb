"""The passes of one engine.

    a unit's module is called                `enter`            acquire the unit's parameters; the outermost begins a pass over the model
    it returns, or raises                    `leave`, `abort`   release them; the outermost ends the pass
    its code uses another unit's parameter   `use`              acquire that unit too, until the pass ends
    autograd comes to something of the model `event`            the first begins a backward pass
    autograd has finished                    `_end_backward`    reduce what is left, agree on what was used, release everything

A forward pass inside a backward pass is a recomputation, and does not count as a pass of its own.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from types import FrameType
from typing import TYPE_CHECKING, Any

import torch

from onefold.memory import storage_of
from onefold.runtime.agree import agree_and_finish
from onefold.runtime.buffers import check_in_place, check_not_wrapped, refuse_changes
from onefold.runtime.differentiate import (
    TRANSFORMS,
    OpenPass,
    here,
    in_autograd,
    keep_from_compiler,
    keep_hooks_from_compiler,
    mapped,
    refuse_transforms,
    still_open,
    tensors_in,
    will_accumulate,
)
from onefold.runtime.flat import State, Unit
from onefold.runtime.parameters.interval import disable_torch_function
from onefold.runtime.parameters.parameter import point, put
from onefold.runtime.parameters.values import refuse_if_computed_with
from onefold.runtime.saved import is_in

if TYPE_CHECKING:
    from onefold.runtime.engine import Engine
    from onefold.runtime.flat import Entry


@dataclass(eq=False, slots=True, weakref_slot=True)
class Graph:
    """The autograd graph of a forward pass, or of an operation outside passes. The hooks on its
    outputs hold it: it lives as long as any part of the graph. It is among `Engine.graphs` until
    a backward pass has used it up.

    Attributes:
        of_model: of a pass over the whole model. since: the count of writes when it began.
        by_hand: units to gather when a backward pass reaches the output, see [Note: kept by hand].
    """

    of_model: bool
    since: int = 0
    by_hand: list[Unit] = field(default_factory=list)


class Passes:
    """See this module.

    [Note: kept by hand] Code may keep a whole parameter for its backward pass without saving it for
    backward: `ctx.weight = weight` in a Function, or the arguments of a checkpoint. Autograd tells
    nobody of it. So a unit of which code outside its module got a parameter, and of which nothing
    was saved since, is gathered when the backward pass reaches the output of the pass, and stays
    until its gradients have come. An embedding whose module was called is not: its backward pass
    reads no weight, and the usual reason to read the weight is its dtype.

    Attributes:
        stack: open forward passes of units, the innermost last. A pass is taken from it when all of
            it is done, so that one that was interrupted is ended again.
        raised_in: (unit, phase) of the last pass that raised.
        reached: the graphs whose outputs the backward pass under way has reached.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.units, self.gather, self.reduce = engine.units, engine.gather, engine.reduce
        self.run_ahead = engine.group.run_ahead
        self.stack: list[OpenPass] = []
        self.raised_in: tuple[str, str] | None = None
        self.reached: set[Graph] = set()
        self._graph: Graph | None = None  # of the forward pass, or recomputation, under way
        # Units whose parameters code outside their modules has used in this pass; with what is in
        # [Note: kept by hand], `saved_apart` of the unit when code first got the parameter itself
        self._borrowed: dict[Unit, int | None] = {}
        self._entered: set[Unit] = set()  # those whose module was called
        self._compared = -1  # the last step in which the model was compared with what shard() found

    # -- a unit's module ---------------------------------------------------------------------------

    def enter(self, unit: Unit, call: FrameType, part: bool = False) -> bool:
        """Begin the forward pass of a unit's module. Returns True if this begins a pass over the
        model, whose inputs are to be cast.

        `call`: the frame of the module's call. `part`: the caller called a part of the unit's module
        by itself, not the module.
        """
        engine = self.engine
        with disable_torch_function():
            if not still_open(self.stack):
                still_open(here.passes)  # of other models
            recompute, first = in_autograd(), not self.stack
            this = OpenPass(unit, recompute, call, self.abort)
            this.beside.append(this)
            self.stack.append(this)
            outermost = first and not recompute
            if first:
                graph = self._graph = Graph(outermost and unit.index == 0 and not part)
                if outermost:
                    self._begin_forward(this, graph.of_model)
                graph.since = engine.writes
            self._entered.add(unit)
            # In one statement: Ctrl-C may come between two
            unit.in_use, this.in_use = unit.in_use + 1, True
            self._acquire(unit, recompute)
            if unit.in_use == 1:
                swap(unit, inside=True)
            return outermost

    def _acquire(self, unit: Unit, recompute: bool, borrows: bool = False) -> None:
        """Gather `unit` for a pass. `borrows`: for code outside its module."""
        if recompute:
            self.event()
        # A re-entrant checkpoint runs its part of the pass without gradients
        elif (torch.is_grad_enabled() or self.engine.graded) and not (borrows and unit.used):
            unit.calls += 1
        if self.run_ahead is not None and not borrows:
            self.run_ahead.comes(unit.index, self.engine.phase, again=not recompute)
        self.gather.acquire(unit, backward=recompute)
        if recompute:
            unit.recomputing = self.gather.reached
            if not (borrows or unit.gradients or self.engine.differentiating):
                unit.gradients = unit.awaited  # of another forward pass, recomputed re-entrantly

    def leave(self, call: FrameType, output: Any) -> Any:
        """End the forward pass of a unit's module after its call, which has this frame, has returned
        `output`. Returns the output with copies of the tensors that lie in gathered buffers; None if
        the call began no pass, or has raised.
        """
        this = next((this for this in still_open(self.stack) if this.call is call), None)
        if this is None:
            return None
        with disable_torch_function():
            try:
                output = self._returned(this, output)
            except Exception:
                self.abort(this)
                raise
            self._close(this)
            return output

    def _returned(self, this: OpenPass, output: Any) -> Any:
        unit, outermost, graph = this.unit, this.outermost, self._graph
        self._no_longer_uses(this)
        if outermost:
            output = copied_out(output, self.gather.by_storage)
        if torch.is_grad_enabled() and graph is not None:
            if outermost:
                graph.by_hand = self._kept_by_hand()
            self._watch(output, graph, unit, whole=this is self.stack[0])
        if not unit.in_use and not this.recompute:
            keep_writes(unit)
        if outermost:  # other modules may have written to these after their own forward
            for borrowed in self._borrowed:
                keep_writes(borrowed)
        if not unit.in_use and (not this.recompute or unit.looks_up_only):
            self.gather.after_forward(unit, output)
        if outermost:
            self._end_forward(aborted=False)
        return output

    def abort(self, this: OpenPass) -> None:
        """Clean up after the forward pass of a unit's module raised."""
        with disable_torch_function():
            # The innermost unit comes first
            self.raised_in = self.raised_in or (this.unit.name, self.engine.phase)
            self._no_longer_uses(this)
            if this.outermost:
                if this.beside is not here.passes:  # hooks on saved tensors are a thread's own
                    self.gather.hooks = self.engine.activations.hooks = None
                try:
                    self._end_forward(aborted=True)
                except Exception:
                    self._close(this)
                    raise
            self._close(this)

    def use(self, entry: Entry, keeps: bool = False) -> torch.Tensor:
        """Return the whole parameter for code in a forward pass whose unit does not own it. See
        runtime/parameters/parameter.py.

        `keeps`: the code gets the parameter itself (runtime/parameters/parameter.py), so it must stay
        whole until the pass ends, also if its own module is called in between.
        """
        unit, recompute = entry.unit, in_autograd()
        # A checkpoint inside the unit's module may recompute, which the unit's hooks do not see
        self._acquire(unit, recompute, borrows=True)
        if not recompute:
            self._borrowed.setdefault(unit, None)
        if keeps and not unit.in_use:
            unit.borrowed = True
            if not recompute and self._borrowed[unit] is None:
                self._borrowed[unit] = unit.saved_apart
        return entry.compute

    def _close(self, this: OpenPass) -> None:
        for passes in (self.stack, this.beside):
            if this in passes:  # the last one, unless another thread's began later
                passes.remove(this)
        if not self.stack:
            self._graph = None

    def _no_longer_uses(self, this: OpenPass) -> None:
        unit = this.unit
        if this.in_use:
            if unit.in_use == 1:
                swap(unit, inside=False)
            unit.in_use, this.in_use = unit.in_use - 1, False

    def _kept_by_hand(self) -> list[Unit]:
        """Return the units to gather when the backward pass begins. See [Note: kept by hand]."""
        return [
            unit
            for unit, saved in self._borrowed.items()
            if unit.saved_apart == saved
            and not (unit.resident or (unit.looks_up_only and unit in self._entered))
        ]

    # -- a forward pass over the model -------------------------------------------------------------

    def _begin_forward(self, this: OpenPass, of_model: bool) -> None:
        engine = self.engine
        if engine.backward_open:  # a backward pass raised before it came to its end
            self.reset()
        if engine.follower is not None:
            engine.follower.forward_begins()
        engine.uninitialized.refuse("a forward pass would use")
        self.raised_in = None
        self._entered.clear()
        graded = engine.graded = torch.is_grad_enabled()
        engine.transfers.check()
        self._look()
        check_in_place(self.units)
        root = self.units[0].module()
        if self._compared < engine.step_count < 2:  # most changes and wrappers come by now
            check_not_wrapped(root)
            if not in_functional_call():  # it may put others in the places of parameters
                refuse_changes(root, engine.entries, "a pass")
            if root is not None:
                engine.buffers.find(root)
            self._compared = engine.step_count
        # A pass without gradients in between (a reference pass with adapters off) must not change
        # what the open graphs rely on
        if graded or not engine.graphs:
            self.reduce.follow_trainable(engine.flats)
        if graded and not engine.graphs:
            for unit in self.units:
                unit.calls = 0
        this.outermost = True  # from here on there is something to end
        engine.activations.begin_forward()  # first: the gatherer's hooks call the hooks set here
        self.refresh(self.units)
        self.gather.begin_forward(of_model)
        if of_model:
            engine.buffers.before_pass()

    def _end_forward(self, aborted: bool) -> None:
        engine, graph = self.engine, self._graph
        graded = torch.is_grad_enabled()
        self._borrowed.clear()
        for entry in engine.entries if aborted else ():
            entry.alias = None
        self.gather.end_forward(aborted)
        if graph is not None and graph.of_model and not aborted:
            engine.buffers.due = graded and engine.sync
        engine.activations.end_forward()
        engine.wait_if_given_out()
        if graph is not None:
            if graded and not aborted:
                engine.graphs.add(graph)
            self.gather.release_when_gone(graph)

    def refresh(self, units: Iterable[Unit]) -> None:
        """Gather the stale resident copies among `units`, in the order of use. Release units that a
        forward pass without a backward pass has left gathered, if their masters have new values now.
        See [Note: stale copies].
        """
        for unit in units:
            if unit.ungathered or not any(flat.stale for flat in unit.flats):
                continue
            if unit.resident:
                self.gather.wait(unit)
                self.gather.launch(unit)
            elif not unit.in_use and not self.engine.backward_open:
                self.gather.release(unit, kept_too=True)  # kept from its next gather on

    def watch_outside(self, output: Any) -> None:
        """Hook what an operation outside passes has returned: a backward pass through it is one of
        this engine's.
        """
        graph = Graph(False, self.engine.writes)
        self.engine.graphs.add(graph)
        self._watch(output, graph, None, whole=True)

    def _watch(self, output: Any, graph: Graph, unit: Unit | None, whole: bool) -> None:
        """Hook the output of a unit, so that the engine hears when the backward pass reaches it:
        early enough to gather ahead of use. `whole`: it is all that `graph` has computed.
        """
        early = unit if unit is not None and not (unit.resident or unit.looks_up_only) else None
        if not whole and early is None:
            return

        def reached(_: torch.Tensor) -> None:
            if self.engine.closed:  # a graph may outlive its model, unless it needs whole weights
                if early is not None:
                    self.engine.refuse_if_closed()
                return
            self.gather.reached += 1
            with disable_torch_function():
                # Once the output of a pass was checked, its units are not, in that backward pass
                if graph.since != self.engine.writes and (whole or graph not in self.reached):
                    refuse_if_computed_with(self.engine, graph.since)
                self.event()
                if whole:
                    self.reached.add(graph)
                if self.run_ahead is not None and unit is not None:
                    self.run_ahead.comes(unit.index, "backward")
                if early is not None and not self.gather.is_done(early):
                    self.gather.acquire(early, backward=True)
                for kept in graph.by_hand if whole else ():
                    if not self.gather.is_done(kept):
                        kept.by_hand = True
                        self.gather.acquire(kept, backward=True)

        for t in tensors_in(output):
            if t.grad_fn is not None:  # a leaf would keep the hook of every pass
                t.register_hook(reached)

    # -- a backward pass ---------------------------------------------------------------------------

    def event(self, accumulates: bool = False) -> None:
        """Note that a backward pass has reached something of this engine. The first event opens the
        pass, and asks autograd to call `_end_backward` at its end.

        `accumulates`: the event is that a parameter has got its gradient.
        """
        engine = self.engine
        opens = not engine.backward_open and in_autograd()
        if not opens and not (accumulates and engine.differentiating):
            return
        with disable_torch_function():
            refuse_transforms()
            # The graph under way does not show a gradient from inside a re-entrant checkpoint
            reduces = accumulates or any(
                will_accumulate(entry.compute) for entry in self.engine.entries if entry.active
            )
            if reduces:
                follower = engine.follower
                engine.factor = 1.0 if follower is None else follower.backward_begins()
            engine.differentiating = not reduces
            if opens:
                engine.backward_open, engine.creates_graph = True, torch.is_grad_enabled()
                self.gather.begin_backward()
                torch.autograd.Variable._execution_engine.queue_callback(self._end_backward)
            else:
                self.gather.foresee_backward()
            if reduces:
                self.reduce.begin_backward()

    def _end_backward(self, pending: bool = False) -> None:
        """End a backward pass. `pending`: what waits for the boundary is reduced, whether or not a
        gradient has come now.
        """
        engine, reduce, used = self.engine, self.reduce, pending
        with disable_torch_function(), torch.no_grad():
            if not engine.differentiating:
                for unit in self.units:  # some of their gradients did not come
                    reduce.store(unit)
                self.gather.join_rest(self.gather.backward)
                used = used or bool(reduce.used)
                if used and not engine.deferring:
                    reduce.launch_rest()
                    agree_and_finish(engine, learn=not pending)
                    engine.step_count += 1
                    # Code may step by itself, and some ranks own nothing
                    if not engine.optimizer_seen:
                        for flat in engine.flats:
                            flat.bumps += flat.travels
                if engine.deferring or engine.holding:
                    engine.pending = True
                elif used:
                    engine.pending = False
            if used or (engine.differentiating and not engine.creates_graph):
                engine.graphs -= self.reached
            engine.early.join()
            self._let_go()
            engine.transfers.gradients_are_down()
            engine.wait_if_given_out()
            self._look()
            for unit in self.units:
                unit.gradients = set()
            if used and reduce.marks is not None:
                reduce.marks.compare()

    def reduce_pending(self) -> None:
        """Reduce the gradients that wait for the boundary, as the backward pass of the boundary
        would have. Collective. `Engine.sync` must hold.
        """
        engine = self.engine
        with disable_torch_function():
            if engine.backward_open:  # a backward pass raised before it came to its end
                self.reset()
            engine.backward_open, engine.factor = True, 1.0
            self.reduce.begin_backward()
            self._end_backward(pending=True)

    def reset(self) -> None:
        """Clean up after a forward or backward pass that raised."""
        if not self.engine.differentiating:
            self.reduce.drop()
            self.engine.pending = False
        self.engine.graphs.clear()
        self._let_go()

    def _let_go(self) -> None:
        self.reached.clear()
        self.gather.end_backward()
        self.engine.activations.end_backward()
        # Not before: a pass that was interrupted is reset
        self.engine.backward_open = self.engine.differentiating = False

    def _look(self) -> None:
        self.engine.memory.look()
        self.engine.transfers.host.look()


keep_hooks_from_compiler(Passes._watch)
keep_from_compiler(Passes._end_backward)


# -- stale copies ----------------------------------------------------------------------------------
#
# [Note: stale copies] Which copies of masters are stale after the masters were written to.
#
#     master ──┬── the resident whole (stages 0 to 2)                          ► refreshed before it is used
#              ├── a cached shard: secondary or encoded (runtime/gather.py)   ► made anew by the next gather
#              └── a gathered unit whose backward pass never came              ► released
#
# A flat buffer's masters have a number, `Flat.version`. Whoever has made a copy of them notes the number
# that it was made of, and compares: `Flat.copied`, `Gather.cached_of`. Stage 3 has no resident copies:
# each gather begins with the masters as they are. Only units that stay gathered must notice a write.
#
# | who writes                    | raises                              | a late backward pass                      |
# |-------------------------------|-------------------------------------|-------------------------------------------|
# | an optimizer's step           | `bumps`, on all ranks alike; and    | is refused (`last_write` in           |
# |                               | `last_write` of what has a gradient | parameters/values.py)                     |
# | the engine, a load            | `bumps`, all `last_write`s          | is refused                                |
# | code, also through `.data`    | torch's version counters            | is not: what it reads has the old values, |
# |                               |                                     | or as `.data` of plain PyTorch the new    |
# | a module, in its forward pass | nothing: `keep_writes` gives masters| is as in plain PyTorch                    |
# |                               | what the whole has already          |                                           |


# -- what a forward pass writes to its parameters --------------------------------------------------
#
# Parameters that a module writes to inside its forward pass: a norm constraint, a clamp.
#
# In a forward pass the whole parameter lies in a buffer that goes back to the pool when the unit is
# released. What was written there would be lost. So the engine looks for writes when the forward pass
# of a unit ends, and copies this rank's part of what was written into its masters.
#
# | how it was written                               | how that shows                                                      |
# |--------------------------------------------------|---------------------------------------------------------------------|
# | `self.weight.clamp_()` under no_grad             | the parameter's version counter                                     |
# | `self.weight.data.clamp_()`                      | that of the alias that all who read `.data` share (`Entry.alias`)   |
# | `self.weight.data = renorm(self.weight.data)`    | the setter says so (`Whole`); the parameter lies in other memory    |
#
# All ranks have to write the same, as under DDP.


@torch.no_grad()
def keep_writes(unit: Unit) -> None:
    """Copy what was written to a unit's parameters into the masters, if the unit is gathered. Called
    at the end of the unit's forward pass.

    Raises:
        RuntimeError: parameters that are stored off the device or travel encoded were written to.
    """
    for flat in unit.flats if unit.state is State.GATHERED else ():
        full, written = flat.full, list[Any]()
        if full is None or flat.unsharded:
            continue
        for entry in flat.entries:
            version, alias, entry.alias = entry.local._version, entry.alias, None
            if entry.box is not None:  # a write to a DTensor counts there
                version += entry.compute._version
            if version == entry.seen_version and (alias is None or not alias._version):
                continue
            entry.seen_version = version
            written.append(entry)
            if entry.slot.numel and storage_of(entry.local) != storage_of(full):
                flat.view(full, entry).copy_(entry.local.detach())
                point(entry.local, flat.view(full, entry))
        if written and (flat.storage.offloaded or not flat.gather.exact):
            raise RuntimeError(
                f"parameter {written[0].slot.name!r} was written to in the forward pass, and it is"
                " stored off the device or travels encoded, so that the change would be lost. Write"
                " to it after optimizer.step(), under torch.no_grad()."
            )
        if written:
            engine: Any = flat.engine()
            if engine.copying is not None:
                engine.copying()  # a save may still read the masters
            flat.storage.keep_written(full[slice(*flat.owned)])
            flat.gather.cached_of = -1


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
    inside = [t for t in tensors_in(output) if is_in(buffers, t)] if buffers else []
    copies = {id(t): t.clone() for t in inside}  # one for each object, however often it occurs
    return mapped(output, lambda t: copies.get(id(t), t), objects=4) if copies else output


# -- torch.func ------------------------------------------------------------------------------------
#
# Other tensors in the parameters' places: `torch.func.functional_call` puts them there for one
# call. Replacing a parameter for good is refused.


def swap(unit: Unit, inside: bool) -> None:
    """Let the module see the whole parameters of `unit` (`inside` its pass), or the optimizer's again.
    Tensors that `functional_call` has put in their places stay for the call.

    Raises:
        RuntimeError: other code has put a tensor in a parameter's place, which would be ignored.
        ValueError: functional_call was given a tensor of another shape than the whole parameter.
    """
    for flat in unit.flats:
        for entry in flat.entries:
            before, after = entry.param, entry.compute
            if not inside:
                before, after = after, before
            for parameters, attribute in entry.places:
                there = parameters.get(attribute)
                if there is before:
                    put(parameters, attribute, after)
                elif inside:
                    _look_at(entry, there)


def _look_at(entry: Entry, there: torch.Tensor | None) -> None:
    """Look at what is in a parameter's place, instead of the parameter."""
    name, shape = entry.slot.name, tuple(entry.slot.shape)
    if there is None or not in_functional_call():
        raise RuntimeError(
            f"parameter {name!r} was replaced after shard() (assigned or removed). Write into it"
            " instead: `with onefold.full_params(model, write=True):` for values; for another"
            " structure assign between onefold.unshard(model) and a new shard(), or before shard()."
        )
    if tuple(there.shape) != shape:
        raise ValueError(
            f"functional_call was given a tensor of shape {tuple(there.shape)} for {name!r},"
            f" expected the whole parameter's {shape}. torch.func.grad, vmap and the like see"
            f" this rank's interval of a sharded parameter. {TRANSFORMS}"
        )


def in_functional_call() -> bool:
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
