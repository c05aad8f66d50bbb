"""Models that torch.compile compiles: which of its modes stage 3 supports.

The engine's hooks stay outside compiled code (`keep_from_compiler` in runtime/differentiate.py), so
that blocks and whole models may be compiled at every stage. CUDA graphs are the exception.

[Note: CUDA graphs] A CUDA graph replays kernels with the addresses that they were recorded with.
torch takes the addresses of parameters for fixed, and records a graph again when one has changed. At
stage 3 a unit is gathered into whichever buffer of the pool is free: it would be recorded in every
pass, until torch gives up after 128 recordings and never replays one.

Graphs of blocks would need, for each gathered unit, the same address in every pass: a pool with
fixed places, used in turn by unit and pass, of which there are as many as units are gathered at a
time. Forward and backward passes would need the same place for a unit, and the place must be free
when a gather ahead of its use begins.
"""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any

import torch
from torch import nn

#: The types of devices for which torch records graphs.
GRAPHED = frozenset(("cuda",))


def refuse_cuda_graphs(root: nn.Module | None, device: torch.device) -> None:
    """Check that no part of `root`, and nothing around this pass, is compiled with CUDA graphs. See
    [Note: CUDA graphs].

    Raises:
        ValueError: something is.
    """
    if root is None or device.type not in GRAPHED or "torch._dynamo" not in sys.modules:
        return
    for name, module in root.named_modules():
        for compiled in (module.__dict__.get("forward"), module._compiled_call_impl):
            asked = getattr(compiled, "get_compiler_config", None)
            if asked is not None and _records(asked()):
                raise _refusal(repr(name) if name else "the model")
    if any(_records(config) for config in _configurations_around()):
        raise _refusal("the model")


def _records(config: Any) -> bool:
    return isinstance(config, dict) and bool(config.get("triton.cudagraphs"))


def _configurations_around() -> list[Any]:
    """Return the configurations of the compiled functions that the caller runs in."""
    frame: FrameType | None = sys._getframe(1)
    found = []
    while frame is not None:
        if frame.f_code.co_name == "compile_wrapper":
            found.append(getattr(frame.f_locals.get("self"), "compiler_config", None))
        frame = frame.f_back
    return found


def _refusal(what: str) -> ValueError:
    return ValueError(
        f"{what} was compiled with CUDA graphs (torch.compile's mode 'reduce-overhead' or"
        " 'max-autotune'), which read parameters at fixed addresses. At stage 3 a block is gathered"
        " to another address in each pass, so that its graph would be recorded anew each time."
        " Compile it with mode='default' or 'max-autotune-no-cudagraphs' (torch_compile_mode in"
        " training arguments), or use stage 2."
    )
