"""Runs and plans come to what is recorded of them, and the check would notice a byte.

A part is some runs of every kind. `make test` takes a few parts; --all, or
`python tests/recording/record.py`, takes everything.
"""

from __future__ import annotations

import copy
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from recording import record, store
from recording.plans import names as plan_names
from recording.table import table

RUN_PARTS, PLAN_PARTS = 72, 18
RUNS = [run.name for run in table()]
#: Runs whose records have everything in them: ranks that differ, tiers, a load, hashes of bits.
FULL = ("stages: 3 on 3", "tiers: 3, all on NVMe", "any processor: 3, states on the host")


def differing(names: list[str]) -> list[str]:
    return record.compared(record.recording(), record.take(names, processes=1))


@pytest.mark.parametrize("part", range(RUN_PARTS))
def test_runs_are_as_recorded(part: int) -> None:
    wrong = differing(RUNS[part::RUN_PARTS])
    assert not wrong, "\n".join(wrong[: record.SHOWN])


@pytest.mark.parametrize("part", range(PLAN_PARTS))
def test_plans_are_as_recorded(part: int) -> None:
    wrong = differing(plan_names()[part::PLAN_PARTS])
    assert not wrong, "\n".join(wrong[: record.SHOWN])


def test_the_recording_holds_every_run_and_plan_and_no_other() -> None:
    assert sorted(record.recording()) == sorted([*RUNS, *plan_names()])
    assert len(RUNS) >= 220


def test_stages_that_promise_equal_bits_are_recorded_with_the_same() -> None:
    """Which also says that the recorded hashes are of weights: on the same ranks they differ from
    those after other steps.
    """
    known = record.recording()
    for ranks in (1, 2, 4):
        weights = {
            known[f"any processor: {stage} on {ranks}"]["bits"]["weights"] for stage in (0, 1, 2, 3)
        }
        assert len(weights) == 1, ranks
    assert (
        len({known[f"any processor: 3 on {ranks}"]["bits"]["weights"] for ranks in (1, 2, 4)}) == 3
    )


def changed(value: Any) -> Iterator[Any]:
    """Copies of a record with one number or text in it changed, or one entry gone: each in turn."""
    if isinstance(value, (dict, list)):
        for key in list(value) if isinstance(value, dict) else range(len(value)):
            for inner in changed(value[key]):
                other = copy.copy(value)
                other[key] = inner
                yield other
            fewer = copy.copy(value)
            del fewer[key]
            yield fewer
    elif isinstance(value, bool):
        yield not value
    elif isinstance(value, (int, float)):
        yield value + 1
    elif isinstance(value, str):
        yield value[:-1] + ("0" if value[-1:] != "0" else "1")


def test_one_byte_more_or_less_is_noticed_wherever_it_is() -> None:
    known = record.recording()
    for name in FULL:
        tried = 0
        for other in changed(known[name]):
            assert store.differences(name, known[name], other), name
            assert store.differences(name, other, known[name]), name
            tried += 1
        assert tried > 100, (name, tried)
        assert store.differences(name, known[name], copy.deepcopy(known[name])) == []


def test_what_is_written_is_what_is_read(tmp_path: Path) -> None:
    known = record.recording()
    runs = {name: one for name, one in known.items() if not name.startswith("plan ")}
    store.write(tmp_path / "runs.json", runs)
    assert store.read(tmp_path / "runs.json") == runs
    assert (tmp_path / "runs.json").read_text() == (record.HERE / record.RUNS).read_text(), (
        "it was written by hand, or in another way"
    )
    assert (
        sum((record.HERE / name).stat().st_size for name in (record.RUNS, record.PLANS)) < 1_500_000
    )


def test_the_command_checks_writes_and_compares_bits(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    one, only = "stages: 3 on 2, fp32", ["--only", "^stages: 3 on 2, fp32$"]

    def asked(*arguments: object) -> tuple[int, str]:
        code = record.main([*map(str, arguments), *only])
        return code, capsys.readouterr().out

    for name in (record.RUNS, record.PLANS):
        shutil.copy(record.HERE / name, tmp_path)
    path = tmp_path / record.RUNS
    runs = store.read(path)
    runs[one]["layout"][0][1] += 1
    store.write(path, runs)
    code, said = asked("--check", "--folder", tmp_path)
    assert code == 1 and f"{one} / layout / 0 / 1" in said, said
    code, said = asked("--write", "--folder", tmp_path)
    assert code == 0 and path.read_text() == (record.HERE / record.RUNS).read_text(), said
    code, said = asked("--bits", tmp_path / "bits.json")
    assert code == 0, said
    kept = json.loads((tmp_path / "bits.json").read_text())
    weights = kept["records"][one]["bits"]["weights"]
    weights["head.weight"] = weights["head.weight"][::-1]
    (tmp_path / "other.json").write_text(json.dumps(kept))
    code, said = asked("--against", tmp_path / "other.json")
    assert (
        code == 1 and f"{one} / bits / weights / head.weight" in said and "1 differences" in said
    ), said
    kept["machine"]["processor"] = "another"
    (tmp_path / "other.json").write_text(json.dumps(kept))
    with pytest.raises(SystemExit, match="another machine"):
        asked("--against", tmp_path / "other.json")
    with pytest.raises(SystemExit, match="no source tree"):
        asked("--against", tmp_path)


def test_a_tree_is_compared_with_another_by_its_own_recorder(tmp_path: Path) -> None:
    """A copy whose loss is a hair's breadth from ours: its recorder says other losses, weights and
    states, and the same bytes.
    """
    unwanted = shutil.ignore_patterns("__pycache__")
    shutil.copytree(record.TREE / "src" / "onefold", tmp_path / "src" / "onefold", ignore=unwanted)
    shutil.copytree(record.HERE, tmp_path / "tests" / "recording", ignore=unwanted)
    for helper in record.TESTS.glob("*.py"):
        shutil.copy(helper, tmp_path / "tests")
    subjects = tmp_path / "tests" / "recording" / "subjects.py"
    subjects.write_text(
        subjects.read_text().replace("out * out.detach() / 16", "out * out.detach() / 16.001")
    )
    wrong = record.against(tmp_path, "^any processor: 3, at the boundary$", 1)
    assert {sentence.split(" / ")[1] for sentence in wrong} == {"bits"}, wrong
    assert {sentence.split(" / ")[2] for sentence in wrong} == {
        "losses",
        "weights",
        "states",
    }, wrong
