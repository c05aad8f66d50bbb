"""The format: files that every reader of safetensors opens, values without pickle, tensors in boxes
that ranks of other meshes read.
"""

from __future__ import annotations

import random
from collections import Counter
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import onefold
from checkpoints.injured import flip
from onefold.checkpoint.errors import DamagedCheckpoint
from onefold.checkpoint.folder_source import FolderSource
from onefold.checkpoint.manifest import (
    FileRecord,
    Manifest,
    Record,
    StoredPiece,
    key_of,
    write_manifest,
)
from onefold.checkpoint.source import Item
from onefold.checkpoint.tensorfile import BLOCK, CHUNK, DTYPES, Planned, TensorFile, write_tensors
from onefold.layout.holders import AxisCut, BoxInterval, TensorBox, region_of
from reference import built, differences
from zoo import TinyMLP


def test_others_open_the_tensors_and_what_a_program_keeps_beside_comes_back(tmp_path: Path) -> None:
    plain: dict[str, Any] = {
        "python": random.getstate(), "numpy": np.random.default_rng(3).bit_generator.state,
        "counter": Counter({3: 1, 5: 2}), "inf": -float("inf"), "dtype": torch.bfloat16,
        "nested": {"$tensor": 1, 3: (2, [b"\0", None, {"ö": True}])},
    }  # fmt: skip
    tensors = {
        f"{code} {shape}": torch.randint(0, 2, shape).to(dtype)
        for code, dtype in DTYPES.items()
        for shape in ((), (0,), (3, 5), (70, 70))
    }
    model = onefold.shard(built(TinyMLP), onefold.Recipe.zero(3))
    for odd in (2j, torch.device("cpu"), Path("a"), {1, 2}):
        with pytest.raises(onefold.CheckpointError, match="Give plain values instead"):
            onefold.save(tmp_path / "odd", model=model, extra={"odd": odd})
    extra = (
        plain
        | tensors
        | {
            "scalar": np.float32(0.1),
            "array": np.arange(5000.0).reshape(-1, 5),
            "nan": float("nan"),
        }
    )
    path = onefold.save(tmp_path / "a", model=model, extra=extra, data={"at": 12})
    loaded = onefold.load(path, model=model)
    back = loaded.extra
    assert loaded.data == {"at": 12} and back["nan"] != back["nan"]
    for name, value in plain.items():
        assert back[name] == value and type(back[name]) is type(value), name
    assert back["scalar"] == float(np.float32(0.1)) and type(back["scalar"]) is float
    assert not differences(tensors, {name: back[name] for name in tensors})
    assert np.array_equal(back["array"], extra["array"])
    stored = load_file(path / "rank-00000.safetensors")
    for name, t in model.state_dict().items():
        at = ".".join(["0"] * t.dim())
        assert torch.equal(stored[f"parameter:{name}@{at}+0"], t.reshape(-1)), name


# -- boxes -----------------------------------------------------------------------------------------

WEIGHT, SHAPE, FILE = Item("parameter", "weight"), (10, 12), "rank-00000.safetensors"


def boxes(rows: int, columns: int) -> list[TensorBox]:
    cuts = [[AxisCut(0, rows, i), AxisCut(1, columns, j)] for i in range(rows) for j in range(columns)]  # fmt: skip
    return [region for cut in cuts if (region := region_of(SHAPE, cut)).numel]


def written(folder: Path, regions: list[TensorBox], pieces: int) -> torch.Tensor:
    """Write a checkpoint of one weight in these boxes, each in some pieces; returns the weight."""
    weight = torch.randn(SHAPE, generator=torch.Generator().manual_seed(1))
    folder.mkdir()
    planned, found = [], []
    for region in regions:
        flat = weight[region.slices].reshape(-1)
        ends = [round(i * region.numel / pieces) for i in range(pieces + 1)]
        for a, b in zip(ends, ends[1:], strict=False):
            where = BoxInterval(region, a, b)
            parts = partial(list, flat[a:b].clone().split(7))
            planned.append(Planned(key_of(WEIGHT, where), torch.float32, (b - a,), parts))
            found.append(StoredPiece(FILE, where))
    file = FileRecord(write_tensors(folder / FILE, planned), tensors=True)
    write_manifest(folder, Manifest((Record(WEIGHT, "F32", SHAPE, tuple(found)),), {FILE: file}))
    return weight


def read_by(folder: Path, regions: list[TensorBox]) -> torch.Tensor:
    """The weight that two ranks of each box have together, each an interval of it.
    Raises: DamagedCheckpoint.
    """
    weight = torch.zeros(SHAPE)
    for region in regions:
        own = torch.zeros(region.numel)
        for rank in range(2):
            a, b = (round(i * region.numel / 2) for i in (rank, rank + 1))
            with closing(FolderSource(folder)) as source:
                source.read_box(WEIGHT, BoxInterval(region, a, b), own[a:b])
        weight[region.slices] = own.view(region.shape)
    return weight


MESHES = {"whole": boxes(1, 1), "rows": boxes(3, 1), "columns": boxes(1, 5), "both": boxes(2, 4)}


@pytest.mark.parametrize("stored", MESHES)
@pytest.mark.parametrize("wanted", MESHES)
def test_every_byte_that_another_mesh_reads_is_checked(
    stored: str, wanted: str, tmp_path: Path
) -> None:
    folder = tmp_path / "checkpoint"
    weight = written(folder, MESHES[stored], 3)
    assert torch.equal(read_by(folder, MESHES[wanted]), weight)
    begin = (folder / FILE).stat().st_size - 4 * len(MESHES[stored]) * 3 - weight.numel() * 4
    for at in range(begin, begin + weight.numel() * 4, 97):
        flip(folder / FILE, at)
        with pytest.raises(DamagedCheckpoint, match=r"'parameter:weight.*bytes have changed"):
            read_by(folder, MESHES[wanted])
        flip(folder / FILE, at)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16, torch.float64])
def test_any_cut_of_a_tensor_of_many_blocks_is_read_and_checked(
    dtype: torch.dtype, tmp_path: Path
) -> None:
    draw = random.Random(3)
    numel = (2 * CHUNK + 3 * BLOCK) // dtype.itemsize + 11
    values = torch.randint(0, 100, (numel,)).to(dtype)
    planned = Planned("a", dtype, (numel,), partial(list, values.split(BLOCK + 5)))
    digest = write_tensors(tmp_path / FILE, [planned, planned_tail(dtype)])
    with TensorFile(tmp_path / FILE, checked=True) as file:
        assert file.digest == digest
        begin = file.header["a"].begin
    for into in (dtype, torch.float32):
        for _ in range(6):
            start, stop = sorted(draw.randrange(numel + 1) for _ in range(2))
            out = torch.empty(stop - start, dtype=into)
            with TensorFile(tmp_path / FILE, checked=True) as file:
                file.read("a", start, stop, out)
            assert torch.equal(out, values[start:stop].to(into))
            if start < stop:
                at = begin + draw.randrange(start, stop) * dtype.itemsize
                flip(tmp_path / FILE, at)
                with (
                    TensorFile(tmp_path / FILE, checked=True) as file,
                    pytest.raises(DamagedCheckpoint, match="bytes have changed"),
                ):
                    file.read("a", start, stop, out)
                flip(tmp_path / FILE, at)


def planned_tail(dtype: torch.dtype) -> Planned:
    return Planned("b", dtype, (3,), lambda: [torch.zeros(3, dtype=dtype)])
