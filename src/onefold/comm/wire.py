"""How collectives are launched: one `Wire` for each kind of backend. Wires have no state; a
`Launch` carries what a move needs of its group.

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
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from onefold.comm.ledger import TrafficEvent
from onefold.comm.pending import CollectiveContext, Pending
from onefold.device import simulated

if TYPE_CHECKING:
    from onefold.comm.peers import Peers

#: (peer, tensor) for each message.
Parts = Sequence[tuple[int, torch.Tensor]]


@dataclass(frozen=True)
class Cut:
    """How the ranks of a group divide one buffer among themselves. Lengths are in elements.

    Attributes:
        sizes: of the parts, by position.
        numel: of the buffer.
        own: of this rank's part.
        between: of the parts that belong to ranks on other nodes, together.
        even: True if all parts have the same length.
    """

    sizes: tuple[int, ...]
    numel: int
    own: int
    between: int
    even: bool


@dataclass(frozen=True, slots=True)
class Launch:
    """What every move is launched with.

    Attributes:
        group: the ranks that take part.
        move: the kind of move, by its name in the ledger.
        number: of the flat buffer, or another that tells messages apart.
        addresses: the range of the unit's buffer that is reduced, or None for all of it. `move`,
            `number` and `addresses` go into tags and checksums.
        context: what the move is for.
        event: the ledger's event.
    """

    group: Peers
    move: str
    number: int
    context: CollectiveContext
    event: TrafficEvent
    addresses: tuple[int, int] | None = None

    def launching(self) -> AbstractContextManager[None]:
        return self.group.launching(self.context)

    def pending(
        self, works: list[Any], keep: Any, after: Sequence[Callable[[], object]] = ()
    ) -> Pending:
        """Return the move in flight. `keep` is kept alive until it is complete."""
        return Pending(self.group, works, self.context, self.event, keep, after)

    def note(self, which: int, numel: int = 0) -> None:
        """Add the move to the checksum of a native communicator: 0 of gathers, 1 of reductions."""
        about = numel if self.addresses is None else self.addresses
        self.group.note_launch(which, self.move, self.number, about)


class Wire(ABC):
    """One kind of backend. The tensors of each move are as `Moves` describes them."""

    @property
    @abstractmethod
    def native(self) -> bool:
        """Whether moves are the backend's own operations, on the device."""

    @abstractmethod
    def all_gather(self, launch: Launch, full: torch.Tensor, mine: torch.Tensor) -> Pending:
        """Send each rank's interval `mine` of `full` to all others."""

    @abstractmethod
    def exchange(self, launch: Launch, sends: Parts, recvs: Parts) -> Pending:
        """Send a part to each peer, and receive one from each."""

    # -- on native backends only -------------------------------------------------------------------

    def scatter_parts(
        self, launch: Launch, sent: torch.Tensor, cut: Cut, received: torch.Tensor
    ) -> Pending:
        raise NotImplementedError

    def reduce_scatter(
        self, launch: Launch, sent: torch.Tensor, own: torch.Tensor, mean: bool
    ) -> Pending:
        raise NotImplementedError

    def all_reduce(self, launch: Launch, whole: torch.Tensor, mean: bool) -> Pending:
        raise NotImplementedError

    def gather_sums(self, launch: Launch, whole: torch.Tensor, own: torch.Tensor) -> Pending:
        raise NotImplementedError


class Gloo(Wire):
    """See [Note: tags instead of order] in comm/peers.py."""

    native = False

    def all_gather(self, launch: Launch, full: torch.Tensor, mine: torch.Tensor) -> Pending:
        shard, peers = mine.numel(), launch.group.peers
        sends = [(peer, mine) for peer in peers]
        recvs = [(peer, full[peer * shard : (peer + 1) * shard]) for peer in peers]
        return self.exchange(launch, sends, recvs)

    def exchange(self, launch: Launch, sends: Parts, recvs: Parts) -> Pending:
        group = launch.group
        tag = group.tag(launch.move, launch.number, launch.addresses)
        after: list[Callable[[], object]] = []
        if group.device.type != "cpu":  # gloo moves host memory only: stage through it
            host = [(p, torch.empty(t.shape, dtype=t.dtype, device="cpu")) for p, t in recvs]
            after = [
                lambda t=t, h=h: t.copy_(h)  # type: ignore[misc]
                for (_, t), (_, h) in zip(recvs, host, strict=True)
            ]
            sends, recvs = [(p, t.cpu()) for p, t in sends], host
        over, at = group.gather_group, group.at
        with launch.launching():
            works = [
                dist.irecv(t, group=over, group_src=at[p], tag=of_length(tag, t))
                for p, t in recvs
                if t.numel()
            ]
            works += [
                dist.isend(t, group=over, group_dst=at[p], tag=of_length(tag, t))
                for p, t in sends
                if t.numel()
            ]
        return launch.pending(works, (sends, recvs), after)


def of_length(tag: int, message: torch.Tensor) -> int:
    """Return `tag` with the message's length hashed into its lower bits (Fibonacci hashing).

    Messages of different lengths then never match: gloo would abort the process if more bytes
    arrived than the receiver asked for.
    """
    return tag ^ (message.numel() * message.element_size() * 2654435769 & 0xFFFFFFFF) >> 20


class Native(Wire):
    """See [Note: order instead of tags] in comm/peers.py."""

    native = True

    def all_gather(self, launch: Launch, full: torch.Tensor, mine: torch.Tensor) -> Pending:
        launch.note(0, full.numel())
        with launch.launching():
            work = dist.all_gather_single(
                full, mine, group=launch.group.gather_group, async_op=True
            )
        return launch.pending([work], full)

    def exchange(self, launch: Launch, sends: Parts, recvs: Parts) -> Pending:
        launch.note(1)
        group = launch.group
        dtype = next((t.dtype for _, t in [*sends, *recvs]), torch.float32)
        empty = torch.empty(0, dtype=dtype, device=group.device)
        out, inp = [empty] * group.size, [empty] * group.size
        for peer, t in recvs:
            out[group.at[peer]] = t
        for peer, t in sends:
            inp[group.at[peer]] = t
        with launch.launching():
            work = dist.all_to_all(out, inp, group=group.reduce_group, async_op=True)
        return launch.pending([work], (out, inp))

    def scatter_parts(
        self, launch: Launch, sent: torch.Tensor, cut: Cut, received: torch.Tensor
    ) -> Pending:
        launch.note(1)
        group = launch.group
        gives, gets = list(cut.sizes), [cut.own] * group.size
        alone = received.shape[0] < group.size
        if alone:  # this rank's part stays where it is
            gives[group.rank] = gets[group.rank] = 0
        over, into = group.reduce_group, received.view(-1)
        with launch.launching():
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
        return launch.pending([work], (sent, received))

    def reduce_scatter(
        self, launch: Launch, sent: torch.Tensor, own: torch.Tensor, mean: bool
    ) -> Pending:
        launch.note(1)
        over = launch.group.reduce_group
        with launch.launching():
            work = dist.reduce_scatter_single(
                own, sent, op=_operation(mean), group=over, async_op=True
            )
        return launch.pending([work], (sent, own))

    def all_reduce(self, launch: Launch, whole: torch.Tensor, mean: bool) -> Pending:
        launch.note(1, whole.numel())
        over = launch.group.reduce_group
        with launch.launching():
            work = dist.all_reduce(whole, op=_operation(mean), group=over, async_op=True)
        return launch.pending([work], whole)

    def gather_sums(self, launch: Launch, whole: torch.Tensor, own: torch.Tensor) -> Pending:
        launch.note(1)
        with launch.launching():
            work = dist.all_gather_single(
                whole, own, group=launch.group.reduce_group, async_op=True
            )
        return launch.pending([work], whole)


class Fake(Wire):
    """See [Note: one rank stands for all] in comm/moves.py."""

    @property
    def native(self) -> bool:
        """True in a simulation with a clock, which simulates a device with streams."""
        return simulated() is not None

    def all_gather(self, launch: Launch, full: torch.Tensor, mine: torch.Tensor) -> Pending:
        return self._stand_in(launch, full, ring=True, queue="gathers")

    def exchange(self, launch: Launch, sends: Parts, recvs: Parts) -> Pending:
        return self._stand_in(launch, (sends, recvs))

    def scatter_parts(
        self, launch: Launch, sent: torch.Tensor, cut: Cut, received: torch.Tensor
    ) -> Pending:
        return self._stand_in(launch, (sent, received))

    def reduce_scatter(
        self, launch: Launch, sent: torch.Tensor, own: torch.Tensor, mean: bool
    ) -> Pending:
        return self._stand_in(launch, (sent, own), ring=True)

    def all_reduce(self, launch: Launch, whole: torch.Tensor, mean: bool) -> Pending:
        return self._stand_in(launch, whole, ring=True)

    def gather_sums(self, launch: Launch, whole: torch.Tensor, own: torch.Tensor) -> Pending:
        return self._stand_in(launch, whole, ring=True)

    @staticmethod
    def _stand_in(
        launch: Launch, keep: Any, ring: bool = False, queue: str = "reductions"
    ) -> Pending:
        """Return a move in which nothing arrives. `ring`: a real backend would send it round a
        ring. `queue`: the communicator that it would use.
        """
        group, event = launch.group, launch.event
        if (clock := simulated()) is not None:
            return launch.pending([clock.collective(event, group.ranks, ring, queue)], keep)
        waited = [lambda: group.ledger.waited(event, time.perf_counter())]
        return launch.pending([], keep, waited)


GLOO, NATIVE, FAKE = Gloo(), Native(), Fake()


def wire_of(backend: str) -> Wire:
    """Return the wire for a process group's backend, by torch's name for it."""
    return {"gloo": GLOO, "fake": FAKE}.get(backend, NATIVE)


def _operation(mean: bool) -> Any:
    return dist.ReduceOp.AVG if mean else dist.ReduceOp.SUM
