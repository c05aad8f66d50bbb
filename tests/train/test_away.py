"""What the choice of a stage takes off the plan where state rests off the device, against engines that really keep it there."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import onefold
from models import TinyGPT, tokens_of
from onefold.memory import GRADIENTS, MASTERS, MOMENTS, PARAMETERS
from onefold.plan import auto
from onefold.plan.from_module import model_shape
from onefold.plan.states import at_rest, units_of
from onefold.recipe import Recipe, Tier
from onefold.recipe.tiers import SECTOR
from onefold.train import away
from onefold.train.choose import Asked, Choice, choose
from onefold.train.errors import TrainError
from ranks import run_ranks

MIB = 1 << 20
TIERS: dict[str, dict[str, Any]] = {
    "states on the host": {"offload_optimizer": "cpu"},
    "half of them on the host": {"offload_optimizer": 0.5},
    "a budget on the host": {"offload_optimizer": 13_000_000},
    "states on NVMe": {"offload_optimizer": "nvme"},
    "states on NVMe, gradients on the host": {"offload_optimizer": ("nvme", 0.4), "offload_gradients": "cpu"},
}
AT_STAGE_3: dict[str, dict[str, Any]] = {
    "all on the host": {"offload_optimizer": "cpu", "offload_param": "cpu"},
    "parameters on the host, states on NVMe": {"offload_optimizer": "nvme", "offload_param": "cpu"},
    "all on NVMe": {"offload_optimizer": "nvme", "offload_param": "nvme"},
}


def model() -> nn.Module:
    torch.manual_seed(0)
    made = TinyGPT(width=256, depth=3)
    made.blocks[0].requires_grad_(False)
    return made


def planned_and_held(stage: int, precision: str, which: dict[str, dict[str, Any]], folder: str) -> list[str]:
    """What differs by more than the alignment of direct reads and writes takes."""
    import torch.distributed as dist

    ranks = dist.get_world_size() if dist.is_initialized() else 1
    wrong = []
    for name, tiers in which.items():
        recipe = Recipe.zero(stage, precision=precision, **tiers, **({"nvme": folder} if "nvme" in str(tiers) else {}))
        on_device = Recipe.zero(stage, precision=precision)
        shape, module = model_shape(model()), model()
        gone = away.away_of(shape, recipe, on_device, ranks)
        module = onefold.shard(module, recipe)
        optimizer = torch.optim.AdamW([p for p in module.parameters() if p.requires_grad], lr=1e-3)
        module(tokens_of(0)).float().backward()
        optimizer.step()
        engine = onefold.engine_of(module)
        chosen = {u.index for u in engine.units if any(f.home is not None for f in u.flats)}
        units = units_of(shape, on_device, ranks)
        if recipe.parameters.tier is Tier.DEVICE:  # else the frozen leave too
            trained = {i for i in away._leaving(units, recipe) if any(f.trainable for f in units[i].flats)}
            if chosen != trained:
                wrong.append(f"{name}: units {chosen} leave, {trained} were expected")
        slack = 4 * SECTOR * 4 * len(engine.at_home) if engine.on_disk else 4096
        states = [t for s in optimizer.state.values() for t in s.values() if isinstance(t, torch.Tensor)]
        held = {
            "device": {k: v for k, v in engine.memory.now().items() if k in (PARAMETERS, MASTERS, GRADIENTS)},
            "host": sum(v for k, v in engine.beyond.host.now().items() if k in (PARAMETERS, MASTERS, GRADIENTS)),
            "nvme": engine.beyond.disk.now(),
        }
        at_home = {id(e.param) for f in engine.at_home for e in f.entries}
        host_states = sum(
            t.numel() * t.element_size() for p, s in optimizer.state.items() if id(p) in at_home
            for t in s.values() if isinstance(t, torch.Tensor) and t.device.type != "meta"
        )  # fmt: skip
        assert states
        rest = gone.at_rest(at_rest(units))
        for category in (PARAMETERS, MASTERS):
            if abs(rest.get(category, 0) - held["device"].get(category, 0)) > slack:
                wrong.append(f"{name}: {category} {rest.get(category, 0)} planned on the device, {held['device']}")
        on_host = gone.host - (away._in_steps(units, recipe) if recipe.optimizer.tier is Tier.NVME else 0)
        if abs(on_host - held["host"] - host_states) > slack:
            wrong.append(f"{name}: {on_host} planned on the host, {held['host']} and states of {host_states}")
        if abs(gone.nvme - sum(held["nvme"].values())) > slack:
            wrong.append(f"{name}: {gone.nvme} planned on NVMe, {held['nvme']}")
    return wrong


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize(("stage", "ranks"), [(0, 1), (1, 2), (2, 2), (3, 2), (3, 1)])
def test_what_leaves_the_device_is_what_engines_keep_elsewhere(stage: int, ranks: int, precision: str, tmp_path: Path) -> None:
    which = TIERS | (AT_STAGE_3 if stage == 3 else {})
    for wrong in run_ranks(ranks, planned_and_held, stage, precision, which, str(tmp_path)):
        assert wrong == []


# -- the choice ------------------------------------------------------------------------------------------------------------------


class Language(nn.Module):
    """Takes input_ids and labels, returns the loss; many blocks, so that one of them is little of the whole."""

    def __init__(self, depth: int = 24) -> None:
        super().__init__()
        self.inner = TinyGPT(width=64, depth=depth, length=32)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return self.inner(input_ids)


@pytest.fixture(autouse=True)
def apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No calibration: bytes are planned all the same."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def asked(**changes: Any) -> Asked:
    plain = Asked(
        stage="auto", micro_batch=1, global_batch=0, seq=16, precision="fp32", checkpointing="none", ranks=2, local_ranks=2,
        free=1 << 34, device="cpu",
    )  # fmt: skip
    tiers = changes.pop("tiers", {})
    return replace(plain, tiers=tuple(tiers.items()), **changes)


EVERYTHING = {"offload_optimizer": "nvme", "offload_param": "nvme", "nvme": ["/nvme"]}
ON_DISK = {"offload_optimizer": "nvme", "nvme": ["/nvme"]}


@pytest.mark.parametrize("ranks", [1, 2])
def test_parameters_off_the_device_mean_stage_3_however_many_ranks(ranks: int) -> None:
    chosen = choose(Language(2), asked(ranks=ranks, local_ranks=ranks, tiers=EVERYTHING))
    assert chosen.stage == 3 and set(chosen.needed) == {3} and "the only one that can keep parameters off the device" in chosen.reason
    assert chosen.predicted is not None and chosen.predicted.nvme > 0 and "on NVMe" in chosen.reason


def test_states_off_the_device_leave_the_stage_as_it_would_be() -> None:
    alone = choose(Language(2), asked(ranks=1, local_ranks=1, tiers={"offload_optimizer": "cpu"}))
    assert alone.stage == 0 and "with one rank there is nothing to divide" in alone.reason and "on the host" in alone.reason
    two = choose(Language(2), asked(tiers={"offload_optimizer": "cpu"}))
    assert two.stage == 1 and set(two.needed) == {1, 2, 3}
    assert choose(Language(2), asked(stage="2", tiers={"offload_optimizer": "cpu"})).stage == 2


def test_what_fits_at_no_stage_fits_with_its_states_on_nvme() -> None:
    whole, away_ = choose(Language(), asked()).needed, choose(Language(), asked(tiers=ON_DISK)).needed
    assert away_[3] < whole[3], (whole, away_)
    tight = int((whole[3] + away_[3]) / 2 / auto.USABLE)
    assert "may run out of memory" in choose(Language(), asked(free=tight)).reason
    chosen = choose(Language(), asked(free=tight, tiers=ON_DISK))
    assert "may run out" not in chosen.reason and chosen.predicted is not None
    assert chosen.predicted.rest.get(MOMENTS, 0) == 0 and chosen.needed[chosen.stage] <= chosen.available


def test_on_a_cpu_the_host_is_the_same_memory_and_beside_a_gpu_it_is_another() -> None:
    tiers = {"offload_optimizer": "cpu"}
    cpu, gpu, plain = (choose(Language(), asked(**more)) for more in ({"tiers": tiers}, {"tiers": tiers, "device": "cuda"}, {}))
    assert cpu.predicted is not None and gpu.predicted is not None and cpu.predicted.host == gpu.predicted.host > 0
    assert gpu.needed[1] == gpu.predicted.peak_bytes < plain.needed[1]
    assert cpu.needed[1] == gpu.needed[1] + cpu.predicted.host


def test_room_on_the_device_goes_to_larger_micro_batches() -> None:
    free = int(choose(Language(), asked(ranks=1, local_ranks=1)).needed[0] * 1.2 / auto.USABLE)
    sizes: list[Choice] = [
        choose(Language(), asked(ranks=1, local_ranks=1, micro_batch=0, free=free, device="cuda", tiers=tiers))
        for tiers in ({}, {"offload_optimizer": "cpu"})
    ]
    assert sizes[0].micro_batch < sizes[1].micro_batch, [c.reason for c in sizes]
    assert all(c.needed[0] <= c.available for c in sizes)


def test_a_host_without_room_and_what_is_not_counted_are_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(away, "free_host_memory", lambda: MIB)
    tiers = {"offload_optimizer": "cpu", "offload_activations": "cpu", "tile": "1MB"}
    notes = choose(Language(2), asked(device="cuda", tiers=tiers)).notes
    assert any("the host has no room" in note for note in notes)
    assert any("does not count activations on the host and weights in tiles" in note for note in notes)


class Opaque(Language):
    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("not under a trace")


def test_a_model_that_cannot_be_traced_is_judged_by_the_states_that_stay() -> None:
    states = choose(Opaque(), asked()).needed
    chosen = choose(Opaque(), asked(device="cuda", tiers=EVERYTHING))
    assert chosen.stage == 3 and chosen.needed[3] < states[3] / 2 and "could not be traced" in chosen.reason
    assert chosen.predicted is None


def test_what_no_stage_can_be_is_refused() -> None:
    with pytest.raises(TrainError, match="give offload_optimizer='nvme' too"):
        choose(Language(2), asked(tiers={"offload_param": "nvme", "nvme": ["/nvme"]}))
