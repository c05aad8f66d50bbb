"""State on NVMe: what is written is read, whatever the disk does; errors are told on every rank; and
nothing is left of a run that ended, or was killed.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import itertools
import logging
import os
import shutil
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import looks
import onefold
from examples import examples
from on_ranks import on_ranks
from onefold.memory import TierError, empty, failure
from onefold.offload.nvme import PAGE, Nvme, refuse_unless_fits
from zoo import TinyGPT, tokens_of

MIB = 1 << 20
SOURCE = str(Path(onefold.__file__).parents[1])


#: Bytes that a system call is asked for → an error of the system, or how many bytes it moves.
Answer = Callable[[int], OSError | int | None]


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Nvme]:
    monkeypatch.setattr("onefold.offload.nvme.BLOCK", 4 * PAGE)
    with closing(Nvme([tmp_path], name="test")) as store:
        yield store


def disk_that(patch: pytest.MonkeyPatch, answer: Answer, *ops: str) -> None:
    """Reads or writes go as `answer` says."""
    for name in ("preadv", "pwritev") if not ops else (*map(CALLS.get, ops),):
        call = getattr(REAL, str(name))

        def asked(file: int, views: list[memoryview], at: int, call: Any = call) -> Any:
            given = answer(len(views[0]))
            if isinstance(given, OSError):
                raise given
            if given is None:
                return call(file, views, at)
            call(file, [views[0][: given - given % PAGE]], at)  # the disk moves whole pages
            return given

        patch.setattr(os, str(name), asked)


CALLS = {"read": "preadv", "write": "pwritev"}
REAL = SimpleNamespace(preadv=os.preadv, pwritev=os.pwritev)


def on_pages(values: Tensor) -> Tensor:
    """The same values in memory that the disk can work on."""
    return blank(values.numel(), values.dtype).copy_(values)


def blank(numel: int, dtype: torch.dtype = torch.uint8) -> Tensor:
    return empty(max(1, numel), dtype, torch.device("cpu"), paged=True)[:numel].zero_()


def numbered(numel: int = 16 * PAGE, dtype: torch.dtype = torch.uint8) -> Tensor:
    return on_pages(torch.arange(numel).remainder(251).to(dtype))


def data_files(store: Nvme) -> list[os.stat_result]:
    return [os.fstat(file.file.fileno()) for file in store.files]


# -- what is written is read -----------------------------------------------------------------------


def chunks(data: st.DataObject, numel: int, step: int) -> list[tuple[int, int]]:
    """[0, numel) cut at pages, in any order."""
    pages = -(-numel // step)
    inner = sorted(data.draw(st.sets(st.integers(1, pages - 1), max_size=4))) if pages > 1 else []
    return data.draw(
        st.permutations(list(itertools.pairwise([0, *(p * step for p in inner), numel])))
    )


@examples(60)
@given(data=st.data())
def test_what_is_written_is_read_in_any_pieces_also_where_transfers_are_short(
    data: st.DataObject,
) -> None:
    dtype = data.draw(st.sampled_from([torch.float32, torch.bfloat16, torch.uint8, torch.int64]))
    step = PAGE // dtype.itemsize
    sizes = data.draw(st.lists(st.integers(1, 40 * step), min_size=1, max_size=3))
    shorter = data.draw(st.sampled_from([1, 3, MIB]))
    threads, folders = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 2))
    with tempfile.TemporaryDirectory() as parent, pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            "onefold.offload.nvme.BLOCK", data.draw(st.sampled_from([PAGE, 5 * PAGE, MIB]))
        )
        with closing(Nvme([Path(parent)] * folders, name="drawn", threads=threads)) as store:
            regions = [store.region(f"region {i}", numel, dtype) for i, numel in enumerate(sizes)]
            values = [torch.randint(0, 100, (numel,)).to(dtype) for numel in sizes]
            new = blank(sizes[0], dtype).fill_(7)
            regions[0].read(0, new).wait()
            assert not new.any(), "a new region holds zeros"
            disk_that(patch, lambda nbytes: min(shorter * PAGE, nbytes))
            for region, expected in zip(regions, values, strict=True):
                pieces = chunks(data, region.numel, step)
                begun = [region.write(a, on_pages(expected[a:b])) for a, b in pieces]
                for transfer in begun:
                    transfer.wait()
            for region, expected in zip(regions, values, strict=True):
                for a, b in chunks(data, region.numel, step):
                    into = blank(b - a, dtype)
                    region.read(a, into).wait()
                    assert torch.equal(into, expected[a:b]), f"{region.name} from element {a} on"
            total = sum(-(-region.nbytes // PAGE) * PAGE for region in regions)
            assert sum(file.st_size for file in data_files(store)) == total
            assert sum(file.st_blocks for file in data_files(store)) * 512 >= total, (
                "the files have holes: a full disk would show in the middle of a step"
            )
        assert not os.listdir(parent)


@pytest.mark.parametrize("op", ["read", "write"])
def test_a_transfer_of_fewer_bytes_than_asked_is_continued(
    store: Nvme, op: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    region, found = store.region("short", 4 * PAGE, torch.uint8), blank(4 * PAGE)
    asked: list[int] = []

    def short(nbytes: int) -> int:
        asked.append(nbytes)
        return min(nbytes, PAGE + 100)  # a part of a page is moved again

    disk_that(monkeypatch, short, op)
    region.write(0, numbered(4 * PAGE)).wait()
    region.read(0, found).wait()
    assert torch.equal(found, numbered(4 * PAGE))
    assert asked == [4 * PAGE, 3 * PAGE, 2 * PAGE, PAGE]


@pytest.mark.parametrize("first", ["write", "read"])
def test_transfers_of_the_same_bytes_keep_their_order_and_others_do_not_wait(
    store: Nvme, first: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    region, into = store.region("shared", 8192, torch.float32), blank(4096, torch.float32)
    old, new = numbered(4096, torch.float32), on_pages(torch.zeros(4096))
    region.write(0, old).wait()
    go = threading.Event()

    def late(nbytes: int) -> None:
        go.wait(10.0)

    disk_that(monkeypatch, late, first)
    begun = region.write(0, new) if first == "write" else region.read(0, into)
    then = region.read if first == "write" else region.write
    then(4096, blank(1024, torch.float32)).wait()
    second = threading.Thread(target=lambda: then(0, into if first == "write" else new).wait())
    second.start()
    second.join(0.2)  # long enough for one that does not wait
    assert not begun.done() and second.is_alive()
    go.set()
    second.join(300.0)
    begun.wait()
    assert torch.equal(into, new if first == "write" else old)


def resident() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return sum(int(i.split()[1]) * 1024 for i in lines if i.startswith(("RssAnon", "RssShmem")))


def test_the_hosts_memory_does_not_grow(store: Nvme) -> None:
    region, buffer = store.region("large", 32 * MIB, torch.uint8), blank(2 * MIB).fill_(1)
    region.write(0, buffer).wait()
    before = resident()
    for start in range(0, 32 * MIB, 2 * MIB):
        region.write(start, buffer).wait()
        region.read(start, buffer).wait()
    assert resident() - before < 2 * MIB


def test_close_waits_ends_the_threads_and_refuses_everything_after(tmp_path: Path) -> None:
    before = set(threading.enumerate())
    with (
        closing(Nvme([tmp_path], name="closed")) as store,
        closing(Nvme([tmp_path], name="closed")) as other,
    ):
        region, values = store.region("last", 4 * MIB, torch.uint8), numbered(4 * MIB)
        transfers = [region.write(at, values[at : at + MIB]) for at in range(0, 4 * MIB, MIB)]
        store.close()
        assert all(transfer.done() for transfer in transfers)
        for late in (lambda: region.read(0, values), lambda: store.region("late", 1, torch.uint8)):
            with pytest.raises(TierError, match="'closed' is closed"):
                late()
        other.region("of another store", 1024, torch.uint8).write(0, blank(1024)).wait()
    assert set(threading.enumerate()) == before and not any(tmp_path.iterdir())


# -- disks that do not do what they are asked ------------------------------------------------------


def once(error: OSError) -> Answer:
    left, lock = [1], threading.Lock()

    def answer(nbytes: int) -> OSError | None:
        with lock:
            return error if left and left.pop() else None

    return answer


def broken(code: int) -> OSError:
    return OSError(code, os.strerror(code))


@pytest.mark.parametrize("op", ["read", "write"])
def test_an_error_says_which_file_and_region_and_what_to_do_on_every_wait(
    store: Nvme, op: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    region, other = (store.region(name, 16 * PAGE, torch.uint8) for name in ("moments", "masters"))
    for each in (region, other):
        each.write(0, numbered()).wait()
    disk_that(monkeypatch, once(broken(errno.EIO)), op)
    transfer = getattr(region, op)(0, numbered())
    for _ in range(2):
        with pytest.raises(TierError) as caught:
            transfer.wait()
    words = [str(store.files[0].folder), "'moments'", "Input/output error", "name another disk"]
    assert all(word in str(caught.value) for word in words) and transfer.done()
    found = blank(16 * PAGE)
    other.read(0, found).wait()
    assert torch.equal(found, numbered()), "other transfers are none the worse"


@pytest.mark.parametrize("op", ["read", "write"])
def test_a_transfer_that_ends_early_is_an_error_and_no_endless_loop(
    store: Nvme, op: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    region = store.region("cut", 16 * PAGE, torch.uint8)
    with monkeypatch.context() as patch:
        disk_that(patch, lambda nbytes: 100)
        with pytest.raises(TierError, match=r"'cut' in .* ended after 0, .* Name another disk"):
            getattr(region, op)(0, numbered()).wait()


@pytest.mark.parametrize("op", ["read", "write"])
def test_a_disk_without_direct_transfers_still_serves_and_is_mentioned_once(
    store: Nvme, op: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not fcntl.fcntl(store.files[0].file, fcntl.F_GETFL) & os.O_DIRECT:
        pytest.skip("this file system takes no direct transfers")
    region, found = store.region("odd", MIB, torch.uint8), blank(MIB)
    disk_that(monkeypatch, once(broken(errno.EINVAL)), op)
    with caplog.at_level(logging.WARNING, "onefold"):
        for _ in range(3):
            region.write(0, numbered(MIB)).wait()
            region.read(0, found).wait()
    assert torch.equal(found, numbered(MIB))
    assert sum("takes no direct transfers" in r.getMessage() for r in caplog.records) == 1


def test_a_full_disk_shows_when_space_is_asked_for_and_all_of_it_is_given_back(
    store: Nvme, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(file: int, begin: int, nbytes: int) -> None:
        os.truncate(file, begin + nbytes)
        raise broken(errno.ENOSPC)

    store.region("fits", 4 * PAGE, torch.uint8)
    with monkeypatch.context() as patch:
        patch.setattr(os, "posix_fallocate", full)
        with pytest.raises(TierError, match=r"'does not' in .* No space left on device; name"):
            store.region("does not", 4 * PAGE, torch.uint8)
    assert sum(file.st_size for file in data_files(store)) == 4 * PAGE
    region, found = store.region("fits too", 4 * PAGE, torch.uint8), blank(4 * PAGE)
    region.write(0, numbered(4 * PAGE)).wait()
    region.read(0, found).wait()
    assert torch.equal(found, numbered(4 * PAGE))


# -- before a run ----------------------------------------------------------------------------------


def test_what_does_not_fit_or_has_no_folder_is_refused(tmp_path: Path) -> None:
    free, missing = shutil.disk_usage(tmp_path).free, tmp_path / "missing"
    refuse_unless_fits([tmp_path], free // 2, "the states")
    with pytest.raises(
        TierError, match=rf"the states: {4 * free:,} bytes are needed at {tmp_path}"
    ):
        refuse_unless_fits([tmp_path], 4 * free, "the states")
    with pytest.raises(TierError, match="is not there"):
        refuse_unless_fits([missing], 1, "the states")
    with pytest.raises(TierError, match=r"is not there. Create it"):
        Nvme([missing], name="refused")


# -- what is left of runs -----------------------------------------------------------------------------

#: Opens a store on sys.argv[1], says so and does what the last line says.
OPEN = """
import os, sys, time, torch
from onefold.memory import empty
from onefold.offload.nvme import Nvme
store = Nvme([sys.argv[1]], name="other", threads=2)
region = store.region("weights", 16 << 20, torch.uint8)
buffer = empty(16 << 20, torch.uint8, torch.device("cpu"), paged=True)
transfers = [region.write(0, buffer), region.read(0, buffer)]
print("open", flush=True)
"""


def started(path: Path, then: str) -> subprocess.Popen[str]:
    """A program of its own that has opened a store."""
    process = subprocess.Popen(
        [sys.executable, "-c", OPEN + textwrap.dedent(then), str(path)],
        env={**os.environ, "PYTHONPATH": SOURCE},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None and process.stdout.readline() == "open\n"
    return process


def test_nothing_is_left_of_a_process_however_it_ends(
    tmp_path: Path,
) -> None:
    killed, raises = (
        started(tmp_path, then)
        for then in ("time.sleep(600)", "raise ValueError('of the program')")
    )
    try:
        assert not any(tmp_path.iterdir()), "also while they run"
        _, errors = raises.communicate(timeout=300)
        assert raises.returncode == 1 and "Exception ignored" not in errors, errors
        killed.kill()
        killed.communicate(timeout=300)
        assert not any(tmp_path.iterdir())
    finally:
        for process in (killed, raises):
            process.kill()
            process.communicate()


def test_a_forked_child_keeps_no_space_and_uses_no_store_of_its_parent(store: Nvme) -> None:
    region = store.region("of the parent", PAGE, torch.uint8)
    if (child := os.fork()) == 0:
        try:
            with pytest.raises(TierError, match="belongs to process"):
                region.read(0, blank(PAGE))
            store.close()
            os._exit(0 if all(file.file.closed for file in store.files) else 1)
        except BaseException:
            os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    region.write(0, numbered(PAGE)).wait()


# -- on ranks --------------------------------------------------------------------------------------


class Run:
    """A model whose state is on the disk in `folder`, and its steps."""

    def __init__(self, folder: Path, **options: Any) -> None:
        torch.manual_seed(0)
        tiers = {"offload_optimizer": "nvme", "offload_param": "nvme", "nvme": str(folder)}
        recipe = onefold.Recipe.zero(3, stall_timeout=20.0, **(tiers | options))
        self.model: Any = onefold.shard(TinyGPT(), recipe)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)

    def step(self, number: int) -> float:
        loss = self.model(tokens_of(10 * number + dist.get_rank()))
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return float(loss.detach())

    def break_disk(self, op: str, kind: str, code: int = errno.EIO) -> None:
        """Of rank 1, for states of this kind."""
        for file in looks.disk(self.model).files if dist.get_rank() == 1 else ():

            def move(doing: str, what: str, *rest: Any, file: Any = file) -> None:
                if doing == op and kind in what:
                    raise failure("moving bytes of", file.folder, broken(code))
                type(file).move(file, doing, what, *rest)

            file.move = move

    def mend_disk(self) -> None:
        for file in looks.disk(self.model).files:
            vars(file).pop("move", None)


@on_ranks(2)
@pytest.mark.parametrize(
    ("op", "kind", "code"),
    [
        ("write", "exp_avg", errno.ENOSPC),
        ("read", "exp_avg", errno.EIO),
    ],
)
def test_a_disk_that_fails_in_the_middle_of_a_step_stops_every_rank_for_good(
    op: str, kind: str, code: int, folder: Path
) -> None:
    run = Run(folder)
    run.step(0)
    run.break_disk(op, kind, code)
    said = f"rank 1, in the middle of the step.*{os.strerror(code)}"
    with pytest.raises(onefold.TierError, match=f"(?s){said}"):
        run.step(1)
    with pytest.raises(onefold.TierError, match="last checkpoint"):
        run.step(2)
    with pytest.raises((onefold.CheckpointError, onefold.TierError)):
        onefold.save(folder / "checkpoint", model=run.model, optimizer=run.optimizer)
    assert not (folder / "checkpoint").exists()


@on_ranks(2)
@pytest.mark.parametrize(
    ("tiers", "error", "raised"),
    [
        ({}, MemoryError, (onefold.TierError, onefold.TierError)),
        (
            {"offload_optimizer": "cpu", "offload_param": None, "nvme": None},
            OSError,
            (None, OSError),
        ),
    ],
    ids=["nvme", "cpu"],
)
def test_no_error_in_the_middle_of_a_step_is_swallowed(
    tiers: dict[str, Any], error: type[Exception], raised: Any, folder: Path
) -> None:
    run = Run(folder, **tiers)
    run.step(0)

    def fails(*_: Any) -> None:
        raise error("no room")

    expected = raised[dist.get_rank()]
    if dist.get_rank() == 1:
        looks.engine(run.model).flats[-1].storage.stepped = fails
    with pytest.raises(expected, match="no room") if expected else contextlib.nullcontext():
        run.step(1)
    if expected is onefold.TierError:
        with pytest.raises(onefold.TierError, match="last checkpoint"):
            run.step(2)


@on_ranks(2)
@pytest.mark.parametrize("what", ["master", "the last state", "no room"])
def test_a_disk_that_fails_in_a_load_is_said_on_every_rank(what: str, folder: Path) -> None:
    run, again = Run(folder), Run(folder)
    run.step(0)
    path = onefold.save(folder / "saved", model=run.model, optimizer=run.optimizer)
    flat, said = looks.engine(again.model).flats[-1], "Input/output error"
    if what == "the last state":
        again.break_disk("write", f"{flat.unit_name}.{flat.index}.state exp_avg_sq")
    elif what == "master":
        again.break_disk("write", what)
    else:
        said = what

        def fails(*_: Any) -> None:
            raise OSError(what)

        if dist.get_rank() == 1:
            looks.disk(again.model).region = fails
    with pytest.raises(onefold.CheckpointError, match=rf"(?s){said}.*\(rank 1\)"):
        onefold.load(path, model=again.model, optimizer=again.optimizer)


@on_ranks(2)
def test_a_disk_that_fails_before_the_step_leaves_every_rank_as_it_was(folder: Path) -> None:
    plain, run = Run(folder), Run(folder)
    assert plain.step(0) == run.step(0)
    run.break_disk("write", "gradient")
    with pytest.raises(
        onefold.TierError, match=r"(?s)rank 1, before the step.*nothing has been ste"
    ):
        run.step(1)
    run.mend_disk()
    run.optimizer.zero_grad()
    assert [run.step(2), run.step(3)] == [plain.step(2), plain.step(3)]


@on_ranks(2, fresh=True)
def test_a_run_that_will_not_fit_is_refused_on_every_rank_before_it_begins(folder: Path) -> None:
    if dist.get_rank() == 1:  # the disk of one host only
        shutil.disk_usage = lambda path: shutil._ntuple_diskusage(1 << 30, (1 << 30) - 1000, 1000)
    with pytest.raises(onefold.TierError, match=r"(?s)^rank 1, before the run: .* 1,000 are free"):
        Run(folder)
    dist.barrier()
    assert list(folder.iterdir()) == []


def test_a_pass_that_raises_leaves_no_read_under_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = onefold.Recipe.zero(
        3, offload_optimizer="nvme", offload_param="nvme", nvme=str(tmp_path)
    )
    layers = nn.Sequential(*(nn.Linear(300, 300) for _ in range(6)))
    model = onefold.shard(layers, recipe, units=(nn.Linear,))
    model(torch.ones(2, 300)).sum().backward()
    ended = list[int]()

    def late(nbytes: int) -> None:
        time.sleep(0.3)
        ended.append(nbytes)

    disk_that(monkeypatch, late, "read")
    with pytest.raises(RuntimeError):
        model(torch.ones(2, 299))
    found = len(ended)
    time.sleep(1.0)
    assert 0 < found == len(ended)


def test_nothing_is_read_where_gathers_read_the_masters_themselves(tmp_path: Path) -> None:
    model = Run(tmp_path, precision="fp32").model
    looks.watch(model)
    for flat in looks.engine(model).flats:
        flat.storage.renew()
    assert not looks.moved(model).get("read")
