"""How the moves of a group are launched: one `Wire` for each kind of backend. They have no state of
their own; what a move needs of the group is given.

| wire     | backend                | a gather                     | an exchange of parts                    |
|----------|------------------------|------------------------------|-----------------------------------------|
| `Gloo`   | gloo                   | messages between two ranks   | messages between two ranks              |
| `Native` | NCCL and the like      | all_gather_single            | all_to_all_single, or a list of tensors |
| `Fake`   | torch's "fake" backend | nothing arrives              | nothing arrives                         |
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from onefold.comm.ledger import TrafficEvent
from onefold.comm.pending import Pending
from onefold.comm.stall import CollectiveContext
from onefold.device import simulated

if TYPE_CHECKING:
    from onefold.comm.group import Group

#: (peer, tensor) for each message.
Parts = Sequence[tuple[int, torch.Tensor]]
# Their names from torch 2.13 on
all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


@dataclass(frozen=True)
class Cut:
    """How the ranks of a group divide one buffer among themselves, lengths in elements.

    Attributes:
        sizes: by position. numel: of the buffer. own: this rank's part. away: of the buffer, what
            belongs to ranks on other nodes.
        even: all parts are of one length.
    """

    sizes: tuple[int, ...]
    numel: int
    own: int
    away: int
    even: bool


class Wire(ABC):
    """Arguments of all moves: the group, tensors as `Group` describes them, what the move is for,
    the unit's number (it goes into tags and checksums), and the ledger's event.
    """

    @property
    @abstractmethod
    def native(self) -> bool:
        """Moves are operations of the backend's own, on the device."""

    @abstractmethod
    def all_gather(
        self,
        group: Group,
        full: torch.Tensor,
        mine: torch.Tensor,
        place: CollectiveContext,
        unit_index: int,
        move: str,
        event: TrafficEvent,
    ) -> Pending:
        """Each rank's interval `mine` of `full` to all others."""

    @abstractmethod
    def exchange(
        self,
        group: Group,
        sends: Parts,
        recvs: Parts,
        place: CollectiveContext,
        unit_index: int,
        move: str,
        event: TrafficEvent,
    ) -> Pending:
        """One part to each peer, and one from each."""

    # -- on native backends alone ------------------------------------------------------------------

    def scatter_parts(
        self,
        group: Group,
        sent: torch.Tensor,
        cut: Cut,
        received: torch.Tensor,
        place: CollectiveContext,
        unit_index: int,
        move: str,
        event: TrafficEvent,
    ) -> Pending:
        raise NotImplementedError

    def reduce_scatter(
        self,
        group: Group,
        sent: torch.Tensor,
        own: torch.Tensor,
        place: CollectiveContext,
        unit_index: int,
        move: str,
        mean: bool,
        event: TrafficEvent,
    ) -> Pending:
        raise NotImplementedError

    def all_reduce(
        self,
        group: Group,
        whole: torch.Tensor,
        place: CollectiveContext,
        unit_index: int,
        mean: bool,
        event: TrafficEvent,
    ) -> Pending:
        raise NotImplementedError

    def gather_sums(
        self,
        group: Group,
        whole: torch.Tensor,
        own: torch.Tensor,
        place: CollectiveContext,
        unit_index: int,
        event: TrafficEvent,
    ) -> Pending:
        raise NotImplementedError


class Gloo(Wire):
    """See [Note: tags instead of order] in comm/group.py."""

    native = False

    def all_gather(
        self,
        group: Group,
        full: torch.Tensor,
        mine: torch.Tensor,
        place: CollectiveContext,
        unit_index: int,
        move: str,
        event: TrafficEvent,
    ) -> Pending:
        shard = mine.numel()
        sends = [(peer, mine) for peer in group.peers]
        recvs = [(peer, full[peer * shard : (peer + 1) * shard]) for peer in group.peers]
        return self.exchange(group, sends, recvs, place, unit_index, move, event)

    def exchange(
        self,
        group: Group,
        sends: Parts,
        recvs: Parts,
        place: CollectiveContext,
        unit_index: int,
        move: str,
        event: TrafficEvent,
    ) -> Pending:
        tag = group.tag(move, unit_index)
        after: list[Callable[[], object]] = []
        if group.device.type != "cpu":  # gloo moves host memory only: stage through it
            host = [(p, torch.empty(t.shape, dtype=t.dtype)) for p, t in recvs]
            after = [
                lambda t=t, h=h: t.copy_(h)  # type: ignore[misc]
                for (_, t), (_, h) in zip(recvs, host, strict=True)
            ]
            sends, recvs = [(p, t.cpu()) for p, t in sends], host
        over = group.gather_group
        with group.launching(place):
            works = [
                dist.irecv(t, group=over, group_src=group.at[p], tag=tag)
                for p, t in recvs
                if t.numel()
            ]
            works += [
                dist.isend(t, group=over, group_dst=group.at[p], tag=tag)
                for p, t in sends
                if t.numel()
            ]
        return Pending(group, works, place, event, keep=(sends, recvs), after=after)


class Native(Wire):
    """See [Note: order instead of tags] in comm/group.py."""

    native = True

    def all_gather(
        self,
        group: Group,
        full: torch.Tensor,
        mine: torch.Tensor,
        place: CollectiveContext,
        unit_index: int,
        move: str,
        event: TrafficEvent,
    ) -> Pending:
        group.note_launch(0, move, unit_index, full.numel())
        with group.launching(place):
            work = all_gather_single(full, mine, group=group.gather_group, async_op=True)
        return Pending(group, [work], place, event, keep=full)

    def exchange(
        self,
        group: Group,
        sends: Parts,
        recvs: Parts,
        place: CollectiveContext,
        unit_index: int,
        move: str,
        event: TrafficEvent,
    ) -> Pending:
        group.note_launch(1, move, unit_index)
        dtype = next((t.dtype for _, t in [*sends, *recvs]), torch.float32)
        empty = torch.empty(0, dtype=dtype, device=group.device)
        out, inp = [empty] * group.size, [empty] * group.size
        for peer, t in recvs:
            out[group.at[peer]] = t
        for peer, t in sends:
            inp[group.at[peer]] = t
        with group.launching(place):
            work = dist.all_to_all(out, inp, group=group.reduce_group, async_op=True)
        return Pending(group, [work], place, event, keep=(out, inp))

    def scatter_parts(
        self,
        group: Group,
        sent: torch.Tensor,
        cut: Cut,
        received: torch.Tensor,
        place: CollectiveContext,
        unit_index: int,
        move: str,
        event: TrafficEvent,
    ) -> Pending:
        group.note_launch(1, move, unit_index)
        gives, gets = list(cut.sizes), [cut.own] * group.size
        alone = received.shape[0] < group.size
        if alone:  # this rank's part stays where it is
            gives[group.rank] = gets[group.rank] = 0
        over, into = group.reduce_group, received.view(-1)
        with group.launching(place):
            if not group.ordered:
                by_number = sorted(range(group.size), key=group.at.__getitem__)
                sends, recvs = sent.split(gives), into.split(gets)
                work = dist.all_to_all(
                    [recvs[p] for p in by_number],
                    [sends[p] for p in by_number],
                    group=over,
                    async_op=True,
                )
            elif cut.even and not alone:
                work = dist.all_to_all_single(into, sent, group=over, async_op=True)
            else:
                work = dist.all_to_all_single(into, sent, gets, gives, group=over, async_op=True)
        return Pending(group, [work], place, event, keep=(sent, received))

    def reduce_scatter(
        self,
        group: Group,
        sent: torch.Tensor,
        own: torch.Tensor,
        place: CollectiveContext,
        unit_index: int,
        move: str,
        mean: bool,
        event: TrafficEvent,
    ) -> Pending:
        group.note_launch(1, move, unit_index)
        with group.launching(place):
            work = _reduce_scatter(
                own, sent, op=_operation(mean), group=group.reduce_group, async_op=True
            )
        return Pending(group, [work], place, event, keep=(sent, own))

    def all_reduce(
        self,
        group: Group,
        whole: torch.Tensor,
        place: CollectiveContext,
        unit_index: int,
        mean: bool,
        event: TrafficEvent,
    ) -> Pending:
        group.note_launch(1, "all-reduce", unit_index, whole.numel())
        with group.launching(place):
            work = dist.all_reduce(
                whole, op=_operation(mean), group=group.reduce_group, async_op=True
            )
        return Pending(group, [work], place, event, keep=whole)

    def gather_sums(
        self,
        group: Group,
        whole: torch.Tensor,
        own: torch.Tensor,
        place: CollectiveContext,
        unit_index: int,
        event: TrafficEvent,
    ) -> Pending:
        group.note_launch(1, "all-reduce", unit_index)
        with group.launching(place):
            work = all_gather_single(whole, own, group=group.reduce_group, async_op=True)
        return Pending(group, [work], place, event, keep=whole)


class Fake(Wire):
    """See [Note: one rank stands for all] in comm/group.py."""

    @property
    def native(self) -> bool:
        """In a simulation with a clock, which is a device's."""
        return simulated() is not None

    def all_gather(
        self,
        group: Group,
        full: torch.Tensor,
        mine: torch.Tensor,
        place: CollectiveContext,
        unit_index: int,
        move: str,
        event: TrafficEvent,
    ) -> Pending:
        return self._stand_in(group, place, event, full, ring=True, queue="gathers")

    def exchange(
        self,
        group: Group,
        sends: Parts,
        recvs: Parts,
        place: CollectiveContext,
        unit_index: int,
        move: str,
        event: TrafficEvent,
    ) -> Pending:
        return self._stand_in(group, place, event, (sends, recvs))

    def scatter_parts(
        self,
        group: Group,
        sent: torch.Tensor,
        cut: Cut,
        received: torch.Tensor,
        place: CollectiveContext,
        unit_index: int,
        move: str,
        event: TrafficEvent,
    ) -> Pending:
        return self._stand_in(group, place, event, (sent, received))

    def reduce_scatter(
        self,
        group: Group,
        sent: torch.Tensor,
        own: torch.Tensor,
        place: CollectiveContext,
        unit_index: int,
        move: str,
        mean: bool,
        event: TrafficEvent,
    ) -> Pending:
        return self._stand_in(group, place, event, (sent, own), ring=True)

    def all_reduce(
        self,
        group: Group,
        whole: torch.Tensor,
        place: CollectiveContext,
        unit_index: int,
        mean: bool,
        event: TrafficEvent,
    ) -> Pending:
        return self._stand_in(group, place, event, whole, ring=True)

    def gather_sums(
        self,
        group: Group,
        whole: torch.Tensor,
        own: torch.Tensor,
        place: CollectiveContext,
        unit_index: int,
        event: TrafficEvent,
    ) -> Pending:
        return self._stand_in(group, place, event, whole, ring=True)

    @staticmethod
    def _stand_in(
        group: Group,
        place: CollectiveContext,
        event: TrafficEvent,
        keep: Any,
        ring: bool = False,
        queue: str = "reductions",
    ) -> Pending:
        """`ring`: a backend would send it round a ring. `queue`: the communicator that it would go
        to.
        """
        if (clock := simulated()) is not None:
            work = clock.collective(event, group.ranks, ring, queue)
            return Pending(group, [work], place, event, keep)
        ledger = group.ledger
        waited = [lambda: ledger.waited(event, time.perf_counter())]
        return Pending(group, [], place, event, keep, after=waited)


GLOO, NATIVE, FAKE = Gloo(), Native(), Fake()


def wire_of(backend: str) -> Wire:
    """The wire of a process group's backend, by torch's name of it."""
    return {"gloo": GLOO, "fake": FAKE}.get(backend, NATIVE)


def _operation(mean: bool) -> Any:
    return dist.ReduceOp.AVG if mean else dist.ReduceOp.SUM
