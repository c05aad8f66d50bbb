"""Triton's kernels: the bits of torch's operations, and no import of Triton where there is no
GPU.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import onefold
from onefold.comm import launching, sums
from onefold.quant import codec, kernel_check, kernels
from onefold.quant.registry import WITH_KERNELS
from ranks import run_ranks

ROOT = Path(__file__).parents[2]


def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join(
        [
            str(ROOT / "src"),
            str(ROOT),
            *filter(None, [environment.pop("FIRST", ""), os.environ.get("PYTHONPATH", "")]),
        ]
    )
    env = {**os.environ, "PYTHONPATH": path, **environment}
    return subprocess.run(
        [sys.executable, *arguments], cwd=ROOT, env=env, capture_output=True, text=True, timeout=280
    )


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
def test_kernels_have_the_bits_of_torch(sample):
    """On the GPU if there is one, else in Triton's interpreter. With `--all` by the command."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    here = {} if torch.cuda.is_available() else {"TRITON_INTERPRET": "1"}
    names = sample(WITH_KERNELS, 4)
    program = (
        "import torch\nfrom onefold.quant import kernel_check as k\n"
        f"device = torch.device({device!r})\n"
        f"print(k.codec_differences(device, {names}) + k.row_differences(device, {names})"
        " + k.moment_differences(device) + k.sum_differences(device))"
    )
    command = ["-m", "benchmarks", "codecs", "--check", "--device", device]
    every = len(names) == len(WITH_KERNELS)
    found = run("-W", "ignore", *(command if every else ["-c", program]), **here)
    said = "agree on every bit of 120 intervals and 48 sums" if every else "[]"
    assert found.returncode == 0 and said in found.stdout, found.stdout + found.stderr


def test_without_a_gpu_triton_is_never_imported(tmp_path):
    (tmp_path / "triton.py").write_text("raise RuntimeError('triton was imported')")
    program = (
        "import sys, torch, onefold\nfrom onefold.quant import Encoded, codec\nfrom"
        " onefold.comm.sums import sum_parts\nx = torch.randn(1000)\nfor name in ('int8', 'int4',"
        " 'fp8', 'nf4'): Encoded.of(x, codec(name)).decode(torch.empty(1000))\nsum_parts(x.view(2,"
        " 500), torch.empty(500), 0.5)\nprint('triton' in sys.modules)\n"
    )
    found = run("-c", program, FIRST=str(tmp_path))
    assert found.returncode == 0 and found.stdout == "False\n", found.stdout + found.stderr


def kernels_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors of the CPU are served, by what stands for the kernels."""
    for room in (kernels, sums, kernel_check):
        monkeypatch.setattr(room, "served", lambda like: launching._allowed.get())
    monkeypatch.setattr(kernel_check, "INTERPRETED", True)  # small sizes


def test_the_comparison_notices_a_wrong_codec(monkeypatch):
    def wrong(by, source, payload, scales, rounding):
        payload.zero_()
        scales.fill_(1.0)
        return source.numel() // by.block * by.block

    kernels_here(monkeypatch)
    monkeypatch.setattr(kernels, "encode", wrong)
    monkeypatch.setattr(kernels, "decode", lambda *_: 0)  # leaves all to torch
    monkeypatch.setattr(kernel_check, "cases", lambda by: [("ones", torch.ones(300))])
    found = kernel_check.codec_differences(torch.device("cpu"))
    assert len(found) == 2 * (3 * 3 + 1) and all("encoded" in what for what in found), found


@pytest.mark.parametrize("wrong", ["backwards", "scaled first", "in fp64", "from +0", None])
def test_the_comparison_notices_a_sum_in_another_order_or_rounding(monkeypatch, wrong):
    def act(parts, out, scale, own, rank, round_to):
        rows = [part.float() for part in parts]
        if own is not None:
            rows.insert(rank, own.float())
        if wrong == "backwards":
            rows.reverse()
        total = torch.zeros_like(rows[0]) if wrong == "from +0" else torch.full_like(rows[0], -0.0)
        if wrong == "in fp64":
            total = total.double()
        for row in rows:
            total = total + (row * scale if wrong == "scaled first" else row)
        total = total if wrong == "scaled first" else total * scale
        out.copy_(total if round_to is None else total.to(round_to))

    kernels_here(monkeypatch)
    triton_sums = type(sys)("onefold.comm.triton_sums")
    triton_sums.sum_parts = act
    monkeypatch.setitem(sys.modules, "onefold.comm.triton_sums", triton_sums)
    monkeypatch.setattr("onefold.comm.triton_sums", triton_sums, raising=False)
    assert bool(kernel_check.sum_differences(torch.device("cpu"))) == (wrong is not None)


def test_the_comparison_says_where_no_kernel_runs():
    with pytest.raises(
        ValueError,
        match=r"no kernel runs on 'cpu': expected CUDA with Triton, or TRITON_INTERPRET=1",
    ):
        kernel_check.differences("cpu")


# -- launches --------------------------------------------------------------------------------------


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the kernels that are launched. Torch's operations do what they would do."""
    found: list[str] = []

    def standing_in(name: str) -> Any:
        def act(codec: Any, *arguments: Any) -> int:
            found.append(name)
            *_, last = arguments
            whole = arguments[0] if name == "encode" else last if name == "decode_sum" else None
            return (arguments[2] if whole is None else whole).shape[-1]

        return act

    monkeypatch.setattr(kernels, "served", lambda like: launching._allowed.get())
    for name in ("encode", "decode", "decode_sum"):
        monkeypatch.setattr(kernels, name, standing_in(name))
    return found


@pytest.mark.parametrize("name", WITH_KERNELS)
def test_the_intervals_of_all_ranks_take_one_launch(launched: list[str], name: str) -> None:
    by, ranks, numel = codec(name), 64, 256 * 3
    used = by.encoded_bytes(numel)
    coded = torch.zeros(ranks, used + 16, dtype=torch.uint8)[:, :used]
    values = torch.zeros(ranks, numel)
    by.encode_rows(values, coded)
    by.decode_rows(coded, values)
    by.keep_residual_rows(coded, values)
    by.decode_sum(coded, values[0], 7, values[1])
    assert launched == ["encode", "decode", "decode", "decode_sum"]


def launches_of_a_step() -> list[str]:
    """The kernels that a step of one linear layer launches on rank 1 of 4, and their rows."""
    found: list[str] = []

    def recorded(name: str) -> Any:
        def act(codec: Any, first: torch.Tensor, *_: Any) -> int:
            found.append(f"{name} of {first.shape[0]}")
            return 0

        return act

    kernels.served = lambda like: launching._allowed.get()
    for name in ("encode", "decode", "decode_sum"):
        setattr(kernels, name, recorded(name))
    recipe = onefold.Recipe.zero(
        3, gather_codec="int8", reduce_codec="int8", error_feedback=True, stall_timeout=30.0
    )
    model = onefold.shard(nn.Linear(64, 1024, bias=False), recipe, units=())
    model(torch.ones(2, 64)).sum().backward()
    return found


def test_a_gather_and_a_reduction_take_a_launch_for_all_ranks() -> None:
    found = run_ranks(4, launches_of_a_step)[1]
    gather = ["encode of 1", "decode of 4"]
    # Its own part lies between those of the others
    reduction = ["encode of 1", "decode of 1", "encode of 2", "decode of 2", "decode_sum of 4"]
    assert found == [*gather, *gather[1:], *reduction] or found == [*gather, *reduction], found
