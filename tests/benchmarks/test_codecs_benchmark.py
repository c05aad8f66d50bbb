"""`benchmarks/codecs.py`: a row for everything that a codec does, and a comparison that notices a wrong kernel."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

ROOT = Path(__file__).parents[2]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

from benchmarks import codecs, gpu
from onefold.comm.codecs import kernels


def test_every_act_of_every_codec_has_a_row_of_bytes_that_it_must_touch() -> None:
    rows = codecs.measured("cpu", 4096, rounds=1)
    names = {(row["codec"], row["dtype"], row["act"]) for row in rows}
    expected = {("copy", dtype, "copy") for dtype in ("fp32", "bf16")}
    for name in codecs.NAMES:
        both = {"encode", "decode"} | ({"encode, stochastic"} if name != "nf4" else set())
        expected |= {(name, "fp32", act) for act in (*both, "decode and add")} | {(name, "bf16", act) for act in both}
    assert names == expected and len(rows) == len(names), sorted(names ^ expected)
    assert all(row["bytes_per_s"] > 0 and row["of_copy"] > 0 for row in rows)
    int8 = {act: nbytes for act, nbytes, _ in codecs.acts("int8", torch.zeros(4096))}
    payload = 4096 + 2 * 16
    assert int8 == {"encode": 4 * 4096 + payload, "encode, stochastic": 4 * 4096 + payload, "decode": 4 * 4096 + payload,
                    "decode and add": 8 * 4096 + payload}  # fmt: skip


def test_a_kernel_that_does_something_else_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(by: Any, source: torch.Tensor, payload: torch.Tensor, scales: torch.Tensor, rounding: Any) -> int:
        payload.zero_()
        scales.fill_(1.0)
        return source.numel() // by.block * by.block

    monkeypatch.setattr(kernels, "encode", wrong)
    monkeypatch.setattr(kernels, "decode", lambda *_: 0)  # leaves all to the plain operations
    monkeypatch.setattr(codecs, "cases", lambda device: [("ones", torch.ones(300))])
    found = codecs.differences("cpu")
    assert len(found) == 2 * 2 * 3 and all("encoded" in what for what in found), found


def test_the_chapter_of_the_gpu_benchmark_fails_where_kernels_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    row = {"codec": "int8", "dtype": "fp32", "act": "encode", "ns": 1.0, "bytes_per_s": 5e9, "of_copy": 0.5}
    for differences, status in ((["int8: encoded"], "failed"), ([], "ok")):
        rank = {"rates": [row], "differences": differences}
        monkeypatch.setattr(codecs.launch, "run_ranks", lambda *_, rank=rank, **__: {"status": "ok", "ranks": [rank]})
        table, (outcome,) = codecs.chapter(argparse.Namespace(device="cpu", timeout=1.0))
        assert isinstance(table, gpu.Table) and table.rows == [["int8", "fp32", "encode", "1.000", "5.0", "50%"]]
        assert outcome["status"] == status and outcome["peer"] == "codecs"
    assert "codecs" in gpu.CHAPTERS
