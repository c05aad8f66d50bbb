"""Kernels of the codecs: the bytes of the plain operations, and no import of Triton where there is no GPU."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]


def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join([str(ROOT / "src"), str(ROOT), *filter(None, [environment.pop("FIRST", ""), os.environ.get("PYTHONPATH", "")])])
    env = {**os.environ, "PYTHONPATH": path, **environment}
    return subprocess.run([sys.executable, *arguments], cwd=ROOT, env=env, capture_output=True, text=True, timeout=280)


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
def test_kernels_write_the_bytes_of_the_plain_operations():
    """On the GPU if there is one, else in Triton's interpreter."""
    here = {} if torch.cuda.is_available() else {"TRITON_INTERPRET": "1"}
    found = run("-m", "benchmarks.codecs", "--check", "--device", "cuda" if torch.cuda.is_available() else "cpu", **here)
    assert found.returncode == 0 and "agree on every bit" in found.stdout, found.stdout + found.stderr


def test_codecs_on_a_cpu_never_import_triton(tmp_path):
    (tmp_path / "triton.py").write_text("raise RuntimeError('triton was imported')")
    program = (
        "import sys, torch, onefold\n"
        "from onefold.comm.codecs import Encoded, codec\n"
        "x = torch.randn(1000)\n"
        "for name in ('int8', 'int4', 'fp8', 'nf4'): Encoded.of(x, codec(name)).decode(torch.empty(1000))\n"
        "print('triton' in sys.modules)\n"
    )
    found = run("-c", program, FIRST=str(tmp_path))
    assert found.returncode == 0 and found.stdout == "False\n", found.stdout + found.stderr
