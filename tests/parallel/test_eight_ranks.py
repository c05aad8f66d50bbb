"""Three axes at once, on eight ranks: losses, norms and weights are those of one process, and stages 1,
2 and 3 of one mesh have the same bits.

| mesh               | divided                                                                        |
|--------------------|--------------------------------------------------------------------------------|
| pp 2 × dp 2 × tp 2 | each stage's feed-forward layers, embedding and head over tp                    |
| dp 2 × ep 2 × tp 2 | attention over tp; experts over ep, and each expert over tp                     |

transformers' own plans on eight ranks are in test_transformers_plans.py.
"""

from __future__ import annotations

import mixture_models
import pytest
import torch
from pipeline_models import Case
from test_pipelines import compare

from ranks import run_ranks

pytestmark = [pytest.mark.slow, pytest.mark.one_in(2)]

PIPELINES = {
    "1F1B": Case("Schedule1F1B", tp=2, max_norm=0.5, steps=2),
    "interleaved 1F1B": Case(
        "ScheduleInterleaved1F1B", tp=2, stages=4, registered=True, max_norm=0.5, steps=2
    ),
}


@pytest.mark.parametrize("name", PIPELINES)
def test_pipelines_beside_data_and_tensor_parallelism_train_as_one_process(name: str) -> None:
    for ranks in compare(name, PIPELINES[name], 1, 2, 3):
        assert len({tuple(seen["norms"]) for seen in ranks}) == 1, "norms differ between ranks"


def test_experts_beside_data_and_tensor_parallelism_train_as_one_process() -> None:
    case = mixture_models.Case()
    expected = mixture_models.in_one_process(case)
    ranks = run_ranks(8, mixture_models.trained, case, 1, 2, 3)
    holders = {"blocks.0.experts.up": 2, "blocks.0.attention.wq.weight": 4, "tokens.weight": 8}
    first = ranks[0][0]
    for at in range(3):
        for rank, seen in enumerate(each[at] for each in ranks):
            told = f"stage {at + 1}, rank {rank}"
            for what, wanted in (
                ("losses", expected["losses"][rank // 2]),
                ("norms", expected["norms"]),
            ):
                torch.testing.assert_close(
                    seen[what], wanted, rtol=2e-5, atol=1e-6, msg=f"{told}: {seen[what]} {wanted}"
                )
            assert seen["norms"] == first["norms"], f"{told}: other bits"
            assert seen["losses"] == ranks[rank][0]["losses"], f"{told}: other bits"
            assert {name: seen["holders"][name] for name in holders} == holders, told
        weights = ranks[0][at]["weights"]
        for key, value in expected["weights"].items():
            difference = (weights[key] - value).abs().max().item()
            assert difference < 2e-5, f"stage {at + 1}: {key} differs by {difference}"
            assert torch.equal(weights[key], first["weights"][key]), f"stage {at + 1}: {key}"
