"""A recorded window: what is in it, what is not, and the trace that other programs read."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from observed_loops import one_step, sharded
from synthetic_run import BLOCKS, beyond, recorded, units

import onefold
from onefold.observe import record
from onefold.observe.chrome import lanes
from onefold.observe.trace import Move, Recording, Work, covered
from onefold.plan.schema import GRADIENTS, MOMENTS


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
    names = {unit.name for unit in onefold.engine_of(model).units}
    forward = {w.unit for w in seen.work if w.phase == "forward"}
    assert forward == names, f"forward passes of {forward}, units {names}"
    assert {w.unit for w in seen.work if w.phase == "backward"} == names
    assert [w.kind for w in seen.work].count("optimizer") == seen.steps == 1
    assert all(seen.start <= w.start <= w.end <= seen.end for w in seen.work)
    assert seen.changes and all(seen.start <= at <= seen.end for at, *_ in seen.changes)
    assert not seen.truncated and seen.moves == []


def test_what_was_held_and_the_changes_add_up_to_what_is_held() -> None:
    model, optimizer = sharded(3, "bf16")
    with record(model, optimizer) as seen:  # the first step, which creates the moments
        one_step(model, optimizer)
    times, levels = seen.levels()
    end = {c: series[-1] for c, series in levels.items() if series[-1]}
    state = sum(t.untyped_storage().nbytes() for s in optimizer.state.values() for t in s.values())
    assert end == {**onefold.engine_of(model).memory.now(), MOMENTS: state}
    assert levels[MOMENTS][0] == 0 and max(levels[GRADIENTS]) > 0
    assert times == sorted(times) and times[0] == seen.start and times[-1] == seen.end
    assert all(n >= 0 for series in levels.values() for n in series)
    assert sum(seen.peak().values()) == max(
        sum(level) for level in zip(*levels.values(), strict=True)
    )


def test_outside_of_a_window_nothing_is_kept() -> None:
    model, optimizer = sharded(3, "bf16")
    engine = onefold.engine_of(model)
    one_step(model, optimizer)
    assert not engine.memory.record and len(engine.memory.timeline) == len(engine.timeline) == 0
    hooks = len(optimizer._optimizer_step_pre_hooks), len(optimizer._optimizer_step_post_hooks)
    with pytest.raises(ZeroDivisionError), record(model, optimizer, activations=True):
        raise ZeroDivisionError
    assert not engine.memory.record
    assert (
        len(optimizer._optimizer_step_pre_hooks),
        len(optimizer._optimizer_step_post_hooks),
    ) == hooks
    with record(model, optimizer) as second:
        one_step(model, optimizer)
    assert second.steps == 1


def test_two_windows_at_once_are_refused_and_two_in_turn_are_apart() -> None:
    model, optimizer = sharded(3, "bf16")
    with record(model, optimizer) as first:
        one_step(model, optimizer)
        with pytest.raises(RuntimeError, match="recorded already"), record(model):
            pass
    with record(model, optimizer) as second:
        one_step(model, optimizer)
    assert len(first.work) == len(second.work)
    assert first.end <= second.start and min(w.start for w in second.work) >= second.start
    with pytest.raises(ValueError, match="not sharded"), record(torch.nn.Linear(2, 2)):
        pass


def test_moves_of_the_window_are_taken_over_with_their_waits() -> None:
    model, optimizer = sharded()
    traffic = onefold.engine_of(model).traffic
    traffic.record("all-gather", "before", 10)
    with record(model, optimizer) as seen:
        event = traffic.record("all-gather", "blocks.0", 1000, 4, "bfloat16", "forward", 0)
        traffic.waited(event, since=event.launched)
        traffic.record("reduce-scatter", "blocks.0", 500, 4, "float32", "backward", 0)
        traffic.record("state", "", 7)
    traffic.record("all-gather", "after", 10)
    assert [(m.move, m.unit, m.nbytes, m.dtype, m.phase) for m in seen.moves[:2]] == [
        ("all-gather", "blocks.0", 1000, "bfloat16", "forward"),
        ("reduce-scatter", "blocks.0", 500, "float32", "backward"),
    ]
    assert seen.wire() == {
        "all-gather": 1000,
        "reduce-scatter": 500,
    }, "the state's bytes are no part of a step"
    assert seen.by_unit() == {"blocks.0": {"all-gather": 1000, "reduce-scatter": 500}}
    assert seen.exposed == seen.moves[0].exposed > 0
    assert seen.moves[1].landed == seen.end, (
        "what is under way when the window ends lands at its end"
    )


def test_a_ring_that_is_too_short_is_said() -> None:
    model, optimizer = sharded()
    traffic = onefold.engine_of(model).traffic
    with record(model, optimizer) as seen:
        for _ in range((traffic.events.maxlen or 0) + 1):
            traffic.record("all-gather", "blocks.0", 1)
    assert seen.truncated and len(seen.moves) == traffic.events.maxlen


def test_seconds_count_once_however_many_spans_cover_them() -> None:
    assert covered([]) == 0
    assert covered([(0, 2), (1, 3), (5, 6), (5.5, 5.7)]) == 4
    spans = [
        Work("compute", "(root)", "forward", 0, 10),
        Work("compute", "a", "forward", 2, 4),
        Work("optimizer", "", "optimizer", 10, 12),
    ]
    waits = [
        Move("all-gather", "a", 1, "float32", "forward", 0, 3, 1.0),
        Move("all-gather", "b", 1, "float32", "forward", 0, 3.5, 0.5),
    ]
    seen = Recording(0, 2, 0, 12, 1, moves=waits, work=spans)
    assert (seen.compute, seen.optimizer) == (8.5, 2)


@pytest.mark.parametrize("rank", [0, 3])
def test_the_chrome_trace_names_every_gather_reduction_and_unit(tmp_path: Path, rank: int) -> None:
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
    assert len(rows["compute"]) == 2 * (BLOCKS + 1) + 1 and len(rows["optimizer"]) == 1
    assert sum(e["dur"] for e in rows["waiting"]) == pytest.approx(step.exposed * 1e6)
    assert (
        next(e for e in trace["traceEvents"] if e["name"] == "process_name")["args"]["name"]
        == f"Onefold rank {rank} of 4"
    )


def test_spans_of_a_row_of_the_trace_never_overlap_partly(tmp_path: Path) -> None:
    """Perfetto draws nested spans and drops those that overlap otherwise."""
    rows = by_row(json.loads(recorded().write_chrome(tmp_path / "trace.json").read_text()))
    assert rows
    for name, row in rows.items():
        for a, b in itertools.combinations(sorted(row, key=lambda e: (e["ts"], -e["dur"])), 2):
            apart = b["ts"] >= a["ts"] + a["dur"] - 1e-3
            inside = b["ts"] + b["dur"] <= a["ts"] + a["dur"] + 1e-3
            assert apart or inside, f"{a['name']} and {b['name']} overlap on row {name}"


def test_the_memory_counter_follows_the_ledger(tmp_path: Path) -> None:
    step = recorded()
    trace = json.loads(step.write_chrome(tmp_path / "trace.json").read_text())
    counters = [e for e in trace["traceEvents"] if e["ph"] == "C"]
    assert max(sum(e["args"].values()) for e in counters) == sum(step.peak().values())
    assert counters[0]["ts"] == 0 and counters[-1]["ts"] == pytest.approx(step.seconds * 1e6)


def test_torch_profilers_events_lie_beside_ours_on_one_clock(tmp_path: Path) -> None:
    model, optimizer = sharded(3, "bf16")
    one_step(model, optimizer)
    with record(model, optimizer, torch_profiler=True) as seen:
        one_step(model, optimizer)
    trace = json.loads(seen.write_chrome(tmp_path / "trace.json").read_text())
    ours = by_row(trace)["compute"]
    matrix = [e for e in trace["traceEvents"] if e["ph"] == "X" and e["name"] == "aten::addmm"]
    assert matrix, "torch.profiler saw no matrix product"
    begin, end = min(e["ts"] for e in ours), max(e["ts"] + e["dur"] for e in ours)
    outside = [e for e in matrix if not begin - 5000 <= e["ts"] <= end + 5000]
    assert not outside, (
        f"{len(outside)} of {len(matrix)} matrix products lie outside of {begin:.0f} to {end:.0f} µs"
    )


def test_lanes_are_as_few_as_overlap_asks_for() -> None:
    spans = [(0.0, 2.0, "a"), (1.0, 3.0, "b"), (2.0, 4.0, "c"), (3.5, 5.0, "d")]
    assert [[what for _, _, what in row] for row in lanes(spans)] == [["a", "c"], ["b", "d"]]
    assert lanes([]) == []


def test_the_chrome_trace_has_a_counter_for_each_tier_and_a_row_for_moves_between_them(
    tmp_path: Path,
) -> None:
    step = beyond(recorded())
    events = json.loads(step.write_chrome(tmp_path / "trace.json").read_text())["traceEvents"]
    counted = {
        e["name"]: max(sum(c["args"].values()) for c in events if c["name"] == e["name"])
        for e in events
        if e["ph"] == "C"
    }
    assert counted == {
        "memory": sum(step.peak().values()),
        **{f"memory, {t}": sum(step.peak(tier=t).values()) for t in ("host", "nvme")},
    }
    assert {
        e["name"].split()[0] for e in by_row({"traceEvents": events})["to and from host and NVMe"]
    } == {"down", "written"}
