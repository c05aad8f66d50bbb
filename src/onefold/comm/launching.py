"""Which tensors Triton's kernels serve, and how a kernel is launched: under a guard of the device that its tensors are on.

| what              | served by kernels                                          | else by torch, with equal bits        |
|-------------------|------------------------------------------------------------|---------------------------------------|
| device            | CUDA from compute capability 8.0 on, and ROCm              | CPU, XPU, older GPUs                  |
| Triton            | installed, and able to build and launch a kernel           | missing, or broken: a warning says so |
| kind of tensor    | one with memory                                            | a FakeTensor                          |

8.0 is the least that Triton supports. No kernel asks for more: bf16 and e4m3 are made by integer arithmetic, because conversions differ by
architecture (cvt to e4m3 exists from 8.9 on) and by what they make of values that are out of range.

[Note: the tensor's device] Triton launches on the current device of the calling thread and on that device's current stream, whatever its
arguments are. On another device than the tensors' the pointers are foreign there: an error, or reads over the link between the two.
"""

from __future__ import annotations

import contextlib
import importlib.util
import warnings
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

_COMPUTE_CAPABILITY = (8, 0)


def guard(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """Inside, `device` is this thread's current one."""
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()


def launch(kernel: Any, programs: int, like: torch.Tensor, *arguments: Any, **options: Any) -> None:
    """Start `programs` programs of a Triton kernel on the device of `like`, on its current stream; see [Note: the tensor's device].

    Products are not fused with sums: a fused operation rounds once where torch's two operations round twice.
    """
    if programs:
        with guard(like.device):
            kernel[(programs,)](*arguments, num_warps=4, enable_fp_fusion=False, **options)


def served(like: torch.Tensor) -> bool:
    """Whether kernels can run on this tensor."""
    return like.is_cuda and not isinstance(like, FakeTensor) and usable(like.device)


@cache
def usable(device: torch.device) -> bool:
    """Whether kernels run on this device: asked once, by launching an empty one."""
    if importlib.util.find_spec("triton") is None or torch.cuda.get_device_capability(device) < _COMPUTE_CAPABILITY:
        return False
    from onefold.comm.triton_floats import nothing

    return _starts(lambda: launch(nothing, 1, torch.empty(0, device=device), 0))


def _starts(probe: Callable[[], None]) -> bool:
    """Whether Triton can build and launch: it needs a C compiler and Python's headers, which a slim image may lack."""
    try:
        probe()
    except Exception as error:  # whatever it is, torch's operations give the same bits
        warnings.warn(
            f"Triton is installed but cannot run a kernel ({type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}). "
            "Sums and codecs use torch's operations: the same results, more slowly.",
            stacklevel=2,
        )
        return False
    return True
