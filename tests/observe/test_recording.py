"""A recorded window: what is in it, what is not, and what a timeline shows of it."""

from __future__ import annotations

import pytest
from observed_loops import one_step, sharded
from synthetic_run import recorded, units

import onefold
from onefold.observe.report import Span, spans_of
from onefold.observe.trace import record


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
def test_the_timeline_names_every_gather_and_reduction(rank: int) -> None:
    step = recorded(rank)
    rows: dict[str, list[Span]] = {}
    for span in spans_of(step):
        rows.setdefault(span.row, []).append(span)
    for name, moves in (
        ("gathers", [f"all-gather {unit}" for unit in units() for _ in range(2)]),
        ("reductions", [f"reduce-scatter {unit}" for unit in units()]),
    ):
        here = [span for row, spans in rows.items() if row.startswith(name) for span in spans]
        assert sorted(span.name.partition(",")[0] for span in here) == sorted(moves)
    for spans in rows.values():
        assert all(a.end <= b.start for a, b in zip(spans, spans[1:], strict=False))
    assert len(rows["optimizer"]) == 1
    waited = sum(span.end - span.start for span in rows["waiting"])
    assert waited == pytest.approx(step.exposed)
