"""Each row of the chapters has its tiny counterpart on a CPU, where two ranks stand for GPUs."""

from __future__ import annotations

import pytest

from onefold.doctor.chapter_expected import expected_memory
from onefold.doctor.chapter_runs import CHAPTERS, Scope
from onefold.doctor.chapters import TINY_PATIENCE, measure_chapters
from onefold.doctor.checks import OK
from onefold.plan import hardware
from ranks import absolute_path

pytestmark = pytest.mark.one_in(4)


@pytest.mark.slow
@pytest.mark.parametrize("name", CHAPTERS)
def test_every_row_of_the_chapters_has_its_tiny_counterpart(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", absolute_path())
    (found,) = measure_chapters(Scope("cpu", 2, tiny=True, steps=2, limit=400.0), [name])
    assert found.status == OK and found.name == name and not found.said, found
    rows = found.rows
    at = {column: number for number, column in enumerate(found.columns)}
    assert all(len(row) == len(found.columns) for row in rows) and found.seconds > 0
    if name == "block":
        assert [row[at["tokens"]] for row in rows] == ["16", "32"]
        assert all(float(row[at["step ms"]]) > 0 and float(row[at["waits ms"]]) > 0 for row in rows)
    elif name == "exchange":
        assert [row[1] for row in rows] == ["all-to-all and sum", "reduce-scatter"] * 2
        assert all(float(row[at[n]]) > 0 for row in rows for n in ("alone ms", "both ms"))
    elif name == "copies":
        assert [row[0] for row in rows] == ["1", "4"] and all(float(row[1]) > 0 for row in rows)
        assert [len(run.ranks[0]["losses"]) for run in found.runs] == [4, 16]
        assert all(row[at["copies ms"]] == "no streams" for row in rows)
    elif name == "communicators":
        expected = expected_memory(hardware.machine(2, 2, "h100-80"))
        assert [row[0] for row in rows] == ["nothing", *expected]
        assert all(float(row[at["driver MiB"]].replace(",", "")) > 0 for row in rows)
    elif name == "lost":
        assert [row[0] for row in rows] == ["killed", "stopped"]
        for row, least, most in zip(rows, (0.0, TINY_PATIENCE - 0.5), (5.0, 15.0), strict=True):
            assert row[at["error"]] == "StallError", row
            assert least <= float(row[at["told after s"]]) < most, row
            assert "rank 0" in row[at["text"]] and row[at["expected"]].endswith("and a step"), row
    elif name == "compile":
        assert [row[0] for row in rows] == ["eager", "inductor"]
        assert float(rows[1][at["loss difference"]]) < 1e-2 and float(rows[1][at["step ms"]]) > 0
    else:
        assert [row[0] for row in rows] == ["ordered", "native"] and rows[1][1] == "gloo has none"
        assert float(rows[0][at["step ms"]]) > 0
