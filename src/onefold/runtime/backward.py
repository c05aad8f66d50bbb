"""The backward passes of one engine: how each begins, and how it ends, also when it raised."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

import onefold.runtime.updates as updates_of
from onefold.comm import CollectiveContext, StallError, alike, both
from onefold.memory.pool import TierError
from onefold.runtime import differentiate
from onefold.runtime.differentiate import in_autograd, keep_from_compiler
from onefold.runtime.parameters.interval import disable_torch_function, get_grad
from onefold.runtime.pending_gradients import show_pending

if TYPE_CHECKING:
    from onefold.runtime.flat import Entry
    from onefold.runtime.gather import Gatherer
    from onefold.runtime.parameters.values import ForwardPass
    from onefold.runtime.reduce import Reducer
    from onefold.runtime.resources import Activations, Resources, Spans
    from onefold.runtime.stepper import Steppers


class Backward:
    """Opens a backward pass at its first event, and ends it when autograd has finished.

    Attributes:
        reached: the forward passes whose outputs this backward pass has reached.
    """

    def __init__(
        self,
        entries: Sequence[Entry],
        resources: Resources,
        gather: Gatherer,
        reduce: Reducer,
        stepper: Steppers,
        activations: Activations,
        spans: Spans,
    ) -> None:
        self.entries, self.resources, self.progress = entries, resources, resources.progress
        self.gather, self.reduce, self.stepper = gather, reduce, stepper
        self.activations, self.spans = activations, spans
        self.reached: list[ForwardPass] = []

    def event(self, accumulates: bool = False) -> None:
        """Note that a backward pass has reached something of this engine. The first event opens the
        pass, and asks autograd to call `_end` at its end.

        `accumulates`: the event is that a parameter has got its gradient.
        """
        progress = self.progress
        if not progress.backward_open and in_autograd():
            with disable_torch_function():
                differentiating = not (accumulates or differentiate.accumulates(self.entries))
                if not differentiating:
                    self._tell_follower()
                progress.differentiating = differentiating
                progress.backward_open, progress.creates_graph = True, torch.is_grad_enabled()
                self.gather.begin_backward()
                if not progress.differentiating:
                    self.reduce.begin_backward()
                self.spans.begin_backward()
            torch.autograd.Variable._execution_engine.queue_callback(self._end)
        elif accumulates and progress.differentiating:
            # A gradient from inside a re-entrant checkpoint: the outer graph does not show it
            self._tell_follower()
            progress.differentiating = False
            self.gather.foresee_backward()
            self.reduce.begin_backward()

    def _tell_follower(self) -> None:
        follower, self.progress.factor = self.progress.follower, 1.0
        if follower is None:
            return
        try:
            self.progress.factor = follower.backward_begins()
        except BaseException:
            self.reached.clear()
            raise

    def _end(self) -> None:
        progress, reduce = self.progress, self.reduce
        memory, transfers = self.resources.memory, self.resources.transfers
        with disable_torch_function(), torch.no_grad():
            if progress.differentiating:
                self._end_differentiating()
                return
            reduce.collect()
            reduce.take_multipliers_back()
            self.gather.join_rest_of_backward()
            used = reduce.used
            if used and not progress.deferring:
                reduce.launch_rest()
                agree_and_finish(self.resources, self.gather, reduce, used)
                progress.step_count += 1
                progress.reduced_since_gather = True
            progress.outside_graphs = False
            if used:
                self._close_graphs()
            if progress.deferring or progress.holding:
                progress.pending = True
                show_pending(reduce)
            elif used:
                progress.pending = False
            self.stepper.early.join()
            self.gather.end_backward()
            self.activations.end_backward()
            progress.backward_open = False  # not before: a pass that was interrupted is reset
            transfers.gradients_are_down()
            self.resources.masters.after_pass()
            memory.look()
            transfers.host.look()
            for unit in reduce.units:
                unit.gradients = set()
            if used and reduce.marks is not None:
                reduce.marks.compare()

    def reduce_pending(self) -> None:
        """Reduce the gradients that wait for the boundary, as the backward pass of the boundary
        would have. Collective. `Progress.sync` must hold.
        """
        progress, reduce = self.progress, self.reduce
        with disable_torch_function(), torch.no_grad():
            if progress.backward_open:  # a backward pass raised before it came to its end
                self.reset()
            progress.backward_open, progress.factor, progress.pending = True, 1.0, False
            reduce.begin_backward()
            reduce.launch_rest()
            agree_and_finish(self.resources, self.gather, reduce, reduce.used, learn=False)
            progress.step_count += 1
            progress.reduced_since_gather = True
            self.stepper.early.join()
            progress.backward_open = False
            self.resources.pool.drain()
            self.resources.transfers.gradients_are_down()
            self.resources.memory.look()
            self.resources.transfers.host.look()
            for unit in reduce.units:
                unit.gradients = set()
            if reduce.marks is not None:
                reduce.marks.compare()

    def take_gradients(self) -> None:
        """Take the gradients that lie on whole parameters: those of a backward pass that was run in
        two halves, whose second has set `.grad` by itself (torch.distributed.pipelining). They stay
        whole: `Progress.deferring` must hold.
        """
        progress, reduce = self.progress, self.reduce
        with disable_torch_function(), torch.no_grad():
            progress.backward_open, progress.factor = True, 1.0
            reduce.begin_backward()
            for entry in self.entries:
                if get_grad(entry.compute) is not None:
                    reduce.arrived(entry)
            reduce.collect()
            progress.pending = True
            show_pending(reduce)
            progress.backward_open = False
            for unit in reduce.units:
                unit.gradients = set()

    def _end_differentiating(self) -> None:
        """End a backward pass that accumulated nothing (torch.autograd.grad): there is nothing to
        reduce and nothing to agree on.
        """
        if not self.progress.creates_graph:
            self._close_graphs()
        self.reached.clear()
        self.gather.end_backward()
        self.activations.end_backward()
        self.progress.backward_open = self.progress.differentiating = False
        self.resources.masters.after_pass()
        self.resources.memory.look()

    def _close_graphs(self) -> None:
        """Close the graphs that the backward pass has used up: those of the passes that it reached,
        or one graph if it reached none.
        """
        progress, closed = self.progress, [p for p in dict.fromkeys(self.reached) if p.open]
        for each in closed:
            each.open = False
        graphs, of_root = (len(closed), sum(p.of_root for p in closed)) if self.reached else (1, 1)
        progress.open_graphs = max(0, progress.open_graphs - graphs)
        progress.root_graphs = max(0, progress.root_graphs - of_root)
        self.reached.clear()

    def reset(self) -> None:
        """Clean up after a forward or backward pass that raised."""
        progress = self.progress
        if not progress.differentiating:
            self.reduce.drop()
        progress.backward_open = progress.differentiating = False
        progress.open_graphs = progress.root_graphs = 0
        self.reached.clear()
        progress.outside_graphs = progress.pending = False
        self.gather.end_backward()
        self.activations.end_backward()


# -- the exchange at the end of a backward pass ----------------------------------------------------
#
# What the ranks tell each other at the end of a backward pass, in one exchange of a few hundred
# bits (`Group.any_of`).
#
#     checksums of three orders: of units in forward, of units in backward, of units ready
#         | the same bits inverted
#     checksum of launched collectives, and of what clipping and optimizers did (runtime/updates.py)
#         | the same bits inverted
#         | background work has failed | parameters used | units late | units gathered in backward
#
# Every rank learns which bits are set on any rank. From them it knows:
#
# - which parameters got a gradient anywhere,
# - whether a unit needs a second reduction,
# - whether all ranks used the units in the same order, which then becomes the agreed order of the
#   next steps. (A checksum is the same on all ranks if no bit of it is set together with its
#   inverse.)
# - whether all ranks made the same updates since the last exchange.
#
# [Note: the exchange is never left out] Any of these bits may come from another rank, so no rank can
# know that the exchange is needless. On a native backend it is also where the host learns that a rank
# is missing or has launched other collectives. It costs log2(ranks) messages between hosts; the
# device goes on meanwhile.


_TOLD = 512  # bytes of a message about what went wrong
_UPDATES = 1 << 14  # bytes of updates that differ


keep_from_compiler(Backward._end)  # autograd calls it


def agree_and_finish(
    resources: Resources,
    gather: Gatherer,
    reduce: Reducer,
    used: set[int],
    learn: bool = True,
) -> None:
    """Exchange which parameters were used and which orders were seen; then set the gradients.

    `learn`: the orders are those of a pass, and may become the agreed ones.

    Raises:
        StallError: on every rank. The ranks launched different collectives on a native backend, so
            what they received is not what they asked for; or they clipped or stepped differently.
    """
    group, progress, units = resources.group, resources.progress, reduce.units
    late = {u.index for u in units if u.late}
    gathered = {u.index for u in gather.backward.seen}
    orders = gather.forward, gather.backward, reduce.order
    seen = [zlib.crc32(repr([u.index for u in order.seen]).encode()) for order in orders]
    launched, updates = group.launched(), updates_of.together(group.updates)
    walked = both(struct.pack("<III", *seen))
    sizes = (1, len(reduce.unit_of), len(units), len(units))
    parts = [
        walked,
        both(zlib.crc32(updates.encode(), zlib.crc32(launched)).to_bytes(4, "little")),
        *map(
            _bits,
            ({0} if progress.failure is not None else set(), used, late, gathered),
            sizes,
        ),
    ]
    context = CollectiveContext("control", "(end of backward)", progress.step_count, "backward")
    anywhere = group.any_of(b"".join(parts), context)
    group.shared.heard = progress.step_count
    group.updates.clear()
    found, at = [], 0
    for part in parts:
        found.append(anywhere[at : at + len(part)])
        at += len(part)
    if not alike(found[1]):
        texts = group.tell(f"{launched.hex()} {updates}", _UPDATES, context)
        if any(not text.startswith(f"{launched.hex()} ") for text in texts):
            raise group.out_of_order(context)
        said = {r: t.partition(" ")[2] for r, t in zip(group.ranks, texts, strict=True)}
        raise StallError(
            f"rank {group.ranks[group.rank]} found at the end of the backward pass of step"
            f" {context.step} that the ranks have stepped differently: "
            + (updates_of.difference(said) or "one of the updates differs in a later group.")
        )
    failed, used_anywhere, late_anywhere, gathered_anywhere = (
        _members(int.from_bytes(bits, "little")) for bits in found[2:]
    )
    progress.failure_agreed = bool(failed)
    reduce.finish(used_anywhere)
    if late_anywhere:
        reduce.second_round(sorted(late_anywhere), used_anywhere)
    if learn and alike(found[0]) and not all(order.agreed for order in orders):
        gather.learn(gathered_anywhere)
        if reduce.order.seen:
            reduce.order.learn(reduce.order.units)


def agree_on_failure(resources: Resources, error: BaseException | None, when: str) -> None:
    """Tell all ranks what went wrong with a disk, if anything did. Collective.

    Raises:
        TierError: on every rank, if any rank has an `error`.
    """
    # The error raised below is a TierError too, so this name is left out
    kind = "" if isinstance(error, TierError) else f"{type(error).__name__}: "
    said = f"{kind}{error}" if error is not None else ""
    context = CollectiveContext("control", "(NVMe)", resources.progress.step_count, "optimizer")
    told = resources.group.tell(said, _TOLD, context)
    wrong = [(rank, message) for rank, message in enumerate(told) if message]
    if wrong:
        resources.progress.failure, resources.progress.failure_agreed = None, False
        resources.transfers.forget_writes()
        rank, message = wrong[0]
        raise TierError(f"rank {resources.group.ranks[rank]}, {when}: {message}") from error


def _bits(members: set[int], size: int) -> bytes:
    return sum(1 << i for i in members).to_bytes((size + 7) // 8, "little")


def _members(bits: int) -> set[int]:
    return {i for i, bit in enumerate(reversed(f"{bits:b}")) if bit == "1"}
