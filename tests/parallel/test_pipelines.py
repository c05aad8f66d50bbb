"""ZeRO under torch's pipelines: each stage's module is sharded by itself, gathered once and reduced
once a step, and trains as the whole model does in one process.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from pipeline_models import (
    Case,
    after_a_failure,
    in_one_process,
    refusals,
    resumed,
    saved,
    trained,
)

from ranks import run_ranks

pytestmark = pytest.mark.one_in(9)

LOOPED: dict[str, Any] = {"stages": 4}
V: dict[str, Any] = {"stages": 4, "v_shaped": True}
SCHEDULES = {
    "GPipe": Case(),
    "1F1B": Case("Schedule1F1B"),
    "1F1B, shapes given": Case("Schedule1F1B", static=True),
    "interleaved 1F1B": Case("ScheduleInterleaved1F1B", **LOOPED),
    "looped BFS, registered": Case("ScheduleLoopedBFS", registered=True, **LOOPED),
    "interleaved zero bubble": Case("ScheduleInterleavedZeroBubble", registered=True, **LOOPED),
    "ZBV": Case("ScheduleZBVZeroBubble", registered=True, **V),
    "DualPipeV": Case("ScheduleDualPipeV", **V),
    "four stages on a rank, registered": Case(
        "ScheduleLoopedBFS", registered=True, stages=8, depth=8, steps=2
    ),
    "1F1B on one data rank": Case("Schedule1F1B", dp=1),
    "ZBV on one data rank": Case("ScheduleZBVZeroBubble", dp=1, **V),
}
LOOPS = {
    "two calls in a step": Case(calls=2),
    "two calls in a step on one data rank": Case(calls=2, dp=1, micro_batches=3),
    "two calls in a step, the first under no_sync": Case(
        "Schedule1F1B", calls=2, under_no_sync=True
    ),
    "without REDUCE_GRAD actions": Case("PipelineScheduleMulti", **LOOPED),
    "losses added up": Case("Schedule1F1B", pp=1, stages=1, sums=True),
    "losses added up, zero bubble": Case("ScheduleZBVZeroBubble", sums=True, **V),
    "evaluation before the step": Case("Schedule1F1B", evaluates=True),
    "evaluation before the step, looped": Case(
        "ScheduleLoopedBFS", evaluates=True, registered=True, **LOOPED
    ),
    "checkpointing": Case("Schedule1F1B", pp=1, stages=1, checkpointing=True),
    "checkpointing, zero bubble": Case(
        "ScheduleInterleavedZeroBubble", checkpointing=True, **LOOPED
    ),
    "frozen": Case("Schedule1F1B", frozen=("tokens", "blocks.1", "blocks.3.mlp")),
    "frozen, zero bubble": Case(
        "ScheduleInterleavedZeroBubble", frozen=("blocks.1.mlp", "blocks.3.mlp"), **LOOPED
    ),
    "offloaded": Case("Schedule1F1B", pp=1, stages=1, recipe={"offload_optimizer": "cpu"}),
    "offloaded on one data rank": Case(
        "Schedule1F1B", pp=1, dp=1, stages=1, recipe={"offload_optimizer": "cpu"}, calls=2
    ),
    "tensor parallel": Case("Schedule1F1B", dp=1, tp=2),
    "tensor parallel, zero bubble": Case("ScheduleZBVZeroBubble", dp=1, tp=2, **V),
    "activations offloaded": Case(
        "Schedule1F1B", pp=1, stages=1, recipe={"offload_activations": "1GB"}
    ),
    "kept for backward": Case(pp=1, stages=1, recipe={"reshard_after_forward": False}),
    "loss scaling, clipped": Case("Schedule1F1B", scale=2.0**12, max_norm=0.5),
    "loss scaling, looped": Case("ScheduleInterleaved1F1B", scale=2.0**12, **LOOPED),
    "stages of unequal depth": Case("Schedule1F1B", depth=5, max_norm=0.5),
    "bordered": Case("Schedule1F1B", recipe={"borders": True}, max_norm=0.5),
    "at the boundary": Case(pp=1, stages=1, recipe={"reduce_at": "boundary"}),
}


def close(got: Any, expected: Any) -> bool:
    return bool(torch.allclose(torch.tensor(got), torch.tensor(expected), rtol=2e-5, atol=1e-6))


def compare(name: str, case: Case, *at: int) -> list[list[dict[str, Any]]]:
    """Train at these stages of ZeRO, and compare with one process and among themselves. Returns
    what the ranks saw, by stage.
    """
    expected = in_one_process(case)
    runs = run_ranks(case.pp * case.dp * case.tp, trained, case, *at)
    by_stage = [[rank[i] for rank in runs] for i in range(len(at))]
    first: tuple[Any, dict[str, torch.Tensor]] | None = None
    for stage, ranks in zip(at, by_stage, strict=True):
        weights: dict[str, torch.Tensor] = {}
        for rank, seen in enumerate(ranks):
            weights.update(seen["weights"])
            told = f"{name}, stage {stage}, rank {rank}"
            if seen["losses"]:
                wanted = expected["losses"][seen["dp"]]
                assert close(seen["losses"], wanted), f"{told}: {seen['losses']} {wanted}"
            assert close(seen["norms"], expected["norms"]), f"{told}: norms {seen['norms']}"
            assert seen["graphs"] == [0] * len(seen["graphs"]), f"{told}: open {seen['graphs']}"
            assert stage < 3 or not any(seen["held"]), f"{told}: units stay gathered"
        assert weights.keys() == expected["weights"].keys()
        for key, value in expected["weights"].items():
            difference = (weights[key] - value).abs().max().item()
            assert difference < 2e-5, f"{name}, stage {stage}: {key} differs by {difference}"
        losses = [(seen["losses"], seen["norms"]) for seen in ranks]
        first = first or (losses, weights)
        assert losses == first[0], (
            f"{name}: stage {stage} has other losses or norms than stage {at[0]}"
        )
        for key, value in weights.items():
            assert torch.equal(value, first[1][key]), f"{name}: {key} at stage {stage}"
    return by_stage


@pytest.mark.parametrize("name", SCHEDULES)
def test_every_schedule_trains_as_one_process_at_every_stage(name: str) -> None:
    """And with one gather for each UNSHARD, or each step, and one reduction a step."""
    case = SCHEDULES[name]
    for stage, ranks in enumerate(compare(name, case, 0, 1, 2, 3)):
        for rank, seen in enumerate(ranks):
            for step, sent in enumerate(seen["sent"]):
                for moves, numel, unshards in zip(
                    sent, seen["numel"], seen["unshards"], strict=True
                ):
                    # fp32 parts for each other rank of the stage
                    once = 4 * numel * (case.dp - 1) // case.dp
                    times = unshards if case.registered and stage == 3 else 1
                    # The first call infers shapes with another pass
                    times += step == 0 and stage == 3 and not case.static
                    told = f"{name}, stage {stage}, rank {rank}, step {step}: {moves}, once {once}"
                    expected = {"all-gather": times * once, "reduce-scatter": once}
                    if stage == 0:
                        expected = {"all-reduce": 2 * once}
                    assert moves == (expected if once else {}), f"{told}, expected {expected}"


@pytest.mark.parametrize("name", LOOPS)
def test_loops_and_recipes_train_as_one_process(name: str) -> None:
    compare(name, LOOPS[name], 1, 2, 3)


@pytest.mark.parametrize("tier", ["cpu", "nvme"])
def test_offloaded_parameters_train_as_one_process(tier: str, tmp_path: Path) -> None:
    where: dict[str, Any] = {"offload_optimizer": tier, "offload_param": tier}
    if tier == "nvme":
        where["nvme"] = str(tmp_path)
    compare(tier, Case("Schedule1F1B", pp=1, stages=1, recipe=where), 3)


def test_bf16_has_the_same_bits_at_every_stage() -> None:
    case = Case("Schedule1F1B", recipe={"precision": "bf16"})
    expected = in_one_process(case)
    for runs in run_ranks(4, trained, case, 1, 2, 3):
        for seen in runs:
            assert seen["losses"] == runs[0]["losses"]
            for key, value in seen["weights"].items():
                assert torch.equal(value, runs[0]["weights"][key]), key
        for got, wanted in zip(runs[0]["losses"], expected["losses"][runs[0]["dp"]], strict=False):
            assert abs(got - wanted) < 0.02 * wanted, (got, wanted)


def test_a_step_that_raised_leaves_nothing_behind() -> None:
    for seen in run_ranks(2, after_a_failure):
        assert "FloatingPointError" in seen["said"], seen["said"]
        assert seen["equal"], "other gradients than a fresh model's"
        assert seen["released"] and seen["gathered"] == 0, seen


def test_what_a_stage_cannot_do_is_refused_in_a_sentence() -> None:
    expected = {
        "not sharded": "call onefold.shard(module, recipe, mesh=...) first",
        "in backward": "step_in_backward=True steps a unit as soon as",
        "tied": "a weight cannot be shared between the 2 stages",
        "no actions": "leave register_actions out",
        "unshard inside": "onefold.parallel.unshard was called inside a pass",
        "reshard inside": "onefold.parallel.reshard was called inside a pass",
        "reduce_grad inside": "onefold.parallel.reduce_grad was called inside a pass",
        "reduce_grad under no_sync": "reduce_grad was called inside onefold.no_sync",
        "one parameter": "'head' inside this model belongs to another sharded model already",
        "other numbers": "are to be divided by 2 micro-batches, and those of this step by 4",
    }
    for said in run_ranks(2, refusals):
        assert said.keys() == expected.keys(), said
        for name, sentence in expected.items():
            assert sentence in said[name], f"{name}: {said[name]}"


def test_stages_saved_apart_load_at_another_number_of_stages(tmp_path: Path) -> None:
    written = Case("Schedule1F1B", steps=4)
    expected = in_one_process(written)
    folder = str(tmp_path / "step-7")
    run_ranks(4, saved, written, folder)
    for case, strict in (
        (Case("Schedule1F1B", pp=1, stages=1, steps=4), True),
        (Case("ScheduleInterleaved1F1B", steps=4, **LOOPED), False),
    ):
        ranks = run_ranks(case.pp * case.dp, resumed, case, folder, strict)
        weights = {k: v for seen in ranks for k, v in seen["weights"].items()}
        assert weights.keys() == expected["weights"].keys()
        for seen in ranks:
            later = expected["losses"][seen["dp"]][2 * case.micro_batches :]
            assert not seen["losses"] or close(seen["losses"], later), (seen["losses"], later)
        for key, value in expected["weights"].items():
            difference = (weights[key] - value).abs().max().item()
            assert difference < 2e-5, f"{case.stages} stages: {key} differs by {difference}"
