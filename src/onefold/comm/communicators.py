"""Communicators of the engine's own, over the ranks of one group: made, split, given up and given
back.

    gloo      new_group
    native    split_group of one that is there, if the backend can split and the process group was made with its device; else new_group

[Note: NCCL's patience] A wait for NCCL is the device's, so that the host learns of a rank that does
not come at the end of the backward pass, in the exchange over gloo, and says so in a `StallError`.
NCCL has a watchdog of its own that ends the process without one. A native communicator therefore
has twice the time and half a minute: the exchange begins at most a pass after the move that waits.
"""

from __future__ import annotations

import contextlib
import inspect
import time
from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from onefold.comm.stall import StallError

#: Seconds that a native communicator has beyond twice the stall timeout.
MARGIN = 30.0


class Communicators:
    """Makes communicators over `ranks` (global, in the order of their numbers). Collective over
    them.

    Attributes:
        native: those that are not gloo's.
    """

    def __init__(self, ranks: Sequence[int], device: torch.device, timeout: float) -> None:
        self.ranks, self.device, self.timeout = sorted(ranks), device, timeout
        self.native: list[Any] = []
        self._made: list[Any] = []

    def make(
        self, backend: str, timeout: float | None = None, where: str = "shard()", parent: Any = None
    ) -> Any:
        """One more.

        Args:
            timeout: seconds of a wait; for a native one see [Note: NCCL's patience].
            where: the call that this is for, for messages.
            parent: a native communicator, or process group, over the same ranks, to split from.

        Raises:
            StallError: the other ranks do not come.
        """
        return self._make(
            backend,
            self.timeout if timeout is None else timeout,
            where,
            parent,
            [list(range(len(self.ranks)))],
        )

    def make_part(self, backend: str, parent: Any, parts: list[list[int]]) -> Any:
        """One over those of `parts` that this rank is in, which are these ranks.

        Args:
            parent: a communicator over the union of `parts`. parts: its ranks by its own numbers,
                divided.
        """
        return self._make(backend, self.timeout, "shard()", parent, parts)

    def _make(
        self, backend: str, timeout: float, where: str, parent: Any, parts: list[list[int]]
    ) -> Any:
        patience = timedelta(seconds=timeout if backend == "gloo" else 2 * timeout + MARGIN)
        start = time.perf_counter()
        try:
            if backend != "gloo" and self._can_split(parent):
                made = _split(parent, parts, patience, f"{self.device.type}:{backend}")
            else:
                # A subset calls new_group without the others, which use_local_synchronization
                # allows; over all ranks it is collective.
                options: dict[str, Any] = (
                    {}
                    if len(self.ranks) == dist.get_world_size()
                    else {"use_local_synchronization": True}
                )
                made = dist.new_group(self.ranks, backend=backend, timeout=patience, **options)
        except RuntimeError as error:
            raise self.alone(time.perf_counter() - start, where, error) from None
        self._made.append(made)
        if backend != "gloo":
            self.native.append(made)
        return made

    def _can_split(self, parent: Any) -> bool:
        """Whether torch splits `parent` (None: the default group): it wants to know the device
        since the process group was made.
        """
        default = dist.distributed_c10d._get_default_group()
        if getattr(default, "bound_device_id", None) is None or not hasattr(dist, "split_group"):
            return False
        group = default if parent is None else parent
        # Torch splits no group of backends that it chose by itself
        if str(dist.get_backend(group)) == "undefined":
            return False
        try:
            found = group._get_backend(self.device)
        except RuntimeError:
            return False
        return bool(getattr(found, "supports_splitting", False))

    def alone(self, waited: float, where: str, error: Exception) -> StallError:
        """What a rank says that waited in `where` for the others."""
        return StallError(
            f"rank {dist.get_rank()} waited {waited:.0f} s in {where} for the other ranks of"
            f" {self.ranks} to call it too. (backend: {str(error).splitlines()[0][:200]})"
        )

    @contextlib.contextmanager
    def rendezvous(self) -> Iterator[None]:
        """Inside, the ranks of a subset know equally many groups, and more than when they last made
        one.

        torch makes the name by which a subset's new group meets from its ranks and that number: a
        rank that is in more groups than another would wait under another name, and after a group
        has gone the next would meet at its stale addresses. Lone groups make up the difference.
        """
        known = getattr(getattr(dist.distributed_c10d, "_world", None), "pg_names", None)
        if len(self.ranks) == dist.get_world_size() or known is None:
            yield
            return
        me, store, name = (
            dist.get_rank(),
            dist.distributed_c10d._get_default_store(),
            f"onefold/groups/{self.ranks}/",
        )
        # The same on every rank, since each comes here as often as the others
        turn = store.add(f"{name}turns/{me}", 1)
        used = int(store.get(f"{name}used/{me}")) if turn > 1 else 0
        store.set(f"{name}{turn}/{me}", str(max(len(known), used)))
        keys, start = [f"{name}{turn}/{rank}" for rank in self.ranks], time.perf_counter()
        try:
            store.wait(keys, timedelta(seconds=self.timeout))
        except RuntimeError as error:
            raise self.alone(time.perf_counter() - start, "shard()", error) from None
        most = max(int(store.get(key)) for key in keys)
        fill = [
            dist.new_group([me], backend="gloo", use_local_synchronization=True)
            for _ in range(most - len(known))
        ]
        try:
            yield
        finally:
            store.set(f"{name}used/{me}", str(len(known)))
            for lone in fill:
                dist.destroy_process_group(lone)

    def give_up(self) -> None:
        """Abort the native ones: what waits in them for a rank that does not come lets go of the
        device. Local.
        """
        native, self.native = self.native, []
        for group in native:
            with contextlib.suppress(Exception):  # gone already
                group.abort()

    def close(self) -> None:
        """Give them back. Local; call it when nothing is under way."""
        groups, self._made, self.native = self._made, [], []
        for group in groups:
            with contextlib.suppress(Exception):  # already destroyed with the default group
                dist.destroy_process_group(group)


def _split(parent: Any, parts: list[list[int]], patience: timedelta, backend: str) -> Any:
    options = {}
    if (
        ":" in str(dist.get_backend(parent))
        and "backend" in inspect.signature(dist.split_group).parameters
    ):
        options["backend"] = backend  # else all backends of the parent are split, gloo's too
    return dist.split_group(parent, parts, timeout=patience, **options)
