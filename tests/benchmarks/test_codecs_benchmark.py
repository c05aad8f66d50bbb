"""`benchmarks/codecs.py`: a row for everything that a codec does and for sums."""

from __future__ import annotations

import argparse

import pytest
import torch

from benchmarks import codecs, gpu, pages


def test_every_act_of_every_codec_has_a_row_of_bytes_that_it_must_touch() -> None:
    rows = codecs.measured("cpu", 4096, rounds=1)
    names = {(row["codec"], row["dtype"], row["act"]) for row in rows}
    expected = {
        row
        for dtype in ("fp32", "bf16")
        for row in (("copy", dtype, "copy"), ("sum", dtype, "of 8 parts"))
    }
    for name in codecs.NAMES:
        both = {"encode", "decode"} | ({"encode, stochastic"} if name != "nf4" else set())
        expected |= {(name, "fp32", act) for act in (*both, "decode and add")} | {
            (name, "bf16", act) for act in both
        }
    assert names == expected and len(rows) == len(names), sorted(names ^ expected)
    assert all(row["bytes_per_s"] > 0 and row["of_copy"] > 0 for row in rows)
    int8 = {act: nbytes for act, nbytes, _ in codecs.acts("int8", torch.zeros(4096))}
    payload = 4096 + 2 * 16
    assert int8 == {"encode": 4 * 4096 + payload, "encode, stochastic": 4 * 4096 + payload, "decode": 4 * 4096 + payload,
                    "decode and add": 8 * 4096 + payload}  # fmt: skip


def test_the_chapter_of_the_gpu_benchmark_fails_where_kernels_differ(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    row = {
        "codec": "int8",
        "dtype": "fp32",
        "act": "encode",
        "ns": 1.0,
        "bytes_per_s": 5e9,
        "of_copy": 0.5,
    }
    for differences, status in ((["int8: encoded"], "failed"), ([], "ok")):
        rank = {"rates": [row], "differences": differences}
        monkeypatch.setattr(
            codecs.launch,
            "run_ranks",
            lambda *_, rank=rank, **__: {"status": "ok", "ranks": [rank]},
        )
        table, (outcome,) = codecs.chapter(argparse.Namespace(device="cpu", timeout=1.0))
        assert isinstance(table, pages.Table) and table.rows == [
            ["int8", "fp32", "encode", "1.000", "5.0", "50%"]
        ]
        assert outcome["status"] == status and outcome["peer"] == "codecs"
    assert "codecs" in gpu.CHAPTERS
