"""`Group`: some ranks, with this one among them: their positions, their two levels, and all that they send
each other.

| from         | to         | move           | pairwise (gloo)                            | native (NCCL)                |
|--------------|------------|----------------|--------------------------------------------|------------------------------|
| sharded      | replicated | all-gather     | each rank sends its interval to each other | all_gather_single            |
| partial sums | sharded    | reduce-scatter | sends of intervals, then a local sum       | all_to_all_single, local sum |
| partial sums | replicated | all-reduce     | the two above                              | the two above                |
| replicated   | sharded    | slice          | no traffic                                 | no traffic                   |

With `reduce="native"` in the recipe partial sums go by the backend's own reduce_scatter_single.

[Note: two levels] Ranks may be arranged in groups (layout/flat.py); by default the ranks of
each node are a group if there are several nodes. This rank then has a group on each level:
`intra_group` and `inter_group`. A gather over all ranks runs between groups first, then inside
them. So each byte enters a node once.

[Note: parts] On a mesh of several axes, a flat buffer belongs to some of the ranks (layout/holders.py).
These are a part of the group over all of them, with levels of its own. All ranks of the mesh agree
on what was used, on norms and on failures; parameters and gradients travel among the ranks of a part.

[Note: sums are local and in rank order] Every reduction sends the parts unchanged. The rank that
owns the interval adds them up in rank order, in the accumulation dtype. So the bits of a sum depend
neither on the placement of the result nor on how the unit was cut into messages, and stages 0 to 3
are bit-equal. And 16-bit gradients can be sent in 16 bits and still be summed in fp32.

[Note: one rank stands for all] Under torch's "fake" backend (simulation/simulate.py) moves are entered in
the ledger and nothing arrives. Where a rank needs the others' values, it takes its own.

[Note: tags instead of order] A pairwise message carries a tag made of the move, the unit, a count,
what is reduced or asked for, and the length. If two ranks disagree on what comes next, their
messages do not match: both wait, and the wait ends in a `StallError`. Neither takes the other's
bytes for something else.

[Note: order instead of tags] A native backend matches operations by the order in which each rank
launches them. It takes one unit's bytes for another's if they have the same size. So every launch
goes into a checksum of its communicator (`launched`), and the ranks compare the checksums at the
end of every backward pass, before the optimizer step. Gathers and reductions have a communicator
each, because the order between a gather and a reduction may differ from rank to rank.
"""

from __future__ import annotations

import contextlib
import pickle
import struct
import time
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from onefold.comm.communicators import (
    Communicators,
    backend_of,
    flat_over,
    format_ranks,
    host_identity,
    inner_of,
    nodes_of,
    one_axis,
    ranks_of_a_node,
    refuse_shared_device,
    warn_of_one_connection,
)
from onefold.comm.ledger import TrafficEvent, TrafficLedger
from onefold.comm.pending import (
    Chain,
    Chains,
    CollectiveContext,
    Pending,
    RunAhead,
    StallError,
    stall_error,
)
from onefold.device import (
    current_stream,
    device_identity,
    has_streams,
    new_event,
    new_stream,
)
from onefold.layout import Topology
from onefold.layout.holders import Mesh

#: (peer, tensor) for each message.
Parts = Sequence[tuple[int, torch.Tensor]]
#: Bytes to other ranks; those of them to other nodes; what they were encoded from, 0 if they were not.
Bytes = tuple[int, int, int]
_KINDS = (
    "owners",
    "all-gather",
    "reduce-scatter",
    "all-reduce",
    "control",
    "state",
    "call",
    "agreement",
)
_START = CollectiveContext("control", "(start)", 0, "state")


class Shared:
    """What a group over all ranks of a model and the groups made of it have in common.

    Attributes:
        ranks: the global ranks in ascending order.
        places: the place of each in its mesh, in words: "dp 1, tp 0"; none if the mesh has one axis.
        control: gloo's communicator, for messages that the host reads.
        inner: ranks of each group, as the recipe says it; on a mesh, a number of data ranks.
        node_of: the node of each rank, or what counts as it in the ledger.
        borders: the number of nodes in words; "" if there is one. If there is one, and the recipe names
            a number of ranks for its groups, the groups stand for nodes.
        heard: the last step at whose end all ranks agreed.
        updates: what clipping and optimizers did since the ranks last compared it (runtime/agree.py).
        broken: the error that this rank has failed with, or None.
        launched: the checksums of launches on the communicators of gathers and of reductions, of each
            group.
        chains, relay: see [Note: chains go on in order] in comm/pending.py. There is one relay, the
            stream that waits for the first move of a chain, so that all ranks launch the second moves
            in one order.
        summing: the stream on which parts are added up; None without streams.
        run_ahead: bounds how far the host runs ahead of the device; None where nothing needs it.
    """

    def __init__(self, given: Any, device: torch.device, timeout: float, inner: Any) -> None:
        self.mesh = given if isinstance(given, Mesh) else one_axis(given)
        self.ranks = sorted(self.mesh.ranks)
        self.device, self.timeout, self.inner = device, timeout, inner
        self.node_of = dict(zip(self.ranks, nodes_of(self.ranks, ranks_of_a_node()), strict=True))
        several = len(self.ranks) > 1
        self.rank = dist.get_rank() if several else self.ranks[0]
        self.backend = backend_of(self.mesh.group, device) if several else ""
        self.communicators = Communicators(self.ranks, device, timeout, self.mesh.group)
        self.control: Any = None
        self.places = self.mesh.places
        self.borders = ""
        self.ledger = TrafficLedger()
        self.heard: int | None = None
        self.updates: list[str] = []
        self.broken: StallError | None = None
        self.launched: list[list[int]] = []
        self.chains = Chains()
        self.relay, self.summing = (new_stream(device, urgent=True) for _ in range(2))
        self.run_ahead: RunAhead | None = None

    def inner_of(self, ranks: Sequence[int]) -> int:
        """Return the ranks of each group, of these global ranks in ascending order."""
        inner = self.inner
        if isinstance(inner, int) and not self.mesh.plain:
            inner = self.mesh.ranks_of(inner, ranks)
        return Topology(len(ranks), inner_of(inner, [self.node_of[rank] for rank in ranks])).inner

    def find_nodes(self, group: Group) -> None:
        """Find out which ranks share a node. The launcher's word counts if all ranks have the same: with
        unequal nodes, some may see a number that divides the world size by chance. Collective.

        Raises:
            ValueError: on every rank, if ranks were given different meshes, or compute on one device
                with a native backend.
        """
        mesh = f"{self.mesh.describe()} of ranks {self.mesh.ranks}, data={self.mesh.data}"
        own = device_identity(self.device)
        launcher = ranks_of_a_node()
        told = group.tell((mesh, launcher, host_identity(), own), _START)
        meshes, per_node, hosts, devices = zip(*told, strict=True)
        if len({*meshes}) > 1:
            raise ValueError(
                "ranks were given different meshes, or different axes as data: this one has"
                f" {mesh}. Every rank must give shard() the same."
            )
        if self.backend != "gloo" and own:
            places = zip(hosts, devices, strict=True)
            refuse_shared_device(dict(zip(self.ranks, places, strict=True)), self.device)
        if launcher is None or len({*per_node}) > 1:
            first: dict[str, int] = {}
            numbers = [first.setdefault(host, len(first)) for host in hosts]
            self.node_of = dict(zip(self.ranks, numbers, strict=True))

    def name_nodes(self, inner: int) -> None:
        """Set what counts as a node. `inner`: ranks of each group."""
        name, count = "nodes", len({*self.node_of.values()})
        if count == 1 and isinstance(self.inner, int):
            self.node_of = {rank: number // inner for number, rank in enumerate(self.ranks)}
            name, count = "groups", len({*self.node_of.values()})
        self.borders = f"{count} {name}" if count > 1 else ""


class Group:
    """Some of the ranks that a model is sharded over, or all of them. The engine has communicators of its
    own for gathers and for reductions, so that neither queues behind the other.

    Attributes:
        ranks: global ranks by position.
        rank, size: this rank's position, and the number of ranks.
        number: this rank's place among the ranks in ascending order. It differs from the position
            only on two levels.
        nodes: the node of each position, for the ledger.
        stands_for_all: the other ranks are not there (torch's "fake" backend): nothing of theirs
            arrives.
        alone: no other rank answers: there is none, or this one stands for all, and what the others
            would say is what it says itself.
        flat_over_nodes: every rank sends to every other, although several share a node.
        parts: the division of all ranks that this group is a part of; None if it has all of them.
        shared: what it has in common with the other groups of the model.
    """

    def __init__(
        self,
        shared: Shared,
        ranks: Sequence[int],
        inner: int,
        parts: Sequence[Sequence[int]] | None = None,
        salt: int = 0,
        level: int = 0,
    ) -> None:
        """Local.

        Args:
            ranks: global ranks in ascending order.
            salt: goes into the counts in tags: messages among some ranks of a mesh are never taken
                for messages among all of them.
            level: a bit of the tags, 1 for messages on a level. The two levels need no bit of their
                own: no two ranks are together on both.
        """
        self.shared, self.parts, self._salt, self._level = shared, parts, salt, level
        self.timeout, self.device, self.backend = shared.timeout, shared.device, shared.backend
        self.ledger, self.chains, self.updates = shared.ledger, shared.chains, shared.updates
        self.relay, self.summing = shared.relay, shared.summing
        self.borders = shared.borders
        self.size, self.name = len(ranks), format_ranks(ranks)
        self.stands_for_all = self.backend == "fake"
        self.alone = self.size == 1 or self.stands_for_all
        self.topology = Topology(self.size, inner)
        # Each position's number in a communicator of these ranks, and in gloo's, which has all
        self._at = self.topology.order
        self.ranks = [ranks[i] for i in self._at]
        self.rank, self.number = self.ranks.index(shared.rank), ranks.index(shared.rank)
        # Each rank starts with the one after it: no rank is the first peer of all others.
        self.peers = [(self.rank + i) % self.size for i in range(1, self.size)]
        self.nodes = [shared.node_of[rank] for rank in self.ranks]
        self.flat_over_nodes = flat_over(self.nodes, self.topology)
        self._elsewhere = [node != self.nodes[self.rank] for node in self.nodes]
        self._peers_elsewhere = sum(self._elsewhere)
        number = {rank: i for i, rank in enumerate(shared.ranks)}
        self._at_control = [number[rank] for rank in self.ranks]
        self._row_of: torch.Tensor | None = None  # the row, by number, of each position
        self._counts: Counter[tuple[str, int]] = Counter()  # messages with tags so far
        self._launched = [0, 0]
        shared.launched.append(self._launched)
        # The communicators of gathers and of reductions; on gloo that of control messages is both
        self._own: list[Any] = []
        self._levels: list[Group | None] = [None, None]
        self._parts: dict[tuple[int, ...], Group] = {}

    @classmethod
    def over(
        cls,
        given: Any,
        device: torch.device,
        timeout: float,
        inner: int | str | None = None,
    ) -> Group:
        """Return the group that a model is sharded over. Collective.

        Args:
            given: a ProcessGroup, a one-dimensional DeviceMesh, a `Mesh`, or None for all ranks (or
                for a single process).
            device: where the moved tensors live.
            timeout: seconds a wait may take before it ends in a `StallError`.
            inner: ranks of each group: a number (of data ranks, on a mesh), None, "node" or "flat";
                see the table of comm/communicators.py and [Note: two levels].

        Raises:
            ValueError: the groups do not divide the ranks, or ranks share a device that the backend
                needs for one of them.
        """
        shared = Shared(given, device, timeout, inner)
        ranks, gloo = shared.ranks, shared.backend == "gloo"
        try:
            if shared.backend not in ("", "fake"):
                shared.control = shared.communicators.make("gloo", on_demand=not gloo)
                shared.find_nodes(cls(shared, ranks, len(ranks)))
            each = shared.inner_of(ranks)
            shared.name_nodes(each)
            whole = cls(shared, ranks, each)
            if whole.native and has_streams(device):
                shared.run_ahead = RunAhead(whole)
            whole._connect(parent=shared.communicators.given)
        except BaseException:
            shared.communicators.close()
            raise
        return whole

    def _connect(self, parts: Sequence[Sequence[int]] = (), parent: Any = None) -> None:
        """Make the native communicators, and the levels. Collective over `parent`, by `parts`."""
        shared, topology = self.shared, self.topology
        if self.native:
            warn_of_one_connection(self.device)
            make = partial(shared.communicators.make, self.backend, parts, parent)
            # On two levels every gather runs over the levels, and needs no communicator here
            self._own = [make()] * 2 if topology.two_levels else [make(), make()]
            if self.ranks != sorted(self.ranks):
                self._row_of = torch.tensor(self._at, device="cpu").to(self.device)
        for i, level in enumerate((topology.intra_group, topology.inter_group)):
            if self._level == 0 and len(level(self.rank)) < self.size:
                divided = {tuple(level(p)) for p in range(self.size)} if self._own else ()
                mine, *others = (
                    [self.ranks[p] for p in positions] for positions in (level(self.rank), *divided)
                )
                made = Group(shared, mine, len(mine), self.parts, self._salt, level=1)
                made._connect(others, *self._own[1:])
                self._levels[i] = made

    @property
    def intra_group(self) -> Group:
        """The ranks of this rank's group; all ranks if there is one group."""
        return self._levels[0] or self

    @property
    def inter_group(self) -> Group:
        """The ranks, one of each group, with this rank's shard; all, in groups of one."""
        return self._levels[1] or self

    def part(self, groups: Sequence[Sequence[int]]) -> Group:
        """Return the group of this rank's part. Collective over all ranks, the first time.

        Args:
            groups: a division of all global ranks, each part in ascending order.
        """
        mine = next(tuple(ranks) for ranks in groups if self.shared.rank in ranks)
        if len(mine) == self.size:
            return self
        if mine not in self._parts:
            inner, salt = self.shared.inner_of(mine), format_ranks(mine)
            part = Group(self.shared, mine, inner, groups, zlib.crc32(salt.encode()) & 0xFFF)
            part._connect(groups, *self._own[1:])
            self._parts[mine] = part
        return self._parts[mine]

    @property
    def native(self) -> bool:
        """Whether moves are the backend's own operations, on the device."""
        return not self.alone and self.backend != "gloo"

    @property
    def broken(self) -> StallError | None:
        return self.shared.broken

    @property
    def run_ahead(self) -> RunAhead | None:
        return self.shared.run_ahead

    def communicator(self) -> Any:
        """Make a gloo communicator over all ranks whose caller limits waits. Collective."""
        make, where = self.shared.communicators.make, "the first save or load"
        made = make("gloo", where=where, on_demand=self.backend != "gloo")
        made._get_backend(torch.device("cpu"))._set_default_timeout(timedelta(days=30))
        return made

    def close(self) -> None:
        """Destroy the communicators of all groups. Local; call it when no collective is in flight."""
        self.shared.chains.waiting.clear()
        self.shared.run_ahead = None  # it refers to this group
        self.shared.control = None  # the last reference closes the sockets
        self.shared.communicators.close()

    # -- moves -------------------------------------------------------------------------------------

    def _launch(
        self,
        context: CollectiveContext,
        number: int,
        sent: Bytes,
        start: Callable[[Any], list[Any]],
        tensors: Sequence[torch.Tensor],
        about: Any = None,
        over: int = 1,
        after: Sequence[Callable[[], object]] = (),
    ) -> Pending:
        """Enter a move in the ledger, and launch it. See [Note: one rank stands for all].

        Args:
            number: of the flat buffer, or another that tells messages apart.
            start: launches it over a communicator.
            tensors: kept alive until it is complete.
            about: goes into the checksum, with the move and `number`, if the context says nothing.
            over: 0 for the communicator of gathers, 1 for that of reductions.
        """
        (nbytes, *others), move, unit = sent, context.move, context.unit
        dtype = str(tensors[0].dtype if tensors else torch.float32).removeprefix("torch.")
        event = self.ledger.record(
            TrafficEvent(
                move,
                unit,
                nbytes,
                self.size,
                dtype,
                context.phase,
                context.step,
                self.name,
                *others,
            )
        )
        if self.stands_for_all:
            after = [lambda: self.ledger.waited(event, time.perf_counter())]
            return Pending(self, [], context, event, tensors, after)
        if self._own:
            self._note(over, move, number, context.about or about)
        with self._launching(context):
            works = start(self._own[over] if self._own else self.shared.control)
        return Pending(self, works, context, event, tensors, after)

    def _note(self, over: int, move: str, number: int, about: Any) -> None:
        """Add a launch to the checksum of a native communicator."""
        # Parts of a mesh have buffers of different lengths
        text = f"{move} {number} {about if self.parts is None else None}"
        self._launched[over] = zlib.crc32(text.encode(), self._launched[over])

    def _to_all(self, nbytes: int, plain: int = 0) -> Bytes:
        """Return the bytes sent if each peer is sent `nbytes`, encoded from `plain`."""
        peers, far = len(self.peers), self._peers_elsewhere
        return nbytes * peers, nbytes * far, plain * peers

    def all_gather(
        self,
        full: torch.Tensor,
        context: CollectiveContext,
        number: int,
        *,
        plain: int = 0,
        over: int = 0,
    ) -> Pending:
        """sharded → replicated, in place: send rank r's interval of `full` ([numel], cut evenly) to
        every other rank's `full`.

        Args:
            plain: bytes that `full` was encoded from, for the ledger.
            over: 1 for sums of a reduction, which go to the communicator of reductions, in their
                order.
        """
        if self.size == 1:
            return Pending(self, [], context)
        shard = full.numel() // self.size
        if self.topology.two_levels:
            outer, inner = self.inter_group, self.intra_group
            first = self.rank // outer.size * outer.size * shard
            low = outer.all_gather(
                full[first : first + shard * outer.size],
                context,
                number,
                plain=plain * outer.size // self.size,
                over=over,
            )
            return Chain(
                self,
                low,
                lambda: inner.all_gather(full, context, number, plain=plain, over=over),
            )
        mine = full[self.rank * shard : (self.rank + 1) * shard]
        plain //= self.size
        if self.backend == "gloo":
            sends = [(p, mine) for p in self.peers]
            recvs = [(p, full[p * shard : (p + 1) * shard]) for p in self.peers]
            return self.exchange(sends, recvs, context, number, plain=plain)
        return self._launch(
            context,
            number,
            self._to_all(mine.nbytes, plain),
            lambda group: [dist.all_gather_single(full, mine, group=group, async_op=True)],
            [full],
            full.numel(),
            over,
        )

    def exchange(
        self,
        sends: Parts,
        recvs: Parts,
        context: CollectiveContext,
        number: int,
        *,
        plain: int = 0,
    ) -> Pending:
        """Send each `(peer, tensor)` and receive into each `(peer, tensor)`: the exchange in a
        reduction, a scatter or a gather of uneven parts.

        Tensors are contiguous and one-dimensional; empty ones are skipped on both sides. `plain`:
        bytes that each message was encoded from, for the ledger. See [Note: tags instead of order].
        """
        if self.size == 1:
            return Pending(self, [], context)
        tensors = [t for _, t in (*sends, *recvs)]
        far = sum(t.nbytes for p, t in sends if self._elsewhere[p])
        sent = sum(t.nbytes for _, t in sends), far, plain * len(sends)
        gloo, after = self.backend == "gloo", list[Callable[[], object]]()
        at = self._at_control if gloo else self._at
        if gloo and self.device.type != "cpu":  # gloo moves host memory only: stage through it
            arrive = recvs
            recvs = [(p, torch.empty(t.shape, dtype=t.dtype, device="cpu")) for p, t in recvs]
            after = [lambda: [t.copy_(h) for (_, t), (_, h) in zip(arrive, recvs, strict=True)]]
            sends = [(p, t.cpu()) for p, t in sends]
            tensors += [t for _, t in sends]

        def start(over: Any) -> list[Any]:
            if gloo:
                tag = self.tag(context.move, number, context.about)
                works = []
                for call, peer, some in (
                    (dist.isend, "group_dst", sends),  # first: tiny units are 3 to 5 % quicker
                    (dist.irecv, "group_src", recvs),
                ):
                    for p, t in some:
                        if t.numel():
                            how = {peer: at[p], "tag": of_length(tag, t)}
                            works.append(call(t, group=over, **how))
                return works
            dtype = tensors[0].dtype if tensors else torch.float32
            empty = torch.empty(0, dtype=dtype, device=self.device)
            out, inp = [empty] * self.size, [empty] * self.size
            for whole, ours in ((out, recvs), (inp, sends)):
                for p, t in ours:
                    whole[at[p]] = t
            return [dist.all_to_all(out, inp, group=over, async_op=True)]

        return self._launch(context, number, sent, start, tensors, after=after)

    # -- moves of reductions on native backends ----------------------------------------------------

    def scatter_parts(
        self,
        sent: torch.Tensor,
        received: torch.Tensor,
        context: CollectiveContext,
        number: int,
        plain: int = 0,
    ) -> Pending:
        """Exchange the parts of a reduction, all of one length, in one operation. The caller adds them
        up.

        Args:
            sent: the parts for all ranks, in order of position; or without this rank's own part.
            received: the parts from all ranks, by position: [ranks, part] with a row for this rank,
                or [ranks - 1, part] without.
            plain: bytes that each rank's part was encoded from, for the ledger.
        """
        rows, part = received.shape
        cut = None
        if rows < self.size:  # this rank's part stays where it is
            cut = [part] * self.size
            cut[self.rank] = 0
        return self._launch(
            context,
            number,
            self._to_all(part * sent.element_size(), plain),
            lambda over: [
                dist.all_to_all_single(received.view(-1), sent, cut, cut, group=over, async_op=True)
            ],
            [sent, received],
        )

    def reduce_scatter(
        self,
        sent: torch.Tensor,
        own: torch.Tensor,
        context: CollectiveContext,
        number: int,
        mean: bool,
    ) -> Pending:
        """Run the backend's own reduce-scatter: the sum, or mean, of all ranks' `sent`, [numel]. This
        rank's part is written to `own`. The backend adds in the dtype of `sent`.
        """
        op = dist.ReduceOp.AVG if mean else dist.ReduceOp.SUM
        return self._launch(
            context,
            number,
            self._to_all(own.nbytes),
            lambda group: [
                dist.reduce_scatter_single(own, sent, op=op, group=group, async_op=True)
            ],
            [sent, own],
        )

    def launched(self) -> bytes:
        """Return a checksum of all launches on the native communicators so far, in order. It is the
        same on all ranks unless they diverged. See [Note: order instead of tags].
        """
        return zlib.crc32(repr(self.shared.launched).encode()).to_bytes(4, "little")

    def out_of_order(self, context: CollectiveContext) -> StallError:
        """Return every rank's error if they launched different moves. The group is broken."""
        return self._break(
            StallError(
                f"rank {self.shared.rank} found at the end of the backward pass of step"
                f" {context.step} that ranks {sorted(self.ranks)} launched gathers or reductions of"
                f" different units, or in different orders. {self.backend} matches them by their"
                " order: one unit was taken for another. Do not use the results of this step. Ranks"
                " must use the units of a sharded model in one order; where they cannot, use gloo."
            )
        )

    # -- from the first rank -----------------------------------------------------------------------

    def broadcast(self, tensors: list[torch.Tensor], context: CollectiveContext) -> None:
        """Broadcast the first rank's tensors to all ranks, in place, in one message. Waits."""
        # Autograd may have saved a tensor for a backward pass that is still to come. On the host equal
        # tensors are not written to. On a device the host would have to wait to know, so they are
        # written to without a sign for autograd (`data` has a version counter of its own).
        some = [
            _once(t.detach() if t.device.type == "cpu" else t.data) for t in tensors if t.numel()
        ]
        if self.size == 1 or not some:
            return
        # A number made of shapes and dtypes: messages of ranks whose tensors differ in these, or in
        # number, do not match.
        number = zlib.crc32(repr([(tuple(t.shape), t.dtype) for t in some]).encode()) & 0x7FFF
        sizes = [t.numel() * t.element_size() for t in some]
        if self.rank == 0:
            message = torch.cat([as_bytes(t).to(self.device) for t in some])
        else:
            message = torch.empty(sum(sizes), dtype=torch.uint8, device=self.device)
        self.from_first(message, context, number).wait()
        if self.rank == 0 or self.alone:
            return
        for t, part in zip(some, message.split(sizes), strict=True):
            part = part.to(t.device)  # a buffer may stay on the host
            if t.device.type != "cpu" or not torch.equal(as_bytes(t), part):
                # clone(): a part may begin at an address that is not aligned for the dtype
                t.copy_(part.clone().view(t.dtype).view(t.shape))

    def from_first(self, message: torch.Tensor, context: CollectiveContext, number: int) -> Pending:
        """Broadcast the first rank's `message`, uint8 [n] on the device, in place. `number`: on gloo,
        messages with different numbers are never taken for each other.
        """
        first, source = self.rank == 0, self._at[0]
        if not self.native:
            sends = [(p, message) for p in self.peers] if first else []
            recvs = [] if first else [(0, message)]
            return self.exchange(sends, recvs, context, number)
        return self._launch(
            context,
            number,
            (message.numel() if first else 0, 0, 0),
            lambda over: [dist.broadcast(message, group=over, group_src=source, async_op=True)],
            [message],
            message.numel(),
        )

    # -- waiting -----------------------------------------------------------------------------------

    def wait(
        self,
        works: list[Any],
        context: CollectiveContext,
        event: TrafficEvent | None = None,
        on_host: bool = False,
        relays: bool = True,
    ) -> None:
        """Wait for `works`, and record in the ledger how long that took. On a device with streams
        the current stream waits, not the host, unless `on_host` is True. `relays`: see [Note: chains
        go on in order] in comm/pending.py.
        """
        # The connections are closed: raise the same error again instead of waiting
        if self.broken is not None:
            raise self.broken
        if relays:
            self.chains.relay_before(context)
        start = time.perf_counter()
        try:
            if on_host or self.backend == "gloo" or not has_streams(self.device):
                limit = timedelta(seconds=self.timeout)
                for work in works:
                    work.wait(limit)
                self.ledger.waited(event, start)
                return
            stream = current_stream(self.device)
            # On these no computation waits, so there is nothing to time
            beside = stream in (self.relay, self.summing)
            with contextlib.nullcontext() if beside else self._timed(stream, context, event):
                for work in works:
                    work.wait()
        except RuntimeError as error:
            raise self.lost(context, time.perf_counter() - start, error) from None

    def wait_for(
        self, mark: Any, context: CollectiveContext, event: TrafficEvent | None = None
    ) -> None:
        """Make the current stream wait for `mark`, an event behind a move that another stream waits
        for, and record in the ledger how long that took.
        """
        if self.broken is not None:
            raise self.broken
        stream = current_stream(self.device)
        with self._timed(stream, context, event):
            stream.wait_event(mark)

    @contextlib.contextmanager
    def _timed(
        self, stream: Any, context: CollectiveContext, event: TrafficEvent | None
    ) -> Iterator[None]:
        """Context around a wait of the computing stream: enter in the ledger how long it takes."""
        before, after = (new_event(self.device) for _ in range(2))
        before.record(stream)
        yield
        after.record(stream)
        self.ledger.marked(event, before, after)
        if self.run_ahead is not None:
            self.run_ahead.waits(context, before, after)

    @contextlib.contextmanager
    def _launching(self, context: CollectiveContext) -> Iterator[None]:
        """Context around the launch of moves: a `StallError` if it fails, as after an exit."""
        if self.broken is not None:
            raise self.broken
        try:
            yield
        except RuntimeError as error:
            raise self.lost(context, 0.0, error) from None

    def lost(self, context: CollectiveContext, waited: float, error: Exception) -> StallError:
        """Return the error of a rank that has waited for `waited` seconds in vain, because of `error`.
        The group is broken.
        """
        shared, among = self.shared, ""
        if self.size < len(shared.ranks):
            among = f", among ranks {self.name}"
            if shared.places:
                among += f" (along {' and '.join(shared.mesh.axes_of(self.ranks))})"
        return self._break(
            stall_error(
                replace(context, after=tuple(u for u in self.updates if " with " not in u)),
                waited,
                error,
                getattr(shared.control, "group_name", ""),
                shared.rank,
                shared.ranks,
                shared.heard,
                among,
                shared.places,
            )
        )

    def _break(self, error: StallError) -> StallError:
        """Abort the native communicators of all groups; every later move raises `error`."""
        self.shared.broken = error
        self.shared.communicators.give_up()
        return error

    def tag(self, move: str, number: int, about: tuple[int, int] | None = None) -> int:
        self._counts[move, number] += 1
        count = self._counts[move, number]
        if about is not None:
            count ^= hash(about)
        move_and_number = _KINDS.index(move) << 27 | (number & 0x7FFF) << 12
        return self._level << 30 | move_and_number | (count ^ self._salt) & 0xFFF

    # -- small messages: what the host reads goes over gloo, on any backend ------------------------

    def exchange_control(
        self, payload: torch.Tensor, context: CollectiveContext, kind: str = "control"
    ) -> list[torch.Tensor]:
        """Gather every rank's small uint8 payload ([n], the same length on all ranks, on the host),
        in rank order. Waits.

        Takes log2(ranks) rounds: in each, a rank passes on all payloads that it has (Bruck et al.
        1997).

        Args:
            kind: messages of different kinds are never taken for each other ("call": a collective
                that the user calls, at any time).
        """
        if self.alone:
            return [payload] * self.size
        # Row i is of the rank i positions after this one
        have = torch.empty((self.size, payload.numel()), dtype=torch.uint8, device="cpu")
        have[0], step = payload, 1
        while step < self.size:
            more = min(step, self.size - step)
            self._round(have[:more], -step, have[step : step + more], context, kind)
            step *= 2
        return list(have.roll(self.rank, 0).unbind())

    def tell(self, value: Any, context: CollectiveContext, kind: str = "control") -> list[Any]:
        """Return every rank's value, which pickle knows, in rank order. Waits."""
        if self.alone:  # a simulation has no values in its tensors
            return [value] * self.size
        said = pickle.dumps(value)
        length = torch.tensor([len(said)], device="cpu").view(torch.uint8)
        lengths = torch.stack(self.exchange_control(length, context, kind)).view(torch.int64)
        mine = torch.frombuffer(bytearray(said.ljust(int(lengths.max()), b"\0")), dtype=torch.uint8)
        told = self.exchange_control(mine, context, kind)
        return [pickle.loads(bytes(t.numpy())) for t in told]  # stops before the zeros

    def failed(self, error: BaseException | None, context: CollectiveContext) -> dict[int, str]:
        """Return {global rank: what went wrong there}. One small exchange if nothing did. Waits."""
        if self.any_of(bytes([error is not None]), context) == b"\0":
            return {}
        told = self.tell("" if error is None else f"{type(error).__name__}: {error}", context)
        return {rank: text for rank, text in sorted(zip(self.ranks, told, strict=True)) if text}

    def any_of(self, bits: bytes, context: CollectiveContext, kind: str = "agreement") -> bytes:
        """Return the bitwise or of `bits` over all ranks, which give equally many. Waits.

        Takes log2(ranks) rounds of one message. With `both` and `alike` it also tells whether all
        ranks gave the same bits.
        """
        if self.alone:
            return bits
        mine, step = torch.frombuffer(bytearray(bits), dtype=torch.uint8), 1
        # Bits that arrive twice change nothing, so the number of ranks need not be a power of 2
        while step < self.size:
            theirs = torch.empty_like(mine)
            self._round(mine, step, theirs, context, kind)
            mine = mine | theirs
            step *= 2
        return mine.numpy().tobytes()

    def _round(
        self, sent: torch.Tensor, by: int, into: torch.Tensor, context: CollectiveContext, kind: str
    ) -> None:
        """Send to the rank `by` positions behind this one and receive from the one as many before it,
        on the host. Messages of different lengths have different tags, so they are never taken for
        each other.
        """
        tag, over = self.tag(kind, sent.shape[-1]), self.shared.control
        to, source = (self._at_control[(self.rank + n) % self.size] for n in (by, -by))
        self.ledger.control_bytes += sent.numel()
        with self._launching(context):
            works = [
                dist.isend(sent, group=over, group_dst=to, tag=tag),
                dist.irecv(into, group=over, group_src=source, tag=tag),
            ]
        self.wait(works, context, on_host=True)

    def gather_asked(
        self, value: torch.Tensor, digest: int, asked: str, context: CollectiveContext
    ) -> torch.Tensor:
        """`gather_values` of numbers that the user's code asks for, after a check that every rank
        asks for the same.

        Args:
            digest: 32 bits that tell what is asked for from anything else.
            asked: the same in words, for the message: "the norm of 'head.weight'".

        Raises:
            RuntimeError: on every rank, if another rank asks for something else.
        """
        said = both(struct.pack("<II", digest, value.nbytes))
        if not self.alone and not alike(self.any_of(said, context, "call")):
            words = self.tell(asked, context, "call")
            by_rank = sorted(zip(self.ranks, words, strict=True))
            other, theirs = next(
                ((rank, said) for rank, said in by_rank if said != asked),
                ("another", "it for other elements of it, or for other tensors beside it"),
            )
            raise RuntimeError(
                f"rank {self.shared.rank} called {asked} while rank {other} called {theirs}: every"
                " rank must call the same, in the same order."
            )
        return self.gather_values(value, context)

    def gather_values(self, value: torch.Tensor, context: CollectiveContext) -> torch.Tensor:
        """Gather a few numbers of every rank: [...] becomes [size, ...], in rank order. On native
        backends the host does not wait.
        """
        shape = (self.size, *value.shape)
        if self.alone:
            return value.expand(shape)
        if not self.native:
            mine = value.detach().cpu().reshape(-1).view(torch.uint8)
            found = torch.cat(self.exchange_control(mine, context))
            return found.view(value.dtype).view(shape).to(value.device)
        out = torch.empty(shape, dtype=value.dtype, device=value.device)
        self.ledger.control_bytes += value.nbytes * (self.size - 1)
        self._note(1, "control", 0, value.numel())
        mine, over = value.reshape(-1).contiguous(), self._own[1]
        with self._launching(context):
            work = dist.all_gather_single(out.view(-1), mine, group=over, async_op=True)
        self.wait([work], context)
        return out if self._row_of is None else out.index_select(0, self._row_of)


def _once(tensor: torch.Tensor) -> torch.Tensor:
    """Return a view with each element of the memory once, that is, without expanded dimensions."""
    for dim, (size, stride) in enumerate(zip(tensor.shape, tensor.stride(), strict=True)):
        if stride == 0 and size > 1:
            tensor = tensor.narrow(dim, 0, 1)
    return tensor


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().reshape(-1).view(torch.uint8)


def of_length(tag: int, message: torch.Tensor) -> int:
    """Return `tag` with the message's length hashed into its lower bits (Fibonacci hashing).

    Messages of different lengths then never match: gloo would abort the process if more bytes
    arrived than the receiver asked for.
    """
    return tag ^ (message.nbytes * 2654435769 & 0xFFFFFFFF) >> 20


def both(bits: bytes) -> bytes:
    """Return `bits` followed by their complement: `alike` reads what `any_of` makes of it."""
    return bits + bytes(b ^ 0xFF for b in bits)


def alike(found: bytes) -> bool:
    """Whether all ranks gave the same bits to `both`; `found` is the result of `any_of` on it."""
    half = len(found) // 2
    return not any(a & b for a, b in zip(found[:half], found[half:], strict=True))
