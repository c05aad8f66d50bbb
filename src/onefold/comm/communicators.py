"""The engine's own communicators over the ranks of one group: how they are made, split, aborted and
destroyed.

    gloo      new_group; beside a native backend, connected on demand
    native    split_group of an existing one, if the backend can split and the process group was made with its device; else new_group

[Note: NCCL's patience] The device waits for NCCL, not the host. The host notices a missing rank two
units later (comm/run_ahead.py), or at the end of the backward pass, in the exchange over gloo, and
then raises a `StallError`. NCCL's own watchdog would end the process without that error. A native
communicator therefore has twice the stall timeout plus half a minute: the host begins to wait at
most a pass after the move that waits. Only the watchdog helps a script that reads a number of the
device (`loss.item()`) before either: torch then waits without a limit.

[Note: streams of high priority] The blocks of a collective are few and short, and a computation
will wait for them. On a stream of normal priority they begin when a multiprocessor has room, which
products of a large batch may leave in some milliseconds only. So communicators of NCCL run on
streams of high priority. Other options are those of the parent, or NCCL's own.

[Note: the garbage collector] Destroying a communicator of NCCL waits for its operations, and for the
other ranks' part in it. Python's garbage collector runs at different points on each rank. So a
model that the collector frees (one with reference cycles) leaves its native communicators in a
list; the next call that makes or destroys communicators destroys them, or the end of the process.

[Note: connections on demand] gloo connects every rank to every other when a group is made. Beside a
native backend it moves small messages only, between each rank and 2·log2(ranks) others. Such a group
connects two ranks when one first sends to the other (torch 2.13 does so under TORCH_GLOO_LAZY_INIT).
Until then a rank does not notice that another has ended, and waits up to five times the group's
timeout for it. So ranks wait for each other in the store when the group is made. Then a barrier
connects each rank with those that it exchanges small messages with: 1, 2, 4, ... places before and
behind it.

[Note: names of groups] The ranks of a new group find each other in the store under the group's
name. torch makes it from a number of this process: how many groups it knows (2.13), or how many it
has made (2.14). Ranks that are in different groups besides would wait under different names. After
a group has gone, the next one could get its name, and find its old addresses. And on 2.14, groups
that a subset of ranks makes would shift the names of all groups that the script makes later. So
Onefold names its groups itself: after their ranks, and how often these have made some. Groups that
other threads make meanwhile keep torch's names.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import gc
import itertools
import os
import threading
import time
import warnings
from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from onefold.comm.members import format_ranks
from onefold.comm.stall import StallError

#: Seconds added to twice the stall timeout for a native communicator.
MARGIN = 30.0


class Communicators:
    """Makes communicators over `ranks` (global, in ascending order). Collective over these ranks.

    Attributes:
        native: the communicators that are not gloo's.
    """

    def __init__(self, ranks: Sequence[int], device: torch.device, timeout: float) -> None:
        self.ranks, self.device, self.timeout = sorted(ranks), device, timeout
        self.native: list[Any] = []
        self._made: list[Any] = []

    def make(
        self,
        backend: str,
        timeout: float | None = None,
        where: str = "shard()",
        parent: Any = None,
        on_demand: bool = False,
    ) -> Any:
        """Make one more communicator.

        Args:
            timeout: seconds that a wait may take; for a native one see [Note: NCCL's patience].
            where: the user's call that needs it, for messages.
            parent: a native communicator, or process group, over the same ranks, to split from.
            on_demand: see [Note: connections on demand].

        Raises:
            StallError: the other ranks did not call it in time.
        """
        patience = self.timeout if timeout is None else timeout
        whole = [list(range(len(self.ranks)))]
        if not on_demand:
            return self._make(backend, patience, where, parent, whole)
        with _connecting_on_demand():
            made = self._make(backend, patience, where, parent, whole)
        start = time.perf_counter()
        try:
            self._meet(made.group_name, patience)
            made.barrier().wait()
        except RuntimeError as error:
            raise self.alone(time.perf_counter() - start, where, error) from None
        return made

    def _meet(self, name: str, timeout: float) -> None:
        """Wait in the store until all ranks have come here. Raises RuntimeError after `timeout`
        seconds.
        """
        store, place = dist.distributed_c10d._get_default_store(), f"onefold/met/{name}"
        if store.add(place, 1) == len(self.ranks):
            store.set(f"{place}/all", "")
        store.wait([f"{place}/all"], timedelta(seconds=timeout))

    def make_part(self, backend: str, parent: Any, parts: list[list[int]]) -> Any:
        """Make a communicator over the part that this rank is in. `self.ranks` must be that part.

        Args:
            parent: a communicator over the union of `parts`.
            parts: a division of the parent's ranks, by their numbers in it.
        """
        return self._make(backend, self.timeout, "shard()", parent, parts)

    def _make(
        self, backend: str, timeout: float, where: str, parent: Any, parts: list[list[int]]
    ) -> Any:
        patience = timedelta(seconds=timeout if backend == "gloo" else 2 * timeout + MARGIN)
        destroy_left()
        start = time.perf_counter()
        try:
            if backend != "gloo" and self._can_split(parent):
                made = _split(parent, parts, patience, self.device, backend)
            else:
                # A subset calls new_group without the others, which use_local_synchronization
                # allows; over all ranks it is collective.
                options: dict[str, Any] = (
                    {}
                    if len(self.ranks) == dist.get_world_size()
                    else {"use_local_synchronization": True}
                )
                if backend == "nccl":
                    options["pg_options"] = dist.ProcessGroupNCCL.Options(
                        is_high_priority_stream=True
                    )
                made = dist.new_group(self.ranks, backend=backend, timeout=patience, **options)
        except RuntimeError as error:
            raise self.alone(time.perf_counter() - start, where, error) from None
        self._made.append(made)
        if backend != "gloo":
            self.native.append(made)
            if _follow_collector not in gc.callbacks:
                gc.callbacks.append(_follow_collector)
        return made

    def _can_split(self, parent: Any) -> bool:
        """Whether torch can split `parent` (None: the default group). It can only if the process
        group was made with a device_id.
        """
        default = dist.distributed_c10d._get_default_group()
        if getattr(default, "bound_device_id", None) is None:
            return False
        group = default if parent is None else parent
        # torch cannot split a group that was made without naming a backend
        if str(dist.get_backend(group)) == "undefined":
            return False
        try:
            found = group._get_backend(self.device)
        except RuntimeError:
            return False
        return bool(getattr(found, "supports_splitting", False))

    def alone(self, waited: float, where: str, error: Exception) -> StallError:
        """Return the error of a rank that waited in `where` for the others."""
        return StallError(
            f"rank {dist.get_rank()} waited {waited:.0f} s in {where} for the other ranks of"
            f" {self.ranks} to call it too. (backend: {str(error).splitlines()[0][:200]})"
        )

    @contextlib.contextmanager
    def named(self) -> Iterator[None]:
        """Give the groups made inside names of their own. See [Note: names of groups]. Local."""
        place, me = f"onefold/groups/{format_ranks(self.ranks)}", dist.get_rank()
        # The same number on every rank: each has come here equally often
        store = dist.distributed_c10d._get_default_store()
        turn = store.add(f"{place}/turns/{me}", 1)
        names = (f"{place}/{turn}.{number}" for number in itertools.count(1))
        with _named_by(names):
            yield

    def give_up(self) -> None:
        """Abort the native communicators, so that operations waiting for a missing rank free the
        device. Local.
        """
        native, self.native = self.native, []
        for group in native:
            with contextlib.suppress(Exception):  # gone already
                group.abort()

    def close(self) -> None:
        """Destroy all communicators. Local; call it when no collective is in flight."""
        native, groups, self._made, self.native = self.native, self._made, [], []
        if _COLLECTING.now:
            _LEFT.extend(native)
            groups = [group for group in groups if not any(group is each for each in native)]
        else:
            destroy_left()
        _destroy(groups)


def _split(
    parent: Any, parts: list[list[int]], patience: timedelta, device: torch.device, backend: str
) -> Any:
    options: dict[str, Any] = {}
    if ":" in str(dist.get_backend(parent)):
        # Else all backends of the parent are split, gloo's too
        options["backend"] = f"{device.type}:{backend}"
    group = dist.distributed_c10d._get_default_group() if parent is None else parent
    own = getattr(group._get_backend(device), "options", None)
    if hasattr(own, "is_high_priority_stream"):
        options["pg_options"] = copy.deepcopy(own)  # torch writes into what it is given
        options["pg_options"].is_high_priority_stream = True
    return dist.split_group(parent, parts, timeout=patience, **options)


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
            f" wait for each other without end. Uninitialized {name}, or set it to 8 or more, before the"
            " process starts.",
            stacklevel=2,
        )


# -- the garbage collector -------------------------------------------------------------------------


class _Collecting(threading.local):
    """Whether Python's garbage collector runs in this thread. See [Note: the garbage collector]."""

    now = False


_COLLECTING = _Collecting()
#: Native communicators of models that the collector freed.
_LEFT: list[Any] = []


def _follow_collector(phase: str, _: Any) -> None:
    _COLLECTING.now = phase == "start"


def destroy_left() -> None:
    """Destroy the communicators of models that the garbage collector has freed. Local."""
    if not _COLLECTING.now:
        left = _LEFT[:]
        _LEFT.clear()
        _destroy(left)


def _destroy(groups: Sequence[Any]) -> None:
    for group in groups:
        with contextlib.suppress(Exception):  # already destroyed with the default group
            dist.destroy_process_group(group)


# -- names -----------------------------------------------------------------------------------------


class _Names(threading.local):
    """The names of the groups that a thread makes next: `given`, else torch's."""

    given: Iterator[str] | None = None


_NAMES = _Names()
_CHANGING = threading.Lock()
#: How many threads are inside `_named_by`.
_inside = 0


@contextlib.contextmanager
def _named_by(names: Iterator[str]) -> Iterator[None]:
    """Have torch take `names` for the groups that this thread makes inside.

    `new_group` and `split_group` take no name. So torch's function that makes one is exchanged for
    as long as some thread is inside; other threads get what it answers.
    """
    global _inside
    c10d = dist.distributed_c10d
    with _CHANGING:
        if not _inside:
            by_torch = c10d._process_group_name

            @functools.wraps(by_torch)
            def name(ranks: Sequence[int], use_hashed_name: bool) -> Any:
                given = _NAMES.given
                return by_torch(ranks, use_hashed_name) if given is None else next(given)

            c10d._process_group_name = name
        _inside += 1
    _NAMES.given = names
    try:
        yield
    finally:
        _NAMES.given = None
        with _CHANGING:
            _inside -= 1
            if not _inside:
                c10d._process_group_name = c10d._process_group_name.__wrapped__  # type: ignore[attr-defined]
