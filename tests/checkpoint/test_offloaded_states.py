"""Checkpoints hold state from any tier, and load into any tier: states bit-equal, the next losses
too.
"""

from __future__ import annotations

import itertools
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from ranks import run_ranks
from zoo import TinyGPT, tokens_of

TIERS: dict[str, tuple[int, dict[str, Any]]] = {
    "device": (3, {}),
    "stage 0 on the host": (0, {"offload_optimizer": "cpu"}),
    "stage 0 on NVMe": (0, {"offload_optimizer": "nvme"}),
    "stage 1 on NVMe": (1, {"offload_optimizer": "nvme"}),
    "everything on the host": (3, {"offload_optimizer": "cpu", "offload_param": "cpu"}),
    "everything on NVMe": (
        3,
        {"offload_optimizer": "nvme", "offload_param": "nvme", "chunk": 65536},
    ),
}


def made(name: str, nvme: str, seed: int) -> tuple[Any, torch.optim.Optimizer]:
    import onefold

    torch.manual_seed(seed)
    stage, tiers = TIERS[name]
    on_disk = {"nvme": nvme} if "nvme" in tiers.values() else {}
    model = onefold.shard(
        TinyGPT(), onefold.Recipe.zero(stage, stall_timeout=20.0, **tiers, **on_disk)
    )
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def steps(model: Any, optimizer: torch.optim.Optimizer, first: int, count: int) -> list[float]:
    rank = dist.get_rank() if dist.is_initialized() else 0
    losses = []
    for step in range(first, first + count):
        loss = model(tokens_of(10 * step + rank))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def differing(folder: str, nvme: str, pairs: list[tuple[str, str]]) -> list[str]:
    """Save from each tier after two steps, load (from, into) those of `pairs`, go on for one: what
    differs from going on without.
    """
    import onefold

    wrong, losses = [], {}
    for name in TIERS:
        model, optimizer = made(name, nvme, 0)
        steps(model, optimizer, 0, 2)
        onefold.save(f"{folder}/{name}", model=model, optimizer=optimizer, step=2)
        losses[name] = steps(model, optimizer, 2, 1), onefold.full_state_dict(model)
    want = losses["device"]
    for source in TIERS:
        if losses[source][0] != want[0]:
            wrong.append(f"{source} trains otherwise")
        for target in (into for saved, into in pairs if saved == source):
            model, optimizer = made(target, nvme, 1)
            onefold.load(f"{folder}/{source}", model=model, optimizer=optimizer)
            got = steps(model, optimizer, 2, 1), onefold.full_state_dict(model)
            if got[0] != want[0] or any(not torch.equal(got[1][n], want[1][n]) for n in want[1]):
                wrong.append(f"{source} -> {target}: {got[0]} instead of {want[0]}")
    return wrong


@pytest.mark.parametrize("ranks", [1, 2])
def test_any_tier_loads_what_any_tier_saved(ranks: int, tmp_path: Path, sample: Any) -> None:
    (tmp_path / "nvme").mkdir()
    pairs = sample(itertools.product(TIERS, repeat=2), 5)
    for wrong in run_ranks(ranks, differing, str(tmp_path), str(tmp_path / "nvme"), pairs):
        assert wrong == []
    assert list((tmp_path / "nvme").iterdir()) == []


def save_async_and_train(folder: str, nvme: str) -> bool:
    """An asynchronous save of state on NVMe is of one moment."""
    import onefold

    model, optimizer = made("everything on NVMe", nvme, 0)
    steps(model, optimizer, 0, 2)
    before = onefold.full_state_dict(model)
    saving = onefold.save_async(f"{folder}/async", model=model, optimizer=optimizer, step=2)
    steps(model, optimizer, 2, 2)
    saving.wait()
    other, optimizer = made("device", nvme, 1)
    onefold.load(f"{folder}/async", model=other, optimizer=optimizer)
    after = onefold.full_state_dict(other)
    return all(torch.equal(before[n], after[n]) for n in before)


def test_an_asynchronous_save_is_of_one_moment(tmp_path: Path) -> None:
    (tmp_path / "nvme").mkdir()
    assert all(run_ranks(2, save_async_and_train, str(tmp_path), str(tmp_path / "nvme")))


def resumed_on_one(folder: str, nvme: str) -> dict[str, torch.Tensor]:
    import onefold

    model, optimizer = made("everything on NVMe", nvme, 1)
    onefold.load(folder, model=model, optimizer=optimizer)
    return onefold.full_state_dict(model)


def saved_on_two(folder: str, nvme: str) -> dict[str, torch.Tensor]:
    import onefold

    model, optimizer = made("everything on NVMe", nvme, 0)
    steps(model, optimizer, 0, 2)
    onefold.save(folder, model=model, optimizer=optimizer, step=2)
    return onefold.full_state_dict(model)


def test_another_number_of_ranks_gets_the_same_state(tmp_path: Path) -> None:
    (tmp_path / "nvme").mkdir()
    want = run_ranks(2, saved_on_two, str(tmp_path / "c"), str(tmp_path / "nvme"))[0]
    for ranks in (1, 3):
        got = run_ranks(ranks, resumed_on_one, str(tmp_path / "c"), str(tmp_path / "nvme"))[0]
        assert want.keys() == got.keys() and all(torch.equal(want[n], got[n]) for n in want)
    shutil.rmtree(tmp_path / "c")
