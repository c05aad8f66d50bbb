"""Seconds and calls of Newton-Schulz, whoever calls it; and how many iterations it has."""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.optim import _muon


@dataclass
class Spent:
    """What each optimizer step since `step` was first called has spent in Newton-Schulz."""

    seconds: list[float] = field(default_factory=list)
    calls: list[int] = field(default_factory=list)

    def step(self) -> None:
        """A step begins."""
        self.seconds.append(0.0)
        self.calls.append(0)

    def timed(self, function: Callable[..., Any], **named: Any) -> Callable[..., Any]:
        """The function, with these arguments too; its calls in a step are counted and timed."""

        def call(*arguments: Any, **more: Any) -> Any:
            begun = time.perf_counter()
            out = function(*arguments, **more, **named)
            if self.calls:  # not what a library tries before the first step
                self.seconds[-1] += time.perf_counter() - begun
                self.calls[-1] += 1
            return out

        call.timed = function  # type: ignore[attr-defined]
        return call

    def watch_torch(self, iterations: int) -> None:
        """Of torch.optim.Muon. Stays for the life of the process."""
        _muon._zeropower_via_newtonschulz = self.timed(in_fp32, iterations=iterations)

    def watch_deepspeed(self, iterations: int) -> None:
        """The same of DeepSpeed's, which does the momentum in the same function."""
        theirs: Any = importlib.import_module("deepspeed.runtime.zero.muon.original_muon")
        theirs.ns_compute_dtype = lambda method="gram": torch.float32
        # A model before this one may have watched it
        function = getattr(theirs.muon_update, "timed", theirs.muon_update)
        theirs.muon_update = self.timed(function, ns_steps=iterations)


def in_fp32(
    grad: Tensor,
    coefficients: tuple[float, float, float],
    steps: int,
    eps: float,
    iterations: int | None = None,
) -> Tensor:
    """torch's `_zeropower_via_newtonschulz` (Jordan et al., Muon, 2024) without its cast to bf16.

    Args:
        grad: a matrix.
        iterations: in place of `steps`.
    """
    a, b, c = coefficients
    tall = grad.size(0) > grad.size(1)
    x = grad.T if tall else grad
    x = x / x.norm().clamp(min=eps)
    for _ in range(steps if iterations is None else iterations):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.T if tall else x
