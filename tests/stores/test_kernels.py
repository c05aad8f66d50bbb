"""Triton's kernels: the bits of torch's operations."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys

import pytest
import torch

from on_ranks import slow

BITS = """
import torch
from onefold.quant.kernel_check import differences
print(differences("cuda" if torch.cuda.is_available() else "cpu"))
"""


@slow
@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
def test_kernels_have_the_bits_of_torch() -> None:
    """On the GPU if there is one, else in Triton's interpreter."""
    here = {} if torch.cuda.is_available() else {"TRITON_INTERPRET": "1"}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", BITS],
        env=os.environ | here,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.stdout == "[]\n", done.stderr
