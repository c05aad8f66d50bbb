"""The format: files that every reader of safetensors opens, values without pickle, tensors in boxes
that ranks of other meshes read.
"""

from __future__ import annotations

import json
import random
from collections import Counter
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file

import onefold
from checkpoints.injured import flip
from examples import examples
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
from onefold.checkpoint.values import decode, encode
from onefold.layout.holders import AxisCut, TensorBox, region_of
from reference import built
from zoo import TinyMLP


def test_every_reader_of_safetensors_opens_what_is_written(tmp_path: Path) -> None:
    tensors = {
        f"{code} {shape}": torch.randint(0, 2, shape).to(dtype)
        for code, dtype in DTYPES.items()
        for shape in ((), (0,), (3, 5))
        if code not in ("C64", "U16", "U32", "U64")
    }
    tensors["höher"] = torch.randn(7)
    planned = [Planned(k, t.dtype, tuple(t.shape), t) for k, t in tensors.items()]
    write_tensors(tmp_path / "a.safetensors", planned)
    theirs = load_file(tmp_path / "a.safetensors")
    assert set(theirs) == set(tensors)
    for name, t in tensors.items():
        ours = t.reshape(-1).view(torch.uint8)
        assert torch.equal(theirs[name].reshape(-1).view(torch.uint8), ours), name


# -- values ----------------------------------------------------------------------------------------

_numbers = (
    st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.complex_numbers(allow_nan=False, allow_infinity=False)
)
_values: Any = st.recursive(
    st.none() | _numbers | st.text() | st.binary(),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.tuples(inner, inner)
        | st.dictionaries(st.text() | st.integers(), inner, max_size=3)
    ),
    max_leaves=12,
)


@given(_values)
@examples(100)
def test_values_come_back_as_they_were(value: Any) -> None:
    back = decode(json.loads(json.dumps(encode(value, "x"))))
    assert back == value and type(back) is type(value)


def test_what_a_program_keeps_beside_comes_back(tmp_path: Path) -> None:
    plain: dict[str, Any] = {
        "python": random.getstate(), "numpy": np.random.default_rng(3).bit_generator.state,
        "counter": Counter({3: 1, 5: 2}), "inf": -float("inf"),
        "dtype": torch.bfloat16, "device": torch.device("cpu"), "scalar": np.float64(0.1),
        "dollar": {"$tensor": 1},
    }  # fmt: skip
    tensors = {"bf16": torch.randn(3, dtype=torch.bfloat16), "long": torch.arange(5000)}
    arrays = {"array": np.arange(6).reshape(2, 3), "long array": np.arange(5000.0)}
    model = onefold.shard(built(TinyMLP), onefold.Recipe.zero(3))
    nan = {"nan": float("nan")}
    onefold.save(tmp_path / "a", model=model, extra=plain | tensors | arrays | nan, data={"at": 12})
    loaded = onefold.load(tmp_path / "a", model=model)
    back = loaded.extra
    assert loaded.data == {"at": 12} and back["nan"] != back["nan"]
    for name, value in plain.items():
        assert back[name] == value and type(back[name]) is type(value), name
    assert all(torch.equal(back[name], t) for name, t in tensors.items())
    for name, array in arrays.items():
        assert np.array_equal(back[name], array) and back[name].dtype == array.dtype


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


LEFT, RIGHT = TensorBox((0, 0), (4, 2)), TensorBox((0, 2), (4, 1))
GAPS: dict[str, list[StoredPiece]] = {
    "covers elements 6 to 12, expected one that begins at 5": [StoredPiece("f", 0, 5, 0), StoredPiece("f", 6, 12, 0)],
    "cover 5 of its 12 elements": [StoredPiece("f", 0, 5, 0)],
    "boxes cover 8 of 12": [StoredPiece("f", 0, 8, 1, LEFT)],
    "cover 3 of its 4 elements of the box": [StoredPiece("f", 0, 8, 1, LEFT), StoredPiece("f", 0, 3, 1, RIGHT)],
    "two boxes overlap": [StoredPiece("f", 0, 8, 1, LEFT), StoredPiece("f", 0, 12, 1)],
}  # fmt: skip


@pytest.mark.parametrize("words", GAPS)
def test_pieces_that_do_not_cover_a_tensor_once_are_refused(words: str) -> None:
    with pytest.raises(DamagedCheckpoint, match=words):
        Record(Item("parameter", "a"), "F32", (4, 3), tuple(GAPS[words]))
