"""Where states go that leave the device, and what adapters hold: counted by the plan."""

from __future__ import annotations

import pytest
from random_plans import GIB, activity, gpus

from onefold.memory import GATHERED, GRADIENTS, MASTERS, PARAMETERS
from onefold.plan.activity import frozen_active
from onefold.plan.evaluate import evaluate
from onefold.plan.hardware import machine
from onefold.plan.job import Job, Scheme
from onefold.plan.planner import plan
from onefold.plan.schema import MOMENTS, Account
from onefold.plan.shapes import ModelShape
from onefold.plan.subject import with_lora


def test_offload_moves_every_state_once_and_none_is_lost() -> None:
    shape, job, ranks = ModelShape.of_size(40_000_000), Job(seq=16), 4
    own = activity(shape, job, 1)

    def account(stage: int, offload: str) -> Account:
        return evaluate(shape, own, gpus(ranks), job, Scheme(stage, "none", offload)).account

    each = shape.numel / ranks
    kept, optimizer, every, disk = (account(3, o) for o in ("none", "optimizer", "parameters", "nvme"))
    assert optimizer.rest == {PARAMETERS: pytest.approx(2 * each, rel=0.01)}
    assert optimizer.host == pytest.approx(16 * each, rel=0.01)  # masters, two moments, gradients
    assert every.rest == {} and every.host == pytest.approx(18 * each, rel=0.01)
    assert disk.nvme == pytest.approx(14 * each, rel=0.01) and disk.host < every.host / 3
    assert kept.host == kept.nvme == 0 and kept.rest_bytes == pytest.approx(12 * each, rel=0.01)
    assert kept.peak_bytes > optimizer.peak_bytes
    assert not {MASTERS, MOMENTS, GRADIENTS} & set(optimizer.peak)
    assert every.peak[GATHERED] > 0
    two = account(2, "optimizer")
    assert two.rest == {PARAMETERS: pytest.approx(2 * shape.numel, rel=0.01)} and two.host == optimizer.host
    assert optimizer.seconds["step"] >= kept.seconds["step"]


def test_what_is_offloaded_never_hides_a_moment_that_is_larger_without_it() -> None:
    """Where gradients make the highest moment on the device, activations make it once they are gone."""
    shape, job = ModelShape.of_size(2_000_000), Job(seq=512, micro_batch=4)
    own = activity(shape, job, 4)
    top = max(s.peak for s in own.slots)
    for offload in ("optimizer", "parameters", "nvme"):
        assert evaluate(shape, own, gpus(2), job, Scheme(3, "none", offload, 4)).account.peak_bytes >= top


def test_an_offloaded_scheme_is_planned_and_not_run() -> None:
    found = plan(ModelShape.of_size(200_000_000), gpus(2, 2.1 * GIB), Job(seq=32), largest=False)
    assert found.recommended is not None and found.recommended.scheme.offload == "optimizer"
    assert not found.recommended.scheme.runs
    with pytest.raises(NotImplementedError, match="optimizer on the host"):
        _ = found.recipe


def test_lora_holds_states_of_its_adapters_only() -> None:
    found = plan("llama-3-8b", machine(8, 8, "h100-80"), Job(lora_rank=16), largest=False)
    full = plan("llama-3-8b", machine(8, 8, "h100-80"), Job(), largest=False)
    adapters = found.model.trainable
    assert 0 < adapters < full.model.numel / 100 and found.model.numel == full.model.numel + adapters
    assert found.stages[0].account.rest[MOMENTS] == pytest.approx(8 * adapters, rel=0.01)
    assert found.stages[0].account.rest[PARAMETERS] == pytest.approx(2 * found.model.numel, rel=0.01)
    assert found.stages[1].account.wire_bytes < full.stages[1].account.wire_bytes / 100
    # Frozen matrices have no gradient of their own: two thirds of the products.
    ratio = found.stages[1].account.seconds["compute"] / full.stages[1].account.seconds["compute"]
    assert 0.66 < ratio < 0.72


def test_lora_counts_the_experts_that_a_token_passes() -> None:
    mixtral = plan("mixtral-8x7b", machine(8, 8, "h100-80"), Job(), largest=False).model
    adapted = with_lora(mixtral, 8)
    dense, routed = 8 * (4096 + 4096) * 2 + 8 * (4096 + 1024) * 2 + 8 * (4096 + 8), 8 * (2 * 4096 + 3 * 14_336)
    assert adapted.numel - mixtral.numel == 32 * (dense + 8 * routed), "every expert has adapters of its own"
    assert adapted.active_numel - mixtral.active_numel == 32 * (dense + 2 * routed)
    assert frozen_active(adapted) == mixtral.active_numel


def test_lora_without_matrices_is_refused() -> None:
    with pytest.raises(ValueError, match="no blocks with matrices"):
        plan(7e9, machine(8), Job(lora_rank=8))
