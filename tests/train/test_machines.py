"""Machines that come and go (`--nnodes 1:2`): two agents here, each on a loopback address of its
own, as on two machines.
"""

from __future__ import annotations

import contextlib
import signal
import subprocess
from pathlib import Path

import pytest

from onefold.train.config import resolve
from onefold.train.loop import Row
from onefold.train.worker import otherwise, unlike
from started_runs import (
    JOB,
    a_free_port,
    alone,
    kill_all_of,
    left_behind,
    losses_on,
    options,
    pid_of,
    rows_of,
    runs,
    started,
    wait_for,
    wait_until,
)

#: Steps of some 0.1 s, so that waiting for machines does not take thousands of them; a constant
#: rate, whatever their number.
SLOWLY = {
    **JOB,
    "model": "small_lm:unhurried",
    "steps": 2000,
    "save_every": 5,
    "schedule": "constant",
    "warmup": 0,
    "stage": 1,
}


def machine(
    folder: Path, number: int, port: int, name: str
) -> contextlib.AbstractContextManager[subprocess.Popen[str]]:
    """`onefold train` as machine `number` (from 1) of two starts it; the first is where they meet.
    Temporary files go to `name`.
    """
    rendezvous = f"is_host={int(number == 1)},last_call_timeout=2,keep_alive_interval=1,keep_alive_max_attempt=6"
    several = {
        "nnodes": "1:2", "nproc": 1, "max_restarts": 5, "resume": "auto", "output": "run", "rdzv_conf": rendezvous,
        "rdzv_endpoint": f"127.0.0.1:{port}", "local_addr": f"127.0.0.{number}",
    }  # fmt: skip
    return started(folder, *options({**SLOWLY, **several}), temporary=name)


def steps_with(ranks: int, process: subprocess.Popen[str], steps: int = 5) -> list[Row]:
    """What the first machine says until it has done so many steps with so many ranks."""
    seen = 0

    def enough(row: Row) -> bool:
        nonlocal seen
        seen += row["event"] == "step" and len(row.get("own_ms", [0])) == ranks
        return seen >= steps

    return wait_for(process, enough)


@pytest.mark.slow
@pytest.mark.slow
def test_a_run_loses_a_machine_goes_on_alone_takes_it_back_and_lets_it_leave(
    tmp_path: Path,
) -> None:
    port, first_place, second_place, third_place = (
        a_free_port(),
        *(tmp_path / name for name in ("first", "second", "third")),
    )
    with machine(tmp_path, 1, port, "first") as first:
        with machine(tmp_path, 2, port, "second"):
            steps_with(2, first, steps=12)
            survivor, gone = pid_of(first_place, 0), pid_of(second_place, 0)
            kill_all_of(second_place)
            wait_until(lambda: not runs(survivor))
        alone_said = steps_with(1, first)

        with machine(tmp_path, 2, port, "third") as third:
            said = steps_with(2, first)
            third.send_signal(signal.SIGTERM)
            _, third_errors = third.communicate(timeout=300)
        said += steps_with(1, first)
        first.send_signal(signal.SIGTERM)
        _, errors = first.communicate(timeout=300)

    assert (third.returncode, first.returncode) == (0, 0), errors + third_errors
    assert f"rank 1 (process {gone} on " in errors and "has gone" in errors, errors
    assert "Traceback" not in errors + third_errors, errors + third_errors
    assert left_behind(first_place) == left_behind(third_place) == []
    notes = [row["text"] for row in [*alone_said, *said] if row["event"] == "note"]
    for words in (
        "saved by 2 ranks at stage 1, and goes on with 1 ",
        "saved by 1 ranks at stage 1, and goes on with 2 ",
    ):
        assert any(words in note for note in notes), (words, notes)

    # Who comes, and who is asked to leave, costs no step; who is lost costs those since the last
    # checkpoint.
    done = [row["step"] for row in said if row["event"] == "step"]
    assert done == list(range(done[0], done[0] + len(done)))
    rows = rows_of(tmp_path / "run")
    # A second machine that was slow to start came later, with a mark of its own
    marks = [row for row in rows if row.get("resumed")][-3:]
    assert [mark["ranks"] for mark in marks] == [1, 2, 1] and marks[0]["from_step"] >= 5, marks

    # The losses are those of a run that one rank does from the beginning, undisturbed.
    found = [row for row in rows if "step" in row]
    assert [row["step"] for row in found] == list(range(1, len(found) + 1)) and rows[-1][
        "steps"
    ] == len(found)
    undisturbed = {
        **SLOWLY,
        "model": "small_lm:plain",
        "steps": len(found),
        "output": str(tmp_path / "undisturbed"),
    }
    assert [row["loss"] for row in found] == pytest.approx(
        losses_on(alone(), **undisturbed), rel=1e-5
    )


def test_options_that_differ_between_machines_are_told_but_for_those_of_a_machine() -> None:
    first = resolve({**JOB, "nproc": 2, "output": "run", "gather_codec": "int8"})
    second = resolve(
        {
            **JOB,
            "nproc": 1,
            "output": "run",
            "gather_codec": "int4",
            "local_addr": "127.0.0.2",
            "second_copy": True,
        }
    )
    told = otherwise(["", "", *[unlike(second, first)] * 2])
    assert told.endswith(
        "they follow rank 0: --second-copy True -> False, --gather-codec int4 -> int8 (ranks 2, 3)"
    ), told
    assert (
        otherwise(
            [
                unlike(first, first),
                unlike(first.model_copy(update={"nproc": 1, "output": None}), first),
            ]
        )
        == ""
    )
