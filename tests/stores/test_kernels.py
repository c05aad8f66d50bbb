"""Triton's kernels: the bits of torch's operations, also as they are compiled for GPUs, and no need of
Triton where there is none.
"""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from on_ranks import slow
from onefold.comm import launching
from onefold.quant import Stochastic, codec
from onefold.quant.registry import WITH_KERNELS

needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="Triton is not installed"
)
BITS = """
import torch
from onefold.quant.kernel_check import differences
print(differences("cuda" if torch.cuda.is_available() else "cpu"))
"""
WITHOUT = """
import sys, torch, onefold
from onefold.quant import CODECS, Encoded, codec
from onefold.comm.sums import sum_parts
for name in CODECS:
    Encoded.of(torch.randn(1000), codec(name)).decode(torch.empty(1000))
sum_parts(torch.randn(2, 500), torch.empty(500), 0.5)
print("triton" in sys.modules)
"""


def said_by(program: str, **environment: str) -> str:
    path = [environment.pop("FIRST", ""), os.environ.get("PYTHONPATH", "")]
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", program],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, path)), **environment},
        capture_output=True,
        text=True,
        timeout=600,
    )
    return done.stdout or done.stderr


@slow
@needs_triton
def test_kernels_have_the_bits_of_torch() -> None:
    """On the GPU if there is one, else in Triton's interpreter."""
    here = {} if torch.cuda.is_available() else {"TRITON_INTERPRET": "1"}
    assert said_by(BITS, **here) == "[]\n"


@slow
def test_without_a_gpu_triton_is_never_imported(tmp_path: Path) -> None:
    (tmp_path / "triton.py").write_text("raise RuntimeError('triton was imported')")
    assert said_by(WITHOUT, FIRST=str(tmp_path)) == "False\n"


def test_a_triton_that_cannot_build_is_told_and_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any, **__: Any) -> None:
        raise RuntimeError("Failed to find C compiler.\nmore")

    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(launching, "launch", broken)
    monkeypatch.setattr(torch, "empty", lambda *_, **__: torch.zeros(0))
    with pytest.warns(UserWarning, match=r"cannot run a kernel \(RuntimeError: Failed to find C"):
        assert not launching.usable.__wrapped__(torch.device("cuda", 1))


# -- as they are compiled for GPUs, which needs none -----------------------------------------------

TYPES = {
    torch.float32: "*fp32",
    torch.bfloat16: "*bf16",
    torch.uint8: "*i8",
    torch.int8: "*i8",
    torch.int16: "*i16",
    torch.int64: "*i64",
}


def compiled(launch: Any, architecture: int) -> tuple[set[str], str]:
    """The instructions (PTX names how each one rounds) and the intermediate code of a launch."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    kernel, arguments, options = launch
    given = dict(zip(kernel.arg_names, arguments, strict=False)) | options
    signature, constants, by_16 = {}, {}, {}
    for i, parameter in enumerate(kernel.params):
        name, value = parameter.name, given[parameter.name]
        if parameter.is_constexpr:
            signature[name], constants[name] = "constexpr", value
        elif isinstance(value, torch.Tensor):
            signature[name], by_16[i,] = TYPES[value.dtype], [["tt.divisibility", 16]]
        else:
            large = isinstance(value, int) and not -(2**31) <= value < 2**31
            signature[name] = "fp32" if isinstance(value, float) else "i64" if large else "i32"
    source = ASTSource(kernel, signature, constexprs=constants, attrs=by_16)
    target = GPUTarget("cuda", architecture, 32)
    made = triton.compile(source, target=target, options=dict(launching.OPTIONS))
    names = re.findall(r"^\s+(?:@\S+ )?([a-z][\w.:]+)", made.asm["ptx"], re.MULTILINE)
    return set(names), made.asm["ttir"]


def launched(what: str, found: list[Any]) -> None:
    """Launch all kernels of a codec, of sums, or of moments."""
    from onefold.comm import triton_sums
    from onefold.quant import triton_kernels, triton_moments

    n = 4096 * 3
    floats, low = torch.empty(n), torch.empty(n, dtype=torch.bfloat16)
    if what == "sums":
        triton_sums.sum_parts(
            low.view(4, -1), floats[: n // 4], 0.25, floats[: n // 4], 1, low.dtype
        )
        triton_sums.sum_parts(floats.view(4, -1), floats[: n // 4], 0.25, None, 0, None)
    elif what == "moments":
        codes, scales = torch.empty(n, dtype=torch.uint8), torch.empty(n // 256)
        lowest, boundary = torch.empty(1 << 16, dtype=torch.uint8), torch.empty(1 << 16)
        triton_moments.unpack(codes, scales, torch.empty(256), floats, 256)
        triton_moments.pack(floats, lowest, boundary, codes, scales, 256)
        triton_moments.round_by_chance(floats, -(1 << 62), 5, low)
    else:
        by = codec(what)
        payload, kept = by.split(torch.empty(by.encoded_bytes(n), dtype=torch.uint8), n)
        triton_kernels.encode(
            by, low, payload, kept, Stochastic(1, 2, 3) if by.stochastic else None
        )
        triton_kernels.decode(by, payload, kept, low, 0)
        triton_kernels.decode(by, payload, kept, floats, 1)


@slow
@needs_triton
@pytest.mark.parametrize("architecture", [80, 90, 100])
@pytest.mark.parametrize("what", [*WITH_KERNELS, "sums", "moments"])
def test_compiled_kernels_round_every_operation_once_to_the_nearest(
    what: str, architecture: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Without fused products, with subnormals, and with offsets of 64 bits. (nf4 looks its levels up
    in a table of 16: that offset has 32.)
    """
    found: list[Any] = []
    for room in ("comm.triton_sums", "quant.triton_kernels", "quant.triton_moments"):
        monkeypatch.setattr(
            f"onefold.{room}.launch",
            lambda kernel, programs, like, *given, **options: found.append(
                (kernel, given, options)
            ),
        )
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    launched(what, found)
    assert found
    for launch in found:
        names, code = compiled(launch, architecture)
        twice = r"fma\.|mad\.(rn\.)?f|.*\.(ftz|approx|full)"
        cut = r"(add|sub|mul|div)((?!\.rn\.).)*\.f32$|cvt((?!\.rn\.).)*\.(f16|bf16|e4m3)(x2)?\.f32$"
        assert not [name for name in names if re.match(f"{twice}|{cut}", name)], launch[0]
        narrow = re.findall(r"tt\.addptr .*!tt\.ptr<[^>]*>>, tensor<\S*xi(?:8|16|32)>", code)
        table = what == "nf4" and "encode" not in launch[0].__name__
        assert len(narrow) == int(table), f"beyond 2**31 elements these offsets wrap: {narrow}"
