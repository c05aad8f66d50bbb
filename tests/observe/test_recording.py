"""A recorded window: what is in it, what is not, and the trace that other programs read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from observed_loops import one_step, sharded
from synthetic_run import recorded, units

import onefold
from onefold.observe.trace import record


def by_row(trace: dict[str, Any]) -> dict[str, list[dict[str, Any]]]:
    """The trace's spans by the name of their row."""
    events = trace["traceEvents"]
    names = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    rows: dict[str, list[dict[str, Any]]] = {}
    for e in events:
        if e["ph"] == "X" and (e["pid"], e["tid"]) in names:
            rows.setdefault(names[e["pid"], e["tid"]], []).append(e)
    return rows


def test_a_real_step_is_recorded_unit_by_unit() -> None:
    model, optimizer = sharded(3, "bf16")
    one_step(model, optimizer)
    with record(model, optimizer) as seen:
        one_step(model, optimizer)
    assert len(seen.updates) == seen.steps == 1
    assert all(seen.start <= start <= end <= seen.end for start, end in seen.updates)
    assert 0 < seen.compute < seen.seconds
    changes = seen.tiers["device"].changes
    assert changes and all(seen.start <= at <= seen.end for at, *_ in changes)
    assert seen.moves == []


def test_outside_of_a_window_nothing_is_kept() -> None:
    model, optimizer = sharded(3, "bf16")
    engine = onefold.engine_of(model)
    one_step(model, optimizer)
    assert not engine.memory.record and not engine.memory.timeline
    with pytest.raises(ZeroDivisionError), record(model, optimizer, activations=True):
        raise ZeroDivisionError
    assert not engine.memory.record
    with record(model, optimizer) as second:
        one_step(model, optimizer)
    assert second.steps == 1


@pytest.mark.parametrize("rank", [0, 3])
def test_the_chrome_trace_names_every_gather_and_reduction(tmp_path: Path, rank: int) -> None:
    step = recorded(rank)
    trace = json.loads(step.write_chrome(tmp_path / "deep" / "trace.json").read_text())
    rows = by_row(trace)
    gathers = [e for name, row in rows.items() if name.startswith("gathers") for e in row]
    reductions = [e for name, row in rows.items() if name.startswith("reductions") for e in row]
    assert sorted(e["name"] for e in gathers) == sorted(
        f"all-gather {unit}" for unit in units() for _ in range(2)
    )
    assert sorted(e["name"] for e in reductions) == sorted(
        f"reduce-scatter {unit}" for unit in units()
    )
    assert sum(e["args"]["bytes"] for e in gathers + reductions) == sum(step.wire().values())
    assert len(rows["optimizer"]) == 1
    assert sum(e["dur"] for e in rows["waiting"]) == pytest.approx(step.exposed * 1e6)
