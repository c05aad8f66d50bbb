"""ZeRO under torch's pipelines: each stage's module is sharded by itself, gathered once and reduced
once a step, and trains as the whole model does in one process.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from pipeline_models import Case, in_one_process, trained

from ranks import run_ranks

LOOPED: dict[str, Any] = {"stages": 4}
V: dict[str, Any] = {"stages": 4, "v_shaped": True}
CASES = {
    "GPipe": Case(),
    "1F1B": Case("Schedule1F1B"),
    "interleaved 1F1B": Case("ScheduleInterleaved1F1B", **LOOPED),
    "interleaved 1F1B, registered": Case("ScheduleInterleaved1F1B", registered=True, **LOOPED),
    "looped BFS": Case("ScheduleLoopedBFS", **LOOPED),
    "looped BFS, registered": Case("ScheduleLoopedBFS", registered=True, **LOOPED),
    "interleaved zero bubble": Case("ScheduleInterleavedZeroBubble", **LOOPED),
    "ZBV": Case("ScheduleZBVZeroBubble", registered=True, **V),
    "DualPipeV": Case("ScheduleDualPipeV", **V),
    "GPipe on one data rank": Case(dp=1),
    "1F1B on one data rank": Case("Schedule1F1B", dp=1),
    "ZBV on one data rank": Case("ScheduleZBVZeroBubble", dp=1, **V),
}


def close(got: Any, expected: Any) -> bool:
    return bool(torch.allclose(torch.tensor(got), torch.tensor(expected), rtol=2e-5, atol=1e-6))


@pytest.mark.parametrize("name", CASES)
def test_every_schedule_trains_as_one_process_at_every_stage(name: str) -> None:
    case = CASES[name]
    expected = in_one_process(case)
    first: tuple[Any, dict[str, torch.Tensor]] | None = None
    for stage in (1, 2, 3):
        ranks = run_ranks(case.pp * case.dp, trained, stage, case)
        weights: dict[str, torch.Tensor] = {}
        for rank, seen in enumerate(ranks):
            weights.update(seen["weights"])
            told = f"{name}, stage {stage}, rank {rank}"
            if seen["losses"]:
                wanted = expected["losses"][rank % case.dp]
                assert close(seen["losses"], wanted), f"{told}: {seen['losses']} {wanted}"
            assert seen["graphs"] == [0] * len(seen["graphs"]), f"{told}: open graphs {seen}"
            assert stage < 3 or not any(seen["held"]), f"{told}: units stay gathered"
        assert weights.keys() == expected["weights"].keys()
        for key, value in expected["weights"].items():
            difference = (weights[key] - value).abs().max().item()
            assert difference < 2e-5, f"{name}, stage {stage}: {key} differs by {difference}"
        losses = [seen["losses"] for seen in ranks]
        first = first or (losses, weights)
        assert losses == first[0], f"{name}: stage {stage} has other losses than stage 1"
        for key, value in weights.items():
            assert torch.equal(value, first[1][key]), f"{name}: {key} at stage {stage}"
