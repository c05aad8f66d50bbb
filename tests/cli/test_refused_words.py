"""Words that no command takes, whatever the option: an empty text, a number without bounds."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

typer = pytest.importorskip("typer", reason="typer is not installed")
from typer.testing import CliRunner

from onefold.cli.app import app

BIG = "1" + "0" * 30
EMPTY, NUMBER = "is an empty text", "expected a finite number of at most 64 bits"

ROWS = [
    ("train --output", "", "--output " + EMPTY),
    ("train --overwrite --output=", None, "--output " + EMPTY),
    ("train --model", "", "--model " + EMPTY),
    ("train --data-cache", "", "--data-cache " + EMPTY),
    ("train --resume", "", "--resume " + EMPTY),
    ("train --config", "", "--config " + EMPTY),
    ("train --model llama:", None, "'' is no size"),
    ("train --model gpt:", None, "'' is no size"),
    ("train --model llama:" + "9" * 400 + "b", None, "is no size"),
    ("train --rdzv-endpoint host:", None, "expected HOST:PORT"),
    ("train --lr inf", None, "--lr inf: " + NUMBER),
    ("train --lr nan", None, "--lr nan: " + NUMBER),
    ("train --seed " + "9" * 20, None, "--seed " + "9" * 20 + ": " + NUMBER),
    ("train --steps " + BIG, None, NUMBER),
    ("train --steps " + "9" * 15, None, "--steps 999999999999999: input should be less than"),
    ("train --micro-batch " + BIG, None, "from 1 to 2147483647, or auto"),
    ("train --nnodes " + BIG, None, "expected a number of machines"),
    ("train --save-before " + "9" * 400 + "d", None, "expected a length of time"),
    ("train --optimizer-options eps=1e400", None, "eps=1e400: expected a finite number"),
    ("train --optimizer-options eps=true", None, "eps=true: expected a finite number"),
    ("train --optimizer-options amsgrad=1", None, "amsgrad=1: expected true or false"),
    ("plan", "", "an argument " + EMPTY),
    ("plan --params 7B --machines", "", "--machines " + EMPTY),
    ("plan --params 7B --seq " + BIG, None, "--seq " + BIG + ": " + NUMBER),
    ("plan --params 7B --seq " + "9" * 15, None, "--seq 999999999999999: expected a whole"),
    ("plan --params 7B --micro-batch " + BIG, None, "expected a whole number from 0"),
    ("checkpoint export a b --like", "", "--like " + EMPTY),
    ("checkpoint export a", "", "an argument " + EMPTY),
    ("checkpoint diff a b --atol inf", None, "--atol inf: " + NUMBER),
    ("report", "", "an argument " + EMPTY),
    ("doctor --disk", "", "--disk " + EMPTY),
    ("config explain", "", "an argument " + EMPTY),
]  # fmt: skip


@pytest.mark.parametrize(("words", "last", "said"), ROWS)
def test_an_empty_text_and_a_number_without_bounds_are_refused_in_a_sentence(
    words: str, last: str | None, said: str
) -> None:
    found = CliRunner().invoke(app, [*words.split(), *([] if last is None else [last])])
    assert found.exit_code == 2 and not isinstance(found.exception, Exception), found
    assert said in found.stderr and found.stderr.count("\n") == 1, found.stderr


DEEP = '{"a":' * 100_000
DIGITS = '{"train_batch_size": ' + "9" * 5000 + "}"


@pytest.mark.parametrize(
    ("text", "status", "said"),
    [
        (DEEP, 2, "Nested too deeply"),
        (DIGITS, 2, "A number of 5000 digits"),
        ("{train_batch_size: " + "9" * 5000 + "}", 2, "A number of 5000 digits"),
        ('{"train_batch_size": 1e400}', 1, "expected a whole number"),
        ('{"train_batch_size": ' + "9" * 400 + "}", 1, "expected a whole number"),
        ('{"\\ud800": 1}', 0, "\\ud800"),
    ],
)
def test_a_deepspeed_file_that_python_cannot_read_is_told(
    tmp_path: Path, text: str, status: int, said: str
) -> None:
    (tmp_path / "ds.json").write_text(text)
    found = CliRunner().invoke(app, ["config", "explain", str(tmp_path / "ds.json")])
    assert found.exit_code == status and not isinstance(found.exception, Exception), found
    assert said in found.output


@pytest.mark.parametrize("line", [DEEP, '{"step": ' + "9" * 5000 + "}"])
def test_a_report_of_metrics_that_python_cannot_read_names_the_line(
    tmp_path: Path, line: str
) -> None:
    (tmp_path / "metrics.jsonl").write_text(f"{line}\n{json.dumps({'step': 1})}\n")
    from onefold.observe.report.tables import read_metrics
    from onefold.observe.runfile import RunFileError

    with pytest.raises(RunFileError, match="line 1, is not JSON"):
        read_metrics(tmp_path)
