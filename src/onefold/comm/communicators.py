"""The ranks, the nodes they are on, and the communicators among them."""

from __future__ import annotations

import atexit
import contextlib
import copy
import functools
import gc
import math
import os
import socket
import threading
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextvars import ContextVar
from datetime import timedelta
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from onefold.comm.pending import GRACE, StallError, default_store, within
from onefold.device import backend_name, device_count, guard
from onefold.layout import Topology
from onefold.layout.holders import Mesh
from onefold.recipe.rows import FLAT, NODE

# -- members ---------------------------------------------------------------------------------------
#
# The ranks of an axis, from a process group, a mesh or None, and the backend that moves their
# tensors.


def format_ranks(ranks: Sequence[int]) -> str:
    """Format ranks in short: "0-7", "0,8,16", "0-3,8-11"."""
    runs = [
        [rank for _, rank in run] for _, run in groupby(enumerate(ranks), lambda at: at[1] - at[0])
    ]
    return ",".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)


def members(given: Any) -> tuple[Any, list[int]]:
    """Return the process group for `given`, and its global ranks in ascending order.

    The group is None for the default group, and for a single process without process groups, whose
    ranks are [0].

    Raises:
        ValueError: `given` is not a process group or a one-dimensional DeviceMesh, there are no
            process groups, or this rank is not in it.
    """
    if not (dist.is_available() and dist.is_initialized()):
        if given is not None:
            raise ValueError(
                f"group={given!r} was given, but this process is in no process group: call"
                " torch.distributed.init_process_group() first, or leave group out to run on one"
                " process."
            )
        return None, [0]
    rank, group = dist.get_rank(), given
    if hasattr(given, "get_group"):
        if getattr(given, "ndim", 1) != 1:
            raise ValueError(
                f"group is a DeviceMesh of {given.ndim} dimensions {given.mesh_dim_names or ''}:"
                " expected a one-dimensional one. Give several axes as mesh=..., with data=(...) for"
                " those that carry different data."
            )
        group = given.get_group() if given.get_coordinate() else dist.GroupMember.NON_GROUP_MEMBER
    if group is None:
        return None, list(range(dist.get_world_size()))
    try:
        ranks = dist.get_process_group_ranks(group)
    except (KeyError, ValueError, TypeError, AttributeError):
        ranks = []
    if rank not in ranks:
        raise ValueError(
            f"group={given!r}: rank {rank} is not in the given group, and only its members call"
            " shard(). Give a torch.distributed ProcessGroup that was not destroyed"
            " (dist.new_group([0, 1])), a one-dimensional DeviceMesh, or None for all ranks."
        )
    return group, ranks


#: Outer replicas of a hybrid division, as torchtitan and transformers name that axis.
REPLICATE = "dp_replicate"


def mesh_of(mesh: Any, data: Sequence[str] | str | None) -> Mesh:
    """Return the ranks of a DeviceMesh, by the arguments of `shard()`.

    Raises:
        ValueError: `mesh` is no DeviceMesh with names, this rank is not in it, or `data` does not
            name axes of it.
    """
    if isinstance(mesh, Mesh):  # of a simulation, which reads it before tensors are fake
        return mesh
    if (names := getattr(mesh, "mesh_dim_names", None)) is None:
        raise ValueError(
            f"mesh={mesh!r}: expected a DeviceMesh with names, so that `data` can name the axes that"
            " carry different data, such as"
            " init_device_mesh('cuda', (4, 2), mesh_dim_names=('dp', 'tp'))."
        )
    found = tuple(mesh.mesh.flatten().tolist())
    if mesh.get_coordinate() is None:
        raise ValueError(
            f"rank {dist.get_rank()} is not in the given mesh (ranks {', '.join(map(str, found))}):"
            " only its members call shard()."
        )
    if data is None and len(names) > 1:
        raise ValueError(
            f"the mesh has the axes {', '.join(map(repr, names))}: give data=(...) the names of"
            " those whose ranks compute with different samples or tokens, such as"
            f" data=({names[0]!r},). The others (tensor parallelism) are then known to compute with"
            " the same."
        )
    chosen = names if data is None else (data,) if isinstance(data, str) else tuple(data)
    own = len(names) == 1 and len(found) < dist.get_world_size()
    group = mesh.get_group() if own else None
    return Mesh(tuple(names), tuple(mesh.shape), chosen, found, group)


def one_axis(given: Any) -> Mesh:
    """Return a mesh of one data axis, of a process group's ranks. Raises as `members`."""
    group, ranks = members(given)
    return Mesh(("data",), (len(ranks),), ("data",), tuple(ranks), group, plain=True)


def backend_of(process_group: Any, device: torch.device) -> str:
    """Return the backend that moves tensors of `device` in this group: 'gloo', 'nccl', ...

    A group that was made without naming a backend has that of the machine's accelerator (torch
    2.13), or one for each type of device (before). If 'gloo' was named, it moves tensors of any
    device, through the host.

    Raises:
        ValueError: the group has no backend for such tensors.
    """
    backends = dict(
        part.split(":") for part in dist.get_backend_config(process_group).split(",") if ":" in part
    )
    if found := backends.get(device.type):
        return found
    if str(dist.get_backend(process_group)) == "gloo":
        return "gloo"
    wanted = f"cpu:gloo,{device.type}:{backend_name(device)}" if device.type != "cpu" else "gloo"
    # Who has forgotten to move the model to its device does not want to train on the CPU
    there = next((kind for kind in backends if kind != "cpu"), device.type)
    raise ValueError(
        f"the model is on {device}, and the process group has no backend for {device.type!r} tensors"
        f" (it has {backends}): give shard() another group or device ({there!r}), or start it with"
        f" torch.distributed.init_process_group({wanted!r})."
    )


def refuse_shared_device(places: Mapping[int, object], device: torch.device) -> None:
    """Raise ValueError if several ranks compute on one device. NCCL would refuse it too, later, and
    without naming a cure.

    Args:
        places: what identifies each global rank's host and device.
        device: this rank's device.
    """
    sharing: dict[object, list[int]] = {}
    for rank, place in places.items():
        sharing.setdefault(place, []).append(rank)
    together = max(sharing.values(), key=len)
    if len(together) == 1:
        return
    raise ValueError(
        f"ranks {format_ranks(sorted(together))} compute on one device ({device} on rank"
        f" {dist.get_rank()}, which sees {device_count()}), and the backend needs one for each rank."
        " Start as many ranks on each host as it has devices (torchrun --nproc-per-node), and give each"
        f" its own before shard(): torch.{device.type}.set_device(int(os.environ['LOCAL_RANK']))."
    )


# -- nodes and groups ------------------------------------------------------------------------------
#
# Which ranks share a node, and how many ranks make a group.
#
# The nodes are those of the launcher's LOCAL_WORLD_SIZE. If it sets none, or none that can be used,
# the ranks compare the identities of their hosts (`host_identity`) when the group is made.
#
# | recipe's `group` | ranks of a group, every node having the same number (above 1) in sequence | else                     |
# |------------------|---------------------------------------------------------------------------|--------------------------|
# | None             | the ranks of a node: two levels                                           | all: one level           |
# | "node"           | the ranks of a node                                                       | raises, naming the nodes |
# | "flat"           | all: one level, every rank to every other                                 | the same                 |
# | a number         | that many                                                                 | the same                 |
#
# `Topology` (layout/flat.py) says which interval each rank then has.


def ranks_of_a_node() -> int | None:
    """Return the number of ranks on each node, as torchrun and its like say it in LOCAL_WORLD_SIZE;
    None if they do not, or if nodes have different numbers of ranks.

    A variable for another number of ranks than there are comes from an outer run, inside which this
    one was started.
    """
    here, of_all = (os.environ.get(n, "") for n in ("LOCAL_WORLD_SIZE", "WORLD_SIZE"))
    every = dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
    if not here.isdecimal() or of_all != str(every) or every % max(1, int(here)):
        return None
    return int(here) or None


def host_identity() -> str:
    """Return what tells this host from others: its name and the id of its boot, or NCCL_HOSTID if
    it is set. NCCL takes the same for a host.

    Containers on one machine have names of their own. They count as hosts of their own, since they
    reach each other over the network.
    """
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        boot = ""
    return os.environ.get("NCCL_HOSTID") or f"{socket.gethostname()} {boot}"


def inner_of(group: int | str | None, nodes: Sequence[int]) -> int:
    """Return the ranks of a group, by the table above. `nodes` has the node of each rank.

    Raises:
        ValueError: group="node", but the ranks are spread over nodes unevenly or not consecutively.
    """
    if group == FLAT:
        return len(nodes)
    if group is not None and group != NODE:
        return int(group)
    each = len(nodes) // len(set(nodes))
    uneven = _runs(nodes) != [each] * len(set(nodes))
    if group is None:  # by default, no groups if nodes are uneven or have one rank each
        return len(nodes) if uneven or each == 1 else each
    if uneven:
        raise ValueError(
            f"group='node': the ranks lie on nodes {list(nodes)}, unevenly. Give the same number of"
            " neighbouring ranks on each node, or the number of ranks of a group."
        )
    return each


def nodes_of(ranks: Sequence[int], per_node: int | None) -> list[int]:
    """Return the node of each global rank, of nodes of `per_node` consecutive ones; None: of one."""
    return [rank // per_node if per_node else 0 for rank in ranks]


def _runs(nodes: Sequence[int]) -> list[int]:
    """Return how many neighbours each run of ranks on one node has."""
    return [len(list(neighbours)) for _, neighbours in groupby(nodes)]


def flat_over(nodes: Sequence[int], topology: Topology) -> bool:
    """Return whether exchanges are flat over nodes: every rank sends to every other, although
    several share a node. `nodes` has the node of each rank.

    With m ranks on each node, reductions then send m times the bytes between nodes that they send
    on two levels.
    """
    return not topology.two_levels and 1 < len(set(nodes)) < len(nodes)


def communicators_of(topology: Topology) -> int:
    """Return how many native communicators an engine's `Group` makes over these ranks: one each for
    gathers and reductions over all ranks, or on two levels one over all ranks and two on each level.
    """
    if topology.size == 1:
        return 0
    return 5 if topology.two_levels else 2


def flat_note(ranks: Sequence[int], nodes: Sequence[int]) -> str:
    """Return a sentence for a default that is flat over nodes: why, what it costs and what to do.
    `nodes` has the node of each of the ranks.
    """
    by_node: dict[int, list[int]] = {}
    for rank, node in zip(ranks, nodes, strict=True):
        by_node.setdefault(node, []).append(rank)
    sizes, runs = [len(some) for some in by_node.values()], _runs(nodes)
    why = "unevenly" if len(set(sizes)) > 1 else "not as neighbours"
    cure, fitting = "numbered host by host", math.gcd(*runs)
    if fitting > 1:
        cure += f", or give group={fitting}: groups of ranks that share a host"
    return (
        f"the ranks lie on {len(sizes)} hosts {why} (ranks"
        f" {'; '.join(map(format_ranks, by_node.values()))}), so that no two levels can be made: every"
        f" rank sends to every other, up to {max(sizes)} times the bytes between hosts in a reduction."
        f" Start the same number of ranks on each host, {cure}."
    )


# -- communicators ---------------------------------------------------------------------------------
#
# The engine's own communicators over the ranks of one group: how they are made, split, aborted and
# destroyed.
#
#     gloo      new_group; beside a native backend, connected on demand
#     native    split_group of one of the same ranks, if the backend splits and the process group was made with its device; else new_group
#
# [Note: NCCL's patience] is in comm/pending.py.
#
# [Note: streams of high priority] The blocks of a collective are few and short, and a computation
# will wait for them. On a stream of normal priority they begin when a multiprocessor has room, which
# products of a large batch may leave in some milliseconds only. So communicators of NCCL run on
# streams of high priority. Other options are those of the parent, or NCCL's own.
#
# [Note: the garbage collector] Destroying a communicator of NCCL waits for its operations, and for the
# other ranks' part in it. Python's garbage collector runs at different points on each rank. So a
# model that the collector frees (one with reference cycles) leaves its native communicators in a
# list; the next call that makes or destroys communicators destroys them.
#
# [Note: the end of a process] To destroy a communicator of NCCL is a collective of the ranks on a
# node. A rank that ends with an exception would wait there for ranks that wait for it in a gather, and
# the launcher, which ends them, would not hear of it. So a process that ends destroys no native
# communicator: torch and the driver free them.
#
# [Note: connections on demand] gloo connects every rank to every other when a group is made. Beside a
# native backend it moves small messages only, between each rank and 2·log2(ranks) others. Such a group
# connects two ranks when one first sends to the other (torch 2.13 does so under TORCH_GLOO_LAZY_INIT).
# Until then a rank does not notice that another has ended. So a barrier when the group is made connects
# each rank with those that it exchanges small messages with: 1, 2, 4, ... places before and behind it.
#
# [Note: names of groups] The ranks of a new group find each other in the store under the group's
# name. torch makes it from a number of this process: how many groups it knows (2.13), or how many it
# has made (2.14). Ranks that are in different groups besides would wait under different names. After
# a group has gone, the next one could get its name, and find its old addresses. And on 2.14, groups
# that a subset of ranks makes would shift the names of all groups that the script makes later. So
# Onefold names its groups itself: after their ranks, the group that the script gave, and how often
# these have made some. So threads of which each has a group meet those of the other ranks. Groups that
# other threads make meanwhile keep torch's names.


#: Seconds added to twice the stall timeout for a native communicator.
MARGIN = 30.0


class Communicators:
    """Makes the communicators of one engine, over `ranks` (global) or some of them. `given`: the process
    group over them that the script gave, if any.

    Attributes:
        native: the communicators that are not gloo's.
    """

    def __init__(
        self, ranks: Sequence[int], device: torch.device, timeout: float, given: Any = None
    ) -> None:
        self.ranks, self.device, self.timeout, self.given = sorted(ranks), device, timeout, given
        self.native: list[Any] = []
        self._made: list[Any] = []

    def make(
        self,
        backend: str,
        parts: Sequence[Sequence[int]] = (),
        parent: Any = None,
        where: str = "shard()",
        on_demand: bool = False,
    ) -> Any:
        """Make one more communicator. Collective over the ranks of `parent`.

        Args:
            parts: a division of the parent's ranks, by their global numbers, to make one for the part
                that this rank is in; none to make one for all.
            parent: a native communicator, or process group, to split from.
            where: the user's call that needs it, for messages.
            on_demand: see [Note: connections on demand].

        Raises:
            StallError: the other ranks did not call it in time.
        """
        whole = sorted(rank for part in parts for rank in part) or self.ranks
        ranks = next((sorted(part) for part in parts if dist.get_rank() in part), whole)
        native = backend != "gloo"
        patience = timedelta(seconds=2 * self.timeout + MARGIN if native else self.timeout)
        destroy_left()

        def new() -> Any:
            with guard(self.device), self._named(ranks):  # each thread has a device of its own
                if native and self._can_split(parent, whole):
                    numbers = {rank: number for number, rank in enumerate(whole)}
                    cut = sorted(
                        sorted(numbers[rank] for rank in part) for part in parts or [whole]
                    )
                    return self._split(parent, cut, patience, backend)
                # A subset calls new_group without the others, which use_local_synchronization
                # allows; over all ranks it is collective.
                options: dict[str, Any] = (
                    {}
                    if len(ranks) == dist.get_world_size()
                    else {"use_local_synchronization": True}
                )
                if backend == "nccl":
                    asked = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
                    asked._timeout = patience  # torch warns of another one than `timeout`
                    options["pg_options"] = asked
                with _connecting_on_demand() if on_demand else contextlib.nullcontext():
                    return dist.new_group(ranks, backend=backend, timeout=patience, **options)

        start = time.perf_counter()
        try:
            # torch's own limits, where it has some, are reached first
            made = within(self.timeout + GRACE, new)
            self._made.append(made)
            if on_demand:
                within(self.timeout + GRACE, lambda: made.barrier().wait())
        except RuntimeError as error:
            raise StallError(
                f"rank {dist.get_rank()} waited {time.perf_counter() - start:.0f} s in {where} for the"
                f" other ranks of {ranks} to call it too. (backend:"
                f" {str(error).splitlines()[0][:200]})"
            ) from None
        if native:
            self.native.append(made)
            if _follow_collector not in gc.callbacks:
                gc.callbacks.append(_follow_collector)
        return made

    def _can_split(self, parent: Any, ranks: list[int]) -> bool:
        """Whether torch can split `parent`, and all its ranks, which a split waits for, are `ranks`: the
        process group was made with a device_id.
        """
        default = dist.distributed_c10d._get_default_group()
        group = parent or default
        # torch cannot split a group that was made without naming a backend
        if (
            default.bound_device_id is None
            or str(dist.get_backend(group)) == "undefined"
            or dist.get_process_group_ranks(group) != ranks
        ):
            return False
        try:
            return bool(group._get_backend(self.device).supports_splitting)
        except (RuntimeError, AttributeError):
            return False

    def _split(self, parent: Any, parts: list[list[int]], patience: timedelta, backend: str) -> Any:
        options: dict[str, Any] = {}
        if ":" in str(dist.get_backend(parent)):
            # Else all backends of the parent are split, gloo's too
            options["backend"] = f"{self.device.type}:{backend}"
        group = parent or dist.distributed_c10d._get_default_group()
        own = getattr(group._get_backend(self.device), "options", None)
        if hasattr(own, "is_high_priority_stream"):
            options["pg_options"] = copy.deepcopy(own)  # torch writes into what it is given
            options["pg_options"].is_high_priority_stream = True
        return dist.split_group(parent, parts, timeout=patience, **options)

    @contextlib.contextmanager
    def _named(self, ranks: Sequence[int]) -> Iterator[None]:
        """Give the group made inside a name of its own. See [Note: names of groups].

        torch takes no name. So its function that makes one is exchanged for as long as some thread
        is inside; other threads get what it answers.
        """
        global _inside
        c10d = dist.distributed_c10d
        place = f"onefold/groups/{format_ranks(ranks)}/{getattr(self.given, 'group_name', '')}"
        # The same number on every rank: each has come here equally often
        turn = default_store().add(f"{place}/turns/{dist.get_rank()}", 1)
        with _CHANGING:
            if not _inside:
                by_torch = c10d._process_group_name

                @functools.wraps(by_torch)
                def name(ranks: Sequence[int], use_hashed_name: bool) -> Any:
                    return _NAME.get() or by_torch(ranks, use_hashed_name)

                c10d._process_group_name = name
            _inside += 1
        token = _NAME.set(f"{place}/{turn}")
        try:
            yield
        finally:
            _NAME.reset(token)
            with _CHANGING:
                _inside -= 1
                if not _inside:
                    c10d._process_group_name = c10d._process_group_name.__wrapped__  # type: ignore[attr-defined]

    def give_up(self) -> None:
        """Abort native communicators: operations that wait for a missing rank end. Local."""
        native, self.native = self.native, []
        for group in native:
            with contextlib.suppress(Exception):  # gone already
                group.abort()

    def close(self) -> None:
        """Destroy all communicators, at the end of the process those of gloo. Call it when no
        collective is in flight; the ranks of a node destroy native ones together.
        """
        native, groups, self._made, self.native = self.native, self._made, [], []
        if _COLLECTING.now or _ending.is_set():
            _LEFT.extend(native)
            groups = [group for group in groups if not any(group is each for each in native)]
        else:
            destroy_left()
        _destroy(groups)


#: The name of the group that is made next in this context; "": torch's.
_NAME: ContextVar[str] = ContextVar("name of a group", default="")
_CHANGING = threading.Lock()
#: How many threads are inside `_named`.
_inside = 0


@contextlib.contextmanager
def _connecting_on_demand() -> Iterator[None]:
    """Have gloo connect on demand in the groups that are made inside. torch offers a variable only,
    and reads it for each group. One that the user has set stays.
    """
    name = "TORCH_GLOO_LAZY_INIT"
    if name in os.environ:
        yield
        return
    os.environ[name] = "1"
    try:
        yield
    finally:
        os.environ.pop(name, None)


@functools.cache
def warn_of_one_connection(device: torch.device) -> None:
    """Warn, once, if all streams of a CUDA device share one queue."""
    name = "CUDA_DEVICE_MAX_CONNECTIONS"
    if device.type == "cuda" and os.environ.get(name) == "1":
        warnings.warn(
            f"{name}=1 gives all streams of the device one queue. Gathers and reductions have a"
            " communicator each, and their order may differ between ranks: in one queue they can"
            f" wait for each other without end. Unset {name}, or set it to 8 or more, before the"
            " process starts.",
            stacklevel=2,
        )


# -- the garbage collector, and the end of a process -----------------------------------------------


class _Collecting(threading.local):
    """Whether Python's garbage collector runs in this thread. See [Note: the garbage collector]."""

    now = False


_COLLECTING = _Collecting()
#: Native communicators of models that the collector freed.
_LEFT: list[Any] = []


def _follow_collector(phase: str, _: Any) -> None:
    _COLLECTING.now = phase == "start"


# See [Note: the end of a process]
_ending = threading.Event()


@functools.cache
def note_exit() -> None:
    """Have the end of the process noted. Called when a finalizer exists that closes communicators:
    what is registered last runs first.
    """
    atexit.register(_ending.set)


def destroy_left() -> None:
    """Destroy the communicators of models that the garbage collector has freed. Local."""
    if not _COLLECTING.now and not _ending.is_set():
        left = _LEFT[:]
        _LEFT.clear()
        _destroy(left)


def _destroy(groups: Sequence[Any]) -> None:
    for group in groups:
        with contextlib.suppress(Exception):  # already destroyed with the default group
            dist.destroy_process_group(group)
