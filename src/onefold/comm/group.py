"""The ranks of one data-parallel axis, and the moves between placements that are the only things to
touch the wire.

| from         | to         | move           | pairwise (gloo)                            | native (NCCL)                |
|--------------|------------|----------------|--------------------------------------------|------------------------------|
| sharded      | replicated | all-gather     | each rank sends its interval to each other | all_gather_single            |
| partial sums | sharded    | reduce-scatter | sends of intervals, then a local sum       | all_to_all_single, local sum |
| partial sums | replicated | all-reduce     | the two above                              | the two above                |
| replicated   | sharded    | slice          | no traffic                                 | no traffic                   |

With `reduce="native"` in the recipe partial sums go by the backend's own reduce_scatter_single and
all_reduce.

[Note: sums are local and in rank order] Every reduction moves the parts as they are and adds them
up on the rank that owns the interval, in the order of the ranks, in the accumulation dtype. The
bits of a sum therefore depend neither on the placement of the result nor on how the unit was cut
into messages, which is why stages 0 to 3 are bit-equal; and 16-bit gradients can travel in 16 bits
and still be summed in fp32.

[Note: two levels] Ranks may stand in groups (layout/topology.py), by themselves those of a node where
there are several. `intra_group` and `inter_group` are then the groups of this rank's on each level,
and a gather over all goes across first, then inside: each byte enters a node once.

[Note: tags instead of order] Pairwise messages carry a tag made of move, unit and count, and of the
addresses that are reduced and the length. Two ranks that disagree on what comes next never take each
other's bytes for something else: they wait, and the wait ends in a `StallError`.

[Note: order instead of tags] A native backend matches operations by the order in which each rank
launches them, and takes a unit's bytes for another's where they have one size. So each
communicator's launches are added up to a checksum (`launched`), which the ranks compare at the end
of every backward pass, before anything is stepped. Moves of gathers and of reductions have a
communicator each: which of the two comes first may differ from rank to rank.

[Note: one rank stands for all] Under torch's "fake" backend (plan/simulate.py) moves are entered in
the ledger and nothing arrives. What the others would tell this rank is what it would tell them. A
simulation with a clock (plan/timeline.py) gives each move a work that is waited for as NCCL's is.
"""

from __future__ import annotations

import contextlib
import math
import time
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from onefold.comm.communicators import Communicators
from onefold.comm.ledger import TrafficEvent, TrafficLedger
from onefold.comm.members import backend_of, format_ranks, members
from onefold.comm.pending import Chain, Chains, Pending
from onefold.comm.stall import CollectiveContext, StallError, explain
from onefold.comm.topology import inner_of, ranks_of_a_node, sides_of
from onefold.comm.wire import FAKE, GLOO, Cut, Launch, Parts, Wire, all_gather_single, wire_of
from onefold.device import current_stream, has_streams, new_event, new_stream
from onefold.layout import Topology

_KINDS = {
    "all-gather": 1,
    "reduce-scatter": 2,
    "all-reduce": 3,
    "control": 4,
    "state": 5,
    "call": 6,
    "agreement": 7,
}


class Group:
    """The ranks of one axis, with communicators of the engine's own: gathers and reductions do not
    queue behind each other.

    Args:
        process_group: a ProcessGroup, a one-dimensional DeviceMesh, or None for all ranks (or for a
            lone process).
        device: where the moved tensors live.
        timeout: seconds a wait may take before it ends in a `StallError`.
        inner: ranks of a group inside; None: as many as the launcher has started on each node;
            "node": the same, asked for; "flat": all are one. See [Note: two levels] and
            layout/topology.py.

    Attributes:
        ranks: global ranks by position. rank, size: this rank's position, and how many there are.
            number: this rank among them in the order of their numbers, which is the position but
                for groups of `inner`.
        nodes: what counts as a node of each position, for the ledger. borders: how many there are,
            in words; "" for one (layout/topology.py).

    Raises:
        ValueError: the groups do not divide the ranks.
    """

    # A bit of the tags: messages of all ranks, or of one of two levels, whose peers are never the
    # same
    _level = 0

    def __init__(
        self,
        process_group: Any,
        device: torch.device,
        timeout: float,
        inner: int | str | None = None,
    ) -> None:
        self.timeout, self.device = timeout, device
        self.ledger = TrafficLedger()
        self.heard: int | None = None  # the step at whose end all ranks agreed last
        self.broken: StallError | None = None
        self.wire: Wire = GLOO
        self.chains = Chains()
        # Where the first of two moves is waited for; one, so that all ranks launch in one order
        self.relay = new_stream(device, "relay")
        self._counts: dict[tuple[str, int], int] = {}
        # Checksums of what the gathers' communicator was given, and the reductions'
        self._launched = [0, 0]
        process_group, numbers = members(process_group)
        self.size = len(numbers)
        self.ranks, self.name = numbers, format_ranks(numbers)
        self.rank, self.number = 0, 0
        self._intra_group: Level | None = None
        self._inter_group: Level | None = None
        self.communicators = Communicators(numbers, device, timeout)
        per_node = ranks_of_a_node(world_size=dist.get_world_size() if self.size > 1 else None)
        if isinstance(inner, int):
            Topology(self.size, inner_of(inner, numbers, None))  # refused before anything is made
        if self.size > 1:
            self.number = numbers.index(dist.get_rank())
            self.backend = backend_of(process_group, device)
            self.wire = wire_of(self.backend)
        self.control_group = self.gather_group = self.reduce_group = None
        if self.size > 1 and not self.fake:
            with self.communicators.rendezvous():
                self.control_group = self.communicators.make("gloo")
            self._stand_at(
                self.number, list(range(self.size)), list(range(self.size)), [0] * self.size
            )
            per_node = self._agreed(per_node)
        self.topology = Topology(self.size, inner_of(inner, numbers, per_node))
        order = self.topology.order  # the communicators' own numbers of the positions
        self.ranks = [numbers[i] for i in order]
        self.nodes, self.borders = sides_of(self.ranks, per_node, inner, self.topology)
        if self.size == 1:
            return
        self._stand_at(self.ranks.index(dist.get_rank()), order, order, self.nodes)
        if self.backend == "gloo":
            self.gather_group = self.reduce_group = self.control_group
        elif not self.fake:
            with self.communicators.rendezvous():
                self.gather_group = self.reduce_group = self.communicators.make(
                    self.backend, parent=process_group
                )
                # Else all that is gathered goes over the levels
                if 1 in (self.topology.inner, self.topology.outer):
                    self.gather_group = self.communicators.make(self.backend, parent=process_group)
        levels = self.topology.intra_group, self.topology.inter_group
        self._intra_group, self._inter_group = (
            None if len(part(self.rank)) == self.size else Level(self, part) for part in levels
        )

    def _stand_at(
        self, rank: int, numbers: list[int], control: list[int], nodes: Sequence[int]
    ) -> None:
        """Take a position, and prepare what every move asks for. `numbers`, `control`: of the
        positions, as the communicators of data and of control messages count.
        """
        self.rank, self.at, self._at_control = rank, numbers, control
        self.ordered = numbers == sorted(numbers)
        self._row_of: torch.Tensor | None = None  # where rows by position lie among rows by number
        # Starting behind oneself spreads the load: no rank is everybody's first.
        self.peers = [(rank + i) % self.size for i in range(1, self.size)]
        self._elsewhere = [node != nodes[rank] for node in nodes]
        self._peers_elsewhere = sum(self._elsewhere)

    @property
    def intra_group(self) -> Group:
        """The ranks of this rank's group; all, where there is one."""
        return self._intra_group or self

    @property
    def inter_group(self) -> Group:
        """The ranks that hold in other groups what this rank holds in its own; all, where groups
        have one rank.
        """
        return self._inter_group or self

    def _agreed(self, per_node: int | None) -> int | None:
        """`per_node` if all ranks were told the same; None where nodes have unequal numbers of
        ranks, of which some may seem to divide.
        """
        said = (per_node or 0).to_bytes(8, "little")
        return (
            per_node
            if alike(self.any_of(both(said), CollectiveContext("control", "(start)", 0, "state")))
            else None
        )

    def communicator(self, timeout: float) -> Any:
        """One more gloo communicator over the same ranks, for messages of the host that may wait
        `timeout` seconds. Collective.
        """
        with self.communicators.rendezvous():
            return self.communicators.make("gloo", timeout, "the first save or load")

    def close(self) -> None:
        """Give the communicators back. Local; call it when nothing is under way."""
        levels, self._intra_group, self._inter_group = (
            (self._intra_group, self._inter_group),
            None,
            None,
        )
        for level in levels:
            if level is not None:
                level.close()
        self.chains.clear()
        # The last reference closes the sockets
        self.control_group = self.gather_group = self.reduce_group = None
        self.communicators.close()

    def give_up(self) -> None:
        """A rank does not come: the native communicators stop waiting for it on the device."""
        for level in (self._intra_group, self._inter_group):
            if level is not None:
                level.communicators.give_up()
        self.communicators.give_up()

    # -- waiting -----------------------------------------------------------------------------------

    def wait(
        self, works: list[Any], place: CollectiveContext, event: TrafficEvent | None = None
    ) -> None:
        """Wait for `works`, and enter in the ledger how long that took. On a device with streams
        the current stream waits, not the host.
        """
        on_host = self.backend == "gloo" or not has_streams(self.device)
        self._wait(works, place, event, on_host)

    def _wait(
        self, works: list[Any], place: CollectiveContext, event: TrafficEvent | None, on_host: bool
    ) -> None:
        # The connections are closed: say again what happened rather than wait again
        if self.broken is not None:
            raise self.broken
        self.chains.relay_before(place)
        start = time.perf_counter()
        try:
            if on_host:
                limit = timedelta(seconds=self.timeout)
                for work in works:
                    work.wait(limit)
                self.ledger.waited(event, start)
            else:
                self._wait_on_stream(works, event)
        except RuntimeError as error:
            raise self._lost(place, time.perf_counter() - start, error) from None

    @contextlib.contextmanager
    def launching(self, place: CollectiveContext) -> Iterator[None]:
        """Around moves that are launched: where a peer has gone already, that fails at once rather
        than in the wait.
        """
        if self.broken is not None:
            raise self.broken
        try:
            yield
        except RuntimeError as error:
            raise self._lost(place, 0.0, error) from None

    def _lost(self, place: CollectiveContext, waited: float, error: Exception) -> StallError:
        name = getattr(self.control_group, "group_name", "")
        self.broken = explain(
            place, waited, error, name, self.ranks[self.rank], self.ranks, self.heard
        )
        self.give_up()
        return self.broken

    def _wait_on_stream(self, works: list[Any], event: TrafficEvent | None) -> None:
        stream = current_stream(self.device)
        if stream == self.relay:  # nothing that computes waits
            for work in works:
                work.wait()
            return
        before, after = new_event(self.device, timing=True), new_event(self.device, timing=True)
        before.record(stream)
        for work in works:
            work.wait()
        after.record(stream)
        self.ledger.marked(event, before, after)

    # -- moves -------------------------------------------------------------------------------------

    def all_gather(
        self,
        full: torch.Tensor,
        place: CollectiveContext,
        unit_index: int,
        *,
        move: str = "all-gather",
        plain: int = 0,
    ) -> Pending:
        """sharded → replicated, in place: rank r's interval of `full` ([numel], cut evenly) goes to
        every other rank's `full`.

        `plain`: bytes that `full` was encoded from, for the ledger.
        """
        if self.size == 1:
            return Pending(self, [], place)
        shard = full.numel() // self.size
        if self._inter_group is not None and self._intra_group is not None:
            first = self.rank // self.inter_group.size * self.inter_group.size * shard
            part = plain * self.inter_group.size // self.size
            low = self.inter_group.all_gather(
                full[first : first + shard * self.inter_group.size],
                place,
                unit_index,
                move=move,
                plain=part,
            )
            return Chain(
                self,
                low,
                lambda: self.intra_group.all_gather(
                    full, place, unit_index, move=move, plain=plain
                ),
            )
        mine = full[self.rank * shard : (self.rank + 1) * shard]
        each, part = mine.numel() * mine.element_size(), plain // self.size
        event = self._record(move, place, full.dtype, each * len(self.peers), each * self._peers_elsewhere,
                             part * len(self.peers), part * self._peers_elsewhere)  # fmt: skip
        return self.wire.all_gather(Launch(self, move, unit_index, place, event), full, mine)

    @property
    def joins_messages(self) -> bool:
        """Whether `all_gather_together` is there, and worth it: a message costs the host more than
        copies of the few bytes in it.
        """
        return (
            self.wire is GLOO
            and self.size > 1
            and self.device.type == "cpu"
            and (self._inter_group is None or self._intra_group is None)
        )

    def all_gather_together(
        self, fulls: Sequence[torch.Tensor], places: Sequence[CollectiveContext], number: int
    ) -> Pending:
        """The same for several buffers, in one message to each rank: what is sent and received lies
        in memory of its own, as large as all `fulls` are together, until it is waited for.

        Args:
            fulls: [numel] each, cut evenly, of one dtype. places: what the gather of each is for; the ledger has
                an event for each.
            number: messages of two numbers never meet.
        """
        size, rank = self.size, self.rank
        rows = [full.view(size, -1) for full in fulls]
        events = []
        for row, place in zip(rows, places, strict=True):
            each, count, elsewhere = (
                row.shape[1] * row.element_size(),
                len(self.peers),
                self._peers_elsewhere,
            )
            events.append(
                self._record("all-gather", place, row.dtype, each * count, each * elsewhere)
            )
        lengths = [row.shape[1] for row in rows]
        sent = torch.cat([row[rank] for row in rows])
        received = [(peer, torch.empty_like(sent)) for peer in self.peers]

        def arrived() -> None:
            for peer, message in received:
                torch._foreach_copy_([row[peer] for row in rows], list(message.split(lengths)))
            now = time.perf_counter()
            for event in events[1:]:
                self.ledger.waited(event, now)

        sends = [(peer, sent) for peer in self.peers]
        launch = Launch(self, "all-gather", number, places[0], events[0])
        return self.wire.exchange(launch, sends, received).then(arrived)

    # -- moves of reductions on native backends ----------------------------------------------------

    @property
    def native(self) -> bool:
        """Moves are operations of a backend's own, on the device."""
        return self.size > 1 and self.wire.native

    @property
    def fake(self) -> bool:
        """One rank stands for all, and nothing arrives (torch's "fake" backend)."""
        return self.wire is FAKE

    def cut(self, sizes: Sequence[int]) -> Cut:
        """A division of a buffer by position, `sizes` in elements, for the moves below. Make it
        once.
        """
        elsewhere = sum(size for size, far in zip(sizes, self._elsewhere, strict=True) if far)
        return Cut(tuple(sizes), sum(sizes), sizes[self.rank], elsewhere, len(set(sizes)) == 1)

    def scatter_parts(
        self,
        sent: torch.Tensor,
        cut: Cut,
        received: torch.Tensor,
        place: CollectiveContext,
        unit_index: int,
        move: str,
        plain: int = 0,
        addresses: tuple[int, int] | None = None,
    ) -> Pending:
        """The wire half of a reduction, in one operation.

        Args:
            sent: each rank's part, one behind the other by position, [numel]; or without this
                rank's own part, [numel - own].
            received: what comes from each rank, by position: [ranks, own] with this rank's row
                among them; or without, [ranks - 1, own].
            plain: bytes that each rank's part was encoded from, for the ledger.
            addresses: of the unit's buffer, that the reduction is of, the same on all ranks. Ranks
                that mean other addresses never take each other's bytes for their own.
        """
        width = sent.element_size()
        event = self._record(move, place, sent.dtype, (cut.numel - cut.own) * width, cut.between * width,
                             plain * len(self.peers), plain * self._peers_elsewhere)  # fmt: skip
        return self.wire.scatter_parts(
            Launch(self, move, unit_index, place, event, addresses), sent, cut, received
        )

    def can_reduce(self, cut: Cut) -> bool:
        """Whether the backend itself can scatter sums of such parts: they are even, and in its own
        order of the ranks.
        """
        return cut.even and self.ordered

    def reduce_scatter(
        self,
        sent: torch.Tensor,
        cut: Cut,
        own: torch.Tensor,
        place: CollectiveContext,
        unit_index: int,
        move: str,
        mean: bool,
        addresses: tuple[int, int] | None = None,
    ) -> Pending:
        """The backend's own: the sum of all ranks' `sent` [numel], or their mean. This rank gets
        its part `own`. Added in their dtype.
        """
        width = sent.element_size()
        event = self._record(
            move, place, sent.dtype, (cut.numel - cut.own) * width, cut.between * width
        )
        return self.wire.reduce_scatter(
            Launch(self, move, unit_index, place, event, addresses), sent, own, mean
        )

    def all_reduce(
        self,
        whole: torch.Tensor,
        place: CollectiveContext,
        unit_index: int,
        mean: bool,
        addresses: tuple[int, int] | None = None,
    ) -> Pending:
        """The backend's own: the sum of all ranks' `whole`, or their mean, in place. In its
        dtype.
        """
        move, each = "all-reduce", 2 * math.ceil(whole.numel() / self.size) * whole.element_size()
        event = self._record(
            move, place, whole.dtype, each * len(self.peers), each * self._peers_elsewhere
        )
        return self.wire.all_reduce(
            Launch(self, move, unit_index, place, event, addresses), whole, mean
        )

    def gather_sums(
        self,
        whole: torch.Tensor,
        cut: Cut,
        place: CollectiveContext,
        unit_index: int,
        addresses: tuple[int, int] | None = None,
    ) -> Pending:
        """Each rank's part of `whole` ([numel], by position) to all others, in place: behind a
        reduction, and in the order of reductions.

        `cut` is one that `can_reduce`.
        """
        move, each = "all-reduce", cut.own * whole.element_size()
        event = self._record(
            move, place, whole.dtype, each * len(self.peers), each * self._peers_elsewhere
        )
        own = whole[self.rank * cut.own : (self.rank + 1) * cut.own]
        return self.wire.gather_sums(
            Launch(self, move, unit_index, place, event, addresses), whole, own
        )

    def launched(self) -> bytes:
        """A checksum of what the native communicators were given so far, in order: one on all
        ranks. See [Note: order instead of tags].
        """
        found = [
            self._launched,
            *(
                level._launched
                for level in (self._intra_group, self._inter_group)
                if level is not None
            ),
        ]
        return zlib.crc32(repr(found).encode()).to_bytes(4, "little")

    def out_of_order(self, place: CollectiveContext) -> StallError:
        """What all ranks say once they know that they launched different moves. Nothing can be
        trusted from here on.
        """
        self.broken = StallError(
            f"rank {self.ranks[self.rank]} found at the end of the backward pass of step"
            f" {place.step} that ranks {sorted(self.ranks)} launched gathers or reductions of"
            f" different units, or in different orders. {self.backend} matches them by their order:"
            " one unit was taken for another. Do not use the results of this step. Ranks must use"
            " the units of a sharded model in one order; where they cannot, use gloo."
        )
        self.give_up()
        return self.broken

    def note_launch(
        self, which: int, move: str, unit_index: int, about: int | tuple[int, int] = 0
    ) -> None:
        self._launched[which] = zlib.crc32(
            f"{move} {unit_index} {about}".encode(), self._launched[which]
        )

    # -- other moves -------------------------------------------------------------------------------

    def exchange(
        self,
        sends: Parts,
        recvs: Parts,
        place: CollectiveContext,
        unit_index: int,
        *,
        move: str,
        plain: Mapping[int, int] | None = None,
        addresses: tuple[int, int] | None = None,
    ) -> Pending:
        """Send each `(peer, tensor)` and receive into each `(peer, tensor)`; the wire half of a
        reduction (or of a scatter).

        Tensors are contiguous and one-dimensional; empty ones are left out on both sides. `plain`:
        bytes that the part for each peer was encoded from, for the ledger. `addresses`: as in
        `scatter_parts`.
        """
        if self.size == 1:
            return Pending(self, [], place)
        dtype = next((t.dtype for _, t in [*sends, *recvs]), torch.uint8)
        was, elsewhere = plain or {}, self._elsewhere
        counts = [(t.numel() * t.element_size(), was.get(p, 0), elsewhere[p]) for p, t in sends]
        event = self._record(move, place, dtype, sum(c[0] for c in counts), sum(c[0] for c in counts if c[2]),
                             sum(c[1] for c in counts), sum(c[1] for c in counts if c[2]))  # fmt: skip
        return self.wire.exchange(
            Launch(self, move, unit_index, place, event, addresses), sends, recvs
        )

    def exchange_control(
        self, payload: torch.Tensor, place: CollectiveContext, kind: str = "control"
    ) -> list[torch.Tensor]:
        """Every rank's small uint8 payload ([n], one length on all ranks, on the host), in rank
        order. Waits.

        In log2(ranks) rounds: in each a rank passes on all that it has (Bruck et al. 1997). Over
        gloo on any backend: the host reads it.

        `kind`: messages of two kinds never meet ("call": a collective that the user calls, which
        may come at any time).
        """
        if self.size == 1 or self.fake:  # what the others would say is what this rank says
            return [payload] * self.size
        # Row i: of the rank i positions behind this one
        have = torch.empty((self.size, payload.numel()), dtype=torch.uint8)
        have[0] = payload
        step = 1
        while step < self.size:
            more = min(step, self.size - step)
            self._round(have[:more], (self.rank - step) % self.size, have[step : step + more], (self.rank + step) % self.size, place, kind,
                        payload.numel())  # fmt: skip
            step *= 2
        return list(have.roll(self.rank, 0).unbind())

    def any_of(self, bits: bytes, place: CollectiveContext) -> bytes:
        """The bits that any rank has set, of as many on each. Waits.

        In log2(ranks) rounds of one message, over gloo on any backend. See `both` for what all
        ranks have alike.
        """
        if self.size == 1 or self.fake:
            return bits
        mine = torch.frombuffer(bytearray(bits), dtype=torch.uint8)
        step = 1
        # Whose bits come twice changes nothing: any number of ranks will do
        while step < self.size:
            theirs = torch.empty_like(mine)
            self._round(
                mine,
                (self.rank + step) % self.size,
                theirs,
                (self.rank - step) % self.size,
                place,
                "agreement",
                len(bits),
            )
            mine = mine | theirs
            step *= 2
        return mine.numpy().tobytes()

    def _round(
        self,
        sent: torch.Tensor,
        to: int,
        received: torch.Tensor,
        source: int,
        place: CollectiveContext,
        kind: str,
        length: int,
    ) -> None:
        """Send to one rank and receive from another, on the host. Messages of another length are
        another kind: they never meet.
        """
        tag = self.tag(kind, length)
        self.ledger.control_bytes += sent.numel()
        with self.launching(place):
            works = [
                dist.irecv(
                    received, group=self.control_group, group_src=self._at_control[source], tag=tag
                ),
                dist.isend(sent, group=self.control_group, group_dst=self._at_control[to], tag=tag),
            ]
        self._wait(works, place, None, on_host=True)

    def gather_values(self, value: torch.Tensor, place: CollectiveContext) -> torch.Tensor:
        """A few numbers of every rank: [...] becomes [size, ...], in rank order. On native backends
        without waiting on the host.
        """
        shape = (self.size, *value.shape)
        if self.size == 1 or self.fake:
            return value.expand(shape)
        if not self.native:
            payload = value.detach().cpu().reshape(-1).view(torch.uint8)
            return (
                torch.cat(self.exchange_control(payload, place))
                .view(value.dtype)
                .view(shape)
                .to(value.device)
            )
        out = torch.empty(shape, dtype=value.dtype, device=value.device)
        self.ledger.control_bytes += value.numel() * value.element_size() * (self.size - 1)
        self.note_launch(1, "control", 0, value.numel())
        with self.launching(place):
            work = all_gather_single(
                out.view(-1), value.reshape(-1).contiguous(), group=self.reduce_group, async_op=True
            )
        self.wait([work], place)
        if self.ordered:
            return out
        if self._row_of is None:  # sent to the device once
            self._row_of = torch.tensor(self.at).to(value.device)
        return out.index_select(0, self._row_of)

    def broadcast(self, tensors: list[torch.Tensor], place: CollectiveContext) -> None:
        """Rank 0's tensors to all ranks, in place, in one message. Waits."""
        flat = (
            [t.detach().reshape(-1).view(torch.uint8) for t in tensors if t.numel()]
            if self.size > 1
            else []
        )
        if not flat:
            return
        message = (
            torch.cat([t.to(self.device) for t in flat])
            if len(flat) > 1 or self.rank
            else flat[0].to(self.device)
        )
        self.from_first(message, place, 0x7FFF).wait()
        if self.rank != 0:
            parts = message.split([t.numel() for t in flat])
            with torch.no_grad():
                for t, part in zip((t for t in tensors if t.numel()), parts, strict=True):
                    # Where a part begins need not suit the dtype
                    t.copy_(part.clone().view(t.dtype).view(t.shape))

    def from_first(self, message: torch.Tensor, place: CollectiveContext, number: int) -> Pending:
        """Rank 0's `message`, uint8 [n] on the device, into everybody's. `number`: messages of two
        numbers never meet on gloo.
        """
        if not self.native or self.fake:
            sends = [(p, message) for p in range(1, self.size)] if self.rank == 0 else []
            return self.exchange(
                sends, [] if self.rank == 0 else [(0, message)], place, number, move="state"
            )
        event = self._record(
            "state", place, message.dtype, message.numel() if self.rank == 0 else 0, 0
        )
        self.note_launch(1, "state", number, message.numel())
        with self.launching(place):
            work = dist.broadcast(
                message, group=self.reduce_group, group_src=self.at[0], async_op=True
            )
        return Pending(self, [work], place, event, keep=message)

    def _record(
        self,
        move: str,
        place: CollectiveContext,
        dtype: torch.dtype,
        nbytes: int,
        between: int,
        plain: int = 0,
        plain_between: int = 0,
    ) -> TrafficEvent:
        """Enter bytes that are sent, those of them to other nodes, and what these were encoded
        from, or 0.
        """
        on_the_wire = str(dtype).removeprefix("torch.")
        return self.ledger.record(
            move,
            place.unit,
            nbytes,
            self.size,
            on_the_wire,
            place.phase,
            place.step,
            self.name,
            between,
            plain,
            plain_between,
        )

    def tag(self, move: str, unit_index: int, addresses: tuple[int, int] | None = None) -> int:
        count = self._counts[move, unit_index] = self._counts.get((move, unit_index), 0) + 1
        if addresses is not None:
            count ^= hash(addresses)
        return (
            self._level << 30 | _KINDS[move] << 27 | (unit_index & 0x7FFF) << 12 | (count & 0xFFF)
        )


class Level(Group):
    """Some of the ranks of a group, at `positions` of it; what they share is their `whole`'s:
    ledger, failures, and gloo's connections.
    """

    _level = 1

    def __init__(self, whole: Group, part: Callable[[int], list[int]]) -> None:
        """`part`: the positions of a level, itself among them, by the position of one."""
        positions = part(whole.rank)
        self.whole = whole
        self.timeout, self.device, self.ledger, self.wire = (
            whole.timeout,
            whole.device,
            whole.ledger,
            whole.wire,
        )
        self._counts, self._launched, self.chains, self.relay = (
            {},
            [0, 0],
            whole.chains,
            whole.relay,
        )
        self.ranks, self.nodes = (
            [whole.ranks[p] for p in positions],
            [whole.nodes[p] for p in positions],
        )
        self.borders = whole.borders if len(set(self.nodes)) > 1 else ""
        self.size = len(positions)
        self.rank = self.number = positions.index(whole.rank)
        self.name = format_ranks(sorted(self.ranks))
        self.topology = Topology(self.size, self.size)
        self._intra_group = self._inter_group = None
        self.communicators = Communicators(self.ranks, whole.device, whole.timeout)
        control = [whole._at_control[p] for p in positions]
        # gloo's messages go over the connections of the whole
        numbers = [whole.at[p] for p in positions]
        self.control_group: Any = whole.control_group
        self.gather_group: Any = whole.gather_group
        self.reduce_group: Any = whole.reduce_group
        self.backend = whole.backend
        if self.size > 1 and self.backend != "gloo" and not self.fake:
            parts = sorted(
                {tuple(sorted(whole.at[p] for p in part(at))) for at in range(whole.size)}
            )
            divided = [list(each) for each in parts]
            with self.communicators.rendezvous():
                self.gather_group, self.reduce_group = (
                    self.communicators.make_part(self.backend, whole.reduce_group, divided)
                    for _ in range(2)
                )
            numbers = [sorted(self.ranks).index(r) for r in self.ranks]
        self._stand_at(self.rank, numbers, control, self.nodes)

    def give_up(self) -> None:
        self.whole.give_up()

    @property
    def heard(self) -> int | None:  # type: ignore[override]
        return self.whole.heard

    @property
    def broken(self) -> StallError | None:
        return self.whole.broken

    @broken.setter
    def broken(self, error: StallError | None) -> None:
        self.whole.broken = error


def both(bits: bytes) -> bytes:
    """`bits` and their opposites: `any_of` these, `alike` says whether all ranks had the same
    ones.
    """
    return bits + bytes(b ^ 0xFF for b in bits)


def alike(found: bytes) -> bool:
    """Whether no bit was set on one rank and not on another, of what `both` gave."""
    half = len(found) // 2
    return not any(a & b for a, b in zip(found[:half], found[half:], strict=True))
