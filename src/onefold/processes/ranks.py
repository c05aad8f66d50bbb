"""This rank: its device, its process groups, and the exchange of small values between ranks on the
host.

    join           initialize torch.distributed, under a name that is unique to this start (`rendezvous`)
    Ranks          sums, gathers and broadcasts of small values over the default group's gloo
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from onefold.comm import StallError
from onefold.comm.pending import within
from onefold.device import (
    backend_name,
    default_device,
    free_memory,
    of_local_rank,
    set_default,
)
from onefold.memory import free_host_memory
from onefold.wording import TrainError

#: Seconds within which all ranks must have started.
STARTING = 1800.0
#: Seconds between two reads of the store.
INTERVAL = 0.02
T = TypeVar("T")


@dataclass
class Ranks:
    """This process among all ranks of a run.

    Attributes:
        rank, world_size: its rank among all ranks of the run, and their number.
        local_rank, local_world_size: the same among the ranks of this machine.
        device: the device that it computes on.
        backend: the backend of collectives on that device.
        control: the default process group, whose gloo moves small values on the host. The engine
            has communicators of its own, and nothing else in a run of `onefold train` uses this
            one. None if there is one rank only.
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

    def sum(self, *values: float, how: Any = dist.ReduceOp.SUM) -> list[float]:
        """Return each value, summed (or reduced by `how`) over all ranks. Collective."""
        numbers = torch.tensor(values, dtype=torch.float64, device="cpu")
        self._talk(
            "the ranks' figures", lambda: dist.all_reduce(numbers, op=how, group=self.control)
        )
        return numbers.tolist()

    def least(self, value: float) -> float:
        """Return the least value of all ranks. Collective."""
        return self.sum(value, how=dist.ReduceOp.MIN)[0]

    def most(self, value: float) -> float:
        """Return the greatest value of all ranks. Collective."""
        return self.sum(value, how=dist.ReduceOp.MAX)[0]

    def from_first(self, value: Any) -> Any:
        """Return rank 0's value on every rank. The value must be picklable. Collective."""
        box = [value]
        self._talk(
            "what the first rank says",
            lambda: dist.broadcast_object_list(box, src=0, group=self.control),
        )
        return box[0]

    def on_first(self, make: Callable[[], T]) -> T:
        """Call `make` on rank 0, and return its result, or raise its error, on every rank.
        Collective.
        """
        found: Any = None
        if self.is_first:
            try:
                found = make()
            except Exception as error:
                found = error
        found = self.from_first(found)
        if isinstance(found, Exception):
            raise found
        return found

    def gather(self, value: Any) -> list[Any]:
        """Return every rank's value, in rank order. Values must be picklable. Collective."""
        found: list[Any] = [value] * self.world_size
        self._talk(
            "what each rank says", lambda: dist.all_gather_object(found, value, group=self.control)
        )
        return found

    def free_memory(self) -> int:
        """Return the free bytes of this rank's GPU; on the CPU, this rank's part of the host's."""
        if self.device.type != "cpu":
            return free_memory(self.device)
        return free_host_memory() // self.local_world_size

    def _talk(self, what: str, act: Callable[[], object]) -> None:
        if self.world_size == 1:
            return
        try:
            act()
        except RuntimeError as error:
            text = str(error).splitlines()[0][:200]
            raise StallError(
                f"rank {self.rank} lost the others while it waited for {what}. (backend: {text})"
            ) from None


def join(device: str, timeout: float, backend: str | None = None) -> Ranks:
    """Initialize torch.distributed from the launcher's environment variables. `timeout`: seconds
    after which a collective on the host fails (at least 1800). `backend`: None for the device's own.
    """
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    local_rank = int(os.environ.get("LOCAL_RANK", 0))
    local_world_size = int(os.environ.get("LOCAL_WORLD_SIZE", world_size))
    kind = default_device().type if device == "auto" else device
    where = of_local_rank(kind, local_rank) if kind != "cpu" else torch.device("cpu")
    set_default(where)
    backend = backend or backend_name(where)
    store, _, _ = next(dist.rendezvous("env://", rank, world_size))
    if world_size > 1:
        store = dist.PrefixStore("onefold", store)
        asked = partial(rendezvous, store, rank, world_size, STARTING)
        store = dist.PrefixStore(within(STARTING + 1.0, asked, store), store)
    dist.init_process_group(
        backend if kind == "cpu" else f"cpu:gloo,{kind}:{backend}",
        store=store,
        rank=rank,
        world_size=world_size,
        # Loading, sampling and saving take longer on rank 0
        timeout=timedelta(seconds=max(1800.0, timeout)),
    )
    control: Any = dist.group.WORLD if world_size > 1 else None
    return Ranks(rank, world_size, local_rank, local_world_size, where, backend, control)


def leave() -> None:
    """Destroy the process groups. For clean exits only: it would wait for a stuck collective."""
    if dist.is_initialized():
        dist.destroy_process_group()


def rendezvous(store: dist.Store, rank: int, world_size: int, timeout: float) -> str:
    """Return a name for this start of the ranks: the same on all ranks, and different from that of
    every other start. Collective.

    torchrun may keep one store over restarts (torch 2.13 does), which then contains addresses of a
    killed start. Its restart count does not identify a start, because each machine's agent counts
    separately. So the ranks agree on a name:

        every rank   hello/R  = a fresh random number                    (replaces that of an earlier start's rank R)
        rank 0       answer   = all numbers as it has read them     ◄─┐
        every rank   ok/R     = digest of an answer with its own number │ again, until
        rank 0       all ok/R are the digest of its answer?  no ────────┘ they are
                     final    = that digest: the name

    Raises:
        TrainError: not all ranks started within `timeout` seconds.
    """

    def read(*keys: str) -> list[str]:
        there = store.check(list(keys))
        return [value.decode() for value in store.multi_get(list(keys))] if there else []

    mine, end = secrets.token_hex(8), time.monotonic() + timeout
    hellos = [f"hello/{r}" for r in range(world_size)]
    store.set(hellos[rank], mine)
    while time.monotonic() < end:
        if rank == 0 and (said := read(*hellos)):
            answer = json.dumps(said)
            store.set("answer", answer)
        else:
            (answer,) = read("answer") or ["[]"]
        if mine in json.loads(answer)[rank : rank + 1]:
            name = hashlib.sha256(answer.encode()).hexdigest()[:16]
            store.set(f"ok/{rank}", name)
            if rank == 0 and read(*(f"ok/{r}" for r in range(world_size))) == [name] * world_size:
                store.set("final", name)
            if read("final") == [name]:
                return name
        time.sleep(INTERVAL)
    missing = [str(r) for r, key in enumerate(hellos) if rank == 0 and not store.check([key])]
    who = f"ranks {', '.join(missing)}" if missing else "some ranks"
    raise TrainError(
        f"rank {rank} waited {timeout:.0f} s for all {world_size} ranks to start; {who} did not"
        " come."
    )
