"""Checkpoints without ranks. `verify` finds and names every injury, `diff` says what two do not have
in common.
"""

from __future__ import annotations

import contextlib
import random
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import onefold
from checkpoints.injured import flip
from onefold.checkpoint import CheckpointError
from onefold.checkpoint.folder_source import FolderSource
from onefold.checkpoint.manifest import CHECKSUM, MANIFEST, key_of, read_manifest
from onefold.checkpoint.tensorfile import TensorFile
from onefold.inspection.diff import Row, differences
from onefold.inspection.verify import examine
from onefold.runtime.parameters.parameter import disable_torch_function
from ranks import outcomes_of
from reference import adamw, built, train
from saved import Config, Run, Tokenizer, copied
from zoo import TinyGPT, tokens_of


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Run().save(tmp_path_factory.mktemp("saved") / "a", tokenizer=Tokenizer())


@pytest.fixture(scope="module")
def three(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved_by_three(tmp_path_factory.mktemp("verify") / "three")


# -- verify ----------------------------------------------------------------------------------------


def save_as_one_of_three(path: Path, seed: int) -> None:
    model = built(lambda: TinyGPT(depth=2, tied=True), seed)
    model.config = Config()
    model = onefold.shard(model, onefold.Recipe.zero(3, stall_timeout=30.0))
    optimizer = adamw(model)
    train(model, optimizer, [tokens_of(dist.get_rank())])
    extra = {"table": torch.arange(5000) * seed}
    parts: dict[str, Any] = {"optimizer": optimizer, "extra": extra, "tokenizer": Tokenizer()}
    onefold.save(path, model=model, **parts, step=seed)


def saved_by_three(path: Path, seed: int = 1) -> Path:
    for outcome in outcomes_of(3, save_as_one_of_three, path, seed):
        assert not outcome.error, outcome
    return path


def tensor_at(folder: Path, name: str, at: int) -> str:
    """The tensor that holds byte `at` of a file, as its Item says it; "" for the head."""
    records = read_manifest(folder).records
    names = {key_of(r.item, p.where): str(r.item) for r in records for p in r.pieces}
    with TensorFile(folder / name) as file:
        holding = [k for k, entry in file.header.items() if entry.begin <= at < entry.end]
    return names.get(holding[0], "") if holding else ""


def test_a_whole_checkpoint_has_no_problem_and_strange_files_are_none(
    three: Path, tmp_path: Path
) -> None:
    assert examine(three) == [] and len(list(three.iterdir())) == 8
    folder = copied(three, tmp_path / "a")
    (folder / "more").mkdir()
    (folder / "more" / "b").write_text("mine")
    assert examine(folder) == []


FILES = ["rank-00000.safetensors", "rank-00002.safetensors", MANIFEST, CHECKSUM, "state.json", "tokenizer.json"]  # fmt: skip


@pytest.mark.parametrize("name", FILES)
def test_every_flipped_byte_is_found_and_named(three: Path, tmp_path: Path, name: str) -> None:
    folder = copied(three, tmp_path / "a")
    size, draw = (folder / name).stat().st_size, random.Random(name)
    for at in {0, 7, 8, size - 1, *(draw.randrange(size) for _ in range(14))}:
        by = draw.randrange(1, 256)
        flip(folder / name, at, by)
        problems = examine(folder)
        assert name in {p.file for p in problems}, (at, problems)
        if name.startswith("rank-"):
            assert [p.tensor for p in problems] == [tensor_at(three, name, at)], (at, problems)
        flip(folder / name, at, by)


def test_files_that_are_cut_missing_or_of_another_checkpoint_are_named(
    three: Path, tmp_path: Path
) -> None:
    later = saved_by_three(tmp_path / "three", seed=2)
    for name in FILES:
        place = copied(three, tmp_path / name)
        data = (place / name).read_bytes()
        (place / name).write_bytes(data[:-5])
        assert name in {p.file for p in examine(place)}, name
        (place / name).unlink()
        found = {p.file: p.what for p in examine(place)}
        assert name in found and ("rank" not in name or "a part of" in found[name]), found
        if (later / name).read_bytes() != data:
            shutil.copyfile(later / name, place / name)
            assert name in {p.file for p in examine(place)}, name
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("")
    for name in ("file", "empty", "none"):
        with pytest.raises(CheckpointError, match="no Onefold checkpoint"):
            examine(tmp_path / name)


# -- diff ------------------------------------------------------------------------------------------


def compared(a: Path, b: Path, **options: Any) -> list[Row]:
    with contextlib.closing(FolderSource(a)) as first, contextlib.closing(FolderSource(b)) as other:
        return differences(first, other, **options)


def test_one_element_is_found_with_its_place_and_size(saved: Path, tmp_path: Path) -> None:
    run = Run()
    with torch.no_grad(), disable_torch_function():
        weight = dict(run.model.named_parameters())["blocks.1.mlp.0.weight"].data.view(-1)
        old = float(weight[777])
        weight[777] += 0.5
        gap = abs(float(weight[777]) - old)
    other = run.save(tmp_path / "b")
    (row,) = compared(saved, other)
    assert (row["part"], row["where"]) == ("weights", "parameter 'blocks.1.mlp.0.weight'")
    assert (row["differing"], row["at"]) == (1, 777)
    assert row["largest"] == pytest.approx(gap) and row["first"] == "float32 [80, 20]"
    equal: list[tuple[dict[str, Any], bool]] = [
        ({"parts": ["weights"]}, False),
        ({"parts": ["optimizer", "rest", "random"]}, True),
        ({"wanted": lambda name: "blocks.0" in name}, True),
    ]
    for options, same in equal:
        assert (not compared(saved, other, **options)) == same, options


def test_everything_that_resumes_is_compared(saved: Path, tmp_path: Path) -> None:
    run = Run()
    run.optimizer.param_groups[1]["lr"] = 0.5
    run.optimizer.state[run.optimizer.param_groups[0]["params"][0]]["step"].fill_(9.0)
    run.scheduler.last_epoch = 77
    torch.rand(1)
    extra = {"best": 1.25, "table": torch.arange(5000) * 2}
    found = compared(saved, run.save(tmp_path / "b", step=3, data={"position": 17}, extra=extra))
    rows = {(row["part"], row["where"]): (row["first"], row["second"]) for row in found}
    table, random = (rows.pop(key) for key in (("rest", "extra '0'"), ("random", "rng '0'")))
    assert table[0] == table[1] == "int64 [5000]" and random[0] == random[1]
    assert rows == {
        ("rest", "step"): (2, 3),
        ("rest", "scheduler, last_epoch"): (2, 77),
        ("rest", "data, all, position"): (16, 17),
        ("rest", "extra, best"): (1.5, 1.25),
        ("optimizer", "group 1, lr"): (pytest.approx(0.0081), 0.5),
        ("optimizer", "tokens.weight, step"): (2.0, 9.0),
    }
