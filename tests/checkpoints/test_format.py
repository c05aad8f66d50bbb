"""The format: files that every reader of safetensors opens, values without pickle, tensors in boxes
that ranks of other meshes read.
"""

from __future__ import annotations

import random
from collections import Counter
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import onefold
from checkpoints.injured import flip
from onefold.checkpoint.errors import DamagedCheckpoint
from onefold.checkpoint.folder_source import FolderSource, RangeRead
from onefold.checkpoint.manifest import (
    FileRecord,
    Manifest,
    Record,
    StoredPiece,
    key_of,
    write_manifest,
)
from onefold.checkpoint.source import Item
from onefold.checkpoint.tensorfile import DTYPES, Planned, write_tensors
from onefold.layout.holders import AxisCut, TensorBox, region_of
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
        assert torch.equal(stored[f"parameter:{name}@0"], t.reshape(-1)), name


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
        box = None if region.shape == SHAPE else region
        for a, b in zip(ends, ends[1:], strict=False):
            key = key_of(WEIGHT, a, box)
            planned.append(Planned(key, torch.float32, (b - a,), flat[a:b].clone()))
            found.append((a, b, box))
    file = write_tensors(folder / FILE, planned)
    stored = tuple(StoredPiece(FILE, a, b, file.crcs[key_of(WEIGHT, a, c)], c) for a, b, c in found)
    record = FileRecord(file.nbytes, file.head, head_only=True)
    write_manifest(folder, Manifest((Record(WEIGHT, "F32", SHAPE, stored),), {FILE: record}))
    return weight


def read_by(folder: Path, regions: list[TensorBox]) -> torch.Tensor:
    """The weight that two ranks of each box have together, each an interval of it.
    Raises: DamagedCheckpoint.
    """
    weight, checks = torch.zeros(SHAPE), list[RangeRead]()
    for region in regions:
        own = torch.zeros(region.numel)
        for rank in range(2):
            a, b = (round(i * region.numel / 2) for i in (rank, rank + 1))
            with closing(FolderSource(folder)) as source:
                source.read_box(WEIGHT, region, a, b, own[a:b])
                checks += source.checks
        weight[region.slices] = own.view(region.shape)
    with closing(FolderSource(folder)) as source:
        source.compare_with(checks)
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
    data = weight.numel() * 4
    for at in range(1, data, 97):
        flip(folder / FILE, at - data)
        with pytest.raises(DamagedCheckpoint, match=r"bytes have changed.*'weight'"):
            read_by(folder, MESHES[wanted])
        flip(folder / FILE, at - data)
