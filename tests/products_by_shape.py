"""A processor that there is none of: the last bit of each element of a product depends on the
product's shape and on the element's place.

Real libraries choose kernels by shape too, but each processor's chooses others. Where
ONEFOLD_TEST_PRODUCTS=by-shape is set, tests/conftest.py and every rank of tests/ranks.py call
`install()`. A test that then fails compares the bits of products of different shapes. Products of
equal shapes have equal bits, as on any processor. In 16 bits nothing changes: their last bit is
much more than libraries differ by.
"""

from __future__ import annotations

import os
import warnings
from typing import Any

import torch
from torch import Tensor

VARIABLE, BY_SHAPE = "ONEFOLD_TEST_PRODUCTS", "by-shape"
_held: list[Any] = []


def install() -> None:
    """From now on, in this process and those that it forks; nothing where the variable is not
    set.
    """
    if os.environ.get(VARIABLE) != BY_SHAPE or _held:
        return
    library = torch.library.Library("aten", "IMPL")
    _held.append(library)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that kernels are replaced
        for name, inner in {"mm": _mm, "addmm": _addmm, "bmm": _bmm, "baddbmm": _baddbmm}.items():
            library.impl(name, inner, "CPU", allow_override=True)


def _another(out: Tensor, depth: int) -> Tensor:
    """`out`, about half of its elements one bit further from zero; which, its shape and `depth`
    (terms of each sum) decide.
    """
    if out.dtype not in (torch.float32, torch.float64) or not out.numel():
        return out
    seed = hash((*out.shape, depth)) % 1009
    chosen = (torch.arange(out.numel()) * 7919 + seed * 104729) % 1013 < 506
    return out.mul_(
        torch.where(chosen, 1.0 + torch.finfo(out.dtype).eps, 1.0).to(out.dtype).view(out.shape)
    )


# The forms with `out=` are other kernels, which nobody has replaced.


def _mm(a: Tensor, b: Tensor) -> Tensor:
    return _another(torch.mm(a, b, out=a.new_empty(a.shape[0], b.shape[1])), a.shape[1])


def _addmm(c: Tensor, a: Tensor, b: Tensor, beta: float = 1, alpha: float = 1) -> Tensor:
    return _another(
        torch.addmm(c, a, b, beta=beta, alpha=alpha, out=a.new_empty(a.shape[0], b.shape[1])),
        a.shape[1],
    )


def _bmm(a: Tensor, b: Tensor) -> Tensor:
    return _another(torch.bmm(a, b, out=a.new_empty(*a.shape[:2], b.shape[2])), a.shape[2])


def _baddbmm(c: Tensor, a: Tensor, b: Tensor, beta: float = 1, alpha: float = 1) -> Tensor:
    return _another(
        torch.baddbmm(c, a, b, beta=beta, alpha=alpha, out=a.new_empty(*a.shape[:2], b.shape[2])),
        a.shape[2],
    )
