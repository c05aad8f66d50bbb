"""Which tensors Triton kernels can serve, and how a kernel is launched: with the tensors' device as
the current one.

|                   | served by kernels                                          | else by torch, with equal bits        |
|-------------------|------------------------------------------------------------|---------------------------------------|
| device            | CUDA from compute capability 8.0 on, and ROCm              | CPU, XPU, older GPUs                  |
| Triton            | installed, and able to build and launch a kernel           | missing, or broken: a warning says so |
| kind of tensor    | one with memory                                            | a FakeTensor                          |

8.0 is the least that Triton supports. No kernel needs more: bf16 and e4m3 are converted by integer
arithmetic, because the hardware's conversions differ by architecture (cvt to e4m3 exists from 8.9
on) and in how they treat values out of range.

With TRITON_INTERPRET=1 in the environment kernels run in Triton's interpreter, on CPU tensors. So
they can be tried on any machine, slowly.

[Note: the tensor's device] Triton launches on the current device of the calling thread and on that
device's current stream, wherever the arguments are. If the tensors are on another device, the
launch fails, or the kernel reads them over the link between the two devices.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import warnings
from collections.abc import Iterator
from contextvars import ContextVar
from functools import cache
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

from onefold.device import guard

_COMPUTE_CAPABILITY = (8, 0)
#: Options with which every kernel is compiled. Products are not fused with sums: a fused operation
#: rounds once, torch's two operations round twice.
OPTIONS = {"num_warps": 4, "enable_fp_fusion": False}
#: Read once at import, as Triton does.
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
_allowed: ContextVar[bool] = ContextVar("kernels_are_allowed", default=True)


def launch(kernel: Any, programs: int, like: torch.Tensor, *arguments: Any, **options: Any) -> None:
    """Launch `programs` programs of a Triton kernel on the device of `like` and its current stream.
    See [Note: the tensor's device].
    """
    if programs:
        with guard(like.device):
            kernel[(programs,)](*arguments, **OPTIONS, **options)


def served(like: torch.Tensor) -> bool:
    """Whether kernels can run on this tensor."""
    if not (like.is_cuda or INTERPRETED) or not _allowed.get() or isinstance(like, FakeTensor):
        return False
    return usable(like.device)


@contextlib.contextmanager
def by_torch() -> Iterator[None]:
    """Use torch's operations in place of kernels, in this thread: to compare the two."""
    token = _allowed.set(False)
    try:
        yield
    finally:
        _allowed.reset(token)


@cache
def usable(device: torch.device) -> bool:
    """Whether kernels run on this device: tested once, by launching an empty one."""
    if importlib.util.find_spec("triton") is None or device.type not in ("cuda", "cpu"):
        return False
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < _COMPUTE_CAPABILITY:
        return False
    return _starts(device)


def _starts(device: torch.device) -> bool:
    """Whether Triton can build and launch a kernel. It needs a C compiler and Python's headers,
    which a slim image may lack.
    """
    try:
        from onefold.comm.triton_floats import nothing

        launch(nothing, 1, torch.empty(0, device=device), 0)
    except Exception as error:  # whatever it is, torch's operations give the same bits
        said = str(error).splitlines()
        warnings.warn(
            f"Triton is installed but cannot run a kernel ({type(error).__name__}:"
            f" {said[0] if said else ''}). Sums and codecs use torch's operations: the same"
            " results, more slowly.",
            stacklevel=2,
        )
        return False
    return True
