"""The format by itself: checksums that combine, files that every reader of safetensors opens,
values without pickle.
"""

from __future__ import annotations

import json
import os
import random
import zlib
from collections import Counter, OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from examples import examples
from onefold.checkpoint.errors import CheckpointError, DamagedCheckpoint
from onefold.checkpoint.manifest import (
    FileRecord,
    Manifest,
    Record,
    StoredPiece,
    read_manifest,
    write_manifest,
)
from onefold.checkpoint.parts import records
from onefold.checkpoint.source import Item
from onefold.checkpoint.tensorfile import (
    DTYPES,
    Planned,
    TensorFile,
    joined,
    write_tensors,
)
from onefold.checkpoint.values import decode, encode
from onefold.layout.holders import TensorBox


@given(st.lists(st.binary(max_size=300), max_size=6))
@settings(deadline=None)
def test_checksums_of_parts_combine_to_that_of_the_whole(parts: list[bytes]) -> None:
    assert joined((zlib.crc32(p), len(p)) for p in parts) == zlib.crc32(b"".join(parts))


def test_every_reader_of_safetensors_opens_what_is_written(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    tensors = {
        f"{code} {shape}": torch.randint(0, 2, shape).to(dtype)
        for code, dtype in DTYPES.items()
        for shape in ((), (0,), (3, 5))
        if code not in ("C64", "U16", "U32", "U64")
    }
    tensors["höher"] = torch.randn(7)
    planned = [Planned(k, t.dtype, tuple(t.shape), t) for k, t in tensors.items()]
    written = write_tensors(tmp_path / "a.safetensors", planned)
    assert written.nbytes == os.path.getsize(tmp_path / "a.safetensors")
    theirs = load_file(tmp_path / "a.safetensors")
    assert set(theirs) == set(tensors)
    assert all(
        torch.equal(theirs[k].view(torch.uint8), t.view(torch.uint8))
        for k, t in tensors.items()
        if t.ndim
    )
    save_file({"x": torch.arange(10.0)}, tmp_path / "b.safetensors", metadata={"format": "pt"})
    with TensorFile(tmp_path / "b.safetensors") as file:
        out = torch.empty(4, dtype=torch.float64)
        crc = file.read("x", 3, 7, out)
        assert out.tolist() == [3.0, 4.0, 5.0, 6.0]
        assert crc == zlib.crc32(torch.arange(3.0, 7.0).numpy().tobytes()), (
            "the checksum is of the bytes in the file"
        )


@pytest.mark.parametrize("injury", ["empty", "no header", "cut", "longer", "garbage"])
def test_a_file_that_is_none_is_refused_in_a_sentence(tmp_path: Path, injury: str) -> None:
    path = tmp_path / "a.safetensors"
    write_tensors(path, [Planned("x", torch.float32, (100,), torch.zeros(100))])
    data = path.read_bytes()
    path.write_bytes(
        {
            "empty": b"",
            "no header": data[:20],
            "cut": data[:-1],
            "longer": data + b"\0",
            "garbage": b"\xff" * 64,
        }[injury]
    )
    with pytest.raises(DamagedCheckpoint, match=r"a\.safetensors"):
        TensorFile(path)


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
@examples(200)
def test_values_come_back_as_they_were(value: Any) -> None:
    back = decode(json.loads(json.dumps(encode(value, "x"))))
    assert back == value and type(back) is type(value)


def test_states_of_generators_counters_and_arrays_come_back() -> None:
    values = {
        "python": random.getstate(), "numpy": np.random.default_rng(3).bit_generator.state, "counter": Counter({3: 1, 5: 2}),
        "ordered": OrderedDict(a=1), "nan": float("nan"), "inf": -float("inf"), "dtype": torch.bfloat16, "device": torch.device("cpu"),
        "bf16": torch.randn(3, dtype=torch.bfloat16), "scalar": np.float64(0.1), "array": np.arange(6).reshape(2, 3),
        "dollar": {"$tensor": 1},
    }  # fmt: skip
    back = decode(json.loads(json.dumps(encode(values, "x"))))
    assert back["python"] == values["python"] and back["numpy"] == values["numpy"]
    assert back["counter"] == values["counter"] and isinstance(back["counter"], Counter)
    assert back["nan"] != back["nan"] and back["inf"] == values["inf"]
    assert back["dtype"] is torch.bfloat16 and back["device"] == torch.device("cpu")
    assert (
        torch.equal(back["bf16"], values["bf16"])
        and back["scalar"] == values["scalar"]
        and back["dollar"] == {"$tensor": 1}
    )
    assert (
        np.array_equal(back["array"], values["array"])
        and back["array"].dtype == values["array"].dtype
    )


def test_what_only_pickle_could_write_is_refused_with_its_place() -> None:
    with pytest.raises(
        CheckpointError, match=r"extra\['hooks'\]\[1\] is a builtins\.function.*no pickle"
    ):
        encode({"hooks": [1, lambda: None]}, "extra")


def _manifest() -> Manifest:
    item = Item("state", "a.b", "exp_avg")
    record = Record(
        item,
        "F32",
        (4, 3),
        (
            StoredPiece("rank-00000.safetensors", 0, 5, 1),
            StoredPiece("rank-00001.safetensors", 5, 12, 2),
        ),
        ("c",),
    )
    return Manifest(
        (record,),
        {"rank-00000.safetensors": FileRecord(99, "ab", True)},
        7,
        "2026-01-01",
        {"world_size": 2},
    )


def test_a_manifest_comes_back_and_every_changed_byte_of_it_is_found(tmp_path: Path) -> None:
    write_manifest(tmp_path, _manifest())
    assert read_manifest(tmp_path) == _manifest()
    for name in ("manifest.json", "manifest.sha256"):
        whole = (tmp_path / name).read_bytes()
        for at in range(len(whole)):
            (tmp_path / name).write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
            with pytest.raises(CheckpointError):
                read_manifest(tmp_path)
        (tmp_path / name).write_bytes(whole)


def test_a_manifest_of_a_later_version_says_so(tmp_path: Path) -> None:
    from dataclasses import replace

    write_manifest(tmp_path, replace(_manifest(), version=3, saved_by={"onefold": "9.9"}))
    with pytest.raises(
        CheckpointError, match=r"version 3 .* by Onefold 9\.9; this Onefold reads versions up to 2"
    ):
        read_manifest(tmp_path)


def test_pieces_that_do_not_tile_their_tensor_are_refused() -> None:
    with pytest.raises(
        DamagedCheckpoint, match="covers elements 6 to 12, expected one that begins at 5"
    ):
        Record(
            Item("parameter", "a"),
            "F32",
            (12,),
            (StoredPiece("f", 0, 5, 0), StoredPiece("f", 6, 12, 0)),
        )
    with pytest.raises(DamagedCheckpoint, match="cover 5 of its 12 elements"):
        Record(Item("parameter", "a"), "F32", (12,), (StoredPiece("f", 0, 5, 0),))


LEFT, RIGHT = TensorBox((0, 0), (4, 2)), TensorBox((0, 2), (4, 1))


def _boxed(*pieces: StoredPiece) -> Record:
    return Record(Item("parameter", "a"), "F32", (4, 3), pieces)


@pytest.mark.parametrize(
    ("pieces", "message"),
    [
        ((StoredPiece("f", 0, 8, 1, LEFT),), "boxes cover 8 of 12"),
        (
            (StoredPiece("f", 0, 8, 1, LEFT), StoredPiece("f", 0, 3, 1, RIGHT)),
            r"cover 3 of its 4 elements of the box at \(0, 2\)",
        ),
        ((StoredPiece("f", 0, 8, 1, LEFT), StoredPiece("f", 0, 12, 1)), "two boxes overlap"),
        (
            (StoredPiece("f", 1, 8, 1, LEFT), StoredPiece("f", 0, 4, 1, RIGHT)),
            r"elements 1 to 8 of the box at \(0, 0\) of \(4, 2\), expected one that begins at 0",
        ),
    ],
)
def test_boxes_that_do_not_cover_a_tensor_once_are_refused(
    pieces: tuple[StoredPiece, ...], message: str
) -> None:
    with pytest.raises(DamagedCheckpoint, match=message):
        _boxed(*pieces)


def test_ranks_that_leave_a_part_of_a_tensor_out_cannot_save() -> None:
    item, shape = Item("parameter", "a"), (4, 3)
    left = item, "F32", shape, (), StoredPiece("f", 0, 8, 1, LEFT)
    right = item, "F32", shape, (), StoredPiece("g", 0, 4, 1, RIGHT)
    assert records([[left], [right]])[0].boxes == (LEFT, RIGHT)
    with pytest.raises(DamagedCheckpoint, match="boxes cover 8 of 12"):
        records([[left], []])
    with pytest.raises(DamagedCheckpoint, match=r"two boxes overlap|expected one that begins"):
        records([[left, right], [right]])
