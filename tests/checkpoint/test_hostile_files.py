"""A checkpoint of a stranger, whose checksums are right: whatever its files hold, `load` and `verify`
say so in a sentence. Nothing is called, nothing waits, and nothing outside the folder is read.
"""

from __future__ import annotations

import contextlib
import copy
import hashlib
import json
import os
import random
import signal
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.optim import lr_scheduler

import onefold
from onefold.checkpoint import CheckpointError
from onefold.checkpoint.folder import remove_litter
from onefold.checkpoint.loading import source_of
from onefold.checkpoint.manifest import CHECKSUM, MANIFEST, STATE, checksum_line
from onefold.checkpoint.tensorfile import TensorFile, crc32
from onefold.checkpoint.values import decode, fits, refuse_another_state
from onefold.inspection.diff import differences
from onefold.inspection.summary import glance, summarize
from onefold.inspection.verify import examine
from onefold.pretrained.huggingface import HuggingFaceSource
from onefold.reading import DEEPEST, LARGEST
from ranks import run_ranks
from saved import Run, copied
from zoo import TinyMLP, tokens_of

Change = Callable[[dict[str, Any]], object]
DEEP = json.loads("[" * 150 + "]" * 150)


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


class Saved:
    """A run with a schedule and a loss scale, and its checkpoint."""

    def __init__(self, folder: Path) -> None:
        self.run = Run()
        optimizer = self.run.optimizer
        self.run.scheduler = lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=50)
        self.scaler = torch.amp.GradScaler("cpu")
        extra = {"dtype": torch.float16, "long": torch.arange(5000), "array": np.arange(5000)}
        self.path = self.run.save(folder, scaler=self.scaler, extra=extra)

    def load(self, path: Path) -> Any:
        run = self.run
        things = {"optimizer": run.optimizer, "scheduler": run.scheduler, "scaler": self.scaler}
        return onefold.load(path, model=run.model, **things)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Saved:
    return Saved(tmp_path_factory.mktemp("hostile") / "whole")


@pytest.fixture
def folder(saved: Saved, tmp_path: Path) -> Path:
    return copied(saved.path, tmp_path / "a")


def write_manifest(folder: Path, text: str) -> None:
    """Write a manifest and the checksum that is right for it."""
    (folder / MANIFEST).write_text(text)
    (folder / CHECKSUM).write_text(checksum_line(text.encode()))


def change_manifest(folder: Path, change: Change) -> None:
    body = json.loads((folder / MANIFEST).read_text())
    change(body)
    write_manifest(folder, json.dumps(body))


def write_state(folder: Path, text: str) -> None:
    (folder / STATE).write_text(text)
    record = {"bytes": len(text), "sha256": hashlib.sha256(text.encode()).hexdigest()}
    change_manifest(folder, lambda body: body["files"].update({STATE: record}))


def change_state(folder: Path, change: Change) -> None:
    state = json.loads((folder / STATE).read_text())
    change(state)
    write_state(folder, json.dumps(state))


def looked_at(folder: Path, beside: Path) -> None:
    """What `onefold checkpoint inspect` and `diff` do."""
    with contextlib.closing(source_of(folder)) as source:
        summarize(source, folder)
        with contextlib.closing(source_of(beside)) as other:
            differences(source, other)


def group(**values: Any) -> Change:
    return lambda state: state["optimizers"][0]["groups"][1].update(values)


def scheduler(**values: Any) -> Change:
    return lambda state: state["scheduler"].update(values)


def step(value: Any) -> Change:
    return lambda state: state["scalars"]["tokens.weight"].update(step=value)


NAN = {"$float": "nan"}
#: What is changed in state.json, and the words of `load`. `verify` finds those without "kind" too.
STATES: list[tuple[str, Change, str]] = [
    ("a function of torch", scheduler(_anneal_func={"$dtype": "PyTorchFileWriter"}), "is no value that Onefold writes"),
    ("a module of torch", scheduler(base_lrs={"$dtype": "os"}), "is no value that Onefold writes"),
    ("no method is replaced", scheduler(get_lr=[0.1]), "as 'get_lr', where the given OneCycleLR .*kind"),
    ("no optimizer is replaced", scheduler(optimizer={"a": 1}), "as 'optimizer'.*kind"),
    ("text for a number", scheduler(last_epoch="7"), "has '7' as 'last_epoch'.*kind"),
    ("a schedule that is a list", lambda s: s.update(scheduler=[1]), r"scheduler is \[1\].*kind"),
    ("a loss scale of text", lambda s: s["scaler"].update(scale="big"), "as 'scale'.*kind"),
    ("a loss scale that is no number", lambda s: s["scaler"].update(scale=NAN), "has nan as 'scale'.*kind"),
    ("a loss scale without its growth", lambda s: s["scaler"].pop("growth_factor"), "GradScaler does not load its scaler .KeyError.*kind"),
    ("a rate of text", group(lr="1e-3"), "group 1 of its optimizer 0 has lr='1e-3', where .* 0.*kind"),
    ("a rate that is no number", group(lr=NAN), "has lr=nan.*kind"),
    ("a rate without end", group(lr={"$float": "inf"}), "has lr=inf.*kind"),
    ("an infinite rate", group(lr=1e999), "has lr=inf.*kind"),
    ("a rate that is true", group(lr=True), "has lr=True.*kind"),
    ("no rate", group(lr=None), "has lr=None.*kind"),
    ("one beta", group(betas={"$tuple": [0.9]}), r"has betas=\(0.9,\).*kind"),
    ("betas of text", group(betas={"$tuple": ["a", "b"]}), "has betas=.*kind"),
    ("a beta that is no number", group(betas={"$tuple": [0.9, NAN]}), "has betas=.*kind"),
    ("a first rate of text", group(initial_lr="a"), "has initial_lr='a'.*kind"),
    ("amsgrad of text", group(amsgrad="no"), "has amsgrad='no'.*kind"),
    ("no parameters", group(params=None), r"groups'\]\[1\]\['params'\] is None, expected list"),
    ("parameters that are numbers", group(params=[1, 2]), r"is 1, expected str"),
    ("steps that are a list", step([1.0]), r"has step=\[1.0\] for parameter 'tokens.weight'.*kind"),
    ("steps that are text", step("2"), "has step='2'.*kind"),
    ("steps that are no tensor", step(2), "has step=2 .*kind"),
    ("steps that are no number", step({"$tensor": {"dtype": "F32", "shape": [], "data": "AADAfw=="}}), "has step=tensor.nan.*kind"),
    ("no steps", lambda s: s["scalars"]["tokens.weight"].clear(), "has no step for parameter 'tokens.weight'.*kind"),
    ("a scalar that is large", step({"$tensor": {"dtype": "F32", "shape": [1 << 40], "data": ""}}), "0 bytes of data"),
    ("a scalar that is less than nothing", step({"$tensor": {"dtype": "F32", "shape": [-1], "data": ""}}), "0 bytes of data"),
    ("steps of many digits", step(10**4000), "has step=1000.*kind"),
    ("a tag that nobody knows", lambda s: s.update(extra={"$call": "os.system"}), "of the kind '.call'"),
    ("pairs that are none", lambda s: s.update(extra={"$dict": [1]}), "is no value that Onefold writes"),
    ("a tensor that is not there", lambda s: s.update(extra={"$tensor": {"stored": 9}}), "holds no extra '9'.*kind"),
    ("nesting of values", lambda s: s.update(extra={"$tuple": [DEEP]}), ""),
    ("a position that is none", lambda s: s.update(data=5), "data is 5, expected dict"),
    ("optimizers that are none", lambda s: s.update(optimizers={"a": 1}), "optimizers is .*expected list"),
    ("no optimizers", lambda s: s.update(optimizers=None), "holds no optimizer.*kind"),
    ("steps of nothing", lambda s: s.update(scalars=[]), "scalars is .*expected dict"),
    ("ranks that are text", lambda s: s.update(data_of=["a"]), "expected int"),
    ("counts of ranks that are text", lambda s: s.update(wire={"ranks": "a"}), "counts ranks as.*kind"),
]  # fmt: skip


@pytest.mark.parametrize(("change", "words"), [pytest.param(*row[1:], id=row[0]) for row in STATES])
def test_a_value_of_another_kind_is_refused_before_anything_takes_it(
    saved: Saved, folder: Path, change: Change, words: str
) -> None:
    before = copy.deepcopy(
        (saved.run.optimizer.param_groups[1]["lr"], saved.run.scheduler.state_dict())
    )
    change_state(folder, change)
    found = examine(folder).problems
    if words:
        with pytest.raises(CheckpointError, match=words.removesuffix(".*kind")):
            saved.load(folder)
        # What depends on the run cannot be found without it
        assert words.endswith("kind") or len(found) == 1, found
    else:
        saved.load(folder)
    with contextlib.suppress(CheckpointError):
        looked_at(folder, saved.path)
    now = saved.run.optimizer.param_groups[1]["lr"], saved.run.scheduler.state_dict()
    assert now == before, "a refused load has changed the run"
    saved.run.model(tokens_of(0)).backward()
    saved.load(saved.path)


def piece(tensor: int, **values: Any) -> Change:
    return lambda body: body["tensors"][tensor].update(values)


def of_state(body: dict[str, Any]) -> dict[str, Any]:
    return next(t for t in body["tensors"] if t.get("state") == "exp_avg_sq")


#: What is changed in manifest.json, and the words of `load`.
MANIFESTS: list[tuple[str, Change, str]] = [
    ("a list", lambda b: b.clear(), "is no manifest of an Onefold checkpoint"),
    ("a tensor twice", lambda b: b["tensors"].append(b["tensors"][0]), "a tensor is listed twice"),
    ("a shape beyond 64 bits", piece(0, shape=[10**30]), "where sizes are expected"),
    ("a shape of many dimensions", piece(0, shape=[2] * 65), "where sizes are expected"),
    ("a shape below zero", piece(0, shape=[-1, -8]), "where sizes are expected"),
    ("a shape of halves", piece(0, shape=[1.5]), "where sizes are expected"),
    ("a large shape", piece(0, shape=[1 << 40]), "its pieces cover"),
    ("a large tensor", piece(0, shape=[1 << 40], pieces=[[0, 0, 1 << 40, 0]]), "of another model"),
    ("no second moment", lambda b: b["tensors"].remove(of_state(b)), "has no exp_avg_sq for parameter"),
    ("pieces of no file", piece(0, pieces=[[7, 0, 1, 0]]), "is damaged"),
    ("pieces that are none", piece(0, pieces=[None]), "where sizes are expected"),
    ("a name that is none", piece(0, name=7), "where texts are expected"),
    ("a kind that is none", piece(0, kind="code"), "a tensor is 'code'"),
    ("a dtype that is none", piece(0, dtype="PyTorchFileWriter"), "has the dtype 'PyTorchFileWriter'"),
    ("a version that is none", lambda b: b.update(version="9"), "where int is expected"),
    ("a step that is none", lambda b: b.update(step="9"), "where sizes are expected"),
    ("a date that is none", lambda b: b.update(created=9), "where str is expected"),
    ("a size below zero", lambda b: b["files"][STATE].update(bytes=-1), "where sizes are expected"),
    ("a file elsewhere", lambda b: b["files"].update({"/etc/passwd": b["files"][STATE]}), "not inside the checkpoint"),
    ("a file above", lambda b: b["tensor_files"].append("../x"), "not inside the checkpoint"),
    ("a name with a null", lambda b: b["tensor_files"].append("x\0y"), "not inside the checkpoint"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("change", "words"), [pytest.param(*row[1:], id=row[0]) for row in MANIFESTS]
)
def test_a_manifest_of_other_values_is_refused_in_a_sentence(
    saved: Saved, folder: Path, change: Change, words: str
) -> None:
    change_manifest(folder, change)
    with pytest.raises(CheckpointError, match=words):
        saved.load(folder)
    # A smaller checkpoint is none that is damaged, and only its model can tell
    if "for parameter" not in words:
        assert examine(folder).problems
        assert glance(folder).wrong or words == "of another model"


#: The text of a file, and the words about it.
TEXTS: list[tuple[str, str, str]] = [
    ("digits", '{"a": ' + "1" * 5000 + "}", "A number of 5000 digits"),
    ("depth", '{"a":' * 50_000 + "1" + "}" * 50_000, "Nested too deeply"),
    ("no JSON", "{", "Expecting property name"),
    ("a list", "[1]", "no manifest|expected dict"),
]


@pytest.mark.parametrize(("text", "words"), [pytest.param(*row[1:], id=row[0]) for row in TEXTS])
def test_text_that_no_reader_of_json_takes_is_refused_in_a_sentence(
    saved: Saved, folder: Path, tmp_path: Path, text: str, words: str
) -> None:
    write_state(folder, text)
    with pytest.raises(CheckpointError, match=words):
        saved.load(folder)
    assert [p.file for p in examine(folder).problems] == [STATE]
    write_manifest(folder, text)
    with pytest.raises(CheckpointError, match=words):
        saved.load(folder)
    assert [p.file for p in examine(folder).problems] == [MANIFEST]
    for name in ("model.safetensors.index.json", "model.safetensors"):
        other = tmp_path / name.replace(".", "-")
        other.mkdir()
        head = len(text).to_bytes(8, "little") if name == "model.safetensors" else b""
        (other / name).write_bytes(head + text.encode())
        with pytest.raises(
            CheckpointError, match=f"({words})|is no index|TypeError|AttributeError"
        ):
            HuggingFaceSource(other)


def test_a_file_larger_than_any_of_its_kind_is_not_read(saved: Saved, folder: Path) -> None:
    for name in (STATE, CHECKSUM, MANIFEST):
        os.truncate(folder / name, LARGEST + 1)
        with pytest.raises(CheckpointError, match=f"{name} .*expected at most 256 MiB"):
            saved.load(folder)
        assert any("at most 256 MiB" in p.what for p in examine(folder).problems) or name == STATE
        (folder / name).write_bytes((saved.path / name).read_bytes())


def test_what_could_not_be_loaded_is_not_saved(saved: Saved, tmp_path: Path) -> None:
    deep: list[Any] = []
    for _ in range(DEEPEST):
        deep = [deep]
    with pytest.raises(CheckpointError, match="at most 200 objects in each other"):
        saved.run.save(tmp_path / "deep", extra=deep)
    assert not os.listdir(tmp_path)


def fifo(path: Path, elsewhere: Path) -> None:
    os.mkfifo(path)


def device(path: Path, elsewhere: Path) -> None:
    path.symlink_to("/dev/zero")


def link(path: Path, elsewhere: Path) -> None:
    path.symlink_to(elsewhere)


def folder_there(path: Path, elsewhere: Path) -> None:
    path.mkdir()


def socket_there(path: Path, elsewhere: Path) -> None:
    here = os.open(path.parent, os.O_RDONLY)
    with socket.socket(socket.AF_UNIX) as made:  # its own path may be too long for a socket
        made.bind(f"/proc/self/fd/{here}/{path.name}")
    os.close(here)


@pytest.mark.parametrize(
    ("put", "words"),
    [
        (fifo, "it is a fifo, expected a file"),
        (socket_there, "it is a socket, expected a file"),
        (folder_there, "it is a folder, expected a file"),
        (device, "leads out of the checkpoint"),
        (link, "leads out of the checkpoint"),
    ],
)
def test_what_is_no_file_of_the_folder_is_refused_and_not_waited_for(
    saved: Saved, folder: Path, put: Callable[[Path, Path], None], words: str
) -> None:
    for name in (MANIFEST, CHECKSUM, STATE, "rank-00000.safetensors"):
        (folder / name).unlink()
        put(folder / name, saved.path / name)
        with at_most(20):
            with pytest.raises(CheckpointError, match=words):
                saved.load(folder)
            said = [p for p in examine(folder).problems if p.file == name]
            assert said and words in said[0].what, said
            assert glance(folder).wrong
            with contextlib.suppress(CheckpointError):
                looked_at(folder, saved.path)
        os.rmdir(folder / name) if put is folder_there else (folder / name).unlink()
        (folder / name).write_bytes((saved.path / name).read_bytes())
    saved.load(folder)


def test_a_checkpoint_may_be_a_link_and_hold_links_to_its_own_files(
    saved: Saved, folder: Path
) -> None:
    (folder / STATE).rename(folder / "values")
    (folder / STATE).symlink_to("values")
    (folder.parent / "latest").symlink_to(folder)
    saved.load(folder.parent / "latest")


def test_a_hugging_face_folder_may_be_of_links_but_not_of_fifos(tmp_path: Path) -> None:
    cache, folder = tmp_path / "blobs", tmp_path / "snapshot"
    cache.mkdir()
    folder.mkdir()
    from safetensors.torch import save_file

    save_file({"a": torch.zeros(2)}, cache / "123")
    (folder / "model.safetensors").symlink_to(cache / "123")
    os.mkfifo(folder / "config.json")
    with at_most(20):
        HuggingFaceSource(folder).close()
        (folder / "model.safetensors").unlink()
        (folder / "model.safetensors.index.json").write_text(
            '{"weight_map": {"a": "b.safetensors"}}'
        )
        os.mkfifo(folder / "b.safetensors")
        with pytest.raises(CheckpointError, match=r"are missing: b.safetensors"):
            HuggingFaceSource(folder)


def test_the_owner_of_an_unfinished_save_is_not_written_through_a_link(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("precious")
    unfinished = tmp_path / "run" / ".step-1.0123abcd.unfinished"
    unfinished.mkdir(parents=True)
    (unfinished / "owner").symlink_to(tmp_path / "mine")
    remove_litter(tmp_path / "run")
    assert (tmp_path / "mine").read_text() == "precious"


def change_random(folder: Path, rank: int, change: Callable[[dict[str, Any]], object]) -> None:
    """Change the state of the generators that a rank saved, and the checksum of its bytes."""
    body = json.loads((folder / MANIFEST).read_text())
    record = next(t for t in body["tensors"] if (t["kind"], t["name"]) == ("rng", str(rank)))
    file = folder / body["tensor_files"][record["pieces"][0][0]]
    with TensorFile(file) as whole:
        entry = whole.header[f"rng:{rank}@0"]
    data = bytearray(file.read_bytes())
    state = json.loads(data[entry.begin : entry.end])
    change(state)
    data[entry.begin : entry.end] = json.dumps(state).encode().ljust(entry.end - entry.begin)
    file.write_bytes(data)
    record["pieces"][0][3] = crc32(data[entry.begin : entry.end])
    write_manifest(folder, json.dumps(body))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda s: s["numpy"]["$tuple"].__setitem__(2, 999), "a position of 999 in numpy's 624"),
        (lambda s: s.pop("python"), "KeyError: 'python'"),
    ],
)
def test_random_generators_of_another_form_are_refused(
    saved: Saved, folder: Path, change: Callable[[dict[str, Any]], object], words: str
) -> None:
    change_random(folder, 0, change)
    before = random.getstate()
    with pytest.raises(CheckpointError, match=f"holds no random generators of rank 0.*{words}"):
        saved.load(folder)
    assert random.getstate() == before


def on_two_ranks(folder: str) -> list[str]:
    model = onefold.shard(TinyMLP(), onefold.Recipe.zero(2, stall_timeout=30.0))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    path, said = Path(folder, "a"), []
    onefold.save(path, model=model, optimizer=optimizer)

    def load() -> None:
        dist.barrier()
        try:
            onefold.load(path, model=model, optimizer=optimizer)
            said.append("")
        except CheckpointError as error:
            said.append(str(error))
        dist.barrier()

    if dist.get_rank() == 0:
        change_random(path, 1, lambda state: state["numpy"]["$tuple"].__setitem__(2, 999))
    load()
    if dist.get_rank() == 0:
        (path / "rank-00001.safetensors").rename(path / "x")
        os.mkfifo(path / "rank-00001.safetensors")
    load()
    return said


def test_what_one_rank_finds_is_said_on_every_rank(tmp_path: Path) -> None:
    for random_states, fifo_there in run_ranks(2, on_two_ranks, str(tmp_path)):
        assert "holds no random generators of rank 1" in random_states
        assert "it is a fifo, expected a file" in fifo_there


@pytest.mark.parametrize(
    "make",
    [
        lambda o: lr_scheduler.OneCycleLR(o, max_lr=0.1, total_steps=9),
        lambda o: lr_scheduler.CyclicLR(o, 0.1, 0.2),
        lambda o: lr_scheduler.SequentialLR(
            o, [lr_scheduler.ConstantLR(o), lr_scheduler.StepLR(o, 2)], [3]
        ),
        lambda o: lr_scheduler.ReduceLROnPlateau(o),
        lambda o: lr_scheduler.MultiStepLR(o, [3, 4]),
        lambda o: lr_scheduler.LambdaLR(o, lambda step: 1.0),
        lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 5),
    ],
)
def test_every_schedule_takes_its_own_state_and_none_with_a_method_in_it(
    make: Callable[[torch.optim.Optimizer], Any],
) -> None:
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
    for key in ("step", "optimizer"):
        with pytest.raises(CheckpointError, match=f"as '{key}', where"):
            refuse_another_state("it", "scheduler", new, {**first, key: 1})
    inner = first.get("_schedulers")
    if inner:
        inner[1]["get_lr"] = 1
        with pytest.raises(CheckpointError, match="as 'get_lr', where the given StepLR"):
            refuse_another_state("it", "scheduler", new, first)


def test_what_fits_is_of_the_same_kind() -> None:
    inf = float("inf")
    for ours, value in (
        (1, 2.5), (torch.tensor(1.0), 3), (1e-3, torch.tensor(1e-4)), ((0.9, 0.99), [0.8, 0.9]),
        (None, "text"), ("min", "max"), ("a", None), ([], [1, "b"]), ({}, {"a": 1}), ([1.0], [2.0, 3.0]),
        (frozenset({1}), {2}), (Path("a"), Path("b")), ({3: 1}, {4: 2}), (inf, inf), ((None, 1), (2, 3)),
    ):  # fmt: skip
        assert fits(ours, value, strict=True), (ours, value)
    for ours, value in (
        (1, True), (True, 1), (1, "1"), (1, None), (1, inf), (0.1, torch.tensor(inf)), ((0.9, 0.99), (0.9,)),
        ((0.9, 0.99), 0.9), ([1.0], ["a"]), ({"a": 1}, [1]), (print, 1), (torch.zeros(2), torch.zeros(3)),
        (None, print), ("a", torch.float32),
    ):  # fmt: skip
        assert not fits(ours, value, strict=True), (ours, value)
    assert fits(1.0, inf) and fits(0.5, None), "of a schedule, before its first step"
    assert decode({"$dtype": "float16"}) is torch.float16
