"""How many connections gloo holds beside a native backend: small messages connect on demand, and a
rank that does not come is told of as before.
"""

from __future__ import annotations

import os
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist

import onefold
import standin
from onefold.checkpoint.together import Together
from onefold.comm import StallError
from onefold.comm.communicators import Communicators
from onefold.processes.ranks import join, leave
from ranks import run_ranks
from started_runs import a_free_port
from zoo import TinyMLP, features_of

RANKS = 8
#: A rank talks to those 1, 2 and 4 places before and behind it (4 before is 4 behind).
PARTNERS = 5


def sockets() -> set[str]:
    """Sockets that this process has open, by inode: those opened since are told apart from those of
    earlier groups, which close whenever their partners do.
    """
    found = set()
    for number in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{number}")
        except OSError:  # that of the listing itself
            continue
        if target.startswith("socket:"):
            found.add(target)
    return found


def opened_by_control(native: bool) -> tuple[int, int]:
    """(sockets of a group made for control, those of it after messages in the engine's rounds)."""
    group = standin.new_group() if native else None
    made: list[int] = []
    make = Communicators.make

    def counted(self: Any, backend: str, *args: Any, **options: Any) -> Any:
        before = sockets()
        out = make(self, backend, *args, **options)
        if backend == "gloo":
            made.append(len(sockets() - before))
        return out

    Communicators.make = counted  # type: ignore[method-assign]
    model = onefold.shard(TinyMLP(8, 24, 2, 6), onefold.Recipe.zero(3), group=group)
    model(features_of(dist.get_rank(), 2, 8)).sum().backward()
    assert "TORCH_GLOO_LAZY_INIT" not in os.environ
    return made[0], len(made)


def test_beside_a_native_backend_control_connects_on_demand() -> None:
    eager, lazy = (
        run_ranks(RANKS, opened_by_control, False),
        run_ranks(RANKS, opened_by_control, True),
    )
    # gloo listens on one socket, and holds one for each connection
    assert all(count >= RANKS - 1 for count, _ in eager), eager
    assert all(count <= 1 + PARTNERS for count, _ in lazy), lazy


def held_by_messages() -> tuple[int, int]:
    """Sockets of a group on demand after the engine's rounds, and after all-to-all messages."""
    made = Communicators(list(range(RANKS)), torch.device("cpu"), 30.0)
    before, rank = sockets(), dist.get_rank()
    group = made.make("gloo", on_demand=True)

    def messages(places: list[int]) -> int:
        for place in places:
            got = torch.empty(1)
            works = [
                dist.irecv(got, group=group, group_src=(rank - place) % RANKS, tag=place),
                dist.isend(torch.ones(1), group=group, group_dst=(rank + place) % RANKS, tag=place),
            ]
            for work in works:
                work.wait()
        dist.barrier()
        held = len(sockets() - before)
        dist.barrier()  # who leaves first closes its connections, and with them those of the others
        return held

    return messages([1, 2, 4]), messages(list(range(1, RANKS)))


def test_rounds_of_messages_connect_their_partners_alone() -> None:
    for rounds, all_to_all in run_ranks(RANKS, held_by_messages):
        assert PARTNERS <= rounds <= PARTNERS + 1 < all_to_all


def checkpoints_own() -> tuple[int, float]:
    """(sockets that the checkpoints' communicator opens, its timeout in seconds)."""
    model = onefold.shard(TinyMLP(), onefold.Recipe.zero(3), group=standin.new_group())
    dist.barrier()
    before = sockets()
    together = Together.of(onefold.engine_of(model))
    dist.barrier()
    opened = len(sockets() - before)
    assert together.all_gather(dist.get_rank()) == list(range(RANKS))
    backend = together._group._get_backend(torch.device("cpu"))
    return opened, backend.options._timeout.total_seconds()


def test_checkpoints_connect_some_ranks_and_limit_their_waits_themselves() -> None:
    for opened, patience in run_ranks(RANKS, checkpoints_own):
        assert opened <= 1 + PARTNERS and patience == 30 * 24 * 3600, (opened, patience)


def without_one() -> str:
    """What three ranks are told where the fourth does not call shard()."""
    group = standin.new_group()
    if dist.get_rank() == 3:
        time.sleep(8)
        return ""
    begun = time.monotonic()
    with pytest.raises(StallError) as raised:
        onefold.shard(TinyMLP(), onefold.Recipe.zero(3, stall_timeout=2.0), group=group)
    assert time.monotonic() - begun < 7
    return str(raised.value)


def test_a_rank_that_does_not_come_is_told_of_though_nothing_is_connected() -> None:
    *told, _ = run_ranks(4, without_one)
    assert all("in shard() for the other ranks of [0, 1, 2, 3]" in text for text in told), told


def behind_a_late_rank() -> bool:
    """Whether the last rank was at the barrier when this one's group was made."""
    store, late = dist.distributed_c10d._get_default_store(), dist.get_rank() == 2
    meet = Communicators._meet

    def slowly(self: Any, name: str) -> None:
        meet(self, name)
        time.sleep(1)
        store.set("late", "is here")

    if late:
        Communicators._meet = slowly  # type: ignore[method-assign]
    Communicators([0, 1, 2], torch.device("cpu"), 30.0).make("gloo", on_demand=True)
    here = bool(store.check(["late"]))
    dist.barrier()
    return here


def test_a_group_on_demand_is_made_when_every_rank_has_connected() -> None:
    assert run_ranks(3, behind_a_late_rank) == [True] * 3


def joined(store: str) -> tuple[int, list[int], list[float]]:
    """(process groups after `join`, what ranks gathered, sums)."""
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": store, "LOCAL_WORLD_SIZE": "2"}
    ranks = join("cpu", 60.0)
    found = len(dist.distributed_c10d._world.pg_map)
    out = found, ranks.gather(ranks.rank), ranks.sum(1.0, 2.0)
    assert ranks.from_first(ranks.rank) == 0
    dist.barrier()
    leave()
    return out


def test_a_run_has_one_group_for_its_small_values() -> None:
    found = run_ranks(2, joined, str(a_free_port()), process_group=False)
    assert found == [(1, [0, 1], [2.0, 4.0])] * 2
