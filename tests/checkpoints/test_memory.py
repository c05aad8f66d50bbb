"""A load holds in host memory what it leaves there, one buffer, and nothing else, whatever the
optimizer held before.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist

import onefold
from on_ranks import on_ranks
from promises.formulas import give_memory_back_at_once, peak_resident, reset_peak, resident
from reference import adamw, built, train
from zoo import TinyMLP

MIB = 1 << 20
#: What one chunk of a million elements, the manifest, threads and messages between the ranks take, MiB.
SPARE = 10.0


def wide() -> TinyMLP:
    return TinyMLP(16, 512, 8, 16)


def watched(act: Callable[[], object]) -> tuple[float, float]:
    """How far resident memory rose at most, and how much of it stayed, MiB. Collective."""
    dist.barrier()
    reset_peak()
    peak, now = peak_resident(), resident()
    act()
    told = (peak_resident() - peak) / MIB, (resident() - now) / MIB
    dist.barrier()
    return told


@on_ranks(2, fresh=True)
def test_a_load_holds_what_it_leaves_and_one_buffer(folder: Path) -> None:
    def made(stage: int) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
        model = onefold.shard(built(wide), onefold.Recipe.zero(stage, stall_timeout=30.0))
        return model, adamw(model)

    whole = 4 * sum(p.numel() for p in wide().parameters()) / MIB
    give_memory_back_at_once()
    model, optimizer = made(3)
    train(model, optimizer, [torch.randn(4, 16)])
    onefold.save(folder / "a", model=model, optimizer=optimizer)
    onefold.load(folder / "a", model=model, optimizer=optimizer)  # so that code is loaded
    # Where a unit's states are gathered, beside those they replace, at stage 0
    for stage, held, buffer in ((3, whole / 2, 0.0), (0, whole, whole / 4)):
        model, optimizer = made(stage)
        for new in (2 * held, 0.0):  # the moments, which a second load finds there
            peak, stays = watched(
                lambda m=model, o=optimizer: onefold.load(folder / "a", model=m, optimizer=o)
            )
            assert peak <= new + buffer + SPARE and stays <= new + SPARE, (stage, new, peak, stays)
