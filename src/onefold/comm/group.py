"""`Group`: the ranks that a model is sharded over, their two levels, and parts of them. Their
collectives are in comm/moves.py, the waiting in comm/peers.py.

[Note: two levels] Ranks may be arranged in groups (layout/flat.py); by default the ranks of
each node are a group if there are several nodes. This rank then has a group on each level:
`intra_group` and `inter_group`. A gather over all ranks runs between groups first, then inside
them. So each byte enters a node once.

[Note: parts] On a mesh of several axes, a flat buffer belongs to some of the ranks (layout/holders.py).
These are a `Part` of the group over all of them, with levels of its own. All ranks of the mesh agree
on what was used, on norms and on failures; parameters and gradients travel among the ranks of a part.
"""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from onefold.comm.communicators import (
    Communicators,
    Nodes,
    backend_of,
    flat_note,
    flat_over,
    format_ranks,
    host_identity,
    inner_of,
    members,
    ranks_of_a_node,
    refuse_shared_device,
    sides_of,
    warn_of_one_connection,
)
from onefold.comm.ledger import TrafficLedger
from onefold.comm.mesh import Mesh
from onefold.comm.moves import Moves
from onefold.comm.peers import alike, both
from onefold.comm.pending import Chains, CollectiveContext, RunAhead, StallError
from onefold.comm.wire import GLOO, Wire, wire_of
from onefold.device import device_identity, has_streams, new_stream
from onefold.layout import Topology


class Group(Moves):
    """The ranks that a model is sharded over. The engine has communicators of its own for gathers and for
    reductions, so that neither queues behind the other.

    Args:
        process_group: a ProcessGroup, a one-dimensional DeviceMesh, or None for all ranks (or for a
            single process).
        device: where the moved tensors live.
        timeout: seconds a wait may take before it ends in a `StallError`.
        inner: ranks of each group: a number (of data ranks, on a mesh), None, "node" or "flat"; see
            the table of comm/communicators.py and [Note: two levels].
        backend: None takes the one that `process_group` has for such tensors.

    Attributes:
        ranks: global ranks by position.
        rank, size: this rank's position, and the number of ranks.
        number: this rank's place among the ranks in ascending order. It differs from the position
            only on two levels.
        nodes: the node of each position, for the ledger.
        borders: the number of nodes in words, such as "2 nodes"; "" if there is one
            (comm/communicators.py).
        flat_over_nodes: every rank sends to every other, although several share a node.
        flat_note: a sentence about that, if the recipe leaves the groups to Onefold; else "".
        reunion: where these ranks meet after the group was closed.

    Raises:
        ValueError: the groups do not divide the ranks, or ranks share a device that the backend
            needs for one of them.
    """

    def __init__(
        self,
        process_group: Any,
        device: torch.device,
        timeout: float,
        inner: int | str | None = None,
        backend: str | None = None,
    ) -> None:
        self.timeout, self.device = timeout, device
        self.reunion = Reunion(process_group, timeout, inner)
        self.ledger = TrafficLedger()
        self.heard: int | None = None  # the step at whose end all ranks agreed last
        self.updates: list[tuple[str, ...]] = []
        self.broken: StallError | None = None
        self.wire: Wire = GLOO
        self.chains = Chains()
        # The stream that waits for the first move of a chain. There is one, so that all ranks
        # launch the second moves in one order
        self.relay, self.summing = (
            new_stream(device, "relay", urgent=True),
            new_stream(device, "sums", urgent=True),
        )
        self.run_ahead: RunAhead | None = None
        self._counts: dict[tuple[str, int], int] = {}
        self._parts: dict[tuple[int, ...], Group] = {}
        # Checksums of the launches on the communicators of gathers and of reductions
        self._launched = [0, 0]
        mesh = process_group if isinstance(process_group, Mesh) else None
        process_group, numbers = members(process_group)
        self._mesh = mesh
        # Data ranks of each group, where the recipe names a number
        self._data_ranks: int | None = None
        if mesh is not None and isinstance(inner, int):
            self._data_ranks, inner = inner, mesh.ranks_of(inner, numbers)
        self.size = len(numbers)
        self.ranks, self.name = numbers, format_ranks(numbers)
        self.rank, self.number = 0, 0
        self._intra_group = None
        self._inter_group = None
        self.communicators = Communicators(numbers, device, timeout, process_group)
        said = ranks_of_a_node(world_size=dist.get_world_size() if self.size > 1 else None)
        if isinstance(inner, int):
            Topology(self.size, inner_of(inner, numbers, None))  # raises before anything is made
        if self.size > 1:
            self.number = numbers.index(dist.get_rank())
            self.backend = backend or backend_of(process_group, device)
            self.wire = wire_of(self.backend)
        self.control_group = self.gather_group = self.reduce_group = None
        try:
            self._connect(process_group, numbers, inner, said)
        except BaseException:
            self.close()
            raise

    def _connect(
        self, process_group: Any, numbers: list[int], inner: int | str | None, said: int | None
    ) -> None:
        """Make the communicators, and agree on the levels. Collective. `said`: what the launcher says
        are the ranks of a node.
        """
        device = self.device
        per_node: Nodes = said
        if not self.alone:
            with self.communicators.named():
                self.control_group = self.communicators.make("gloo", on_demand=self.native)
            self._set_position(
                self.number, list(range(self.size)), list(range(self.size)), [0] * self.size
            )
            per_node = self._agreed(said)
            if per_node is None or device.type != "cpu":
                hosts = self._compare_places()
                per_node = hosts if per_node is None else per_node
        self._inner, self._per_node = inner, per_node
        self.topology = Topology(self.size, inner_of(inner, numbers, per_node))
        self.flat_note = flat_note(inner, numbers, per_node, self.topology)
        order = self.topology.order  # each position's number in the communicators
        self.ranks = [numbers[i] for i in order]
        self.nodes, self.borders = sides_of(self.ranks, per_node, inner, self.topology)
        self.flat_over_nodes = flat_over(self.nodes, self.topology)
        if self.size == 1:
            return
        self._set_position(self.ranks.index(dist.get_rank()), order, order, self.nodes)
        if self.native and has_streams(device):
            self.run_ahead = RunAhead(device, self.timeout, self._lost_by_device)
        if self.backend == "gloo":
            self.gather_group = self.reduce_group = self.control_group
        elif not self.alone:
            warn_of_one_connection(device)
            with self.communicators.named():
                self.gather_group = self.reduce_group = self.communicators.make(
                    self.backend, parent=process_group
                )
                # On two levels every gather runs over the levels, and needs no communicator here
                if not self.topology.two_levels:
                    self.gather_group = self.communicators.make(self.backend, parent=process_group)
        levels = self.topology.intra_group, self.topology.inter_group
        self._intra_group, self._inter_group = (
            None if len(part(self.rank)) == self.size else Level(self, part) for part in levels
        )

    @property
    def intra_group(self) -> Group:
        """The ranks of this rank's group; all ranks if there is one group."""
        return self._intra_group or self

    @property
    def inter_group(self) -> Group:
        """The ranks, one of each group, that hold the same shard as this rank; all ranks if groups
        have one rank each.
        """
        return self._inter_group or self

    def part(self, groups: Sequence[Sequence[int]]) -> Group:
        """Return the group of this rank's part. Collective over all ranks, the first time.

        Args:
            groups: a division of all global ranks, each part in ascending order.
        """
        mine = next(tuple(ranks) for ranks in groups if self.ranks[self.rank] in ranks)
        if len(mine) == self.size:
            return self
        if mine not in self._parts:
            self._parts[mine] = Part(self, groups)
        return self._parts[mine]

    @property
    def everyone(self) -> tuple[list[int], dict[int, str]]:
        return self.ranks, {} if self._mesh is None else self._mesh.places

    def axes_of(self, ranks: Sequence[int]) -> list[str]:
        return [] if self._mesh is None else self._mesh.axes_of(ranks)

    def _agreed(self, per_node: int | None) -> int | None:
        """Return `per_node` if it is the same on all ranks, else None. With unequal nodes, some
        ranks may see a number that divides the world size by chance.

        Raises:
            ValueError: on every rank, if ranks were given different meshes, or some of them none.
        """
        nodes, mesh, here = (per_node or 0).to_bytes(8, "little"), bytes(8), "none"
        if self._mesh is not None:
            axes = self._mesh.axes
            given = axes.names, axes.sizes, axes.data, self._mesh.ranks
            mesh = hashlib.sha256(repr(given).encode()).digest()[:8]
            here = f"{self._mesh.describe()} with data={axes.data}"
        context = CollectiveContext("control", "(start)", 0, "state")
        found = self.any_of(both(nodes) + both(mesh), context)
        if not alike(found[16:]):
            raise ValueError(
                "ranks were given different meshes, or different axes as data: this one has"
                f" {here}. Every rank must give shard() the same."
            )
        return per_node if alike(found[:16]) else None

    def _compare_places(self) -> dict[int, int]:
        """Return the host of each global rank, numbered by their first ranks. Collective.

        Raises:
            ValueError: on every rank, if ranks compute on one device with a native backend.
        """
        mine = [host_identity(), device_identity(self.device)]
        digests = [hashlib.sha256(text.encode()).digest()[:8] for text in mine]
        payload = torch.frombuffer(bytearray(b"".join(digests)), dtype=torch.uint8)
        told = self.exchange_control(payload, CollectiveContext("control", "(start)", 0, "state"))
        places = [bytes(place.tolist()) for place in told]
        if self.native and mine[1]:
            refuse_shared_device(dict(zip(self.ranks, places, strict=True)), self.device)
        first: dict[bytes, int] = {}
        hosts = [first.setdefault(place[:8], len(first)) for place in places]
        return dict(zip(self.ranks, hosts, strict=True))

    def communicator(self) -> Any:
        """Make one more gloo communicator over the same ranks, for host messages whose caller limits
        the wait. Collective.
        """
        where = "the first save or load"
        with self.communicators.named(where):
            made = self.communicators.make("gloo", where, on_demand=self.native)
        made._get_backend(torch.device("cpu"))._set_default_timeout(timedelta(days=30))
        return made

    def close(self) -> None:
        """Destroy the communicators. Local; call it when no collective is in flight."""
        levels, self._intra_group, self._inter_group = (
            (self._intra_group, self._inter_group),
            None,
            None,
        )
        for level in (*levels, *self._parts.values()):
            if level is not None:
                level.close()
        self._parts.clear()
        self.chains.clear()
        self.run_ahead = None  # it refers to this group
        # The last reference closes the sockets
        self.control_group = self.gather_group = self.reduce_group = None
        self.communicators.close()

    def give_up(self) -> None:
        """Abort the native communicators of all levels and parts, when a rank has failed to arrive."""
        for group in self.below():
            group.communicators.give_up()
        super().give_up()


class Reunion:
    """The ranks of a group that was closed. Tensors that outlive their model hold it, and nothing
    else of that model. They meet over gloo, whose connections each rank closes by itself.
    """

    def __init__(self, process_group: Any, timeout: float, inner: int | str | None) -> None:
        self._given = process_group, torch.device("cpu"), timeout, inner
        self._group: Group | None = None
        self._world: Any = None  # the default group in which `_group` was made

    def group(self, size: int) -> Group | None:
        """Return a group of these ranks; None if process groups were destroyed. Collective."""
        try:
            there, ranks = members(self._given[0])
        except ValueError:
            return None
        if len(ranks) != size:
            return None
        if self._group is None or self._world is not dist.group.WORLD:
            backend = "fake" if str(dist.get_backend(there)) == "fake" else "gloo"
            self._group, self._world = Group(*self._given, backend), dist.group.WORLD
        return self._group

    def __del__(self) -> None:
        if self._group is not None:
            self._group.close()


class Level(Group):
    """The ranks of one level of a group. They share the ledger, the failures and gloo's connections
    of the `whole` group.
    """

    _level = 1

    def __init__(self, whole: Group, part: Callable[[int], list[int]]) -> None:
        """`part(p)` returns the positions, in `whole`, of the level that position p is in, p
        included.
        """
        positions = part(whole.rank)
        self.whole = whole
        self.timeout, self.device, self.ledger, self.wire = (
            whole.timeout,
            whole.device,
            whole.ledger,
            whole.wire,
        )
        self._counts, self._launched, self._parts = {}, [0, 0], {}
        self._salt = whole._salt
        self._sized = self._sized and whole._sized
        self.chains, self.relay, self.summing = whole.chains, whole.relay, whole.summing
        self.run_ahead = whole.run_ahead
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
        if self.backend != "gloo" and not self.alone:
            parts = sorted(
                {tuple(sorted(whole.at[p] for p in part(at))) for at in range(whole.size)}
            )
            divided = [list(each) for each in parts]
            with self.communicators.named():
                self.gather_group, self.reduce_group = (
                    self.communicators.make_part(self.backend, whole.reduce_group, divided)
                    for _ in range(2)
                )
            numbers = [sorted(self.ranks).index(r) for r in self.ranks]
        self._set_position(self.rank, numbers, control, self.nodes)

    def give_up(self) -> None:
        self.whole.give_up()

    @property
    def everyone(self) -> tuple[list[int], dict[int, str]]:
        return self.whole.everyone

    def axes_of(self, ranks: Sequence[int]) -> list[str]:
        return self.whole.axes_of(ranks)

    @property
    def heard(self) -> int | None:  # type: ignore[override]
        return self.whole.heard

    @property
    def updates(self) -> list[tuple[str, ...]]:  # type: ignore[override]
        return self.whole.updates

    @property
    def broken(self) -> StallError | None:
        return self.whole.broken

    @broken.setter
    def broken(self, error: StallError | None) -> None:
        self.whole.broken = error


class Part(Level):
    """Some ranks of a mesh, with levels of their own. See [Note: parts]."""

    _level = 0

    def __init__(self, whole: Group, groups: Sequence[Sequence[int]]) -> None:
        """`groups` divide the global ranks of `whole`. Collective over `whole`."""
        self._sized, self.parts = False, groups
        inner, per_node = whole._inner, whole._per_node
        self._inner, self._per_node = inner, per_node
        if whole._mesh is not None and whole._data_ranks is not None:
            mine = next(ranks for ranks in groups if whole.ranks[whole.rank] in ranks)
            inner = whole._mesh.ranks_of(whole._data_ranks, mine)
        position = {rank: p for p, rank in enumerate(whole.ranks)}
        # By position in `whole`: the positions of its part, in the order of the part's own positions
        places: dict[int, list[int]] = {}
        for ranks in groups:
            topology = Topology(len(ranks), inner_of(inner, ranks, per_node))
            there = [position[ranks[i]] for i in topology.order]
            places |= dict.fromkeys(there, there)
        super().__init__(whole, places.__getitem__)
        self.number = sorted(self.ranks).index(self.ranks[self.rank])
        self._salt = zlib.crc32(self.name.encode()) & 0xFFF
        self.topology = Topology(self.size, inner_of(inner, sorted(self.ranks), per_node))
        self.flat_over_nodes = flat_over(self.nodes, self.topology)
        self.flat_note = ""
        levels = self.topology.intra_group, self.topology.inter_group
        self._intra_group, self._inter_group = (
            None if len(part(self.rank)) == self.size else Level(self, part) for part in levels
        )
