"""`onefold checkpoint ...` as a user runs it: what each command prints, its JSON, its exit status,
and how it fails.
"""

from __future__ import annotations

import json
import os
import zipfile
from pathlib import Path
from typing import Any

import pytest

typer = pytest.importorskip("typer", reason="typer is not installed")
pytest.importorskip("rich", reason="rich is not installed")
import torch
from safetensors.torch import load_file
from typer.testing import CliRunner, Result

from onefold.cli.app import app
from saved import Run, copied

DEEPSPEED = Path(__file__).parents[1] / "checkpoints" / "data" / "saved_by_deepspeed"


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two checkpoints of one run, of steps 2 and 3."""
    root = tmp_path_factory.mktemp("run")
    for steps in (2, 3):
        Run(steps=steps).save(root / f"step-{steps:08d}")
    return root


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One of a model that transformers does not know, for quick exports."""
    return Run(config=False).save(tmp_path_factory.mktemp("bare") / "a")


@pytest.fixture
def first(root: Path) -> Path:
    return root / "step-00000002"


def command(*arguments: Any, status: int = 0) -> Result:
    result = CliRunner().invoke(app, ["checkpoint", *map(str, arguments)])
    assert result.exit_code == status, (arguments, result.output, result.exception)
    return result


def said(*arguments: Any, status: int = 0) -> dict[str, Any]:
    result = command(*arguments, "--json", status=status)
    assert result.stdout.count("\n") == 1
    found: dict[str, Any] = json.loads(
        result.stdout, parse_constant=lambda name: pytest.fail(f"{name} is no JSON")
    )
    return found


def refused(*arguments: Any) -> str:
    """The sentence; the same in JSON."""
    result = command(*arguments, status=2)
    assert (
        not result.stdout
        and result.stderr.startswith("error: ")
        and "Traceback" not in result.stderr
    )
    event = said(*arguments, status=2)
    assert event["event"] == "error" and result.stderr == f"error: {event['message']}\n"
    return str(event["message"])


def damaged(folder: Path, to: Path) -> Path:
    """The first byte of the tensors' data is another."""
    copied(folder, to)
    data = bytearray((to / "rank-00000.safetensors").read_bytes())
    data[int.from_bytes(data[:8], "little") + 8] ^= 1
    (to / "rank-00000.safetensors").write_bytes(data)
    return to


def test_inspect_says_what_a_checkpoint_holds(first: Path) -> None:
    found = said("inspect", first)
    assert (found["form"], found["step"], found["path"]) == ("Onefold", 2, str(first))
    assert (found["saved by"]["world_size"], found["saved by"]["stage"]) == (1, 1)
    count = sum(p.numel() for p in Run(steps=0).model.parameters())
    by = {(s["kind"], s["state"]): s for s in found["tensors"]}
    assert by["parameter", ""]["bytes"] == 4 * count == by["state", "exp_avg"]["bytes"]
    assert [(g["optimizer"], g["group"]) for g in found["groups"]] == [("AdamW", 0), ("AdamW", 1)]
    assert found["parameters"] == count == sum(g["elements"] for g in found["groups"])
    assert {row["what"] for row in found["resumes"]} == {
        "optimizer",
        "scheduler",
        "data",
        "random states",
        "extra",
    }
    text = command("inspect", first).stdout
    for words in (
        "step 2",
        "world_size",
        "exp_avg_sq",
        "weight_decay 0.01",
        "config.json",
    ):
        assert words in text, (words, text)


def test_inspect_of_a_folder_takes_the_newest_and_names_all(root: Path, first: Path) -> None:
    found = said("inspect", root)
    assert (found["step"], found["checkpoints"]) == (3, ["step-00000003", "step-00000002"])
    assert said("inspect", first)["checkpoints"] == []


def test_inspect_and_diff_read_what_deepspeed_saved(tmp_path: Path) -> None:
    with zipfile.ZipFile(DEEPSPEED / "stage-1-fp32-2.zip") as packed:
        packed.extractall(tmp_path)
    found = said("inspect", tmp_path / "saved")
    assert (found["form"], found["step"]) == ("DeepSpeed", 3)
    assert said("diff", tmp_path / "saved", tmp_path / "saved")["equal"]
    for part in ("random", "rest"):
        answer = refused("diff", tmp_path / "saved", tmp_path / "saved", "--only", part)
        assert f"--only {part}" in answer


def test_what_is_damaged_is_named_with_status_1_and_not_exported(
    first: Path, tmp_path: Path
) -> None:
    assert "whole" in command("verify", first).stdout
    found = said("verify", first)
    assert found["whole"] and found["problems"] == []
    bad = damaged(first, tmp_path / "a")
    assert "rank-00000.safetensors" in command("verify", bad, status=1).stdout
    (problem,) = said("verify", bad, status=1)["problems"]
    assert problem["file"] == "rank-00000.safetensors" and problem["tensor"]
    assert "bytes have changed" in problem["what"]
    assert "changed" in refused("export", bad, tmp_path / "b")
    assert os.listdir(tmp_path) == ["a"]


def test_export_writes_what_others_open(bare: Path, tmp_path: Path) -> None:
    found = said("export", bare, tmp_path / "hf", "--dtype", "bf16")
    assert found["files"] == ["model.safetensors"] and found["bytes"] > 0
    weights = load_file(tmp_path / "hf" / "model.safetensors")
    expected = dict(Run().model.state_dict())
    for name in ("blocks.1.mlp.0.weight", "tokens.weight"):
        assert torch.equal(weights[name], expected[name].detach().bfloat16()), name
    command("export", bare, tmp_path / "small", "--max-shard", "20KB")
    assert (tmp_path / "small" / "model.safetensors.index.json").exists()
    for size in ("many", "-3GB", ""):
        assert "--max-shard" in refused("export", bare, tmp_path / "more", "--max-shard", size)
    assert not (tmp_path / "more").exists()


def test_diff_ends_with_1_and_says_what_differs(root: Path, first: Path) -> None:
    second = root / "step-00000003"
    found = said("diff", first, second, status=1)
    assert not found["equal"] and (found["first"]["step"], found["second"]["step"]) == (2, 3)
    assert {"part": "rest", "where": "step", "first": 2, "second": 3} in found["differences"]
    text = command("diff", first, second, status=1).stdout
    for words in ("they differ", "weights", "optimizer", "tokens.weight", "exp_avg_sq"):
        assert words in text, (words, text)
    asked = "--only", "weights", "--filter", "*.norm_1.*"
    rows = said("diff", first, second, *asked, status=1)["differences"]
    assert rows and all(r["part"] == "weights" and ".norm_1." in r["where"] for r in rows)


@pytest.mark.parametrize(
    "arguments",
    [
        ("inspect",),
        ("verify",),
        ("export", "out"),
        ("diff", "other"),
    ],
)
def test_a_path_without_a_checkpoint_ends_with_2_and_a_sentence(
    tmp_path: Path, arguments: tuple[str, ...]
) -> None:
    name, *more = arguments
    (tmp_path / "file").write_text("x")
    more = [str(tmp_path / m) if m in ("out", "other") else m for m in more]
    for path in ("nothing", "file"):
        assert str(tmp_path / path) in refused(name, tmp_path / path, *more)
    assert os.listdir(tmp_path) == ["file"]
