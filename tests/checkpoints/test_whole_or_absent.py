"""A save leaves a whole checkpoint or none, whatever comes between: a kill, a full disk, another run,
a rank that does something else. What stands in its way is said on every rank.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import onefold
from on_ranks import on_ranks
from onefold.checkpoint import CheckpointError, checkpointer
from onefold.checkpoint import folder as folders
from onefold.checkpoint.folder_source import FolderSource
from onefold.inspection.verify import examine
from onefold.locks import Lock
from ranks import outcomes_of
from reference import adamw, built, differences, train, weights
from saved import Run
from zoo import TinyGPT, TinyMLP, tokens_of


def made(stage: int = 3, depth: int = 2) -> tuple[nn.Module, torch.optim.Optimizer]:
    recipe = onefold.Recipe.zero(stage, stall_timeout=30.0)
    model = onefold.shard(built(lambda: TinyGPT(depth=depth)), recipe)
    optimizer = adamw(model)
    train(model, optimizer, [tokens_of(3)])
    return model, optimizer


# -- kills -----------------------------------------------------------------------------------------

#: Calls of the system, before each of which a process is killed; the others with `--all`.
MOMENTS = {"fsync", "rename", "mkdir", "unlink", "rmdir"}
MORE = {"open", "write", "flock", "close", "ftruncate"}


def is_killed_saving(run: Run, path: Path, moment: int, calls: set[str]) -> bool:
    """Whether a child that saves step 2 came to this moment, at which it is killed."""
    child = os.fork()
    if child == 0:
        seen = 0

        def look(frame: Any, event: str, of: Any) -> None:
            nonlocal seen
            if event == "c_call" and of.__name__ in calls:
                seen += 1
                if seen == moment:
                    os.kill(os.getpid(), signal.SIGKILL)

        sys.setprofile(look)
        try:
            run.save(path, overwrite=True)
        finally:
            os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL


@pytest.mark.parametrize("disk", ["new", "over another", "over another, without exchange"])
def test_a_save_that_is_killed_at_any_moment_leaves_a_whole_checkpoint_or_none(
    disk: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, every: bool
) -> None:
    run, path, found = Run(), tmp_path / "a", []
    calls = MOMENTS | (MORE if every else set())
    if "without" in disk:
        monkeypatch.setattr(folders, "_EXCHANGE", 1 << 30)  # no file system knows it
    moment = 1
    while True:
        if disk != "new":
            run.save(path, step=1, overwrite=True)
        killed = is_killed_saving(run, path, moment, calls)
        if "without" not in disk:
            found.append(onefold.load(path).step if path.exists() else None)
        for litter in tmp_path.glob(".*"):
            os.utime(litter, (0, 0))
        onefold.Checkpointer(tmp_path, model=run.model).close()  # the next start
        assert {p.name for p in tmp_path.iterdir()} <= {"a", ".lock"}, moment
        assert disk == "new" or path.exists(), moment
        assert not path.exists() or not examine(path), moment
        found.append(onefold.load(path).step if path.exists() else None)
        if not killed:
            break
        if disk == "new":
            folders.remove(path) if path.exists() else None
        moment += 1
    assert moment > 10
    assert set(found) == {None if disk == "new" else 1, 2}


def killed_while_saving(root: str) -> None:
    """Rank 1 dies when its file is half written; an older checkpoint of the same name is there."""
    from onefold.checkpoint import tensorfile

    model, optimizer = made()
    onefold.save(f"{root}/a", model=model, optimizer=optimizer, step=1)
    if dist.get_rank() == 1:
        tensorfile._put = lambda *_: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[assignment]
    onefold.save(f"{root}/a", model=model, optimizer=optimizer, step=2, overwrite=True)


def test_a_rank_that_dies_in_a_save_is_told_and_the_checkpoint_before_stays(tmp_path: Path) -> None:
    began = time.monotonic()
    first, second = outcomes_of(2, killed_while_saving, str(tmp_path))
    assert second.exitcode == -signal.SIGKILL
    assert first.error == "CheckpointError" and "lost the other ranks" in first.message, first
    assert time.monotonic() - began < 120.0  # of the 300 that its collectives may take
    assert onefold.load(tmp_path / "a").step == 1 and not examine(tmp_path / "a")


# -- what cannot be --------------------------------------------------------------------------------


class Noted(nn.Linear):
    """Has extra state."""

    def get_extra_state(self) -> int:
        return 7

    def set_extra_state(self, state: int) -> None:
        assert state == 7


@on_ranks(2)
def test_what_cannot_be_saved_or_loaded_is_said_on_every_rank_and_changes_nothing(
    folder: Path,
) -> None:
    rank, (model, optimizer) = dist.get_rank(), made()
    good, taken = folder / "good", folder / "taken"
    onefold.save(good, model=model, optimizer=optimizer, step=1)
    if rank == 0:
        (folder / "file").write_text("")
        taken.mkdir()
        (taken / "mine.txt").write_text("keep")
    noted, plain = (
        onefold.shard(kind(5, 3), onefold.Recipe.zero(3, stall_timeout=30.0))
        for kind in (Noted, nn.Linear)
    )
    onefold.save(folder / "noted", model=noted)
    onefold.load(folder / "noted", model=noted)

    def save(where: Path, **given: Any) -> Callable[[], object]:
        return lambda: onefold.save(where, **({"model": model} | given))

    def load(where: Path, **given: Any) -> Callable[[], object]:
        return lambda: onefold.load(where, **({"model": model} | given))

    def inside() -> None:
        with onefold.full_params(model):
            load(good)()

    new, stranger = folder / "new", torch.optim.SGD(nn.Linear(2, 2).parameters())
    apart = torch.optim.AdamW([{"params": [p]} for p in model.parameters()])
    schedule = torch.optim.lr_scheduler.ConstantLR(optimizer)
    rows: dict[str, Callable[[], object]] = {
        "is a file; name a folder": save(folder / "file"),
        "a file of this name is in the way": save(folder / "file" / "deep"),
        "holds files that are no checkpoint of Onefold's: name another": save(taken, overwrite=True),
        "give overwrite=True to replace it": save(good),
        r"extra\['f'\] is a .*no pickle": save(new, extra={"f": print}),
        "step=-3: expected the number of steps done": save(new, step=-3),
        "belongs to another model": save(new, optimizer=stranger),
        "given step 0 on rank 0 and 1 on rank 1": save(new, step=rank),
        "expected something with save_pretrained": save(new, tokenizer=print),
        "given strict True on rank 0 and False on rank 1": load(good, strict=not rank),
        "given path": save(folder / f"new {rank}"),
        "called (load|save) while rank . called (load|save)": save(new) if rank else load(good),
        "is nothing; expected a checkpoint": load(folder / "nowhere"),
        "is a folder without a checkpoint": load(taken),
        "holds no scheduler": load(good, scheduler=schedule),
        "parameter groups": load(good, optimizer=apart),
        "holds no optimizer": load(folder / "noted", model=noted, optimizer=adamw(noted)),
        r"names are missing in it \(blocks.2": load(good, model=made(depth=3)[0]),
        "is of another model": load(good, model=plain),
        r"unknown to this model \(_extra_state\)": load(folder / "noted", model=plain),
        r"load\(\) was called inside full_params\(\)": inside,
    }  # fmt: skip
    before = weights(model), weights(plain)
    for words, call in rows.items():
        dist.barrier()
        with pytest.raises((CheckpointError, RuntimeError), match=words):
            call()
    assert not differences(before[0], weights(model)) and not differences(before[1], weights(plain))
    dist.barrier()
    assert sorted(p.name for p in folder.iterdir()) == ["file", "good", "noted", "taken"]
    assert "_extra_state" in onefold.load(folder / "noted", model=plain, strict=False).unexpected[0]
    load(good, optimizer=optimizer)()

    def fails(*_: Any, **__: Any) -> None:
        raise OSError("the folder is gone")

    with (
        onefold.Checkpointer(folder / "run", model=model) as checkpoints,
        pytest.MonkeyPatch.context() as patch,
        pytest.raises(CheckpointError, match=r"the folder is gone.*\(rank 0\)"),
    ):
        patch.setattr(checkpointer, "newest_first", fails)
        checkpoints.load()


@on_ranks(2)
def test_a_load_waits_for_a_rank_that_is_slow_as_long_as_it_reads(folder: Path) -> None:
    model = onefold.shard(built(TinyGPT), onefold.Recipe.zero(0, stall_timeout=4.0))
    onefold.save(folder / "saved", model=model)

    def slow(self: Any, item: Any, *rest: Any, read: Any = FolderSource.read_box) -> None:
        time.sleep(1.2 * (dist.get_rank() == 1 and item.name.startswith("blocks.0")))
        read(self, item, *rest)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FolderSource, "read_box", slow)
        dist.barrier()
        begun = time.monotonic()
        onefold.load(folder / "saved", model=model)
    assert time.monotonic() - begun > 4.0


@contextlib.contextmanager
def mounted(folder: Path, *options: str) -> Iterator[Path]:
    """A file system in memory; a test is skipped where this user may not mount one."""
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", ",".join(options), "tmpfs", str(folder)]
    if os.geteuid() != 0 or subprocess.run(command, capture_output=True).returncode:
        pytest.skip("mounting a tmpfs needs the rights to: run as root, with CAP_SYS_ADMIN")
    try:
        yield folder
    finally:
        subprocess.run(["umount", str(folder)], check=True)


def onto_disks_that_take_nothing(full: Path, read_only: Path) -> dict[str, str]:
    model, optimizer = made()
    states: dict[str, Any] = {"model": model, "optimizer": optimizer}

    def keep(root: Path) -> None:
        with onefold.Checkpointer(root, model=model, asynchronous=False) as checkpoints:
            checkpoints.save(1, optimizer=optimizer)

    said = {}
    for name, place in (("full", full), ("read-only", read_only)):
        calls: dict[str, Callable[[], object]] = {
            "save": lambda p=place: onefold.save(p / "a", **states),
            "save_async": lambda p=place: onefold.save_async(p / "b", **states).wait(),
            "export": lambda p=place: onefold.export(model, p / "c"),
            "Checkpointer": lambda p=place: keep(p / "d"),
        }
        for call, run in calls.items():
            with pytest.raises(CheckpointError) as error:
                run()
            said[f"{name}: {call}"] = str(error.value)
    return said


def test_a_full_disk_and_a_read_only_one_are_said_on_every_rank_and_keep_nothing(
    tmp_path: Path,
) -> None:
    with (
        mounted(tmp_path / "full", "size=40k") as full,
        mounted(tmp_path / "read-only", "ro") as read_only,
    ):
        for outcome in outcomes_of(2, onto_disks_that_take_nothing, full, read_only):
            assert not outcome.error, outcome
            for call, sentence in outcome.value.items():
                no_room = "free space there, or choose another disk"
                wanted = no_room if "full" in call else "is read-only: choose another folder"
                assert wanted in sentence, (call, sentence)
        left = [p.relative_to(full).as_posix() for p in full.rglob("*")]
        assert left == ["d", "d/.lock"] and not list(read_only.iterdir())


# -- two runs --------------------------------------------------------------------------------------


def test_two_runs_cannot_save_into_one_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpointer, "LOCK_PATIENCE", 0.2)
    model = onefold.shard(built(TinyMLP), onefold.Recipe.zero(3))
    words = f"in use by process {os.getpid()} on .*two runs"
    with onefold.Checkpointer(tmp_path, model=model), pytest.raises(CheckpointError, match=words):
        onefold.Checkpointer(tmp_path, model=model)
    onefold.Checkpointer(tmp_path, model=model).close()


def test_a_forked_child_neither_keeps_the_lock_nor_takes_it_away(tmp_path: Path) -> None:
    lock = Lock(tmp_path / "lock")
    child = os.fork()
    if child == 0:
        lock.release()  # as a worker's garbage collector may
        os._exit(0)
    os.waitpid(child, 0)
    with pytest.raises(BlockingIOError):
        Lock(tmp_path / "lock")
    sleeper = os.fork()
    if sleeper == 0:
        time.sleep(300.0)
        os._exit(0)
    lock.release()
    Lock(tmp_path / "lock").release()
    os.kill(sleeper, signal.SIGKILL)
    os.waitpid(sleeper, 0)
