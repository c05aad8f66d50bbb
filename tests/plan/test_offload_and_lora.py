"""Where states go that leave the device, and what adapters hold: counted by the plan."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from random_plans import GIB, activity, gpus

import onefold
from onefold.memory import GATHERED, GRADIENTS, MASTERS, PARAMETERS
from onefold.offload.activations import NEAR
from onefold.plan import api
from onefold.plan.account import Question
from onefold.plan.activity import of_dims, on_host
from onefold.plan.api import planned as plan
from onefold.plan.hardware import machine
from onefold.plan.job import PARTS, Job, Scheme
from onefold.plan.modules import model_shape, module_of
from onefold.plan.schema import MOMENTS, Account
from onefold.plan.shapes import ModelShape
from onefold.recipe import Tier
from zoo import Language


def test_offload_moves_every_state_once_and_none_is_lost() -> None:
    shape, job, ranks = ModelShape.of_size(400_000_000), Job(seq=16), 4
    own = activity(shape, job, 1)

    def account(stage: int, offload: str, share: float = 1.0) -> Account:
        question = Question(shape, lambda *_: own, gpus(ranks), job)
        return question.answer(Scheme(stage, "none", offload, 1, share)).account

    each = shape.numel / ranks
    kept, optimizer, every, disk = (
        account(3, o) for o in ("none", "optimizer", "parameters", "nvme")
    )
    assert optimizer.rest == {PARAMETERS: pytest.approx(2 * each, rel=0.01)}
    assert optimizer.host == pytest.approx(16 * each, rel=0.01)  # masters, two moments, gradients
    assert every.rest == {} and every.host == pytest.approx(18 * each, rel=0.01)
    assert (
        disk.by_tier[Tier.NVME] == pytest.approx(18 * each, rel=0.01) and disk.host < every.host / 3
    )
    assert (
        kept.host == 0
        and kept.offloaded == kept.moved == {}
        and kept.rest_bytes == pytest.approx(12 * each, rel=0.01)
    )
    assert kept.peak_bytes > optimizer.peak_bytes
    # On the device are the sums of three units in flight, of 4 bytes for each element in all
    assert not {MASTERS, MOMENTS} & set(optimizer.peak) and optimizer.peak.get(GRADIENTS, 0) < each
    assert every.peak[GATHERED] > 0
    two = account(2, "optimizer")
    assert (
        two.rest == {PARAMETERS: pytest.approx(2 * shape.numel, rel=0.01)}
        and two.host == optimizer.host
    )
    assert optimizer.seconds["step"] >= kept.seconds["step"]
    part = account(3, "optimizer", 0.5)
    assert kept.rest_bytes > part.rest_bytes > optimizer.rest_bytes and part.host == pytest.approx(
        optimizer.host / 2, rel=0.1
    )
    assert part.moved["down"] == pytest.approx(optimizer.moved["down"] / 2, rel=0.1)


@pytest.mark.parametrize("capacity", [7.0, 6.2, 5.6, 5.0])
def test_the_smallest_part_of_the_optimizer_leaves_that_lets_the_rest_fit(capacity: float) -> None:
    shape, job = ModelShape.of_size(1_000_000_000), Job(seq=64, checkpointing="none")
    found = plan(shape, gpus(2, capacity * GIB), job, stages=(3,), largest=False)
    best = found.recommended
    assert best is not None and best.scheme.offload == "optimizer", best
    assert (
        found.recipe.offload_share == best.scheme.share and found.recipe.optimizer.tier is Tier.HOST
    )
    own = activity(shape, job, 1)
    question = Question(shape, lambda *_: own, found.machine, job)
    fewer = [share for share in PARTS if share < best.scheme.share]
    assert not any(question.answer(replace(best.scheme, share=share)).fits for share in fewer)


def test_a_recipe_that_is_planned_to_offload_is_one_that_runs(tmp_path: Path) -> None:
    tight = gpus(1, 5.0 * GIB)
    shape = ModelShape.of_size(1_000_000_000)
    disk = {"seq": 32, "offload_optimizer": "nvme", "offload_param": "nvme"}
    found = plan(shape, tight, Job.of(disk, "the test"), largest=False)
    with pytest.raises(ValueError, match="give nvme='/path/on/the/disk'"):
        _ = found.recipe
    assert (
        found.to_json()["recipe"] | {"offload_optimizer": "nvme", "offload_param": "nvme"}
        == found.to_json()["recipe"]
    )
    named = plan(
        shape,
        tight,
        Job.of({**disk, "nvme": str(tmp_path)}, "the test"),
        largest=False,
    )
    assert named.recipe.nvme == (str(tmp_path),) and named.recipe.parameters.tier is Tier.NVME
    host = plan(shape, tight, Job.of({"seq": 32, "nvme": str(tmp_path)}, "the test"), largest=False)
    assert host.recipe.nvme is None and host.recipe.optimizer.tier is Tier.HOST, (
        "a folder is used where something goes there"
    )


def test_recipe_auto_goes_to_a_disk_where_one_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, seq = Language(width=128, depth=16, length=16), {"seq": 16, "micro_batch": 1}
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    whole = (
        onefold.plan(
            model,
            gpus=1,
            precision="fp32",
            checkpointing="none",
            offload="none",
            largest=False,
            **seq,
        )
        .stages[0]
        .account
    )
    monkeypatch.setattr(api, "free_host_memory", lambda: int(0.75 * whole.peak_bytes / api.USABLE))
    with pytest.raises(ValueError, match="does not fit"):
        onefold.plan.recipe_for(model, **seq)
    recipe = onefold.plan.recipe_for(model, nvme=str(tmp_path), chunk=65536, **seq)
    assert (
        recipe.optimizer.tier is Tier.NVME
        and recipe.nvme == (str(tmp_path),)
        and recipe.offload_share < 1
    )
    assert "on NVMe" in recipe.notes[-1]
    with pytest.raises(ValueError, match="there is no such folder"):
        onefold.plan.recipe_for(model, nvme=str(tmp_path / "nowhere"), **seq)


def test_lora_holds_states_of_its_adapters_only() -> None:
    found = plan("llama-3-8b", machine(8, 8, "h100-80"), Job(lora_rank=16), largest=False)
    full = plan("llama-3-8b", machine(8, 8, "h100-80"), Job(), largest=False)
    adapters = found.model.trainable
    assert (
        0 < adapters < full.model.numel / 100 and found.model.numel == full.model.numel + adapters
    )
    assert found.stages[0].account.rest[MOMENTS] == pytest.approx(8 * adapters, rel=0.01)
    assert found.stages[0].account.rest[PARAMETERS] == pytest.approx(
        2 * found.model.numel, rel=0.01
    )
    assert found.stages[1].account.wire_bytes < full.stages[1].account.wire_bytes / 100
    # Frozen matrices have no gradient of their own: two thirds of the products, and next to no sums
    # over the ranks and copies of gradients.
    ratio = found.stages[1].account.seconds["compute"] / full.stages[1].account.seconds["compute"]
    assert 0.5 < ratio < 0.68


def test_activations_on_the_host_leave_the_device_what_runs_and_what_is_on_its_way() -> None:
    shape = model_shape(module_of("llama-3-8b"), name="llama-3-8b")
    assert shape.transformer is not None
    whole = of_dims(shape, shape.transformer, 1, 2048, 2, "none")
    peaks = {budget: on_host(whole, budget, shared=False).peak for budget in (1 << 32, 1 << 62)}
    kept = whole.peak
    assert kept - (1 << 32) <= peaks[1 << 32] <= kept - (1 << 32) + 2 * NEAR, (kept, peaks)
    one = sum(row.kept for row in whole.rows) // shape.transformer.layers
    assert peaks[1 << 62] < kept / 2 and peaks[1 << 62] >= one
