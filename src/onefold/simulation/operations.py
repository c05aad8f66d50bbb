"""Tell the engine's operations from the model's, and count the bytes that the engine's read and
write.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch

import onefold.runtime
from onefold.machine.kernels import kernels_of, values_in
from onefold.memory import nbytes_of
from onefold.runtime.parameters import access, interval, operators, parameter


def of_engine() -> bool:
    """Whether the engine's own code is running. Code of the engine that carries out the model's
    operations on parameters does not count.
    """
    if torch._C._is_torch_function_enabled():
        return False  # the engine's own code disables torch functions
    frame = sys._getframe(1)
    while frame is not None:
        file = frame.f_code.co_filename
        if file.startswith(_RUNTIME):
            if not file.startswith(_BETWEEN):
                return True
        elif file == _MODULE:
            return False
        frame = frame.f_back  # type: ignore[assignment]
    return False


_MODULE = torch.nn.modules.module.__file__
_RUNTIME = str(Path(onefold.runtime.__file__).parent)
#: Files of the runtime that carry out the model's operations on parameters.
_BETWEEN = tuple(str(module.__file__) for module in (parameter, interval, access, operators))


#: Operations that do not read the tensor that they write to.
_OVERWRITING = frozenset({"copy_", "zero_", "fill_", "_foreach_copy_", "_foreach_zero_"})


def moved_by(func: Any, name: str, args: Any, kwargs: Any, out: Any) -> int:
    """Return the bytes that an operation outside the model's passes reads and writes."""
    declared = func._schema.arguments
    if not func._schema.is_mutable:
        found = kernels_of(func, args, kwargs, out, {})
        return found.other_bytes if found is not None else 0
    given = {a.name: v for a, v in zip(declared, args, strict=False)} | kwargs
    total = 0
    for argument in declared:
        tensors = [t for t in values_in(given.get(argument.name)) if isinstance(t, torch.Tensor)]
        written = argument.alias_info is not None and argument.alias_info.is_write
        # Fused optimizers declare `grads` as written, but write them only with a gradient scale
        written = written and not (argument.name == "grads" and "fused" in name)
        overwritten = written and (name in _OVERWRITING or argument.name == "out")
        total += (1 + (written and not overwritten)) * sum(map(nbytes_of, tensors))
    return total
