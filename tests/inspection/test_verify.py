"""`verify`: every byte of a checkpoint is read, every injury is found and named."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import onefold
from onefold.checkpoint import CheckpointError
from onefold.checkpoint.manifest import (
    CHECKSUM,
    MANIFEST,
    Record,
    StoredPiece,
    checksum_line,
    key_of,
    read_manifest,
)
from onefold.checkpoint.tensorfile import TensorFile
from onefold.inspection.reshard import reshard
from onefold.inspection.summary import glance
from onefold.inspection.verify import Problem, examine
from saved import Run, Tokenizer, copied


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of three files of tensors, with what makes it look like a Hugging Face
    folder.
    """
    root = tmp_path_factory.mktemp("verify")
    return reshard(Run().save(root / "one", tokenizer=Tokenizer()), root / "three", 3)


def files_of(folder: Path) -> list[str]:
    return sorted(p.name for p in folder.iterdir())


def pieces(folder: Path) -> list[tuple[Record, StoredPiece, str]]:
    """Every piece with the tensor it is of and its key in the file."""
    return [
        (r, p, key_of(r.item, p.start)) for r in read_manifest(folder).records for p in r.pieces
    ]


def tensor_at(folder: Path, name: str, at: int) -> str:
    """The tensor that holds byte `at` of a file, as its Item says it; "" for the head."""
    names = {key: str(record.item) for record, _, key in pieces(folder)}
    with TensorFile(folder / name) as file:
        return next(
            (names[key] for key, entry in file.header.items() if entry.begin <= at < entry.end), ""
        )


def test_a_whole_checkpoint_has_no_problem_and_every_byte_was_read(whole: Path) -> None:
    steps: list[int] = []
    verdict = examine(whole, steps.append)
    assert verdict.problems == [] and verdict.notes == [] and examine(whole).problems == []
    assert verdict.files == len(files_of(whole)) == 8
    assert verdict.nbytes == sum(p.stat().st_size for p in whole.iterdir())
    assert verdict.tensors == len(read_manifest(whole).records)
    data = sum(
        (p.stop - p.start) * TensorFile(whole / p.file).header[key].dtype.itemsize
        for _, p, key in pieces(whole)
    )
    assert sum(steps) == data


BESIDE = ["state.json", "config.json", "tokenizer.json"]


@pytest.mark.parametrize(
    "name", ["rank-00000.safetensors", "rank-00002.safetensors", MANIFEST, CHECKSUM, *BESIDE]
)
def test_every_flipped_byte_is_found_and_named(whole: Path, tmp_path: Path, name: str) -> None:
    folder = copied(whole, tmp_path / "a")
    sound, draw = (folder / name).read_bytes(), random.Random(name)
    places = {0, 7, 8, len(sound) - 1, *(draw.randrange(len(sound)) for _ in range(14))}
    for at in sorted(p for p in places if p < len(sound)):
        data = bytearray(sound)
        data[at] ^= draw.randrange(1, 256)
        (folder / name).write_bytes(data)
        problems = examine(folder).problems
        assert name in {p.file for p in problems}, (at, problems)
        if name.startswith("rank-"):
            tensor = tensor_at(whole, name, at)
            assert [(p.file, p.tensor) for p in problems] == [(name, tensor)], (at, problems)
        elif name != MANIFEST:
            assert [p.file for p in problems] == [name], (at, problems)


def test_a_short_file_is_named_with_the_tensors_that_are_cut(whole: Path, tmp_path: Path) -> None:
    folder, name = copied(whole, tmp_path / "a"), "rank-00001.safetensors"
    with TensorFile(folder / name) as file:
        last = max(file.header.values(), key=lambda e: e.begin)
        lost = {
            tensor_at(whole, name, e.begin) for e in file.header.values() if e.end > last.begin - 1
        }
    data = (folder / name).read_bytes()
    (folder / name).write_bytes(data[: last.begin - 1])
    first, *others = examine(folder).problems
    assert first == Problem(
        name, "", f"it has {last.begin - 1} bytes and should have {len(data)}: it was cut short."
    )
    assert (
        {p.tensor for p in others} == lost
        and all("ends before them" in p.what for p in others)
        and len(lost) == 2
    )


def test_a_missing_file_says_which_tensors_went_with_it(whole: Path, tmp_path: Path) -> None:
    folder = copied(whole, tmp_path / "a")
    (folder / "rank-00001.safetensors").unlink()
    (problem,) = examine(folder).problems
    inside = [key for _, p, key in pieces(whole) if p.file == problem.file]
    assert f"a part of {len(inside)} tensors" in problem.what


def test_files_of_another_checkpoint_are_found(whole: Path, tmp_path: Path) -> None:
    later = reshard(
        Run(steps=3).save(tmp_path / "one", tokenizer=Tokenizer()), tmp_path / "three", 3
    )
    for name in files_of(whole):
        if (later / name).read_bytes() == (whole / name).read_bytes():
            continue
        folder = copied(whole, tmp_path / f"with {name}")
        shutil.copyfile(later / name, folder / name)
        assert name in {p.file for p in examine(folder).problems}
    folder = copied(whole, tmp_path / "exchanged")
    (folder / "rank-00000.safetensors").rename(folder / "x")
    (folder / "rank-00001.safetensors").rename(folder / "rank-00000.safetensors")
    (folder / "x").rename(folder / "rank-00001.safetensors")
    assert {p.file for p in examine(folder).problems} == {
        "rank-00000.safetensors",
        "rank-00001.safetensors",
    }


def test_files_that_do_not_belong_to_it_are_noted_and_are_no_problem(
    whole: Path, tmp_path: Path
) -> None:
    folder = copied(whole, tmp_path / "a")
    (folder / "notes.txt").write_text("mine")
    (folder / "more").mkdir()
    (folder / "more" / "b").write_text("mine too")
    verdict = examine(folder)
    assert verdict.problems == [] and [n.file for n in verdict.notes] == ["more/b", "notes.txt"]


def test_what_is_no_checkpoint_is_said_in_a_sentence(whole: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "empty").mkdir()
    for name, words in (
        ("file", "is a file"),
        ("empty", "no Onefold checkpoint"),
        ("nothing", "there is no folder"),
    ):
        with pytest.raises(CheckpointError, match=words):
            examine(tmp_path / name)
    folder = copied(whole, tmp_path / "later")
    text = json.dumps(json.loads((folder / MANIFEST).read_text()) | {"version": 99}).encode()
    (folder / MANIFEST).write_bytes(text)
    (folder / CHECKSUM).write_text(checksum_line(text))
    with pytest.raises(CheckpointError, match="version 99"):
        examine(folder)


def rewritten(folder: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """The manifest with a change, and the right checksum of it."""
    body = json.loads((folder / MANIFEST).read_text())
    change(body)
    text = json.dumps(body).encode()
    (folder / MANIFEST).write_bytes(text)
    (folder / CHECKSUM).write_text(checksum_line(text))


@pytest.mark.parametrize("way", ["..", "absolute", "link", "state", "folder link"])
def test_nothing_outside_the_folder_is_read_though_every_hash_is_right(
    whole: Path, tmp_path: Path, way: str
) -> None:
    """A file of tensors, or state.json, lies beside the checkpoint, bytes and hashes as they should
    be.
    """
    folder, outside = copied(whole, tmp_path / "checkpoint"), tmp_path / "outside"
    name = "state.json" if way == "state" else "rank-00001.safetensors"
    outside.mkdir()
    (folder / name).rename(outside / name)
    if way in ("link", "state"):
        (folder / name).symlink_to(outside / name)
        said = "is a symbolic link that leads out of the checkpoint"
    else:
        there = {
            "..": f"../outside/{name}",
            "absolute": str(outside / name),
            "folder link": f"inside/{name}",
        }[way]

        def change(body: dict[str, Any]) -> None:
            body["files"][there] = body["files"].pop(name)
            body["tensor_files"] = [there if n == name else n for n in body["tensor_files"]]

        rewritten(folder, change)
        said = "is not inside the checkpoint's folder"
        if way == "folder link":
            (folder / "inside").symlink_to(outside)
            said = "is a symbolic link that leads out of the checkpoint"
    with pytest.raises(CheckpointError, match=said):
        run = Run(seed=2, steps=0)
        onefold.load(folder, model=run.model, optimizer=run.optimizer, scheduler=run.scheduler)
    with pytest.raises(CheckpointError, match=said):
        reshard(folder, tmp_path / "resharded", 1)
    assert any(said in str(problem) for problem in examine(folder).problems), examine(
        folder
    ).problems
    assert said in glance(folder).wrong
