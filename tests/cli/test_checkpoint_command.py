"""`onefold checkpoint ...` as a user runs it: what each command prints, its JSON, its exit status,
and how it fails.
"""

from __future__ import annotations

import json
import os
import shutil
import zipfile
from pathlib import Path
from typing import Any

import pytest

typer = pytest.importorskip("typer", reason="typer is not installed")
pytest.importorskip("rich", reason="rich is not installed")
import torch
from safetensors.torch import load_file
from typer.testing import CliRunner, Result

from onefold.checkpoint.manifest import MANIFEST
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


def injured(folder: Path, to: Path) -> Path:
    """A byte of the last tensor's data is another."""
    copied(folder, to)
    data = bytearray((to / "rank-00000.safetensors").read_bytes())
    data[-1] ^= 1
    (to / "rank-00000.safetensors").write_bytes(data)
    return to


# -- inspect ---------------------------------------------------------------------------------------


def test_inspect_says_what_a_checkpoint_holds(first: Path) -> None:
    found = said("inspect", first)
    assert (found["event"], found["form"], found["step"], found["path"]) == (
        "inspect",
        "Onefold",
        2,
        str(first),
    )
    assert (
        found["saved_by"]["world_size"] == 1
        and found["saved_by"]["stage"] == 1
        and found["saved_by"]["torch"] == torch.__version__
    )
    count = sum(p.numel() for p in Run(steps=0).model.parameters())
    assert found["parameters"] == count
    by = {(s["kind"], s["state"]): s for s in found["sorts"]}
    assert by["parameter", ""]["nbytes"] == 4 * count == by["state", "exp_avg"]["nbytes"]
    assert [(g["optimizer"], g["index"]) for g in found["groups"]] == [("AdamW", 0), ("AdamW", 1)]
    assert (
        sum(g["elements"] for g in found["groups"]) == count
        and found["groups"][1]["options"]["weight_decay"] == 0.0
    )
    assert set(found["resumes"]) == {"optimizer", "scheduler", "data", "random states", "extra"}
    assert (
        found["files"]["rank-00000.safetensors"]
        == (first / "rank-00000.safetensors").stat().st_size
    )
    assert found["model_files"] == ["config.json"] and "tensors" not in found
    text = command("inspect", first).stdout
    for words in (
        "step 2", "on 1 rank at stage 1", "exp_avg_sq", "parameter groups", "weight_decay 0.01", "last_epoch 2", "position 16",
        "config.json",
    ):  # fmt: skip
        assert words in text, (words, text)
    assert "blocks.0.mlp.0.weight" not in text


def test_inspect_of_a_folder_of_checkpoints_lists_them_the_newest_first(
    root: Path, first: Path, tmp_path: Path
) -> None:
    found = said("inspect", root)
    assert found["event"] == "list" and [(c["step"], c["wrong"]) for c in found["checkpoints"]] == [
        (3, ""),
        (2, ""),
    ]
    folder = tmp_path / "run"
    shutil.copytree(root, folder)
    (folder / "step-00000003" / "state.json").unlink()
    shutil.copytree(first, folder / ".step-00000004.0123abcd.unfinished")
    (folder / "step-00000009").mkdir()
    (folder / "step-00000009" / MANIFEST).write_text("{}")
    text = command("inspect", folder, status=1).stdout
    for words in (
        "state.json is missing",
        "a killed one has left it",
        "step-00000009",
        "not whole",
    ):
        assert words in text, (words, text)


def test_inspect_and_diff_read_what_deepspeed_saved(tmp_path: Path) -> None:
    with zipfile.ZipFile(DEEPSPEED / "stage-1-fp32-2.zip") as packed:
        packed.extractall(tmp_path)
    found = said("inspect", tmp_path / "saved")
    assert (
        found["form"] == "DeepSpeed"
        and found["step"] == 3
        and found["groups"][0]["options"]["lr"] > 0
    )
    assert "DeepSpeed" in command("inspect", tmp_path / "saved").stdout
    assert said("diff", tmp_path / "saved", tmp_path / "saved")["equal"]
    assert "not a checkpoint of Onefold" in refused(
        "reshard", tmp_path / "saved", tmp_path / "b", "--ranks", 2
    )


# -- verify ----------------------------------------------------------------------------------------


def test_verify_ends_with_0_for_a_whole_checkpoint_and_with_1_naming_what_is_not(
    root: Path, first: Path, tmp_path: Path
) -> None:
    assert "whole" in command("verify", first).stdout
    found = said("verify", first)
    assert (
        found["whole"]
        and found["checkpoints"][0]["files"] == 5
        and found["checkpoints"][0]["problems"] == []
    )
    bad = injured(first, tmp_path / "a")
    (bad / "mine.txt").write_text("x")
    result = command("verify", bad, status=1)
    assert (
        "1 problem" in result.stdout
        and "rank-00000.safetensors: " in result.stdout
        and "note: mine.txt" in result.stdout
    )
    (problem,) = said("verify", bad, status=1)["checkpoints"][0]["problems"]
    assert (
        problem["file"] == "rank-00000.safetensors"
        and problem["tensor"]
        and "CRC-32" in problem["what"]
    )


# -- reshard and export ----------------------------------------------------------------------------


def test_reshard_writes_the_same_checkpoint_for_other_ranks(
    root: Path, first: Path, tmp_path: Path
) -> None:
    found = said("reshard", first, tmp_path / "b", "--ranks", 3)
    assert found["event"] == "reshard" and sum(f.startswith("rank-") for f in found["files"]) == 3
    command("verify", tmp_path / "b")
    assert "the same" in command("diff", first, tmp_path / "b").stdout
    assert "resharded for 3 ranks" in command("inspect", tmp_path / "b").stdout
    assert "overwrite" in refused("reshard", first, tmp_path / "b", "--ranks", 2)
    assert "wrote" in command("reshard", root, tmp_path / "b", "--ranks", 1, "--overwrite").stdout
    assert said("inspect", tmp_path / "b")["step"] == 3, (
        "of a folder of checkpoints the newest is taken"
    )
    command("reshard", first, tmp_path / "c", status=2)


def test_export_writes_what_others_open(bare: Path, tmp_path: Path) -> None:
    found = said("export", bare, tmp_path / "hf", "--dtype", "bf16")
    assert (
        found["event"] == "export"
        and found["files"] == ["model.safetensors"]
        and found["bytes"] > 0
    )
    weights = load_file(tmp_path / "hf" / "model.safetensors")
    expected = dict(Run().model.state_dict())
    for name in ("blocks.1.mlp.0.weight", "tokens.weight"):
        assert weights[name].dtype == torch.bfloat16 and torch.equal(
            weights[name], expected[name].detach().bfloat16()
        ), name
    assert "wrote" in command("export", bare, tmp_path / "small", "--max-shard", "20KB").stdout
    assert (tmp_path / "small" / "model.safetensors.index.json").exists()
    for size in ("many", "-3GB", "3XB", ""):
        assert "--max-shard" in refused("export", bare, tmp_path / "more", "--max-shard", size)
    assert not (tmp_path / "more").exists()


def test_what_is_damaged_is_neither_exported_nor_resharded(bare: Path, tmp_path: Path) -> None:
    folder = copied(bare, tmp_path / "a")
    data = bytearray((folder / "rank-00000.safetensors").read_bytes())
    data[int.from_bytes(data[:8], "little") + 40] ^= 1
    (folder / "rank-00000.safetensors").write_bytes(data)
    for name in ("export", "reshard"):
        more = ["--ranks", 2] if name == "reshard" else []
        assert "changed" in refused(name, folder, tmp_path / name, *more)
    assert os.listdir(tmp_path) == ["a"]


# -- diff ------------------------------------------------------------------------------------------


def test_diff_ends_with_1_and_says_what_differs(root: Path, first: Path) -> None:
    second = root / "step-00000003"
    found = said("diff", first, second, status=1)
    assert not found["equal"] and (found["first"]["step"], found["second"]["step"]) == (2, 3)
    assert {"item", "what", "differing", "of", "largest", "relative", "at"} <= set(
        found["tensors"][0]
    )
    assert {"part": "rest", "where": "step", "first": 2, "second": 3} in found["values"]
    text = command("diff", first, second, status=1).stdout
    for words in (
        "they differ",
        "weights: ",
        "optimizer: ",
        "tokens.weight",
        "exp_avg_sq",
        "scheduler, last_epoch",
    ):
        assert words in text, (words, text)
    said("diff", first, second, "--only", "weights", "--only", "optimizer", "--atol", 1e9)
    assert {
        t["item"]["kind"]
        for t in said("diff", first, second, "--only", "weights", status=1)["tensors"]
    } == {"parameter"}
    names = {
        t["item"]["name"]
        for t in said("diff", first, second, "--filter", "*.norm_1.*", status=1)["tensors"]
    }
    assert names and all(".norm_1." in n for n in names)


# -- what cannot be done ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    "arguments",
    [
        ("inspect",),
        ("verify",),
        ("export", "out"),
        ("reshard", "out", "--ranks", "2"),
        ("diff", "other"),
    ],
)
def test_a_path_without_a_checkpoint_ends_with_2_and_a_sentence(
    tmp_path: Path, arguments: tuple[str, ...]
) -> None:
    name, *more = arguments
    (tmp_path / "file").write_text("x")
    (tmp_path / "empty").mkdir()
    more = [str(tmp_path / m) if m in ("out", "other") else m for m in more]
    for path in ("nothing", "file", "empty"):
        assert str(tmp_path / path) in refused(name, tmp_path / path, *more)
    assert sorted(os.listdir(tmp_path)) == ["empty", "file"]
