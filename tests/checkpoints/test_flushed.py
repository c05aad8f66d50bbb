"""A checkpoint is on the disk before it has its name, so that a crash of the machine leaves no half
of one.
"""

from __future__ import annotations

import errno
import os
import time
from pathlib import Path

import pytest
import torch

import onefold
import onefold.checkpoint.folder as checkpoint_folder
from on_ranks import on_ranks
from reference import adamw, built, on_each_rank
from zoo import TinyMLP, features_of


def watched(monkeypatch: pytest.MonkeyPatch) -> list[tuple[float, str, str]]:
    """What this process flushes and renames from here on: (when, what, path)."""
    seen: list[tuple[float, str, str]] = []
    fsync, rename = os.fsync, os.rename

    def flushing(file: int) -> None:
        path = os.readlink(f"/proc/self/fd/{file}")
        fsync(file)
        seen.append((time.monotonic(), "flushed", path))

    def renaming(old: str | Path, new: str | Path) -> None:
        seen.append((time.monotonic(), "renamed", str(old)))
        rename(old, new)

    monkeypatch.setattr(os, "fsync", flushing)
    monkeypatch.setattr(os, "rename", renaming)
    return seen


@on_ranks(2, fresh=True)
@pytest.mark.parametrize("how", ["new", "over another one", "in the background"])
def test_all_of_a_checkpoint_is_flushed_before_it_gets_its_name(how: str, folder: Path) -> None:
    model = onefold.shard(built(TinyMLP), onefold.Recipe.zero(stage=3))
    optimizer = adamw(model)
    model(features_of(0, 4, 7)).square().mean().backward()
    optimizer.step()
    target = folder / "checkpoint"
    states = {"model": model, "optimizer": optimizer, "step": 1, "extra": {"t": torch.ones(3)}}
    if how == "over another one":
        onefold.save(target, **states)
    with pytest.MonkeyPatch.context() as monkeypatch:
        seen = watched(monkeypatch)
        if how == "in the background":
            onefold.save_async(target, **states).wait()
        else:
            onefold.save(target, **states, overwrite=True)
    every = sorted(event for events in on_each_rank(seen) for event in events)
    (named,) = [(when, path) for when, what, path in every if what == "renamed"]
    before = {path for when, what, path in every if what == "flushed" and when < named[0]}
    after = {path for when, what, path in every if what == "flushed" and when > named[0]}
    files = {path.relative_to(target) for path in target.rglob("*")}
    missing = {Path(named[1]) / file for file in (Path(), *files)} - set(map(Path, before))
    assert not missing, f"not on the disk before the rename: {sorted(map(str, missing))}"
    assert str(folder) in after, "the new name itself is not flushed"
    assert len(files) >= 4  # two ranks' tensors, the state, the manifest


@pytest.mark.parametrize("before", [None, 1])
def test_a_save_whose_name_the_disk_refuses_raises_and_leaves_what_was_there(
    before: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = onefold.shard(built(TinyMLP), onefold.Recipe.zero(stage=3))
    target, flush = tmp_path / "checkpoint", checkpoint_folder.flush
    if before is not None:
        onefold.save(target, model=model, step=before)

    def refusing(path: Path) -> None:
        if path == tmp_path:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        flush(path)

    monkeypatch.setattr(checkpoint_folder, "flush", refusing)
    with pytest.raises(onefold.checkpoint.CheckpointError, match=os.strerror(errno.EIO)):
        onefold.save(target, model=model, step=2, overwrite=True)
    assert [p.name for p in tmp_path.iterdir()] == ([] if before is None else [target.name])
    assert before is None or onefold.load(target, model=model).step == before
