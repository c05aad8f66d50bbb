"""The reference steps of a calibration: they are the engine's, and what is noted of them is what
its ledgers say.
"""

from __future__ import annotations

import pytest
import torch

from onefold.comm import Group
from onefold.doctor.bench import Bench
from onefold.doctor.benchmark_blocks import Sizes
from onefold.doctor.reference_steps import Training, take_steps
from onefold.machine.measured import StepPoint
from onefold.shard import engine_of
from ranks import run_ranks

pytestmark = pytest.mark.slow

TINY = Sizes(
    dtypes=("float32", "bfloat16"), matrices=(), blocks=(), copy_bytes=(), optimizer_numels=(), move_bytes=(), overlap_bytes=0,
    disk_bytes=0, budget_s=0.0, steps=((16, 8),),
)  # fmt: skip


def bench() -> Bench:
    device = torch.device("cpu")
    return Bench(Group(None, device, 60.0), device, TINY)


def steps_on_a_rank() -> tuple[tuple[StepPoint, ...], dict[tuple[str, int], dict[str, int]]]:
    """The points, and what the ledger counts in a step of each."""
    there = bench()
    points = take_steps(there, None)
    sent = {}
    for point in points:
        training = Training(there, None, point.dtype, point.stage, point.hidden, point.tokens)
        training.step()
        engine = engine_of(training.model)
        engine.traffic.reset()
        training.step()
        sent[point.dtype, point.stage] = engine.traffic.by_move()
    there.group.close()
    return points, sent


def test_reference_steps_send_what_is_noted_of_them() -> None:
    (first, sent), (second, _) = run_ranks(2, steps_on_a_rank)
    assert first == second  # the group's seconds, and everything else, are the same on all ranks
    assert [(p.dtype, p.stage) for p in first] == [(d, s) for d in TINY.dtypes for s in (0, 3)]
    for point in first:
        assert sent[point.dtype, point.stage] == point.wire
        assert all(point.calls[move] > 0 for move in point.wire)
    whole, divided = first[:2]
    assert divided.stepped < whole.stepped == whole.numel == divided.numel
