"""The ranks of one start meet, apart from what earlier starts have left in the same store.

torchrun may keep one store over restarts (torch 2.13 does), and keys of a start that was killed
then stand in it: addresses where nobody listens any more. The restart count tells starts apart on
one machine, not on several, where each agent counts its own. So the ranks agree on a name of their
own for this start, and everything they store afterwards begins with it:

    every rank   hello/R  = a fresh random number                                    (over what an earlier start's rank R had said)
    rank 0       answer   = all numbers as it has read them     ◄─┐
    every rank   ok/R     = digest of an answer with its own number │ again, until
    rank 0       all ok/R are the digest of its answer?  no ────────┘ they are
                 final    = that digest: the name
"""

from __future__ import annotations

import hashlib
import json
import secrets
import time

import torch.distributed as dist

from onefold.train.errors import TrainError

#: Seconds between two looks.
INTERVAL = 0.02


def meet(store: dist.Store, rank: int, world_size: int, timeout: float) -> str:
    """The name of this start, the same on all its ranks and on no other start's. Collective.

    Raises:
        TrainError: not all ranks came within `timeout` seconds.
    """
    mine, end = secrets.token_hex(8), time.monotonic() + timeout
    store.set(f"hello/{rank}", mine)
    while time.monotonic() < end:
        name = _lead(store, world_size) if rank == 0 else _follow(store, rank, mine)
        if name is not None:
            return name
        time.sleep(INTERVAL)
    missing = [r for r in range(world_size) if not store.check([f"hello/{r}"])] if rank == 0 else []
    who = f"ranks {', '.join(map(str, missing))}" if missing else "some ranks"
    raise TrainError(
        f"rank {rank} waited {timeout:.0f} s for all {world_size} ranks to start; {who} did not"
        " come."
    )


def _lead(store: dist.Store, world_size: int) -> str | None:
    hellos = _all(store, "hello", world_size)
    if hellos is None:
        return None
    answer = json.dumps(hellos)
    if not store.check(["answer"]) or store.get("answer").decode() != answer:
        store.set("answer", answer)
    digest = _digest(answer)
    others = _all(store, "ok", world_size, first=1)
    if others is None or any(other != digest for other in others):
        return None
    store.set("final", digest)
    return digest


def _follow(store: dist.Store, rank: int, mine: str) -> str | None:
    if not store.check(["answer"]):
        return None
    answer = store.get("answer").decode()
    hellos = json.loads(answer)
    if len(hellos) <= rank or hellos[rank] != mine:
        return None
    digest = _digest(answer)
    if not store.check([f"ok/{rank}"]) or store.get(f"ok/{rank}").decode() != digest:
        store.set(f"ok/{rank}", digest)
    return digest if store.check(["final"]) and store.get("final").decode() == digest else None


def _all(store: dist.Store, what: str, world_size: int, first: int = 0) -> list[str] | None:
    keys = [f"{what}/{r}" for r in range(first, world_size)]
    return (
        [value.decode() for value in store.multi_get(keys)]
        if not keys or store.check(keys)
        else None
    )


def _digest(answer: str) -> str:
    return hashlib.sha256(answer.encode()).hexdigest()[:16]
