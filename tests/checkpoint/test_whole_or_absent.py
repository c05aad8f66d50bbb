"""What stands in the way of a save or a load: each a clear error on every rank, nothing damaged,
nothing left.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from ranks import outcomes_of, run_ranks
from zoo import TinyGPT, TinyMLP, tokens_of


def start(stage: int = 3, depth: int = 3) -> tuple[nn.Module, torch.optim.Optimizer]:
    import onefold

    torch.manual_seed(1)
    model = onefold.shard(TinyGPT(depth=depth), onefold.Recipe.zero(stage, stall_timeout=30.0))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model(tokens_of(3)).backward()
    optimizer.step()
    optimizer.zero_grad()
    return model, optimizer


def said_by(function: Any, *args: Any, **kwargs: Any) -> str:
    import onefold

    try:
        function(*args, **kwargs)
    except onefold.CheckpointError as error:
        return str(error)
    return "nothing"


def obstacles(root: str) -> dict[str, str]:
    import onefold

    model, optimizer = start()
    base, save, load = Path(root), onefold.save, onefold.load
    first = dist.get_rank() == 0
    good = save(base / "good", model=model, optimizer=optimizer, step=1)
    if first:
        (base / "file").write_text("")
        (base / "folder").mkdir()
        (base / "folder" / "mine.txt").write_text("keep")
    dist.barrier()
    said = {
        "a file": said_by(save, base / "file", model=model),
        "below a file": said_by(save, base / "file" / "deep", model=model),
        "another folder": said_by(save, base / "folder", model=model, overwrite=True),
        "there already": said_by(save, good, model=model),
        "extra": said_by(save, base / "x", model=model, extra={"f": print}),
        "step": said_by(save, base / "x", model=model, step=-3),
        "another optimizer": said_by(
            save, base / "x", model=model, optimizer=torch.optim.SGD(nn.Linear(2, 2).parameters())
        ),
        "nothing there": said_by(load, base / "nowhere", model=model),
        "no checkpoint": said_by(load, base / "folder", model=model),
        "no scheduler": said_by(
            load, good, model=model, scheduler=torch.optim.lr_scheduler.ConstantLR(optimizer)
        ),
        "other groups": said_by(
            load,
            good,
            model=model,
            optimizer=torch.optim.AdamW([{"params": [p]} for p in model.parameters()]),
        ),
    }
    deeper = onefold.shard(TinyGPT(depth=4), onefold.Recipe.zero(3))
    said["a deeper model"] = said_by(load, good, model=deeper)
    before = onefold.full_state_dict(other := onefold.shard(TinyMLP(), onefold.Recipe.zero(3)))
    said["another model"] = said_by(load, good, model=other)
    after = onefold.full_state_dict(other)
    said["changed"] = str([k for k in before if not torch.equal(before[k], after[k])])
    said["weights only"] = said_by(
        load, save(base / "bare", model=model), model=model, optimizer=optimizer
    )
    dist.barrier()
    said["left"] = str(sorted(p.name for p in base.iterdir()))
    load(good, model=model, optimizer=optimizer)  # untouched by all of it
    return said


def test_what_cannot_be_saved_or_loaded_is_said_on_every_rank_and_nothing_is_left(
    tmp_path: Path,
) -> None:
    expected = {
        "a file": "is a file; name a folder",
        "below a file": "a file of this name is in the way",
        "another folder": "holds files that are no checkpoint of Onefold's: name another",
        "there already": "give overwrite=True to replace it",
        "extra": "only pickle could store",
        "step": "step=-3: expected the number of steps done",
        "another optimizer": "belongs to another model",
        "nothing there": "is nothing; expected a checkpoint",
        "no checkpoint": "is a folder without a checkpoint",
        "no scheduler": "holds no scheduler",
        "other groups": "parameter groups",
        "a deeper model": "names are missing in it (blocks.3",
        "another model": "is of another model",
        "weights only": "holds no optimizer",
    }
    for said in run_ranks(2, obstacles, str(tmp_path)):
        for name, words in expected.items():
            assert words in said[name], (name, said[name])
        assert said["changed"] == "[]", "a model that a checkpoint does not fit stays as it was"
        assert said["left"] == "['bare', 'file', 'folder', 'good']"


@contextlib.contextmanager
def mounted(folder: Path, *options: str) -> Iterator[Path]:
    """A file system in memory; a test is skipped where this user may not mount one."""
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", ",".join(options), "tmpfs", str(folder)]
    if os.geteuid() != 0 or subprocess.run(command, capture_output=True).returncode:
        pytest.skip(
            "mounting a tmpfs needs the rights to: run as root, in a container with CAP_SYS_ADMIN"
        )
    try:
        yield folder
    finally:
        subprocess.run(["umount", str(folder)], check=True)


def onto_disks_that_take_nothing(full: str, read_only: str) -> dict[str, str]:
    import onefold
    from onefold.pretrained.export import export

    model, optimizer = start()
    said = {}
    for name, folder in (("full", full), ("read-only", read_only)):
        place = Path(folder)
        said[f"{name}: save"] = said_by(onefold.save, place / "a", model=model, optimizer=optimizer)
        said[f"{name}: save_async"] = said_by(
            lambda p=place: onefold.save_async(p / "b", model=model, optimizer=optimizer).wait(
                300.0
            )
        )
        said[f"{name}: export"] = said_by(export, model, place / "c")
        said[f"{name}: Checkpointer"] = said_by(keep_one, place / "d", model, optimizer)
        model(tokens_of(4)).backward()
        optimizer.step()  # what was told is not told again
        optimizer.zero_grad()
    return said


def keep_one(root: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    import onefold

    with onefold.Checkpointer(root, model=model, asynchronous=False) as checkpoints:
        checkpoints.save(1, optimizer=optimizer)


def test_a_full_disk_and_a_read_only_one_are_said_on_every_rank_and_keep_nothing(
    tmp_path: Path,
) -> None:
    with (
        mounted(tmp_path / "full", "size=64k") as full,
        mounted(tmp_path / "read-only", "ro") as read_only,
    ):
        for said in run_ranks(2, onto_disks_that_take_nothing, str(full), str(read_only)):
            for call, words in said.items():
                full_says = (
                    ("No space left on device", " MiB free, and ")["export" in call],
                    "free space there, or choose another disk",
                )
                for part in (
                    full_says
                    if call.startswith("full")
                    else ("the file system is read-only: choose another folder",)
                ):
                    assert part in words, (call, words)
        assert [p.relative_to(full).as_posix() for p in full.rglob("*")] == [
            "d",
            "d/.lock",
        ] and list(read_only.iterdir()) == []


def test_a_folder_that_cannot_be_written_to_is_said_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import errno

    import onefold

    model, _ = start()
    real = Path.mkdir

    def read_only(self: Path, *args: Any, **kwargs: Any) -> None:
        if self.name.startswith("."):
            raise OSError(errno.EROFS, "Read-only file system", str(self))
        real(self, *args, **kwargs)

    monkeypatch.setattr(Path, "mkdir", read_only)
    with pytest.raises(
        onefold.CheckpointError, match="the file system is read-only: choose another folder"
    ):
        onefold.save(tmp_path / "a", model=model)


def test_two_runs_cannot_save_into_one_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import onefold
    from onefold.checkpoint import checkpointer

    monkeypatch.setattr(checkpointer, "LOCK_PATIENCE", 0.2)
    model, _ = start()
    said = pytest.raises(
        onefold.CheckpointError, match=f"in use by process {os.getpid()} on .*two runs"
    )
    with onefold.Checkpointer(tmp_path, model=model), said:
        onefold.Checkpointer(tmp_path, model=model)
    onefold.Checkpointer(tmp_path, model=model).close()


def test_a_forked_child_neither_keeps_the_lock_nor_takes_it_away(tmp_path: Path) -> None:
    from onefold.checkpoint.folder import Lock

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


def test_extra_states_and_positions_in_the_data_are_not_passed_over(tmp_path: Path) -> None:
    import onefold

    torch.manual_seed(0)
    odd = onefold.shard(Odd(), onefold.Recipe.zero(0))
    path = onefold.save(tmp_path / "odd", model=odd, data={"position": 12})
    assert onefold.load(path, model=odd).data == {"position": 12}

    class Plain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.wrapped = nn.Linear(5, 3)
            self.register_buffer("scale", torch.ones(3))

    plain = onefold.shard(Plain(), onefold.Recipe.zero(0))
    with pytest.raises(onefold.CheckpointError, match=r"unknown to this model \(_extra_state\)"):
        onefold.load(path, model=plain)
    assert "_extra_state" in onefold.load(path, model=plain, strict=False).unexpected


def killed_while_saving(root: str) -> None:
    """Rank 1 dies when its file is half written; an older checkpoint of the same name is there."""
    import onefold
    from onefold.checkpoint import parts as module

    model, optimizer = start()
    onefold.save(f"{root}/a", model=model, optimizer=optimizer, step=1)
    if dist.get_rank() == 1:
        module.write_tensors = lambda *a, **k: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[assignment]
    onefold.save(f"{root}/a", model=model, optimizer=optimizer, step=2, overwrite=True)


def test_a_killed_save_leaves_the_previous_one_and_its_litter_goes_at_the_next_start(
    tmp_path: Path,
) -> None:
    import onefold

    began = time.monotonic()
    first, second = outcomes_of(2, killed_while_saving, str(tmp_path))
    assert second.exitcode == -signal.SIGKILL
    assert first.error == "CheckpointError" and "lost the other ranks" in first.message, first
    assert time.monotonic() - began < 120.0  # of the 300 that its collectives may take
    model, optimizer = start()
    loaded = onefold.load(tmp_path / "a", model=model, optimizer=optimizer)
    assert loaded.step == 1
    (litter := tmp_path / ".b.0123abcd.unfinished").mkdir()
    os.utime(litter, (0, 0))
    (removed := tmp_path / ".c.0123abcd.removed").mkdir()
    (returned := tmp_path / ".d.0123abcd.replaced").mkdir()
    onefold.Checkpointer(tmp_path, model=model).close()
    assert not litter.exists() and not removed.exists() and not returned.exists()
    assert (tmp_path / "d").is_dir(), (
        "what was about to be replaced when the process died has its name back"
    )


def test_replacing_a_checkpoint_is_one_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At the moment of the exchange the name stands for the old one, right after it for the new
    one.
    """
    import onefold
    from onefold.checkpoint import folder

    model, _ = start()
    onefold.save(tmp_path / "a", model=model, step=1)
    seen = []
    real = folder.exchange

    def looking(a: Path, b: Path) -> None:
        seen.append(onefold.load(tmp_path / "a").step)
        real(a, b)
        seen.append(onefold.load(tmp_path / "a").step)

    monkeypatch.setattr(folder, "exchange", looking)
    onefold.save(tmp_path / "a", model=model, step=2, overwrite=True)
    assert seen == [1, 2]
    assert [p.name for p in tmp_path.iterdir()] == ["a"]


class Odd(nn.Module):
    """Its state dict renames its parameter, and its extra state is a tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.wrapped = nn.Linear(5, 3)
        self.seen = torch.zeros(2)
        self.register_buffer("scale", torch.ones(3))
        self._register_state_dict_hook(
            lambda module, state, prefix, meta: state.update({"short": state.pop("wrapped.weight")})
        )

    def get_extra_state(self) -> torch.Tensor:
        return self.seen

    def set_extra_state(self, state: torch.Tensor) -> None:
        self.seen = state

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.wrapped(x) * self.scale


def misunderstandings(root: str) -> dict[str, Any]:
    """A rank that calls something else, or nothing; and a model whose state dict has names of its
    own.
    """
    import onefold

    rank = dist.get_rank()
    torch.manual_seed(0)
    model = onefold.shard(Odd(), onefold.Recipe.zero(3, stall_timeout=60.0))
    model.seen += 7
    onefold.save(f"{root}/odd", model=model)
    whole = onefold.full_state_dict(model)
    torch.manual_seed(9)
    other = onefold.shard(Odd(), onefold.Recipe.zero(1, stall_timeout=5.0))
    onefold.load(f"{root}/odd", model=other)
    found = onefold.full_state_dict(other)
    out: dict[str, Any] = {
        "equal": (
            all(torch.equal(found[name], value) for name, value in whole.items())
            and (bool(whole) or rank > 0)
        ),
        "seen": other.seen.tolist(),
        "whole": (
            not whole
            or (
                whole["short"].shape == (3, 5)
                and not torch.equal(whole["short"][2], torch.zeros(5))
            )
        ),
    }
    with onefold.full_params(other):
        out["inside"] = said_by(onefold.load, f"{root}/odd", model=other)
    out["steps"] = said_by(onefold.save, f"{root}/z", model=model, step=rank)
    out["places"] = said_by(onefold.save, f"{root}/z{rank}", model=model)
    call = (
        (lambda: onefold.save(f"{root}/x", model=model))
        if rank
        else (lambda: onefold.load(f"{root}/odd", model=model))
    )
    out["crossed"] = said_by(call)
    if rank == 0:
        try:
            onefold.save(f"{root}/y", model=other)
        except onefold.StallError as error:
            out["alone"] = str(error)
        Path(root, "given up").touch()
    else:
        until = time.monotonic() + 120.0
        while not Path(root, "given up").exists() and time.monotonic() < until:
            time.sleep(0.05)
    return out


def test_a_rank_that_calls_something_else_or_nothing_is_told(tmp_path: Path) -> None:
    first, second = run_ranks(2, misunderstandings, str(tmp_path))
    for found in (first, second):
        assert found["equal"] and found["whole"] and found["seen"] == [7.0, 7.0]
        assert "load() was called inside full_params()" in found["inside"]
        assert "given step 0 on rank 0 and 1 on rank 1" in found["steps"]
        assert "given path" in found["places"]
    assert "rank 0 called load while rank 1 called save" in first["crossed"]
    assert "rank 1 called save while rank 0 called load" in second["crossed"]
    assert "waiting in control of unit '(save)'" in first["alone"], first["alone"]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["given up", "odd"]


def saved_by_nobody(root: str) -> str:
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.destroy_process_group()
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    import onefold

    model = onefold.shard(nn.Linear(8, 8), onefold.Recipe.zero(3))
    return said_by(onefold.save, Path(root) / "never", model=model)


def test_a_fake_process_group_has_nothing_to_save(tmp_path: Path) -> None:
    said = run_ranks(1, saved_by_nobody, str(tmp_path))[0]
    assert "process group of the fake backend" in said and not list(tmp_path.iterdir())
