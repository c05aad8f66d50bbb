"""A store's folder: one's own while the process lives, gone when it ends, reclaimed when it was
killed.
"""

from __future__ import annotations

import gc
import os
import signal
import threading
from pathlib import Path

import pytest
import torch
from nvme_tools import left_behind, on_pages, program

from onefold.offload.nvme import Nvme, TierError, files, reclaim
from onefold.offload.nvme.files import DATA, LOCK, YOUNG

# Opens a store on sys.argv[1], says so and does what the last line says.
OPEN = """
    import os, sys, time, torch
    from onefold.offload.nvme import Nvme
    store = Nvme([sys.argv[1]], name="other", threads=2)
    region = store.region("weights", 16 << 20, torch.uint8)
    buffer = store.buffer(16 << 20)
    transfers = [region.write(0, buffer), region.read(0, buffer)]
    print("open", flush=True)
"""


def started(path: Path, then: str):
    process = program(OPEN + "    " + then, path)
    assert process.stdout is not None
    line = process.stdout.readline()
    assert line == "open\n", process.communicate()[1]
    return process


def test_the_folder_says_whose_it_is_and_goes_with_close(tmp_path: Path):
    store = Nvme([tmp_path], name="rank3")
    [folder] = store.folders
    assert folder.parent == tmp_path
    assert folder.name.startswith(f"onefold-rank3-{os.getpid()}-")
    assert sorted(os.listdir(folder)) == [DATA, LOCK]
    assert f"process {os.getpid()}" in (folder / LOCK).read_text()
    assert folder.stat().st_mode & 0o077 == 0, "states are nobody else's business"
    store.close()
    assert not any(tmp_path.iterdir())


def test_a_store_that_is_forgotten_takes_its_folder_with_it(tmp_path: Path):
    store = Nvme([tmp_path], name="forgotten")
    store.region("weights", 1024, torch.float32).write(0, on_pages(torch.zeros(1024)))
    del store
    gc.collect()
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize(
    "end", ["pass", "raise SystemExit(3)", "raise ValueError('a fault of the program')"]
)
def test_a_program_that_never_closes_its_store_ends_and_leaves_nothing(tmp_path: Path, end: str):
    process = started(tmp_path, end)
    _, errors = process.communicate(timeout=300)
    assert process.returncode == {"pass": 0, "raise SystemExit(3)": 3}.get(end, 1), errors
    assert not any(tmp_path.iterdir())
    assert "Exception ignored" not in errors, errors


def test_after_a_kill_the_next_start_removes_what_was_left_and_only_that(tmp_path: Path):
    killed, living = started(tmp_path, "time.sleep(600)"), started(tmp_path, "sys.stdin.read()")
    try:
        os.kill(killed.pid, signal.SIGKILL)
        killed.communicate(timeout=300)
        assert len(os.listdir(tmp_path)) == 2, "a killed process leaves its folder"
        with Nvme([tmp_path], name="next") as store:
            left = {path.name.split("-")[2] for path in tmp_path.iterdir()}
            assert left == {str(os.getpid()), str(living.pid)}
            assert store.folders[0].exists()
        _, errors = living.communicate("go on", timeout=300)
        assert living.returncode == 0, errors
        assert not any(tmp_path.iterdir())
    finally:
        for process in (killed, living):
            if process.poll() is None:
                process.kill()
                process.communicate()


def test_a_forked_child_neither_removes_nor_keeps_the_folder_of_a_killed_parent(
    tmp_path: Path,
):
    fork = """
    child = os.fork()
    if child == 0:
        try:
            region.read(0, buffer)
        except RuntimeError as error:
            print("refused:", error, flush=True)
        store.close()
        if not os.fork():
            sys.exit(0)   # a grandchild that ends as programs do, with everything that runs at an exit
        os.wait()
        print("child", os.getpid(), flush=True)
        time.sleep(600)
        os._exit(0)
    time.sleep(600)
    """
    process = started(tmp_path, fork.lstrip())
    assert process.stdout is not None
    child = 0
    try:
        refused = process.stdout.readline()
        assert f"belongs to process {process.pid}" in refused, refused
        child = int(process.stdout.readline().split()[1])
        [folder] = tmp_path.iterdir()
        assert sorted(os.listdir(folder)) == [
            DATA,
            LOCK,
        ], "the child has closed and ended, the parent lives"
        assert reclaim(tmp_path) == []
        os.kill(process.pid, signal.SIGKILL)
        process.wait(300)
        assert reclaim(tmp_path) == [folder], "the child lives, and holds nothing"
    finally:
        process.kill()
        if child:
            os.kill(child, signal.SIGKILL)
        process.communicate(timeout=300)


def test_many_starts_at_once_remove_all_that_is_dead_and_none_of_each_other(tmp_path: Path):
    for _ in range(5):
        dead = [left_behind(tmp_path) for _ in range(6)]
        ready, stores, faults = threading.Barrier(8), [], []

        def start(
            number: int,
            ready: threading.Barrier = ready,
            stores: list = stores,
            faults: list = faults,
        ) -> None:
            ready.wait()
            try:
                stores.append(Nvme([tmp_path], name=f"rank{number}"))
            except Exception as error:
                faults.append(error)

        threads = [threading.Thread(target=start, args=(i,)) for i in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert faults == []
        assert not any(folder.exists() for folder in dead)
        for store in stores:
            assert sorted(os.listdir(store.folders[0])) == [DATA, LOCK]
            store.close()
        assert not any(tmp_path.iterdir())


@pytest.mark.parametrize("so_far", ["the lock", "all of it"])
def test_a_folder_that_another_start_takes_for_litter_is_made_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, so_far: str
):
    lock, taken = files.fcntl.flock, []

    def flock(file: int, how: int) -> None:
        if not taken:
            taken.extend(tmp_path.iterdir())
            (taken[0] / LOCK).unlink()
            if so_far == "all of it":
                taken[0].rmdir()
        lock(file, how)

    monkeypatch.setattr(files.fcntl, "flock", flock)
    with Nvme([tmp_path], name="again") as store:
        assert [*tmp_path.iterdir()] == store.folders != taken
        assert sorted(os.listdir(store.folders[0])) == [DATA, LOCK]
        assert reclaim(tmp_path) == []


def test_a_folder_that_is_being_made_is_left_alone_for_a_minute(tmp_path: Path):
    unlocked, unmarked = (
        left_behind(tmp_path, data=None),
        left_behind(tmp_path, mark=b"", data=None),
    )
    (unlocked / LOCK).unlink()
    os.utime(unlocked)
    assert reclaim(tmp_path) == []
    for path in (unlocked, unmarked, unmarked / LOCK):
        os.utime(path, (path.stat().st_mtime - 2 * YOUNG,) * 2)
    assert reclaim(tmp_path) == sorted([unlocked, unmarked])


def test_nothing_is_removed_that_is_not_ours(tmp_path: Path):
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    other_mark = left_behind(tmp_path, mark=b"somebody else's lock", age=2 * YOUNG)
    no_lock = left_behind(tmp_path, age=2 * YOUNG)
    (no_lock / LOCK).unlink()
    os.utime(no_lock, (0, 0))
    other_name = left_behind(tmp_path).rename(tmp_path / "onefold-checkpoints")
    link = tmp_path / "onefold-link-1-00000000"
    link.symlink_to(left_behind(elsewhere), target_is_directory=True)
    a_file = tmp_path / "onefold-file-1-00000000"
    a_file.write_text("not a folder")
    with_more = left_behind(tmp_path)
    (with_more / "thesis.txt").write_text("the only copy")
    assert reclaim(tmp_path) == []
    assert [
        path.exists()
        for path in (other_mark / DATA, no_lock / DATA, other_name / DATA, link / DATA, a_file)
    ] == [True] * 5
    assert (with_more / "thesis.txt").read_text() == "the only copy"


def test_a_folder_that_is_not_there_is_refused_and_not_made(tmp_path: Path):
    missing, file = tmp_path / "nvme", tmp_path / "file"
    file.write_text("")
    with pytest.raises(TierError, match=f"{missing} for states on NVMe is not there. Create it"):
        Nvme([tmp_path, missing], name="refused")
    with pytest.raises(TierError, match="is a file"):
        Nvme([file], name="refused")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file"], (
        "nor is anything left on the path that was there"
    )


def test_a_folder_that_cannot_be_written_is_refused_in_a_sentence(tmp_path: Path):
    if os.geteuid() == 0:
        with pytest.raises(TierError, match=r"making the NVMe folder /proc/.* failed"):
            Nvme(["/proc"], name="refused")
        return
    tmp_path.chmod(0o500)
    with pytest.raises(TierError, match="that this user may write to"):
        Nvme([tmp_path], name="refused")
