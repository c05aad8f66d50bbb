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
from onefold.observe import Meter, measured, record
from onefold.observe.memory import moments_of
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
def test_a_row_says_what_lies_where_and_what_moved(tmp_path: Path, tier: str) -> None:
    model, optimizer = offloaded(tmp_path, tier)
    meter, beyond = Meter(model, optimizer), onefold.engine_of(model).transfers
    one_step(model, optimizer)
    first, numel = meter.step(), sum(p.numel() for p in TinyGPT(width=64, heads=4).parameters())
    one_step(model, optimizer)
    row = meter.step()
    assert not {MASTERS, MOMENTS, GRADIENTS} & set(row["memory"]["now"]), row["memory"]
    assert row["nvme"] == sum(beyond.disk.now().values()) and row["host"] == sum(
        beyond.host.now().values()
    ) + state_bytes(optimizer)
    assert moments_of(optimizer) == state_bytes(optimizer)
    three = 3 * 4 * numel  # masters and both moments, in fp32
    assert three <= row["host" if tier == "host" else "nvme"] <= 1.2 * three + (16 << 20), row
    assert first["moved_bytes"]["down"] == row["moved_bytes"]["down"] >= 2 * numel, (
        "gradients go down in every step"
    )
    if tier == "nvme":
        assert (
            row["host"] < three
            and row["moved_bytes"]["read"] >= three
            and row["moved_bytes"]["written"] >= three
            and row["io_ms"] >= 0
        )
    else:
        assert row["nvme"] == row["io_ms"] == 0 and not {"read", "written"} & set(
            row["moved_bytes"]
        )


@pytest.mark.parametrize("tier", ["host", "nvme"])
def test_a_recorded_step_has_the_levels_of_each_tier_and_its_account_the_peaks(
    tmp_path: Path, tier: str
) -> None:
    model, optimizer = offloaded(tmp_path, tier)
    beyond = onefold.engine_of(model).transfers
    with record(model, optimizer) as first:
        one_step(model, optimizer)
    with record(model, optimizer) as seen:
        one_step(model, optimizer, 1)
    ledger = beyond.host if tier == "host" else beyond.disk
    _, levels = seen.levels(tier)
    own = {MOMENTS: state_bytes(optimizer)} if tier == "host" else {}
    assert {c: values[-1] for c, values in levels.items() if values[-1]} == {**ledger.now(), **own}
    assert all(min(values) >= 0 for values in levels.values())
    assert MOMENTS not in seen.levels()[1], "states off the device are not on it"
    before, after = (first.levels(tier)[1][MOMENTS][i] for i in (0, -1))
    assert before == 0 < after, "the first step makes the states"
    assert (
        seen.moved()["down"] > 0
        and set(seen.moved()) <= {"up", "down", "read", "written"}
        and seen.io >= 0
    )
    account = measured(model, optimizer, seen)
    assert account.offloaded[tier] == seen.peak(tier=tier) and getattr(account, tier) == sum(
        account.offloaded[tier].values()
    )
    assert account.offloaded[tier][MASTERS] > 0 and not {MASTERS, MOMENTS} & set(account.rest)
    assert account.seconds["io"] == seen.io and account.seconds["optimizer"] > 0
    lines = {name for name, _, _ in account.lines()}
    assert {f"{tier}: all", f"{tier}: {MASTERS}", f"{tier}: {MOMENTS}", "time: io"} <= lines
    assert not beyond.host.record and not beyond.moved.wanted(), (
        "nothing is kept outside of a recording"
    )
