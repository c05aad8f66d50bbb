"""`--stage auto` where state rests off the device: the plan's figures decide
(tests/plan/test_tiers_planned.py has engines beside them).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import choices
import pytest
import torch
from torch import nn

from onefold.memory import MOMENTS
from onefold.plan import api
from onefold.train import choose as choosing
from onefold.train.choose import Asked, Choice, choose
from zoo import TinyGPT

MIB = 1 << 20


class Language(nn.Module):
    """Takes input_ids and labels, returns the loss; many blocks, so that one of them is little of
    the whole.
    """

    def __init__(self, depth: int = 24) -> None:
        super().__init__()
        self.inner = TinyGPT(width=64, depth=depth, length=32)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return self.inner(input_ids)


@pytest.fixture(autouse=True)
def apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No calibration: bytes are planned all the same."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def asked(tiers: dict[str, Any] | None = None, **changes: Any) -> Asked:
    return choices.asked(
        **{"micro_batch": 1, "seq": 16, "ranks": 2, "local_ranks": 2, **changes, **(tiers or {})}
    )


EVERYTHING = {"offload_optimizer": "nvme", "offload_param": "nvme", "nvme": ["/nvme"]}
ON_DISK = {"offload_optimizer": "nvme", "nvme": ["/nvme"]}


@pytest.mark.parametrize("ranks", [1, 2])
def test_parameters_off_the_device_mean_stage_3_however_many_ranks(ranks: int) -> None:
    chosen = choose(Language(2), asked(ranks=ranks, local_ranks=ranks, tiers=EVERYTHING))
    assert (
        chosen.stage == 3
        and set(chosen.needed) == {3}
        and "the only one that can keep parameters off the device" in chosen.reason
    )
    assert chosen.predicted is not None and chosen.predicted.nvme > 0 and "on NVMe" in chosen.reason


def test_states_off_the_device_leave_the_stage_as_it_would_be() -> None:
    alone = choose(Language(2), asked(ranks=1, local_ranks=1, tiers={"offload_optimizer": "cpu"}))
    assert (
        alone.stage == 0
        and "with one rank there is nothing to divide" in alone.reason
        and "on the host" in alone.reason
    )
    two = choose(Language(2), asked(tiers={"offload_optimizer": "cpu"}))
    assert two.stage == 1 and set(two.needed) == {1, 2, 3}
    assert choose(Language(2), asked(stage="2", tiers={"offload_optimizer": "cpu"})).stage == 2


def test_what_fits_at_no_stage_fits_with_its_states_on_nvme() -> None:
    whole, away_ = (
        choose(Language(), asked()).needed,
        choose(Language(), asked(tiers=ON_DISK)).needed,
    )
    assert away_[3] < whole[3], (whole, away_)
    tight = int((whole[3] + away_[3]) / 2 / api.USABLE)
    assert "may run out of memory" in choose(Language(), asked(free=tight)).reason
    chosen = choose(Language(), asked(free=tight, tiers=ON_DISK))
    assert "may run out" not in chosen.reason and chosen.predicted is not None
    assert (
        chosen.predicted.rest.get(MOMENTS, 0) == 0
        and chosen.needed[chosen.stage] <= chosen.available
    )


def test_on_a_cpu_the_host_is_the_same_memory_and_beside_a_gpu_it_is_another() -> None:
    tiers = {"offload_optimizer": "cpu"}
    cpu, gpu, plain = (
        choose(Language(), asked(**more))
        for more in ({"tiers": tiers}, {"tiers": tiers, "device": "cuda"}, {})
    )
    assert (
        cpu.predicted is not None
        and gpu.predicted is not None
        and cpu.predicted.host == gpu.predicted.host > 0
    )
    assert gpu.needed[1] == gpu.predicted.peak_bytes < plain.needed[1]
    assert cpu.needed[1] == cpu.predicted.peak_bytes + cpu.predicted.host


def test_room_on_the_device_goes_to_larger_micro_batches() -> None:
    free = int(choose(Language(), asked(ranks=1, local_ranks=1)).needed[0] * 1.2 / api.USABLE)
    sizes: list[Choice] = [
        choose(
            Language(),
            asked(ranks=1, local_ranks=1, micro_batch=0, free=free, device="cuda", tiers=tiers),
        )
        for tiers in ({}, {"offload_optimizer": "cpu"})
    ]
    assert sizes[0].micro_batch < sizes[1].micro_batch, [c.reason for c in sizes]
    assert all(c.needed[0] <= c.available for c in sizes)


def test_a_host_without_room_is_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choosing, "free_host_memory", lambda: MIB)
    found = choose(Language(2), asked(device="cuda", tiers={"offload_optimizer": "cpu"}))
    assert (
        any("the host has no room" in note for note in found.notes)
        and "may run out of memory" in found.reason
    )


def test_tiles_and_activations_on_the_host_are_counted() -> None:
    plain, tiled = (
        choose(Language(2), asked(stage="3", tiers=tiers)).predicted
        for tiers in ({}, {"tile": "20KB"})
    )
    assert (
        plain is not None
        and tiled is not None
        and sum(tiled.ledger.values()) < sum(plain.ledger.values())
    )
    on_host = choose(
        Language(2),
        asked(seq=32, micro_batch=256, tiers={"offload_activations": "cpu"}, device="cuda"),
    ).predicted
    assert (
        on_host is not None
        and on_host.offloaded["host"]["activations"] > MIB
        and on_host.moved["down"] == on_host.moved["up"] > MIB
    )


class Opaque(Language):
    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("not under a trace")


def test_a_model_that_cannot_be_traced_is_judged_by_the_states_that_stay() -> None:
    states = choose(Opaque(), asked()).needed
    chosen = choose(Opaque(), asked(device="cuda", tiers=EVERYTHING))
    assert (
        chosen.stage == 3
        and chosen.needed[3] < states[3] / 2
        and "could not be traced" in chosen.reason
    )
    assert chosen.predicted is None


def test_what_no_stage_can_be_is_refused() -> None:
    with pytest.raises(ValueError, match="give offload_optimizer='nvme' too"):
        choose(Language(2), asked(tiers={"offload_param": "nvme", "nvme": ["/nvme"]}))
