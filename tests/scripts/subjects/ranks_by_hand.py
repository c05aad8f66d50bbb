"""What scripts do with torch.distributed beside the wrapper."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from scripts.loop import Script
from scripts.registry import EITHER, ROUNDING, habit


@habit(
    "gradients averaged again by hand: `dist.all_reduce(p.grad); p.grad /= world_size`",
    "gradients",
    one=EITHER,
    sharded=EITHER,
    composes=False,
)
def reduce_grads(s: Script) -> None:
    for p in s.model.parameters():
        dist.all_reduce(p.grad)
        p.grad /= dist.get_world_size()


@habit(
    "weights broadcast at the start: `dist.broadcast(p.data, src=0)`",
    "after",
    sharded=EITHER,
    composes=False,
)
def broadcast_weights(s: Script) -> None:
    for p in s.model.parameters():
        dist.broadcast(p.data, src=0)


@habit(
    "weights averaged over ranks (local SGD): `dist.all_reduce(p.data); p.data /= n`",
    "weights",
    sharded=EITHER,
    composes=False,
)
def average_weights(s: Script) -> None:
    for p in s.model.parameters():
        dist.all_reduce(p.data)
        p.data /= dist.get_world_size()


@habit(
    "weights compared over ranks: `dist.all_gather([...], p.data)`",
    "log",
    sharded=EITHER,
    composes=False,
)
def compare_ranks(s: Script) -> None:
    for p in s.model.parameters():
        others = [torch.empty(p.shape) for _ in range(dist.get_world_size())]
        dist.all_gather(others, p.data)
        s.note("equal", all(torch.equal(o, others[0]) for o in others))


@habit("weights' checksums compared over ranks: `all_gather_object(sum)`", "log", expect=ROUNDING)
def checksums(s: Script) -> None:
    sums: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(sums, sum(p.data.double().sum().item() for p in s.model.parameters()))
    s.note("equal", len({round(v, 9) for v in sums}) == 1)


@habit("a loss that one rank's batch does not have: `loss * 0` there", "forward")
def masked(s: Script) -> Any:
    return s.cross_entropy() * (0.0 if s.rank == 1 and s.step == 1 else 1.0)


@habit("dropout with different seeds on the ranks")
class Dropout:
    def before(self, s: Script) -> None:
        for block in s.module.blocks:
            block.mlp[3].p = 0.3

    def after(self, s: Script) -> None:
        torch.manual_seed(10 + s.rank)
