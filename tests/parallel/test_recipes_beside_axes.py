"""Recipes whose state or steps are elsewhere, beside tensor and expert parallelism: they train as one
process does, or are refused in a sentence.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from mixture_models import Case, in_one_process, trained

from ranks import run_ranks

pytestmark = pytest.mark.one_in(4)

#: What the recipe says, the stages, and whether gradients are clipped.
RIGHT: dict[str, tuple[dict[str, Any], tuple[int, ...], bool]] = {
    "states on NVMe": ({"offload_optimizer": "nvme"}, (1, 3), True),
    "all on NVMe": ({"offload_optimizer": "nvme", "offload_param": "nvme"}, (3,), True),
    "parameters on the host": ({"offload_optimizer": "cpu", "offload_param": "cpu"}, (3,), True),
    "activations on the host": ({"offload_activations": "cpu"}, (1, 3), True),
    # Weights that tensor parallelism divides are left whole, with a note
    "tiles": ({"tile": 512}, (1, 3), True),
    "borders": ({"borders": True}, (1, 2, 3), True),
    "borders, states on the host": (
        {"borders": True, "offload_optimizer": "cpu"},
        (1, 3),
        True,
    ),
    "stepping in the backward pass": (
        {"offload_optimizer": "cpu", "step_in_backward": True},
        (1, 3),
        False,
    ),
}


@pytest.mark.parametrize("name", RIGHT)
def test_state_that_is_elsewhere_trains_as_in_one_process(name: str, tmp_path: Path) -> None:
    options, stages, clips = RIGHT[name]
    if "NVMe" in name:
        options = {**options, "nvme": str(tmp_path)}
    case = Case(
        dp=2, ep=1, steps=2, learned=False, max_norm=0.05 if clips else None, options=options
    )
    expected = in_one_process(case)
    ranks = run_ranks(4, trained, case, *stages)
    for i, stage in enumerate(stages):
        for rank, seen in enumerate(each[i] for each in ranks):
            told = f"{name}, stage {stage}, rank {rank}"
            wanted = expected["losses"][rank // 2]
            assert seen["losses"] == pytest.approx(wanted, rel=2e-5), f"{told}: {wanted}"
            assert seen["norms"] == pytest.approx(expected["norms"], rel=2e-5), told
        for key, value in expected["weights"].items():
            apart = (ranks[0][i]["weights"][key] - value).abs().max().item()
            assert apart < 2e-5, f"{name}, stage {stage}: {key} differs by {apart}"
