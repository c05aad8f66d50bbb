"""What the plan says of a cell, and how far the measurement is from it."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import combinations
from typing import Any

from benchmarks.plan_matrix.settings import Cell, batch, build
from onefold.plan.activity import Activity
from onefold.plan.api import machine_here
from onefold.plan.choose import Question
from onefold.plan.job import Job, Scheme
from onefold.plan.modules import model_shape
from onefold.plan.schema import Account
from onefold.tracing.trace import trace

MIB = 1 << 20
#: Relative errors that a prediction may have: the engine's peak, and a calibrated step's time.
PEAK, TIME = 0.05, 0.25
#: Two stages that are predicted to differ by less take the same; of the rounds, the share that must
#: show an order for it to count.
NEAR, AGREE = 0.05, 0.8


@lru_cache(maxsize=64)
def _activity(
    architecture: str, precision: str, checkpointing: str, micro_batch: int, seq: int
) -> Activity:
    cell = Cell(architecture, 1, 0, precision, 1, checkpointing, micro_batch, seq)
    how: Any = {"checkpointing": checkpointing, "precision": precision, "device": "cpu"}
    return Activity.from_trace(trace(build(architecture), batch(cell, micro_batch, 0), **how))


def predict(cell: Cell) -> tuple[Account, bool]:
    """(the account, whether its seconds come from a calibration with that many ranks)."""
    machine, calibrated = machine_here(cell.ranks, cell.ranks, 1 << 40, "cpu")
    samples = cell.micro_batch * cell.ranks * cell.accumulation
    job = Job(
        seq=cell.seq,
        micro_batch=cell.micro_batch,
        global_batch=samples,
        precision=cell.precision,
        checkpointing=cell.checkpointing,
    )

    def activities(micro: int, how: str) -> Activity:
        return _activity(cell.architecture, cell.precision, how, micro, cell.seq)

    shape = model_shape(build(cell.architecture), seq=cell.seq)
    found = Question(shape, activities, machine, job).answer(
        Scheme(cell.stage, cell.checkpointing, "none", cell.micro_batch)
    )
    account = found.account
    return (account if calibrated else replace(account, seconds={})), calibrated


def judge(
    cell: Cell, account: Account, seen: Mapping[str, Any], rounds: Sequence[float] = ()
) -> dict[str, Any]:
    """One rank's row: what was predicted, what measured (`rounds`: seconds), and what is wrong."""
    rest, ledger, peak = (sum(seen[name].values()) for name in ("rest", "ledger", "peak"))
    predicted = sum(account.ledger.values())
    wrong = []
    if abs(rest - account.rest_bytes) > MIB:
        wrong.append(f"at rest {rest:,} bytes, predicted {account.rest_bytes:,}")
    if dict(seen["wire"]) != dict(account.wire):
        wrong.append(f"on the wire {seen['wire']}, predicted {dict(account.wire)}")
    if abs(ledger - predicted) > PEAK * predicted:
        wrong.append(f"engine's peak {ledger:,} bytes, predicted {predicted:,}")
    if max(ledger, peak) > account.bound:
        wrong.append(f"peak {max(ledger, peak):,} bytes, above the bound of {account.bound:,}")
    step, seconds = account.seconds.get("step"), statistics.median(rounds) if rounds else None
    if step and seconds and abs(seconds - step) > TIME * step:
        wrong.append(f"a step took {1000 * seconds:.0f} ms, predicted {1000 * step:.0f}")
    return {
        "cell": cell.to_json(),
        "rest": [account.rest_bytes, rest],
        "wire": [account.wire_bytes, sum(seen["wire"].values())],
        "ledger": [predicted, ledger],
        "peak": [account.peak_bytes, peak],
        "bound": account.bound,
        "step_s": [step, seconds],
        "rounds_s": list(rounds),
        "wrong": wrong,
    }


def orders(rows: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """How many pairs of stages of one setting came in the predicted order ("right"), are "ties", or
    "turned" (sentences).

    A pair is a tie where the plan says that they take the same, within `NEAR` or within the spread
    of the measurement (half the distance between the quartiles of the rounds' differences, as a
    share of the step); and where the measurement itself does not tell: fewer than `AGREE` of its
    rounds came in the same order.
    """
    groups: dict[str, list[Mapping[str, Any]]] = {}
    for row in rows:
        if row["step_s"][0] and row["rounds_s"]:
            groups.setdefault(
                str({k: v for k, v in row["cell"].items() if k != "stage"}), []
            ).append(row)
    right, ties, turned = 0, 0, []
    for group in groups.values():
        for a, b in combinations(group, 2):
            predicted = b["step_s"][0] / a["step_s"][0] - 1
            differences = [y / x - 1 for x, y in zip(a["rounds_s"], b["rounds_s"], strict=True)]
            later = sum(d > 0 for d in differences) / len(differences)
            if abs(predicted) <= max(NEAR, _spread(differences)) or 1 - AGREE < later < AGREE:
                ties += 1
            elif (predicted > 0) == (later >= AGREE):
                right += 1
            else:
                (pa, ma), (pb, mb) = a["step_s"], b["step_s"]
                other = f"stage {b['cell']['stage']} {1000 * mb:.0f} ms"
                turned.append(
                    f"{Cell(**a['cell'])}: {1000 * ma:.0f} ms, {other}; predicted {1000 * pa:.0f}"
                    f" and {1000 * pb:.0f}"
                )
    return {"right": right, "ties": ties, "turned": turned}


def _spread(values: Sequence[float]) -> float:
    """Half the distance between the quartiles."""
    if len(values) < 2:
        return 0.0
    low, _, high = statistics.quantiles(values, n=4, method="inclusive")
    return (high - low) / 2
