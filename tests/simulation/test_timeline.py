"""The timeline of a simulated step: by hand on a machine of round figures, and a short Llama 3 8B on
H100s against the plan's own figure.
"""

from __future__ import annotations

import importlib.util
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import nn

import onefold
from onefold.plan import hardware
from onefold.plan.evaluate import evaluate
from onefold.plan.hardware import Gpu, Host, Machine
from onefold.plan.job import Job, Scheme
from onefold.plan.subject import subject_of
from onefold.plan.traffic import Software
from onefold.simulation import prices
from onefold.simulation.result import Simulation
from onefold.simulation.simulate import simulate
from onefold.simulation.timeline import COMPUTE, HOST, Timeline
from onefold.tracing.repeat import Checkpointing
from timed import LAYERS, SHORT

pytestmark = pytest.mark.one_in(18)

with_transformers = pytest.mark.skipif(
    importlib.util.find_spec("transformers") is None, reason="transformers is not installed"
)
BLOCKS, HIDDEN, ROWS = 4, 1024, 32  # blocks that are not small traffic
#: A product takes 2 s, all memory traffic and launches nothing.
EXACT = Software(kernel_share=1, link_share=1, hop_seconds=0, straggler=0, launch_seconds=0)


class Blocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(HIDDEN, HIDDEN, bias=False) for _ in range(BLOCKS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def by_hand(move: float, ranks: int = 2, per_node: int = 2) -> Machine:
    """`move`: seconds of a gather or a reduction of a block between two ranks. Between nodes a rank
    has as much as inside.
    """
    link = HIDDEN * HIDDEN / move
    gpu = Gpu(
        "by hand", "", 1 << 40, {"bf16": ROWS * HIDDEN * HIDDEN}, 1.0, float("inf"), link, 1.0
    )
    between = hardware.Link("by hand", "", link * per_node) if ranks > per_node else None
    return Machine(gpu, ranks, per_node, between, Host(1e12, 1e12, 1e12, 1e12, 1e12))


def run(
    move: float = 1.0,
    stage: int = 3,
    micro_batches: int = 1,
    software: Software = EXACT,
    machine: Machine | None = None,
    **options: Any,
) -> Timeline:
    machine = machine or by_hand(move)
    recipe = onefold.Recipe.zero(stage, precision="bf16", units=(nn.Linear,), **options)
    # What is worked out by hand is so for software of round figures
    with patch.object(prices, "measured_software", lambda *_: software):
        found = simulate(
            Blocks(),
            recipe,
            machine.ranks,
            micro_batches=micro_batches,
            batch=torch.zeros(ROWS, HIDDEN),
            loss=torch.sum,
            machine=machine,
        )
    assert found.exact
    timeline = found.timeline
    assert timeline is not None
    parts = timeline.parts
    last = max(s.end for s in timeline.spans if s.stream in (COMPUTE, HOST))
    assert parts.model + parts.engine + parts.optimizer + parts.waits + parts.host == pytest.approx(
        last
    ), "the parts are the whole step"
    return timeline


def rows(timeline: Timeline, *kinds: str) -> list[tuple[str, str, float, float]]:
    """(name, number of the block, begin, end) of the spans that take time, in the order of their
    begin.
    """
    found = [s for s in timeline.spans if s.kind in kinds and s.seconds]
    return sorted(
        ((s.name, s.unit.removeprefix("blocks."), s.begin, s.end) for s in found),
        key=lambda row: row[2:],
    )


# -- by hand ---------------------------------------------------------------------------------------


def test_a_gather_ahead_hides_behind_the_block_before_it_and_the_ends_are_exposed() -> None:
    """The last block stays gathered from its forward pass to its backward pass."""
    found = run()
    assert rows(found, "model") == [
        *(("mm", str(i), 1.0 + 2 * i, 3.0 + 2 * i) for i in range(4)),
        # The first block has no gradient of its input
        *(("mm", str(3 - i // 2), 9.0 + 2 * i, 11.0 + 2 * i) for i in range(7)),
    ]
    # Those of 1 and 0 behind a reduction on the same link
    gathers = [(0, 0), (1, 1), (2, 3), (3, 5), (2, 9), (1, 14), (0, 18)]
    reductions = [(3, 13), (2, 17), (1, 21), (0, 23)]
    expected = [("all-gather", str(i), float(t), t + 1.0) for i, t in gathers]
    expected += [("reduce-scatter", str(i), float(t), t + 1.0) for i, t in reductions]
    assert rows(found, "collective") == sorted(expected, key=lambda row: row[2:])
    assert found.exposed == {"blocks.0": {"all-gather": 1.0, "reduce-scatter": 1.0}}
    assert found.step == 11 * 2 + 2
    assert found.busy == {"compute": 22.0, "link in the node": 11.0, "host": 0.0}
    assert found.bound == "compute"


@pytest.mark.parametrize(
    ("in_flight", "expected"), [(0, [5.0] * 4), (1, [5.0, 5.0]), (2, [5.0, 5.0])]
)
def test_in_flight_says_how_many_reductions_the_backward_pass_runs_ahead_of(
    in_flight: int, expected: list[float]
) -> None:
    """A reduction takes 5 s, a block's backward pass 4 s (the first block's 2 s), and none can
    begin before its block is done.
    """
    found = run(move=5.0, stage=2, in_flight=in_flight)
    waits = [
        s
        for s in found.spans
        if s.kind == "wait" and s.name == "reduce-scatter" and s.stream == COMPUTE
    ]
    if in_flight == 0:
        assert [s.unit for s in waits] == [f"blocks.{i}" for i in (3, 2, 1, 0)]
        assert [s.seconds for s in waits] == expected
        assert found.step == 5 + 3 * 3 + 22 + 4 * 5
    else:
        # The link is the limit: four reductions in a row, the first of them behind the backward
        # pass of the last block
        assert found.parts.exposed["reduce-scatter"] == sum(expected)
        assert found.step == 20 + 2 + 4 + 4 * 5


# -- what it is made of ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"machine": hardware.machine(8, 8, "h100-80")}, "expected the same number"),
        ({"offload_optimizer": "cpu"}, "optimizer states off the device"),
    ],
)
def test_what_has_no_timeline_gets_a_sentence(options: dict[str, Any], says: str) -> None:
    machine = options.pop("machine", by_hand(1.0))
    with pytest.raises(ValueError, match=says):
        simulate(
            Blocks(),
            onefold.Recipe.zero(3, **options),
            2,
            batch=torch.zeros(ROWS, HIDDEN),
            machine=machine,
        )


# -- the file --------------------------------------------------------------------------------------


# -- the plan's own figure -------------------------------------------------------------------------


def compared(
    gpus: int, stage: int, checkpointing: Checkpointing, seq: int = 2048, model: str = SHORT
) -> tuple[float, Simulation]:
    """Seconds of a step by the plan, and the simulation."""
    machine = hardware.machine(gpus, 8, "h100-80")
    job = Job(seq=seq, global_batch=gpus)
    scheme, subject = (
        Scheme(stage, checkpointing),
        subject_of(model, job, None, None, machine),
    )
    told = evaluate(
        subject.shape, subject.activities(1, checkpointing), machine, job, scheme
    ).account.seconds["step"]
    return told, simulate(
        model,
        scheme.recipe(job),
        gpus,
        seq=seq,
        checkpointing=checkpointing,
        machine=machine,
    )


@with_transformers
@pytest.mark.parametrize("checkpointing", ["none", "full"])
@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("gpus", [8, 64])
def test_llama_on_h100s_takes_what_the_plan_says_within_a_tenth(
    gpus: int, stage: int, checkpointing: Checkpointing
) -> None:
    # Between nodes the ends of a step are long: four blocks are too few beside them
    model, layers = ("llama-3-8b", 32) if (gpus, stage) == (64, 3) else (SHORT, LAYERS)
    told, found = compared(gpus, stage, checkpointing, model=model)
    assert found.exact
    assert found.timeline is not None
    assert abs(told / found.timeline.step - 1) < 0.1, (
        f"plan {told:.4f} s, timeline {found.timeline.step:.4f} s, {found.timeline.parts}"
    )
    assert {s.unit for s in found.timeline.spans if s.kind == "model"} >= {
        f"model.layers.{i}" for i in range(layers)
    }
