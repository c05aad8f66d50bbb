"""What rests on the host and on NVMe is seen there and not on the device: in rows of metrics,
recordings and accounts.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from observed_loops import one_step
from torch import nn

import onefold
from onefold.observe.meter import Meter
from onefold.observe.trace import measured, record
from onefold.plan.schema import GRADIENTS, MASTERS, MOMENTS
from zoo import TinyGPT


def offloaded(folder: Path, tier: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A small GPT whose masters, gradients and states rest on `tier`."""
    torch.manual_seed(0)
    options: dict[str, Any] = {"nvme": str(folder), "chunk": 65536} if tier == "nvme" else {}
    recipe = onefold.Recipe.zero(
        3, precision="bf16", offload_optimizer="cpu" if tier == "host" else tier, **options
    )
    model = onefold.shard(TinyGPT(width=64, heads=4), recipe)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)


def state_bytes(optimizer: torch.optim.Optimizer) -> int:
    """Bytes of memory of the optimizer's states."""
    return sum(
        t.untyped_storage().nbytes()
        for s in optimizer.state.values()
        for t in s.values()
        if not t.is_meta
    )


@pytest.mark.parametrize("tier", ["host", "nvme"])
def test_rows_recordings_and_accounts_say_what_lies_where_and_what_moved(
    tmp_path: Path, tier: str
) -> None:
    model, optimizer = offloaded(tmp_path, tier)
    meter, beyond = Meter(model, optimizer), onefold.engine_of(model).transfers
    one_step(model, optimizer)
    meter.step()
    with record(model, optimizer) as seen:
        one_step(model, optimizer, 1)
    row, own = meter.step(), state_bytes(optimizer)
    host = {c: n for c, n in beyond.host.now().items() if n}
    disk = {c: n for c, n in beyond.disk.now().items() if n}

    assert not {MASTERS, MOMENTS, GRADIENTS} & set(row["memory"]["now"]), row["memory"]
    assert (row["host"], row["nvme"]) == (sum(host.values()) + own, sum(disk.values()))
    three = 3 * 4 * sum(p.numel() for p in TinyGPT(width=64, heads=4).parameters())
    assert three <= row[tier] <= 1.2 * three + (16 << 20), "masters and both moments, in fp32"
    moved = row["moved_bytes"]
    assert moved["down"] >= three / 6, "gradients go down in 16 bits in every step"
    if tier == "nvme":
        assert row["host"] < three <= min(moved["read"], moved["written"])
    else:
        assert row["nvme"] == row["io_ms"] == 0 and not {"read", "written"} & set(moved)

    *_, (_, last) = seen.tiers[tier].levels()
    levels = {category: n for category, n in last.items() if n}
    assert levels == (host | {MOMENTS: own} if tier == "host" else disk)
    on_device = [level for _, level in seen.tiers["device"].levels()]
    assert not any(level.get(MOMENTS) for level in on_device), "states off the device are not on it"
    account = measured(model, optimizer, seen)
    assert account.offloaded[tier] == seen.peak(tier=tier)
    assert account.offloaded[tier][MASTERS] > 0 and not {MASTERS, MOMENTS} & set(account.rest)
    assert not beyond.host.record and not beyond.moved.wanted(), "nothing is kept outside"
