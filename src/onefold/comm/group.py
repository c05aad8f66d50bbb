"""The ranks of one data-parallel axis, and the moves between placements that are the only things to touch the wire.

| from         | to         | move           | pairwise (gloo)                            | native (NCCL)          |
|--------------|------------|----------------|--------------------------------------------|------------------------|
| sharded      | replicated | all-gather     | each rank sends its interval to each other | all_gather_single      |
| partial sums | sharded    | reduce-scatter | sends of intervals, then a local sum       | all_to_all, local sum  |
| partial sums | replicated | all-reduce     | the two above                              | the two above          |
| replicated   | sharded    | slice          | no traffic                                 | no traffic             |

[Note: sums are local and in rank order] Every reduction moves the parts as they are and adds them up on the rank that owns the
interval, in the order of the ranks, in the accumulation dtype. The bits of a sum therefore depend neither on the placement of
the result nor on how the unit was cut into messages, which is why stages 0 to 3 are bit-equal; and 16-bit gradients can travel
in 16 bits and still be summed in fp32.

[Note: two levels] Ranks may stand in groups (comm/topology.py), by themselves those of a node where there are several. `inside` and
`across` are then the groups of this rank's on each level, and a gather over all goes across first, then inside: each byte enters a node
once.

[Note: tags instead of order] Pairwise messages carry a tag made of move, unit and count. Two ranks that disagree on what comes
next never take each other's bytes for something else: they wait, and the wait ends in a `StallError`.

[Note: one rank stands for all] Under torch's "fake" backend (plan/simulate.py) moves are entered in the ledger and nothing arrives.
What the others would tell this rank is what it would tell them.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from onefold.comm.ledger import TrafficEvent, TrafficLedger
from onefold.comm.members import backend_of, members, spelt
from onefold.comm.pending import Chain, Chains, Pending
from onefold.comm.stall import Place, StallError, explain
from onefold.comm.topology import Topology, inner_of, ranks_of_a_node, sides_of
from onefold.device import current_stream, has_streams, new_event, new_stream

_KINDS = {"all-gather": 1, "reduce-scatter": 2, "all-reduce": 3, "control": 4, "state": 5, "call": 6}
Parts = Sequence[tuple[int, torch.Tensor]]


class Group:
    """The ranks of one axis, with communicators of the engine's own: gathers and reductions do not queue behind each other.

    Args:
        process_group: a ProcessGroup, a one-dimensional DeviceMesh, or None for all ranks (or for a lone process).
        device: where the moved tensors live.
        timeout: seconds a wait may take before it ends in a `StallError`.
        inner: ranks of a group inside; None: as many as the launcher has started on each node; "node": the same, asked for; "flat": all are
            one. See [Note: two levels] and comm/topology.py.

    Attributes:
        ranks: global ranks by position. rank, size: this rank's position, and how many there are. number: this rank among them in the
            order of their numbers, which is the position but for groups of `inner`.
        nodes: what counts as a node of each position, for the ledger. borders: how many there are, in words; "" for one (comm/topology.py).

    Raises:
        ValueError: the groups do not divide the ranks.
    """

    _level = 0  # a bit of the tags: messages of all ranks, or of one of two levels, whose peers are never the same

    def __init__(self, process_group: Any, device: torch.device, timeout: float, inner: int | str | None = None) -> None:
        self.timeout, self.device = timeout, device
        self.ledger = TrafficLedger()
        self.heard: dict[int, int] = {}
        self.broken: StallError | None = None
        self.imagined = False  # see [Note: one rank stands for all]
        self.chains = Chains()
        self.relay = new_stream(device)  # on which the first of two moves is waited for; one, so that all ranks launch in one order
        self._counts: dict[tuple[str, int], int] = {}
        self._groups: list[Any] = []
        process_group, numbers = members(process_group)
        self.size = len(numbers)
        self.ranks, self.name = numbers, spelt(numbers)
        self.rank, self.number = 0, 0
        self._inside: Level | None = None
        self._across: Level | None = None
        per_node = ranks_of_a_node()
        if isinstance(inner, int):
            Topology(self.size, inner_of(inner, numbers, None))  # refused before anything is made
        if self.size > 1:
            self.number = numbers.index(dist.get_rank())
            self.backend = backend_of(process_group, device)
            self.imagined = self.backend == "fake"
        if self.imagined:
            self.control_group = None
        elif self.size > 1:
            with self._meeting():
                self.control_group = self._make("gloo", timeout)
                if self.backend == "gloo":
                    self.gather_group = self.reduce_group = self.control_group
                else:
                    self.gather_group, self.reduce_group = self._make(self.backend, timeout), self._make(self.backend, timeout)
            per_node = self._agreed(per_node)
        self.topology = Topology(self.size, inner_of(inner, numbers, per_node))
        self.ranks = [numbers[i] for i in self.topology.order]
        self.nodes, self.borders = sides_of(self.ranks, per_node, inner, self.topology)
        self._at = self.topology.order  # the communicators' own numbers of the positions
        if self.size == 1:
            return
        self.rank = self.ranks.index(dist.get_rank())
        levels = self.topology.inside(self.rank), self.topology.across(self.rank)
        self._inside, self._across = (None if len(at) == self.size else Level(self, at) for at in levels)

    @property
    def inside(self) -> Group:
        """The ranks of this rank's group; all, where there is one."""
        return self._inside or self

    @property
    def across(self) -> Group:
        """The ranks that hold in other groups what this rank holds in its own; all, where groups have one rank."""
        return self._across or self

    def _agreed(self, per_node: int | None) -> int | None:
        """`per_node` if all ranks were told the same; None where nodes have unequal numbers of ranks, of which some may seem to divide."""
        said = [torch.zeros(1, dtype=torch.int64) for _ in range(self.size)]
        start = time.perf_counter()
        try:
            dist.all_gather(said, torch.tensor([per_node or 0]), group=self.control_group)
        except RuntimeError as error:
            raise self._alone(time.perf_counter() - start, "shard()", error) from None
        return per_node if len({int(t) for t in said}) == 1 else None

    def communicator(self, timeout: float) -> Any:
        """One more gloo communicator over the same ranks, for messages of the host that may wait `timeout` seconds. Collective."""
        with self._meeting():
            return self._make("gloo", timeout, "the first save or load")

    def _make(self, backend: str, timeout: float, where: str = "shard()") -> Any:
        # A subset calls new_group without the others, which use_local_synchronization allows; over all ranks it is collective.
        options: dict[str, Any] = {} if self.size == dist.get_world_size() else {"use_local_synchronization": True}
        start = time.perf_counter()
        try:
            self._groups.append(dist.new_group(sorted(self.ranks), backend=backend, timeout=timedelta(seconds=timeout), **options))
        except RuntimeError as error:
            raise self._alone(time.perf_counter() - start, where, error) from None
        return self._groups[-1]

    def _alone(self, waited: float, where: str, error: Exception) -> StallError:
        return StallError(
            f"rank {dist.get_rank()} waited {waited:.0f} s in {where} for the other ranks of {self.ranks} "
            f"to call it too. (backend: {str(error).splitlines()[0][:200]})"
        )

    @contextlib.contextmanager
    def _meeting(self) -> Iterator[None]:
        """Inside, the ranks of a subset know equally many groups, and more than when they last made one.

        torch makes the name by which a subset's new group meets from its ranks and that number: a rank that is in more groups than
        another would wait under another name, and after a group has gone the next would meet at its stale addresses. Lone groups make
        up the difference.
        """
        known = getattr(getattr(dist.distributed_c10d, "_world", None), "pg_names", None)
        if self.size == dist.get_world_size() or known is None:
            yield
            return
        me, store, name = dist.get_rank(), dist.distributed_c10d._get_default_store(), f"onefold/groups/{sorted(self.ranks)}/"
        turn = store.add(f"{name}turns/{me}", 1)  # the same on every rank, since each comes here as often as the others
        used = int(store.get(f"{name}used/{me}")) if turn > 1 else 0
        store.set(f"{name}{turn}/{me}", str(max(len(known), used)))
        keys, start = [f"{name}{turn}/{rank}" for rank in self.ranks], time.perf_counter()
        try:
            store.wait(keys, timedelta(seconds=self.timeout))
        except RuntimeError as error:
            raise self._alone(time.perf_counter() - start, "shard()", error) from None
        most = max(int(store.get(key)) for key in keys)
        fill = [dist.new_group([me], backend="gloo", use_local_synchronization=True) for _ in range(most - len(known))]
        try:
            yield
        finally:
            store.set(f"{name}used/{me}", str(len(known)))
            for lone in fill:
                dist.destroy_process_group(lone)

    def close(self) -> None:
        """Give the communicators back. Local; call it when nothing is under way."""
        levels, self._inside, self._across = (self._inside, self._across), None, None
        for level in levels:
            if level is not None:
                level.close()
        self.chains.clear()
        groups, self._groups = self._groups, []
        self.control_group = self.gather_group = self.reduce_group = None  # the last reference closes the sockets
        for group in groups:
            with contextlib.suppress(Exception):  # already destroyed with the default group
                dist.destroy_process_group(group)

    # -- waiting ---------------------------------------------------------------------------------------------------------------

    def wait(self, works: list[Any], place: Place, event: TrafficEvent | None = None) -> None:
        """Wait for `works`, and enter in the ledger how long that took. On NCCL the compute stream waits, not the host."""
        if self.broken is not None:  # the connections are closed: say again what happened rather than wait again
            raise self.broken
        self.chains.relay_before(place)
        start = time.perf_counter()
        try:
            if self.backend == "gloo" or place.move == "control":
                limit = timedelta(seconds=self.timeout)
                for work in works:
                    work.wait(limit)
                self.ledger.waited(event, start)
            else:
                self._wait_on_stream(works, event)
        except RuntimeError as error:
            raise self._lost(place, time.perf_counter() - start, error) from None

    @contextlib.contextmanager
    def _launching(self, place: Place) -> Iterator[None]:
        """Around moves that are launched: where a peer has gone already, that fails at once rather than in the wait."""
        if self.broken is not None:
            raise self.broken
        try:
            yield
        except RuntimeError as error:
            raise self._lost(place, 0.0, error) from None

    def _lost(self, place: Place, waited: float, error: Exception) -> StallError:
        name = getattr(self.control_group, "group_name", "")
        self.broken = explain(place, waited, error, name, self.ranks[self.rank], self.ranks, self.heard)
        return self.broken

    def _wait_on_stream(self, works: list[Any], event: TrafficEvent | None) -> None:
        if not has_streams(self.device):
            start = time.perf_counter()
            for work in works:
                work.wait()
            self.ledger.waited(event, start)
            return
        before, after = new_event(self.device, timing=True), new_event(self.device, timing=True)
        stream = current_stream(self.device)
        before.record(stream)
        for work in works:
            work.wait()
        after.record(stream)
        self.ledger.marked(event, before, after)

    # -- moves -----------------------------------------------------------------------------------------------------------------

    def all_gather(self, full: torch.Tensor, place: Place, unit_index: int, *, move: str = "all-gather", plain: int = 0) -> Pending:
        """sharded → replicated, in place: rank r's interval of `full` ([numel], cut evenly) goes to every other rank's `full`.

        `plain`: bytes that `full` was encoded from, for the ledger.
        """
        if self.size == 1:
            return Pending(self, [], place)
        shard = full.numel() // self.size
        if self._across is not None and self._inside is not None:
            first = self.rank // self.across.size * self.across.size * shard
            part = plain * self.across.size // self.size
            low = self.across.all_gather(full[first : first + shard * self.across.size], place, unit_index, move=move, plain=part)
            return Chain(self, low, lambda: self.inside.all_gather(full, place, unit_index, move=move, plain=plain))
        mine = full[self.rank * shard : (self.rank + 1) * shard]
        nbytes = mine.numel() * mine.element_size()
        event = self._record(move, place, [(p, nbytes, plain // self.size) for p in self._peers()], full.dtype)
        if self.imagined:
            return self._imagine(place, event, full)
        if self.backend != "gloo":
            gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
            return Pending(self, [gather(full, mine, group=self.gather_group, async_op=True)], place, event, keep=full)
        sends = [(peer, mine) for peer in self._peers()]
        recvs = [(peer, full[peer * shard : (peer + 1) * shard]) for peer in self._peers()]
        return self._pairwise(sends, recvs, place, unit_index, move, event)

    def exchange(
        self, sends: Parts, recvs: Parts, place: Place, unit_index: int, *, move: str, plain: Mapping[int, int] | None = None
    ) -> Pending:
        """Send each `(peer, tensor)` and receive into each `(peer, tensor)`; the wire half of a reduction (or of a scatter).

        Tensors are contiguous and one-dimensional; empty ones are left out on both sides. `plain`: bytes that the part for each peer
        was encoded from, for the ledger.
        """
        if self.size == 1:
            return Pending(self, [], place)
        dtype = next((t.dtype for _, t in [*sends, *recvs]), torch.uint8)
        was = plain or {}
        event = self._record(move, place, [(p, t.numel() * t.element_size(), was.get(p, 0)) for p, t in sends], dtype)
        if self.imagined:
            return self._imagine(place, event, (sends, recvs))
        if self.backend != "gloo":
            return self._all_to_all(sends, recvs, place, event)
        return self._pairwise(sends, recvs, place, unit_index, move, event)

    def exchange_control(self, payload: torch.Tensor, place: Place, kind: str = "control") -> list[torch.Tensor]:
        """Every rank's small uint8 payload ([n], one length on all ranks, on the host), in rank order. Waits.

        `kind`: messages of two kinds never meet ("call": a collective that the user calls, which may come at any time).
        """
        if self.size == 1:
            return [payload]
        if self.imagined:
            return [payload] * self.size
        parts = [payload if r == self.rank else torch.empty_like(payload) for r in range(self.size)]
        self.ledger.control_bytes += payload.numel() * (self.size - 1)
        tag = self._tag(kind, payload.numel())  # messages of another length are another kind: they never meet
        with self._launching(place):
            works = [dist.irecv(parts[p], group=self.control_group, group_src=self._at[p], tag=tag) for p in self._peers()]
            works += [dist.isend(payload, group=self.control_group, group_dst=self._at[p], tag=tag) for p in self._peers()]
        self.wait(works, place)
        return parts

    def gather_values(self, value: torch.Tensor, place: Place) -> torch.Tensor:
        """A few numbers of every rank: [...] becomes [size, ...], in rank order. On NCCL without waiting on the host."""
        shape = (self.size, *value.shape)
        if self.size == 1 or self.imagined:
            return value.expand(shape)
        if self.backend == "gloo":
            payload = value.detach().cpu().reshape(-1).view(torch.uint8)
            return torch.cat(self.exchange_control(payload, place)).view(value.dtype).view(shape).to(value.device)
        out = torch.empty(shape, dtype=value.dtype, device=value.device)
        self.ledger.control_bytes += value.numel() * value.element_size() * (self.size - 1)
        gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
        gather(out.view(-1), value.reshape(-1).contiguous(), group=self.reduce_group)
        return out

    def broadcast(self, tensors: list[torch.Tensor], place: Place) -> None:
        """Rank 0's tensors to all ranks, in place. Waits."""
        for t in tensors if self.size > 1 else ():
            if not t.numel():
                continue
            flat = t.detach().reshape(-1).view(torch.uint8)
            buffer = flat if self.rank == 0 else torch.empty_like(flat)
            sends = [(p, buffer) for p in range(1, self.size)] if self.rank == 0 else []
            self.exchange(sends, [] if self.rank == 0 else [(0, buffer)], place, 0x7FFF, move="state").wait()
            if self.rank != 0:
                with torch.no_grad():
                    t.copy_(buffer.view(t.dtype).view(t.shape))

    def _record(self, move: str, place: Place, sent: Sequence[tuple[int, int, int]], dtype: torch.dtype) -> TrafficEvent:
        """Enter `sent`: (peer, bytes, bytes that these were encoded from or 0) each."""
        on_the_wire, here = str(dtype).removeprefix("torch."), self.nodes[self.rank]
        away = [part for part in sent if self.nodes[part[0]] != here]
        (nbytes, plain), (between, plain_between) = ((sum(p[1] for p in parts), sum(p[2] for p in parts)) for parts in (sent, away))
        return self.ledger.record(
            move, place.unit, nbytes, self.size, on_the_wire, place.phase, place.step, self.name, between, plain, plain_between
        )

    def _peers(self) -> list[int]:
        # Starting behind oneself spreads the load: no rank is everybody's first.
        return [(self.rank + i) % self.size for i in range(1, self.size)]

    def _tag(self, move: str, unit_index: int) -> int:
        count = self._counts[move, unit_index] = self._counts.get((move, unit_index), 0) + 1
        return self._level << 30 | _KINDS[move] << 27 | (unit_index & 0x7FFF) << 12 | (count & 0xFFF)

    def _pairwise(self, sends: Parts, recvs: Parts, place: Place, unit_index: int, move: str, event: TrafficEvent) -> Pending:
        tag = self._tag(move, unit_index)
        after: list[Callable[[], object]] = []
        if self.device.type != "cpu":  # gloo moves host memory only: stage through it
            host = [(p, torch.empty(t.shape, dtype=t.dtype)) for p, t in recvs]
            after = [lambda t=t, h=h: t.copy_(h) for (_, t), (_, h) in zip(recvs, host, strict=True)]  # type: ignore[misc]
            sends, recvs = [(p, t.cpu()) for p, t in sends], host
        group = self.gather_group
        with self._launching(place):
            works = [dist.irecv(t, group=group, group_src=self._at[p], tag=tag) for p, t in recvs if t.numel()]
            works += [dist.isend(t, group=group, group_dst=self._at[p], tag=tag) for p, t in sends if t.numel()]
        return Pending(self, works, place, event, keep=(sends, recvs), after=after)

    def _imagine(self, place: Place, event: TrafficEvent, keep: Any) -> Pending:
        return Pending(self, [], place, event, keep, after=[lambda: self.ledger.waited(event, time.perf_counter())])

    def _all_to_all(self, sends: Parts, recvs: Parts, place: Place, event: TrafficEvent) -> Pending:
        dtype = next((t.dtype for _, t in [*sends, *recvs]), torch.float32)
        empty = torch.empty(0, dtype=dtype, device=self.device)
        out, inp = [empty] * self.size, [empty] * self.size
        for peer, t in recvs:
            out[self._at[peer]] = t
        for peer, t in sends:
            inp[self._at[peer]] = t
        with self._launching(place):
            work = dist.all_to_all(out, inp, group=self.reduce_group, async_op=True)
        return Pending(self, [work], place, event, keep=(out, inp))


class Level(Group):
    """Some of the ranks of a group, at `positions` of it; what they share is their `whole`'s: ledger, failures, and gloo's connections."""

    _level = 1

    def __init__(self, whole: Group, positions: Sequence[int]) -> None:
        self.whole = whole
        self.timeout, self.device, self.ledger, self.heard, self.imagined = (
            whole.timeout, whole.device, whole.ledger, whole.heard, whole.imagined,
        )  # fmt: skip
        self._counts, self._groups, self.chains, self.relay = {}, [], whole.chains, whole.relay
        self.ranks, self.nodes = [whole.ranks[p] for p in positions], [whole.nodes[p] for p in positions]
        self.borders = whole.borders if len(set(self.nodes)) > 1 else ""
        self.size = len(positions)
        self.rank = self.number = positions.index(whole.rank)
        self.name = spelt(sorted(self.ranks))
        self.topology = Topology(self.size, self.size)
        self._inside = self._across = None
        self._at = [whole._at[p] for p in positions]
        self.control_group: Any = whole.control_group
        if self.size == 1:
            return
        self.backend = whole.backend
        if self.imagined:
            return
        self.gather_group: Any = whole.gather_group
        self.reduce_group: Any = whole.reduce_group
        if self.backend != "gloo":
            self._at = [sorted(self.ranks).index(r) for r in self.ranks]
            with self._meeting():
                self.gather_group, self.reduce_group = self._make(self.backend, self.timeout), self._make(self.backend, self.timeout)

    @property
    def broken(self) -> StallError | None:
        return self.whole.broken

    @broken.setter
    def broken(self, error: StallError | None) -> None:
        self.whole.broken = error
