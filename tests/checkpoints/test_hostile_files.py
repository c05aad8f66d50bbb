"""A checkpoint of a stranger, whose checksums are right: whatever its files hold, all that reads it
says so in a sentence. Nothing is called, nothing waits, nothing outside the folder is read, and the
run stays as it was.
"""

from __future__ import annotations

import contextlib
import copy
import hashlib
import json
import os
import signal
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch.optim import lr_scheduler

import onefold
from checkpoints.injured import (
    Change,
    change_manifest,
    change_state,
    flip,
    write_manifest,
    write_state,
)
from on_ranks import on_ranks
from onefold.checkpoint import CheckpointError
from onefold.checkpoint.loading import source_of
from onefold.checkpoint.manifest import MANIFEST, STATE
from onefold.checkpoint.values import refuse_another_state
from onefold.inspection.diff import differences
from onefold.inspection.summary import summarize
from onefold.inspection.verify import examine
from onefold.pretrained.huggingface import HuggingFaceSource
from onefold.reading import LARGEST
from reference import built
from saved import Run, copied
from zoo import TinyMLP, tokens_of

Hurt = Callable[[Path], object]
TENSORS = "rank-00000.safetensors"


class Saved:
    """A run with a schedule and a loss scale, and its checkpoint."""

    def __init__(self, folder: Path) -> None:
        self.run = Run()
        optimizer = self.run.optimizer
        self.run.scheduler = lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=50)
        self.scaler = torch.amp.GradScaler("cpu")
        self.path = self.run.save(folder, scaler=self.scaler)

    def load(self, path: Path) -> Any:
        run = self.run
        things = {"optimizer": run.optimizer, "scheduler": run.scheduler, "scaler": self.scaler}
        return onefold.load(path, model=run.model, **things)

    def state(self) -> Any:
        groups = [{**g, "params": 0} for g in self.run.optimizer.param_groups]
        return copy.deepcopy((groups, self.run.scheduler.state_dict(), self.scaler.state_dict()))


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Saved:
    return Saved(tmp_path_factory.mktemp("hostile") / "whole")


@pytest.fixture
def place(saved: Saved, tmp_path: Path) -> Path:
    return copied(saved.path, tmp_path / "a")


@contextlib.contextmanager
def at_most(seconds: int) -> Iterator[None]:
    """Fail if the block takes longer: opening a fifo waits for a writer, for ever."""

    def late(*_: object) -> None:
        raise AssertionError(f"it takes more than {seconds} s")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


# -- what is done to the folder --------------------------------------------------------------------


def state(change: Change) -> Hurt:
    return partial(change_state, change=change)


def manifest(change: Change) -> Hurt:
    return partial(change_manifest, change=change)


def scheduler(**values: Any) -> Hurt:
    return state(lambda s: s["scheduler"].update(values))


def group(**values: Any) -> Hurt:
    return state(lambda s: s["optimizers"][0]["groups"][1].update(values))


def step(value: Any) -> Hurt:
    return state(lambda s: s["scalars"]["tokens.weight"].update(step=value))


def extra(value: Any) -> Hurt:
    return state(lambda s: s.update(extra=value))


def tensor(**values: Any) -> Hurt:
    return manifest(lambda b: b["tensors"][0].update(values))


def in_place_of(name: str, put: Callable[[Path, Path], object]) -> Hurt:
    """What is put there, given the path and that of the real file, which lies beside the folder."""

    def hurt(folder: Path) -> None:
        outside = folder.parent / "outside"
        outside.mkdir()
        (folder / name).rename(outside / name)
        put(folder / name, outside / name)

    return hurt


def said_to_be(where: Callable[[Path], str]) -> Hurt:
    """The manifest names a file outside, which is as it should be."""

    def hurt(folder: Path) -> None:
        in_place_of(TENSORS, lambda path, outside: None)(folder)
        (folder / "inside").symlink_to(folder.parent / "outside")
        name = where(folder.parent / "outside")

        def change(body: dict[str, Any]) -> None:
            body["files"][name] = body["files"].pop(TENSORS)
            body["tensor_files"] = [name]

        change_manifest(folder, change)

    return hurt


def checksums(change: Callable[[dict[str, Any]], object]) -> Hurt:
    """A file of tensors with another header, of which the manifest has the digest, and with as many
    bytes as it says.
    """

    def hurt(folder: Path) -> None:
        path = folder / TENSORS
        data = path.read_bytes()
        start = 8 + int.from_bytes(data[:8], "little")
        table = json.loads(data[8:start])
        change(table)
        text = json.dumps(table).encode()
        begin, end = table.get("crc32", {"data_offsets": (0, 0)})["data_offsets"]
        stop = max(t["data_offsets"][1] for t in table.values())
        head = len(text).to_bytes(8, "little") + text
        path.write_bytes(head + data[start:][:stop].ljust(stop, b"\0"))
        digest = hashlib.sha256(head + data[start:][begin:end].ljust(end - begin, b"\0"))
        change_manifest(folder, lambda b: b["files"][TENSORS].update(sha256=digest.hexdigest()))

    return hurt


def of_bytes(more: int) -> Hurt:
    """The checksums take so many bytes more."""

    def change(table: dict[str, Any]) -> None:
        begin, end = table["crc32"]["data_offsets"]
        offsets = [begin, end + more]
        table["crc32"] = {"dtype": "U8", "shape": [offsets[1] - begin], "data_offsets": offsets}

    return checksums(change)


#: What only the run can tell: `load` refuses it.
OF_ANOTHER_RUN: dict[str, tuple[Hurt, str]] = {
    "a method of the schedule": (scheduler(get_lr=[0.1]), "as 'get_lr', where the given OneCycleLR"),
    "a loss scale of text": (state(lambda s: s["scaler"].update(scale="big")), "as 'scale'"),
    "a rate of text": (group(lr="1e-3"), "group 1 of its optimizer 0 has lr='1e-3', where .* 0"),
    "a rate that is no number": (group(lr={"$float": "nan"}), "has lr=nan"),
    "steps of text": (step("2"), "has no step for parameter"),
    "no steps": (state(lambda s: s["scalars"]["tokens.weight"].clear()), "has no step for parameter"),
    "no second moment": (
        manifest(lambda b: b["tensors"].remove(next(t for t in b["tensors"] if t.get("state") == "exp_avg_sq"))),
        "has no exp_avg_sq for parameter",
    ),
}  # fmt: skip
DIGITS, DEPTH = '{"a": ' + "1" * 5000 + "}", '{"a":' * 50_000 + "1" + "}" * 50_000
#: What `verify` finds too.
HOSTILE: dict[str, tuple[Hurt, str]] = {
    "a class of torch": (scheduler(_anneal_func={"$dtype": "PyTorchFileWriter"}), "no value that Onefold writes"),
    "a tag that nobody knows": (extra({"$call": "os.system"}), "of the kind '.call'"),
    "a large scalar": (step({"$tensor": {"dtype": "F32", "shape": [1 << 40], "data": ""}}), "0 bytes of data"),
    "digits": (partial(write_state, text=DIGITS), "value has 5000 digits"),
    "depth": (partial(write_state, text=DEPTH), "Nested too deeply"),
    "a manifest of depth": (partial(write_manifest, text=DEPTH), "Nested too deeply"),
    "a shape beyond 64 bits": (tensor(shape=[10**30]), r"tensors.0.shape.0 is 10+:"),
    "a large shape": (tensor(shape=[1 << 40]), "do not tile it"),
    "pieces of no file": (tensor(pieces=[[7, 0, 0, 1]]), "is damaged"),
    "a dtype that is none": (tensor(dtype="PyTorchFileWriter"), "has the dtype 'PyTorchFileWriter'"),
    "a later version": (manifest(lambda b: b.update(version=99)), "version 99"),
    "an earlier version": (manifest(lambda b: b.update(version=2)), "version 2 .* reads version 3. Load"),
    "a large state": (lambda f: os.truncate(f / STATE, LARGEST + 1), "at most 256 MiB"),
    "a large manifest": (lambda f: os.truncate(f / MANIFEST, LARGEST + 1), "at most 256 MiB"),
    "a file above": (said_to_be(lambda o: f"../outside/{TENSORS}"), "leads out of the checkpoint"),
    "a file elsewhere": (said_to_be(lambda o: str(o / TENSORS)), "leads out of the checkpoint"),
    "a linked folder": (said_to_be(lambda o: f"inside/{TENSORS}"), "leads out of the checkpoint"),
    "a linked state": (in_place_of(STATE, Path.symlink_to), "leads out of the checkpoint"),
    "linked tensors": (in_place_of(TENSORS, Path.symlink_to), "leads out of the checkpoint"),
    "fewer checksums": (of_bytes(-4), "one checksum for each 256 KiB"),
    "no checksums": (checksums(lambda t: t.pop("crc32")), "one checksum for each 256 KiB"),
    "checksums in front": (checksums(lambda t: t.update({"a": t.pop(next(iter(t)))})), "one checksum for each 256 KiB"),
    "a file of no character": (said_to_be(lambda o: "\ud800"), "cannot be the name of a file"),
    "a link to itself": (in_place_of(TENSORS, lambda p, _: p.symlink_to(TENSORS)), "is missing"),
    "a fifo for a manifest": (in_place_of(MANIFEST, lambda p, _: os.mkfifo(p)), "it is a fifo, expected a file"),
    "a fifo for tensors": (in_place_of(TENSORS, lambda p, _: os.mkfifo(p)), "it is a fifo, expected a file"),
    "a device for a state": (in_place_of(STATE, lambda p, _: p.symlink_to("/dev/zero")), "leads out of the checkpoint"),
    "a folder for a state": (in_place_of(STATE, lambda p, _: p.mkdir()), "it is a folder, expected a file"),
}  # fmt: skip


@pytest.mark.parametrize("name", [*OF_ANOTHER_RUN, *HOSTILE])
def test_what_a_stranger_has_written_is_refused_by_all_that_reads_it(
    saved: Saved, place: Path, name: str
) -> None:
    hurt, words = (OF_ANOTHER_RUN | HOSTILE)[name]
    before = saved.state()
    hurt(place)
    with at_most(20):
        with pytest.raises(CheckpointError, match=words):
            saved.load(place)
        if name in HOSTILE:
            with contextlib.suppress(CheckpointError):  # a later version is refused by verify too
                assert examine(place)
        with contextlib.suppress(CheckpointError), contextlib.closing(source_of(place)) as source:
            summarize(source, place)
            with contextlib.closing(source_of(saved.path)) as other:
                differences(source, other)
    assert saved.state() == before, "a refused load has changed the run"
    saved.run.model(tokens_of(0)).backward()
    saved.load(saved.path)


def test_a_checkpoint_may_be_a_link_and_hold_links_to_its_own_files(
    saved: Saved, place: Path
) -> None:
    (place / STATE).rename(place / "values")
    (place / STATE).symlink_to("values")
    (place.parent / "latest").symlink_to(place)
    saved.load(place.parent / "latest")


def test_a_hugging_face_folder_may_be_of_links_as_the_hubs_are(tmp_path: Path) -> None:
    (tmp_path / "snapshot").mkdir()
    save_file({"a": torch.zeros(2)}, tmp_path / "123")
    (tmp_path / "snapshot" / "model.safetensors").symlink_to(tmp_path / "123")
    with contextlib.closing(HuggingFaceSource(tmp_path / "snapshot")) as source:
        assert [item.name for item in source.items()] == ["a"]


# -- on ranks --------------------------------------------------------------------------------------


def make_a_fifo(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def flip_a_value(path: Path) -> None:
    header = int.from_bytes(path.read_bytes()[:8], "little")
    flip(path, 8 + header + 64)


@on_ranks(2)
@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize("hurt", [flip_a_value, make_a_fifo, Path.unlink])
def test_what_is_wrong_with_one_file_is_an_error_on_every_rank(
    stage: int, hurt: Hurt, folder: Path
) -> None:
    model = onefold.shard(built(TinyMLP), onefold.Recipe.zero(stage, stall_timeout=30.0))
    onefold.save(folder / "checkpoint", model=model)
    if dist.get_rank() == 0:
        hurt(folder / "checkpoint" / "rank-00001.safetensors")
    dist.barrier()
    with pytest.raises(CheckpointError):
        onefold.load(folder / "checkpoint", model=model)


# -- schedules -------------------------------------------------------------------------------------

SCHEDULES: list[Callable[[torch.optim.Optimizer], Any]] = [
    lambda o: lr_scheduler.OneCycleLR(o, max_lr=0.1, total_steps=9),
    lambda o: lr_scheduler.CyclicLR(o, 0.1, 0.2),
    lambda o: lr_scheduler.SequentialLR(o, [lr_scheduler.ConstantLR(o), lr_scheduler.StepLR(o, 2)], [3]),
    lr_scheduler.ReduceLROnPlateau,
    lambda o: lr_scheduler.LambdaLR(o, lambda step: 1.0),
    lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 5),
]  # fmt: skip


@pytest.mark.parametrize("make", SCHEDULES)
def test_every_schedule_takes_its_own_state_and_none_with_a_method_in_it(make: Any) -> None:
    def made() -> Any:
        return make(torch.optim.SGD([torch.nn.Parameter(torch.zeros(2))], lr=0.1, momentum=0.9))

    old, new = made(), made()
    first = copy.deepcopy(old.state_dict())
    for _ in range(5):
        old.optimizer.step()
        old.step(*([1.0] if isinstance(old, lr_scheduler.ReduceLROnPlateau) else []))
    # Forth, and back to the state before the first step
    refuse_another_state("it", "scheduler", new, copy.deepcopy(old.state_dict()))
    refuse_another_state("it", "scheduler", old, first)
    with pytest.raises(CheckpointError, match="as 'step', where"):
        refuse_another_state("it", "scheduler", new, {**first, "step": 1})
    if inner := first.get("_schedulers"):
        inner[1]["get_lr"] = 1
        with pytest.raises(CheckpointError, match="as 'get_lr', where the given StepLR"):
            refuse_another_state("it", "scheduler", new, first)
