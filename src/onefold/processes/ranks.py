"""This rank among the others: its device, its process groups, and the few numbers that ranks tell each
other on the host.

    join           torch.distributed, under a name of this start's own (`rendezvous`)
    Ranks          sums, gathers and broadcasts of small values over a gloo group of their own
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
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from onefold.comm import StallError
from onefold.device import backend_name, default_device, free_memory, set_default
from onefold.memory.host import free_host_memory
from onefold.wording import TrainError

#: Seconds in which all ranks must have started.
STARTING = 1800.0
#: Seconds between two looks at the store.
INTERVAL = 0.02
T = TypeVar("T")


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

    def sum(self, *values: float, how: Any = dist.ReduceOp.SUM) -> list[float]:
        """Each value summed (or reduced otherwise) over ranks. Collective."""
        numbers = torch.tensor(values, dtype=torch.float64)
        self._talk(
            "the ranks' figures", lambda: dist.all_reduce(numbers, op=how, group=self.control)
        )
        return numbers.tolist()

    def least(self, value: float) -> float:
        """The least value of all ranks. Collective."""
        return self.sum(value, how=dist.ReduceOp.MIN)[0]

    def most(self, value: float) -> float:
        """The greatest value of all ranks. Collective."""
        return self.sum(value, how=dist.ReduceOp.MAX)[0]

    def from_first(self, value: Any) -> Any:
        """What rank 0 has, on every rank. Collective; it must pickle."""
        box = [value]
        self._talk(
            "what the first rank says",
            lambda: dist.broadcast_object_list(box, src=0, group=self.control),
        )
        return box[0]

    def on_first(self, make: Callable[[], T]) -> T:
        """What `make` gives on rank 0, on every rank; what it raises, too. Collective."""
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
        """Every rank's value, in rank order. Collective; it must pickle."""
        found: list[Any] = [value] * self.world_size
        self._talk(
            "what each rank says", lambda: dist.all_gather_object(found, value, group=self.control)
        )
        return found

    def free_memory(self) -> int:
        """Bytes free for this rank: of its GPU, or its part of the host's."""
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


def join(device: str, timeout: float) -> Ranks:
    """Initialize torch.distributed from what the launcher has set, and say where this rank stands.
    `timeout`: seconds after which a collective on the host gives up.
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
        store = dist.PrefixStore(rendezvous(store, rank, world_size, STARTING), store)
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
    """Free the process groups. On clean exits only: a stuck collective would be waited for."""
    if dist.is_initialized():
        dist.destroy_process_group()


def rendezvous(store: dist.Store, rank: int, world_size: int, timeout: float) -> str:
    """A name for this start of the ranks, the same on all of them and on no other start's.
    Collective.

    torchrun may keep one store over restarts (torch 2.13 does), with addresses of a start that was
    killed. Its restart count tells starts apart on one machine only, since each agent counts its
    own. So the ranks agree:

        every rank   hello/R  = a fresh random number                    (over what an earlier start's rank R had said)
        rank 0       answer   = all numbers as it has read them     ◄─┐
        every rank   ok/R     = digest of an answer with its own number │ again, until
        rank 0       all ok/R are the digest of its answer?  no ────────┘ they are
                     final    = that digest: the name

    Raises:
        TrainError: not all ranks came within `timeout` seconds.
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
