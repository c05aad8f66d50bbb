"""`onefold config explain`: what became of each key of a DeepSpeed configuration."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from onefold.cli.app import app
from onefold.deepspeed.meaning import explain

GIVEN: dict[str, Any] = {
    "train_batch_size": "auto",
    "gradient_clipping": 1.0,
    "comment": "ours",
    "zero_optimization": {"stage": 3, "sub_group_size": 1e9},
    "optimizer": {"type": "AdamW", "params": {"lr": "auto", "eps": 1e-8}},
}


def run(tmp_path: Path, given: dict[str, Any], *options: str) -> Any:
    file = tmp_path / "ds.json"
    file.write_text(json.dumps(given))
    return CliRunner().invoke(app, ["config", "explain", str(file), *options])


def test_each_key_has_one_outcome() -> None:
    found = explain(GIVEN)
    assert found.refusal is None
    outcomes = {key.path: key.outcome for key in found.keys}
    assert outcomes == {
        "train_batch_size": "auto",
        "gradient_clipping": "served",
        "comment": "unknown",
        "zero_optimization.stage": "served",
        "zero_optimization.sub_group_size": "inert",
        "optimizer.type": "served",
        "optimizer.params.lr": "auto",
        "optimizer.params.eps": "served",
    }
    stage = next(key for key in found.keys if key.path == "zero_optimization.stage")
    assert stage.value == 3 and "stage=3" in found.remarks[0]


@pytest.mark.parametrize(
    ("more", "path", "said"),
    [
        ({"amp": {"enabled": True}}, "amp", "asks for something that Onefold does not do"),
        ({"gradient_cliping": 1.0}, "gradient_cliping", "did you mean 'gradient_clipping'"),
        ({"zero_optimization": {"stage": 5}}, "zero_optimization.stage", "expected"),
    ],
)
def test_what_is_refused_says_why(
    more: dict[str, Any], path: str, said: str, tmp_path: Path
) -> None:
    key = next(key for key in explain(more).keys if key.path == path)
    assert key.outcome == "refused" and said in key.why
    done = run(tmp_path, more)
    assert done.exit_code == 1 and "refused" in done.output and said in done.output


def test_a_contradiction_of_the_whole_file_is_told(tmp_path: Path) -> None:
    given = {"train_batch_size": 7, "train_micro_batch_size_per_gpu": 2}
    assert run(tmp_path, given).exit_code == 0
    done = run(tmp_path, given, "--ranks", "2")
    assert done.exit_code == 1 and "refusal " in done.output
    zero = {"stage": 3, "zero_quantized_gradients": True}
    given = {"zero_optimization": zero, "data_types": {"grad_accum_dtype": "bf16"}}  # no recipe
    assert run(tmp_path, given).exit_code == 1


def test_the_command_prints_classes_and_json(tmp_path: Path) -> None:
    done = run(tmp_path, GIVEN)
    assert done.exit_code == 0
    rows = [line.split()[:3] for line in done.output.splitlines()]
    assert ["gradient_clipping", "1", "served"] in rows, done.output
    assert ["train_batch_size", "auto", "auto"] in rows
    out = json.loads(run(tmp_path, GIVEN, "--json").output)
    assert out["event"] == "config" and out["refusal"] is None and len(out["keys"]) == 8
