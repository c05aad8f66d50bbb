"""Boxes read from what was stored in other boxes: the right elements, in few reads, every byte
checked.
"""

from __future__ import annotations

from contextlib import closing
from math import prod
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

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
from onefold.checkpoint.source import Item, read_common
from onefold.checkpoint.tensorfile import Planned, write_tensors
from onefold.layout.holders import AxisCut, TensorBox, region_of
from onefold.layout.regions import BoxInterval

WEIGHT = Item("parameter", "weight")
SHAPE = (10, 12)


@settings(deadline=None)
@given(st.data(), st.lists(st.integers(1, 6), min_size=1, max_size=3).map(tuple))
def test_what_is_common_lands_in_its_place_in_another_dtype_too(
    data: st.DataObject, shape: tuple[int, ...]
) -> None:
    def drawn() -> BoxInterval:
        ends = [sorted((data.draw(st.integers(0, n)), data.draw(st.integers(0, n)))) for n in shape]
        region = TensorBox(tuple(a for a, _ in ends), tuple(b - a for a, b in ends))
        a, b = sorted(data.draw(st.integers(0, region.numel)) for _ in range(2))
        return BoxInterval(region, a, b)

    whole = torch.arange(1, prod(shape) + 1, dtype=torch.float32).view(shape)
    wanted, stored = drawn(), drawn()
    mine, theirs = (whole[i.region.slices].reshape(-1)[i.start : i.stop] for i in (wanted, stored))
    ranges: list[tuple[int, int]] = []

    def read(a: int, b: int, into: torch.Tensor) -> None:
        ranges.append((a, b))
        into.copy_(theirs[a:b])

    out = torch.zeros(3 + wanted.numel, dtype=torch.float64)[3:]
    read_common(wanted, stored, out, torch.float32, read)
    assert torch.equal(out, torch.where(torch.isin(mine, theirs), mine, 0.0).double())
    assert all(a % 16 == 0 and b == min(a + 16, stored.numel) for a, b in ranges)
    assert len(set(ranges)) == len(ranges), "a block is read once"


def boxes(rows: int, columns: int) -> list[TensorBox]:
    cut = [
        region_of(SHAPE, [AxisCut(0, rows, i), AxisCut(1, columns, j)])
        for i in range(rows)
        for j in range(columns)
    ]
    return [region for region in cut if region.numel]


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
            planned.append(
                Planned(key_of(WEIGHT, a, box), torch.float32, (b - a,), flat[a:b].clone())
            )
            found.append((a, b, box))
    file = write_tensors(folder / "rank-00000.safetensors", planned)
    stored = tuple(
        StoredPiece("rank-00000.safetensors", a, b, file.crcs[key_of(WEIGHT, a, box)], box)
        for a, b, box in found
    )
    record = FileRecord(file.nbytes, file.head, head_only=True)
    write_manifest(
        folder,
        Manifest((Record(WEIGHT, "F32", SHAPE, stored),), {"rank-00000.safetensors": record}),
    )
    return weight


def read_by(
    folder: Path, regions: list[TensorBox], ranks: int
) -> tuple[torch.Tensor, list[RangeRead]]:
    """Read as `ranks` ranks of each box would, each an interval of it. Returns the weight that they
    have together, and what they have read.
    """
    weight, checks = torch.zeros(SHAPE), []
    for region in regions:
        own = torch.zeros(region.numel)
        for rank in range(ranks):
            a, b = (round(i * region.numel / ranks) for i in (rank, rank + 1))
            with closing(FolderSource(folder)) as source:
                source.read_box(WEIGHT, region, a, b, own[a:b])
                checks += source.checks
        weight[region.slices] = own.view(region.shape)
    return weight, checks


MESHES: dict[str, list[TensorBox]] = {
    "whole": boxes(1, 1), "rows": boxes(3, 1), "columns": boxes(1, 5), "both": boxes(2, 4)
}  # fmt: skip


@pytest.mark.parametrize("stored", MESHES)
@pytest.mark.parametrize("wanted", MESHES)
def test_every_byte_that_another_mesh_reads_is_checked(
    stored: str, wanted: str, tmp_path: Path
) -> None:
    folder = tmp_path / "checkpoint"
    weight = written(folder, MESHES[stored], 3)
    read, checks = read_by(folder, MESHES[wanted], 2)
    assert torch.equal(read, weight)
    with closing(FolderSource(folder)) as source:
        source.compare_with(checks)
    file = folder / "rank-00000.safetensors"
    bytes_before, data = file.read_bytes(), weight.numel() * 4
    for at in range(1, data, 37):
        changed = bytearray(bytes_before)
        changed[at - data] ^= 1
        file.write_bytes(changed)
        _, checks = read_by(folder, MESHES[wanted], 2)
        with (
            closing(FolderSource(folder)) as source,
            pytest.raises(
                DamagedCheckpoint, match=r"bytes have changed since they were written.*'weight'"
            ),
        ):
            source.compare_with(checks)
