"""A sharded model, or a checkpoint, as the folder that `save_pretrained` would make; nothing left
behind when it goes wrong.
"""

from __future__ import annotations

import errno
import importlib.util
import json
import os
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn

from ranks import run_ranks
from tiny_transformers import (
    FAMILIES,
    TOKENS,
    TRAINED,
    complaint,
    differences,
    files,
    opened,
    saved_folders,
)
from zoo import TinyGPT

SERVER = "libraries"

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("transformers") is None, reason="transformers is not installed"
)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return saved_folders(tmp_path_factory.mktemp("hf"))


@pytest.mark.parametrize("family", FAMILIES)
def test_an_export_has_the_tensors_that_save_pretrained_writes(
    family: str, folders: dict[str, Path], tmp_path: Path
) -> None:
    import onefold
    from onefold.pretrained.export import export

    model = onefold.shard(opened(folders[family], family), onefold.Recipe.zero(0))
    export(model, tmp_path / "out")
    assert differences(files(folders[family]), files(tmp_path / "out")) == []
    theirs, ours = (
        json.loads((f / "config.json").read_text()) for f in (folders[family], tmp_path / "out")
    )
    assert theirs == ours


def write_everything(folders: dict[str, Path], root: Path, stages: list[int]) -> list[str]:
    import onefold
    from onefold.pretrained.export import export

    problems = []
    for family in TRAINED:
        for stage in stages:
            model = onefold.shard(
                opened(folders[family], family), onefold.Recipe.zero(stage, stall_timeout=20.0)
            )
            seen: list[tuple[int, int]] = []
            out = export(
                model,
                root / f"{family} {stage}",
                progress=lambda done, total, seen=seen: seen.append((done, total)),
            )  # type: ignore[misc]
            if seen != sorted(seen) or (seen and seen[-1][0] != seen[-1][1]):
                problems.append(f"{family}: progress was {seen}")
            problems += [
                f"{family} at stage {stage}: {p}"
                for p in differences(files(folders[family]), files(out))
            ]
    model = onefold.shard(
        opened(folders["llama"], "llama"),
        onefold.Recipe.zero(stages[-1], precision="bf16", stall_timeout=20.0),
    )
    whole = files(folders["llama"])
    cases = (
        ("bf16", None, torch.bfloat16),
        ("fp16", torch.float16, torch.float16),
        ("fp32", "master", torch.float32),
    )
    for name, dtype, expected in cases:
        out = export(model, root / name, dtype, max_shard_bytes=6_000)
        problems += [
            f"{name}: {p}"
            for p in differences({k: v.to(expected) for k, v in whole.items()}, files(out))
        ]
        if len(list(out.glob("*.safetensors"))) < 2 or any(
            os.path.getsize(f) > 9_000 for f in out.glob("*.safetensors")
        ):
            problems.append(f"{name}: {sorted(p.name for p in out.iterdir())}")
    return problems


@pytest.mark.parametrize(("ranks", "stages"), [(1, [0]), (2, [0, 3]), (3, [3])])
def test_an_export_from_any_ranks_is_the_folder_that_save_pretrained_makes(
    ranks: int, stages: list[int], folders: dict[str, Path], tmp_path: Path
) -> None:
    assert run_ranks(ranks, write_everything, folders, tmp_path, stages) == [[]] * ranks
    for family in TRAINED:
        with torch.no_grad():
            ours, theirs = (
                opened(f, family)(TOKENS).logits
                for f in (tmp_path / f"{family} {stages[-1]}", folders[family])
            )
        assert torch.equal(ours, theirs)
    for name, dtype in (("bf16", torch.bfloat16), ("fp16", torch.float16), ("fp32", torch.float32)):
        assert json.loads((tmp_path / name / "config.json").read_text())["dtype"] == str(
            dtype
        ).removeprefix("torch.")
        assert opened(tmp_path / name, "llama", dtype).dtype == dtype


def fail_to_write(folder: Path, root: Path) -> list[str]:
    """The message of each failure, and what was left of it."""
    import onefold
    from onefold.pretrained.export import export

    model = onefold.shard(opened(folder, "llama"), onefold.Recipe.zero(3, stall_timeout=20.0))

    def full(*_: Any) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def angry(done: int, total: int) -> None:
        raise KeyError("the caller's own bar")

    said = []
    for rank, name in ((1, "pwrite"), (0, "pwrite"), (0, "fsync")):
        with patch(f"os.{name}", full) if dist.get_rank() == rank else nullcontext():
            said.append(complaint(lambda: export(model, root / "new")))
    said.append(
        complaint(
            lambda: export(model, root / "new", progress=angry if dist.get_rank() == 1 else None)
        )
    )
    said.append(complaint(lambda: export(model, root / "a file")))
    said.append(complaint(lambda: export(model, root / "a file" / "below")))
    said.append(complaint(lambda: export(model, root / "notes", overwrite=True)))
    said.append(complaint(lambda: export(model, root / "model")))
    said.append(complaint(lambda: export(model, root / "new", dtype=torch.int8)))
    dist.barrier()
    said.append(", ".join(sorted(os.listdir(root))))
    dist.barrier()
    export(model, root / "model", overwrite=True)
    return said


def test_an_export_that_cannot_be_is_told_on_every_rank_and_leaves_nothing(
    folders: dict[str, Path], tmp_path: Path
) -> None:
    (tmp_path / "a file").write_text("mine")
    for name, file in (("notes", "notes.txt"), ("model", "model.safetensors")):
        (tmp_path / name).mkdir()
        (tmp_path / name / file).write_text("mine")
    outcomes = run_ranks(2, fail_to_write, folders["llama"], tmp_path)
    expected = ["No space left", "No space left", "No space left", "the caller's own bar", "is a file", "nothing can be exported",
                "something else", "overwrite=True", "floating-point", "a file, model, notes"]  # fmt: skip
    for said in outcomes:
        for message, part in zip(said, expected, strict=True):
            assert part in message, message
    assert sorted(os.listdir(tmp_path)) == ["a file", "model", "notes"]
    assert (
        (tmp_path / "a file").read_text()
        == (tmp_path / "notes" / "notes.txt").read_text()
        == "mine"
    )
    assert differences(files(folders["llama"]), files(tmp_path / "model")) == []


def test_any_other_model_is_exported_under_the_names_of_its_state_dict(tmp_path: Path) -> None:
    import onefold
    from onefold.pretrained.export import export

    class Odd(TinyGPT):
        def __init__(self) -> None:
            super().__init__(tied=True)
            self.register_buffer("counts", torch.arange(3))
            self.register_buffer("flag", torch.tensor(True))
            self.empty = nn.Parameter(torch.zeros(0, 4))

    model = Odd()
    expected = {name: t.clone() for name, t in model.state_dict().items()}
    export(onefold.shard(model, onefold.Recipe.zero(1)), tmp_path / "out", torch.float64)
    ours = files(tmp_path / "out")
    assert (
        differences(
            {n: t.double() if t.is_floating_point() else t for n, t in expected.items()}, ours
        )
        == []
    )
    assert not (tmp_path / "out" / "config.json").exists()


def test_the_tokenizer_of_the_folder_that_was_loaded_comes_along(
    folders: dict[str, Path], tmp_path: Path
) -> None:
    import onefold
    from onefold.pretrained.export import export

    (folders["llama"] / "tokenizer.json").write_text('{"mine": 1}')
    try:
        model = onefold.shard(opened(folders["llama"], "llama"), onefold.Recipe.zero(0))
        out = export(model, tmp_path / "out")
    finally:
        (folders["llama"] / "tokenizer.json").unlink()
    assert (out / "tokenizer.json").read_text() == '{"mine": 1}'


@pytest.mark.parametrize("family", ["llama, tied", "mixtral"])
def test_a_checkpoint_is_exported_without_ranks(
    family: str, folders: dict[str, Path], tmp_path: Path
) -> None:
    import onefold
    from onefold.checkpoint.folder_source import FolderSource
    from onefold.checkpoint.saving import save
    from onefold.pretrained.export_folder import export_folder

    model = onefold.shard(opened(folders[family], family), onefold.Recipe.zero(3))
    save(tmp_path / "step-1", model=model)
    source = FolderSource(tmp_path / "step-1")
    seen: list[tuple[int, int]] = []
    out = export_folder(
        source,
        tmp_path / "out",
        progress=lambda done, total: seen.append((done, total)),
        beside=folders[family],
    )
    half = export_folder(source, tmp_path / "half", torch.bfloat16, beside=folders[family])
    source.close()
    assert differences(files(folders[family]), files(out)) == []
    assert (
        differences({n: t.bfloat16() for n, t in files(folders[family]).items()}, files(half)) == []
    )
    assert seen[-1][0] == seen[-1][1] > 0
    assert opened(half, family, torch.bfloat16).dtype == torch.bfloat16
    assert json.loads((half / "config.json").read_text())["dtype"] == "bfloat16"
