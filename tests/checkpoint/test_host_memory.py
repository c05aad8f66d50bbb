"""What a load needs of the host: what it leaves there, one buffer, and nothing else, whatever the
optimizer held before.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from promises.formulas import give_memory_back_at_once, peak_resident, reset_peak, resident
from ranks import run_ranks
from zoo import TinyMLP

#: Parameters of `TinyMLP(16, 512, 8, 16)` in MiB, of which a block has 4.
MIB = 1 << 20
WHOLE = 4 * sum(p.numel() for p in TinyMLP(16, 512, 8, 16).parameters()) / MIB
BLOCK = WHOLE / 8
#: What the file's manifest, threads and messages between the ranks take, MiB.
SPARE = 6.0


def start(stage: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    import onefold

    model = onefold.shard(TinyMLP(16, 512, 8, 16), onefold.Recipe.zero(stage, stall_timeout=30.0))
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3)


class Watched:
    """How far resident memory rose at most, and how much of it stayed, MiB. Collective."""

    def __enter__(self) -> Watched:
        dist.barrier()
        reset_peak()
        self._peak, self._now = peak_resident(), resident()
        return self

    def __exit__(self, *_: object) -> None:
        self.peak = (peak_resident() - self._peak) / MIB
        self.stays = (resident() - self._now) / MIB
        dist.barrier()


def watched(act: Any, *args: Any, **kwargs: Any) -> tuple[Any, tuple[float, float]]:
    """What `act` returns; (peak, what stays) in MiB beyond what was there before."""
    with Watched() as seen:
        out = act(*args, **kwargs)
    return out, (seen.peak, seen.stays)


def saved(root: str) -> Path:
    import onefold

    model, optimizer = start(3)
    model(torch.randn(4, 16)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    path = onefold.save(f"{root}/a", model=model, optimizer=optimizer, step=1)
    onefold.load(path, model=model, optimizer=optimizer)  # so that code is loaded
    return path


def read_ahead(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> Any:
    import onefold

    loading = onefold.load_async(path, model=model, optimizer=optimizer)
    loading._thread.join()
    return loading


def loads(root: str) -> dict[str, tuple[float, float]]:
    """{which load: (peak, what stays)} in MiB beyond what was there before."""
    import onefold

    give_memory_back_at_once()
    path = saved(root)
    found: dict[str, tuple[float, float]] = {}
    for stage in (3, 0):
        model, optimizer = start(stage)
        for when in ("fresh", "again"):
            _, found[f"{stage}, {when}"] = watched(
                onefold.load, path, model=model, optimizer=optimizer
            )
    model, optimizer = start(3)
    ahead, found["3, ahead"] = watched(read_ahead, path, model, optimizer)
    _, found["3, what was read ahead"] = watched(ahead.wait, 60.0)
    return found


def test_a_load_holds_what_it_leaves_and_one_buffer(tmp_path: Path) -> None:
    shard = WHOLE / 2  # of each kind of state, on 2 ranks
    for rank, found in enumerate(run_ranks(2, loads, str(tmp_path))):
        for name, (peak, stays) in found.items():
            # moments; all that was read
            new = {"3, fresh": 2 * shard, "0, fresh": 2 * WHOLE, "3, ahead": 3 * shard}.get(
                name, 0.0
            )
            # Where a unit's states are gathered, beside those they replace
            buffer = 2 * BLOCK if name.startswith("0") else 0.0
            assert peak <= new + buffer + SPARE, f"rank {rank}, {name}: {found}"
            assert name == "3, what was read ahead" or stays <= new + SPARE, (
                f"rank {rank}, {name}: {found}"
            )
