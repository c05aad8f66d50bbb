"""This rank among the others: its device, its process groups, and the few numbers that ranks tell
each other on the host.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from onefold.comm import StallError
from onefold.device import backend_name, default_device, free_memory, set_default
from onefold.memory.host import free_host_memory
from onefold.train.rendezvous import meet

#: Seconds in which all ranks must have started.
MEETING = 1800.0


@dataclass
class Ranks:
    """Where this process stands.

    Attributes:
        rank, world_size: among all ranks of the run.
        local_rank, local_world_size: among those of this machine.
        device: where it computes.
        backend: of the collectives that move states.
        control: a gloo group of its own for numbers on the host, so that they never mix with the
            engine's collectives.
    """

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    device: torch.device
    backend: str
    control: dist.ProcessGroup | None

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    def sum(self, *values: float) -> list[float]:
        """Each value summed over ranks. Collective."""
        return self._reduce(values, dist.ReduceOp.SUM)

    def least(self, *values: float) -> list[float]:
        """The least of each value over ranks. Collective."""
        return self._reduce(values, dist.ReduceOp.MIN)

    def most(self, *values: float) -> list[float]:
        """The greatest of each value over ranks. Collective."""
        return self._reduce(values, dist.ReduceOp.MAX)

    def from_first(self, value: Any) -> Any:
        """What rank 0 has, on every rank. Collective; it must pickle."""
        if self.world_size == 1:
            return value
        box = [value]
        self._talk(
            "what the first rank says",
            lambda: dist.broadcast_object_list(box, src=0, group=self.control),
        )
        return box[0]

    def gather(self, value: Any) -> list[Any]:
        """Every rank's value, in rank order. Collective; it must pickle."""
        if self.world_size == 1:
            return [value]
        found: list[Any] = [None] * self.world_size
        self._talk(
            "what each rank says", lambda: dist.all_gather_object(found, value, group=self.control)
        )
        return found

    def wait(self) -> None:
        """Until every rank is here. Collective."""
        if self.world_size > 1:
            self._talk("each other", lambda: dist.barrier(group=self.control))

    def free_memory(self) -> int:
        """Bytes free for this rank: of its GPU, or its part of the host's."""
        if self.device.type != "cpu":
            return free_memory(self.device)
        return free_host_memory() // self.local_world_size

    def _reduce(self, values: tuple[float, ...], how: Any) -> list[float]:
        if self.world_size == 1:
            return list(values)
        numbers = torch.tensor(values, dtype=torch.float64)
        self._talk(
            "the ranks' figures", lambda: dist.all_reduce(numbers, op=how, group=self.control)
        )
        return numbers.tolist()

    def _talk(self, what: str, act: Callable[[], object]) -> None:
        try:
            act()
        except RuntimeError as error:
            text = str(error).splitlines()[0][:200]
            raise StallError(
                f"rank {self.rank} lost the others while it waited for {what}. (backend: {text})"
            ) from None


def join(device: str, timeout: float) -> Ranks:
    """Initialize torch.distributed from what the launcher has set, and say where this rank stands.

    Args:
        device: "auto", "cpu" or "cuda".
        timeout: seconds after which a collective on the host gives up.
    """
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    local_rank = int(os.environ.get("LOCAL_RANK", 0))
    local_world_size = int(os.environ.get("LOCAL_WORLD_SIZE", world_size))
    kind = default_device().type if device == "auto" else device
    where = torch.device(kind, local_rank) if kind != "cpu" else torch.device("cpu")
    set_default(where)
    backend = backend_name(where)
    store, _, _ = next(dist.rendezvous("env://", rank, world_size))
    if world_size > 1:
        store = dist.PrefixStore("onefold", store)
        store = dist.PrefixStore(meet(store, rank, world_size, MEETING), store)
    dist.init_process_group(
        backend if kind == "cpu" else f"cpu:gloo,{kind}:{backend}",
        store=store,
        rank=rank,
        world_size=world_size,
    )
    # Loading, sampling and saving keep rank 0 longer than the others, so the host group is patient.
    patience = timedelta(seconds=max(1800.0, timeout))
    control = dist.new_group(backend="gloo", timeout=patience) if world_size > 1 else None
    return Ranks(rank, world_size, local_rank, local_world_size, where, backend, control)


def leave() -> None:
    """Free the process groups; on clean exits only, since destroying them while a collective is
    stuck would wait for it.
    """
    if dist.is_initialized():
        dist.destroy_process_group()
