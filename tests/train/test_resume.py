"""Going on from a checkpoint: where a start finds it, what it refuses, and that nothing shows it
but the time.
"""

from __future__ import annotations

import errno
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from onefold.processes.signals import Stop
from onefold.train import checkpoints
from onefold.train.checkpoints import Keeper
from onefold.train.config import resolve
from onefold.train.loop import Row, train
from onefold.train.prepare import Run, micro_batch_that_divides
from onefold.train.report import Metrics, Reporter
from onefold.wording import TrainError
from started_runs import alone, begun

#: Of ranks.SERVERS.
SERVER = "libraries"

TEXT = "the quick brown fox jumps over the lazy dog. " * 60


@pytest.fixture
def text(tmp_path: Path) -> str:
    (tmp_path / "text.txt").write_text(TEXT)
    return str(tmp_path / "text.txt")


def start(text: str, output: Path, **options: Any) -> tuple[Run, Keeper]:
    """A start of the run as the command makes it, on one rank in this process. Its losses tell
    whether the random generators go on where they stood.
    """
    given = {
        "model": "small_lm:dropping",
        "tokenizer": "bytes",
        "data": text,
        "seq": 32,
        "steps": 8,
        "eval_every": 0,
        "lr": 1e-2,
    }
    config = resolve({**given, "output": str(output), **options})
    run, _ = begun(config, alone())
    return run, Keeper(run, output, Reporter())


def drive(run: Run, keeper: Keeper, asked: Callable[[int], int] = lambda done: 0) -> list[Row]:
    """Train; `asked` says after how many rows of this start what was asked."""
    rows: list[Row] = []
    train(run, lambda: asked(len(rows)), rows.append, keeper=keeper)
    keeper.close()
    return rows


def names(output: Path) -> list[str]:
    return sorted(p.name for p in (output / "checkpoints").glob("step-*"))


@pytest.mark.parametrize(
    "how", [{}, {"async_save": False}, {"precision": "fp16"}, {"schedule": "wsd", "warmup": 3}]
)
def test_a_stopped_and_resumed_run_has_the_losses_and_weights_of_one_that_was_not(
    text: str, tmp_path: Path, how: dict[str, Any]
) -> None:
    whole = start(text, tmp_path / "whole", **how)
    rows = drive(*whole)
    first = drive(
        *start(text, tmp_path / "cut", save_every=3, **how),
        lambda done: Stop.PREEMPT if done == 3 else Stop.NONE,
    )
    assert len(first) == 4 and names(tmp_path / "cut") == ["step-00000003", "step-00000004"]
    second = start(text, tmp_path / "cut", resume="auto", **how)
    assert second[0].start == 4
    again = first + drive(*second)
    for key in ("step", "loss", "grad_norm", "lr", "wire_bytes"):
        assert [row[key] for row in again] == [row[key] for row in rows], key
    for name, tensor in whole[0].model.state_dict().items():
        assert torch.equal(tensor, second[0].model.state_dict()[name]), name


@pytest.mark.parametrize("asked", [Stop.INTERRUPT, Stop.PREEMPT])
def test_a_run_that_is_asked_to_stop_saves_a_checkpoint(
    asked: Stop, text: str, tmp_path: Path
) -> None:
    drive(*start(text, tmp_path / "run"), lambda done: asked)
    assert names(tmp_path / "run") == ["step-00000001"]


def test_the_last_step_is_saved_and_only_so_many_are_kept(text: str, tmp_path: Path) -> None:
    drive(*start(text, tmp_path / "run", save_every=3, keep=2))
    assert names(tmp_path / "run") == ["step-00000006", "step-00000008"]
    run, keeper = start(text, tmp_path / "run", resume="auto")
    assert run.start == run.steps == 8 and drive(run, keeper) == []


# -- what a start finds ----------------------------------------------------------------------------


def test_a_start_goes_on_from_what_it_is_told_to(text: str, tmp_path: Path) -> None:
    drive(*start(text, tmp_path / "a", save_every=3))
    config = resolve({"output": str(tmp_path / "a")})
    assert checkpoints.find(config, restarted=False) is None
    found = checkpoints.find(config, restarted=True)
    assert (
        found is not None
        and found.step == 8
        and found.order["global_batch"] == 2
        and len(found.before) == 2
    )
    branch = {
        "output": str(tmp_path / "b"),
        "resume": str(tmp_path / "a" / "checkpoints" / "step-00000003"),
    }
    first = checkpoints.find(resolve(branch), restarted=False)
    assert first is not None and first.step == 3
    for folder in ("a", "a/checkpoints"):
        newest = checkpoints.find(
            resolve({**branch, "resume": str(tmp_path / folder)}), restarted=False
        )
        assert newest is not None and newest.step == 8
    with pytest.raises(TrainError, match="checkpoints of its own, the newest step-00000008"):
        checkpoints.find(resolve({**branch, "output": str(tmp_path / "a")}), restarted=False)
    with pytest.raises(TrainError, match="no such folder"):
        checkpoints.find(resolve({**branch, "resume": str(tmp_path / "nowhere")}), restarted=False)


def test_where_the_newest_checkpoint_is_damaged_the_one_before_is_taken(
    text: str, tmp_path: Path
) -> None:
    drive(*start(text, tmp_path / "run", save_every=3))
    folder = tmp_path / "run" / "checkpoints"
    tensors = folder / "step-00000008" / "rank-00000.safetensors"
    raw = bytearray(tensors.read_bytes())
    raw[-5] ^= 1
    tensors.write_bytes(raw)
    (folder / "step-00000006" / "state.json").write_text("{}")
    run, keeper = start(text, tmp_path / "run", resume="auto")
    assert run.start == 3
    keeper.close()


def test_other_data_another_seed_and_another_global_batch_are_refused(
    text: str, tmp_path: Path
) -> None:
    drive(*start(text, tmp_path / "run", save_every=8))
    other = tmp_path / "other.txt"
    other.write_text(TEXT.replace("fox", "cat"))
    for options, message in (
        ({"seed": 1}, "made with --seed 0"),
        ({"global_batch": 4}, "has 2, which decides"),
        ({"data": str(other)}, "made on other data"),
        ({"seq": 16}, "made on other data"),
    ):
        with pytest.raises(TrainError, match=message):
            start(text, tmp_path / "run", resume="auto", **options)


# -- the output folder -----------------------------------------------------------------------------


def test_metrics_beyond_the_checkpoint_are_cut_and_the_rest_is_gone_on_with(tmp_path: Path) -> None:
    file, alerts = tmp_path / "metrics.jsonl", list[str]()
    metrics = Metrics(file, alerts.append)
    for step in (1, 2, 3):
        metrics("step", {"step": step, "loss": step / 2})
    metrics("note", {"text": "is no row"})
    metrics("done", {"done": True})
    with file.open("a") as cut_off:
        cut_off.write('{"step": 4, "lo')
    metrics = Metrics(file, alerts.append, after=2)
    metrics("resumed", {"resumed": True, "from_step": 2})
    metrics("step", {"step": 3, "loss": 8.0})
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    assert [row.get("step", row.get("from_step")) for row in rows] == [1, 2, 2, 3] and rows[-1][
        "loss"
    ] == 8.0
    file.write_text('{"step": 1}\n{"st\n{"step": 2}\n{"step": 3}\n')
    Metrics(file, alerts.append, after=2)
    assert file.read_text() == '{"step": 1}\n{"step": 2}\n'
    Metrics(file, alerts.append)
    assert file.read_text() == "" and not alerts


class Full:
    """A file on a disk that takes ten bytes of a line, and then no more."""

    def __init__(self, file: Any) -> None:
        self._file, self.takes = file, 10

    def write(self, line: Any) -> int:
        if not self.takes:
            raise OSError(errno.ENOSPC, "No space left on device")
        count = self._file.write(line[: self.takes])
        self.takes -= count
        return int(count)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)


def test_metrics_on_a_full_disk_are_told_once_and_the_file_keeps_whole_lines(
    tmp_path: Path,
) -> None:
    file, alerts = tmp_path / "metrics.jsonl", list[str]()
    metrics = Metrics(file, alerts.append)
    metrics("step", {"step": 1})
    whole, metrics._file = metrics._file, cast(Any, Full(metrics._file))
    metrics("step", {"step": 2})
    metrics("step", {"step": 3})
    metrics._file = whole
    metrics("step", {"step": 4})
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    assert [row["step"] for row in rows] == [1, 4]
    (alert,) = alerts
    assert alert.startswith(
        f"{file} cannot be written (No space left on device): the training goes on"
    )


# -- the order of the samples ----------------------------------------------------------------------


def test_the_global_batch_stays_and_the_micro_batch_follows_the_ranks() -> None:
    assert [micro_batch_that_divides(4, 24, ranks) for ranks in (1, 2, 3, 4, 6, 8)] == [
        4,
        4,
        4,
        3,
        4,
        3,
    ]
    assert micro_batch_that_divides(64, 24, 2) == 12
    with pytest.raises(TrainError, match=r"24 sequences, which 5 ranks cannot share equally"):
        micro_batch_that_divides(4, 24, 5)
