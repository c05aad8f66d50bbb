"""The plan against real ranks: a part of `benchmarks/plan_matrix`, bytes alone."""

from __future__ import annotations

import statistics
import sys
from pathlib import Path
from typing import Any

import pytest

from ranks import run_ranks

ROOT = Path(__file__).parents[2]
pytest.importorskip("transformers")

from benchmarks.plan_matrix.__main__ import group_seconds
from benchmarks.plan_matrix.measuring import measure
from benchmarks.plan_matrix.pace import Pace
from benchmarks.plan_matrix.planning import judge, orders, predict
from benchmarks.plan_matrix.settings import ARCHITECTURES, Cell, cells


def seen_by_a_rank(part: list[dict[str, Any]], root: str) -> list[dict[str, Any]]:
    """What this rank's ledgers say of each cell."""
    sys.path.insert(0, root)
    from benchmarks.plan_matrix import measuring
    from benchmarks.plan_matrix.settings import by_setting

    # Nothing is timed: optimizer states are made and orders learned in the first step
    measuring.WARMUP = 1
    return [
        seen
        for setting in by_setting([Cell(**cell) for cell in part])
        for seen in measuring.measure(setting, activations=False)
    ]


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_the_ledgers_of_real_models_say_what_the_plan_said(architecture: str, ranks: int) -> None:
    part = [
        c
        for c in cells([architecture], [ranks], ["bf16"], [1, 2], ["none"])
        if not (ranks == 1 and c.stage in (1, 2))
    ]
    seen = run_ranks(ranks, seen_by_a_rank, [c.to_json() for c in part], str(ROOT), timeout=300.0)
    for i, cell in enumerate(part):
        account, _ = predict(cell)
        for rank in range(ranks):
            row = judge(cell, account, seen[rank][i])
            assert row["wrong"] == [], (
                f"{cell}, rank {rank}: {row}, {seen[rank][i]['ledger']}, {dict(account.ledger)}"
            )


def test_a_cell_that_is_off_is_called_wrong() -> None:
    cell = Cell("gpt2", 2, 1, "bf16", 1, "none")
    account, _ = predict(cell)
    right = {
        "rest": account.rest,
        "wire": account.wire,
        "ledger": account.ledger,
        "peak": account.peak,
    }
    assert judge(cell, account, right)["wrong"] == []
    off = {
        "rest": {**account.rest, "parameters": account.rest["parameters"] + (2 << 20)},
        "wire": {**account.wire, "all-gather": account.wire["all-gather"] + 1},
        "ledger": {k: int(1.06 * v) for k, v in account.ledger.items()},
        "peak": {k: 4 * v for k, v in account.peak.items()},
    }
    wrong = judge(cell, account, off)["wrong"]
    words = ("rest", "wire", "engine", "bound")
    assert [next(w for w in words if w in sentence) for sentence in wrong] == list(words)


def row(stage: int, predicted: float, *rounds: float) -> dict[str, Any]:
    cell = Cell("gpt2", 2, stage, "fp32", 1, "none")
    return {
        "cell": cell.to_json(),
        "step_s": [predicted, statistics.median(rounds)],
        "rounds_s": list(rounds),
    }


def test_orders_that_turn_are_told() -> None:
    assert orders([row(1, 1.0, 1.0, 1.1, 0.9), row(3, 1.5, 1.4, 1.5, 1.4)]) == {
        "right": 1,
        "ties": 0,
        "turned": [],
    }
    found = orders([row(1, 1.0, 1.5, 1.6, 1.5), row(3, 1.5, 1.0, 1.0, 1.1)])
    assert (found["right"], found["ties"]) == (0, 0)
    assert (
        "stage 1" in found["turned"][0]
        and "1500 ms, stage 3 1000 ms; predicted 1000 and 1500" in found["turned"][0]
    )


def test_stages_are_a_tie_where_the_plan_or_the_rounds_do_not_tell_them_apart() -> None:
    tie = {"right": 0, "ties": 1, "turned": []}
    # The plan says they take the same
    assert orders([row(1, 1.0, 1.5, 1.5), row(2, 1.01, 1.0, 1.0)]) == tie
    # Every round says something else
    assert orders([row(1, 1.0, 1.5, 1.0, 1.5, 1.0), row(2, 1.1, 1.0, 1.5, 1.0, 1.5)]) == tie
    # All rounds agree, but not on how much
    assert orders([row(1, 1.0, 1.0, 1.0, 1.0), row(2, 1.1, 0.95, 0.5, 0.3)]) == tie


def test_the_seconds_of_a_step_go_from_the_first_begin_to_the_last_end() -> None:
    assert group_seconds(
        [{"spans": [[1.0, 2.0], [5.0, 7.0]]}, {"spans": [[1.5, 2.5], [4.0, 6.0]]}]
    ) == [1.5, 3.0]


def test_rounds_are_timed_in_turns() -> None:
    part = [Cell("gpt2", 1, stage, "fp32", 1, "none") for stage in (0, 3)]
    first, second = measure(part, rounds=2, activations=False)
    assert len(first["spans"]) == len(second["spans"]) == 2
    assert first["paces"] == [1.0, 1.0]
    # Each round begins with another
    times = [first["spans"][0], second["spans"][0], second["spans"][1], first["spans"][1]]
    assert times == sorted(times) and all(begin < end for begin, end in times)


def test_rounds_wait_for_the_calibrated_pace_until_patience_ends() -> None:
    slow = Pace(1e-9, patience=0.0)
    assert not slow.counts(slow.wait())
    assert slow.patience <= 0
    usual = Pace(slow.now() * 1e-9, patience=0.0)
    assert usual.counts(1.0) and not usual.counts(1.2) and not usual.counts(0.8)
    (seen,) = measure(
        [Cell("gpt2", 1, 0, "fp32", 1, "none")],
        rounds=1,
        usual=1e-9,
        patience=0.0,
        activations=False,
    )
    assert len(seen["spans"]) == 1 and seen["paces"][0] > 1  # counted all the same, and told of
