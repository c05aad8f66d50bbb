"""Functions of tensors that are compiled on CUDA."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar, cast

import torch

Call = TypeVar("Call", bound=Callable[..., Any])


def compiled(function: Call) -> Call:
    """Make a function of tensors run compiled where they are on CUDA.

    It is compiled at its first call there. If that fails (no compiler, an old GPU), it runs plainly,
    with the same results but slower. On every other device it runs plainly.
    """
    quick: Callable[..., Any] | None = None

    @wraps(function)
    def call(*arguments: Any) -> Any:
        nonlocal quick
        if not any(isinstance(a, torch.Tensor) and a.is_cuda for a in arguments):
            return function(*arguments)
        if quick is None:
            make: Any = torch.compile
            # Each codec and dtype, and one row or several, are compiled by themselves
            quick = make(function, fullgraph=True, dynamic=True, recompile_limit=64)
        try:
            return quick(*arguments)
        except Exception as error:
            said = str(error).splitlines()
            warnings.warn(
                f"torch.compile cannot compile {function.__name__} ({type(error).__name__}:"
                f" {said[0] if said else ''}). It runs as it is: the same results, more slowly.",
                stacklevel=2,
            )
            quick = function
            return function(*arguments)

    return cast(Call, call)
