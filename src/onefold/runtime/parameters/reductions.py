"""Reductions of a whole tensor to one number, from one number of every rank."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from onefold.runtime.parameters.interval import IntervalSpec, spec_of

_NARROW = (torch.float16, torch.bfloat16)


def norms_of(tensors: Sequence[torch.Tensor], p: Any) -> list[torch.Tensor]:
    """Return the p-norms of whole tensors, each 0-dim. Takes one exchange of numbers for each group
    of ranks.
    """
    p = float(p)
    out = _norms_here(tensors, p)
    apart: dict[Any, list[int]] = {}
    for i, t in enumerate(tensors):
        if (spec := spec_of(t)) is not None:
            apart.setdefault(spec.owners.meet(spec.name)[0], []).append(i)
    for indices in apart.values():
        spec, *others = [s for i in indices if (s := spec_of(tensors[i])) is not None]
        device = out[indices[0]].device
        parts = torch.stack([out[i].to(device) for i in indices]).to(torch.float64)
        mine = parts if math.isinf(p) else parts.pow(p) if p else parts
        what = "the norm" if p == 2 else f"the {p:g}-norm"
        every = spec.exchange(mine, what, others).to(device)
        most = every.amax(0) if p > 0 else every.amin(0)
        total = most if math.isinf(p) else every.sum(0).pow(1.0 / p) if p else every.sum(0)
        rounded: dict[torch.dtype, Sequence[torch.Tensor]] = {}
        for at, i in enumerate(indices):
            dtype = _real(tensors[i].dtype)
            if dtype not in rounded:
                rounded[dtype] = total.to(dtype).unbind()
            out[i] = rounded[dtype][at]
    return out


def _norms_here(tensors: Sequence[torch.Tensor], p: float) -> list[torch.Tensor]:
    """Return the norms of plain tensors, and of this rank's parts of intervals: one call for all
    that share a device and a dtype.

    Norms of 16-bit parts are in fp32: the result is rounded once, when all parts are combined.
    """
    out: list[Any] = [None] * len(tensors)
    alike: dict[tuple[torch.device, torch.dtype, bool, bool], list[int]] = {}
    for i, t in enumerate(tensors):
        part = spec_of(t) is not None
        alike.setdefault((t.device, t.dtype, part, part and not t.numel()), []).append(i)
    for (device, dtype, part, empty), indices in alike.items():
        if empty:  # the neutral element when the parts are combined
            nothing = math.inf if p < 0 else 0.0
            norms: Sequence[torch.Tensor] = [
                torch.full((), nothing, dtype=_real(dtype), device=device)
            ] * len(indices)
        else:
            wide = torch.float32 if part and dtype in _NARROW else None
            norms = torch._foreach_norm([tensors[i] for i in indices], p, dtype=wide)
        for i, norm in zip(indices, norms, strict=True):
            out[i] = norm
    return out


def reduce_to_number(name: str, args: Any, kwargs: Any) -> torch.Tensor | bool | None:
    """Return the reduction of the whole, from one number of every rank. None where one number a
    rank is not enough (a dimension, a matrix norm).
    """
    x = args[0]
    spec = spec_of(x)
    if spec is None or not spec.numel:
        return None
    if name == "equal":
        return _equal(spec, x, args[1] if len(args) > 1 else kwargs["other"])
    if name.endswith("norm"):
        return _norm(name, spec, args, kwargs)
    dtype = kwargs.get("dtype")
    summed = name in ("sum", "mean", "prod")
    if len(args) > 1 or kwargs.keys() - {"dtype"} or (dtype is not None and not summed):
        return None
    if name in ("any", "all"):
        seen = x.any() if name == "any" else x.all()
        every = spec.exchange(seen.reshape(1).to(torch.uint8), name)
        kind = torch.uint8 if x.dtype == torch.uint8 else torch.bool
        return (every.amax() if name == "any" else every.amin()).to(x.device, kind)
    if name == "count_nonzero":
        return spec.exchange(x.count_nonzero().reshape(1), name).sum().to(x.device)
    if x.is_complex():
        return None
    return _sum(name, spec, x, dtype) if summed else _extreme(name, spec, x)


def _sum(name: str, spec: IntervalSpec, x: torch.Tensor, dtype: Any) -> torch.Tensor | None:
    inexact = x.is_floating_point()
    if name == "mean" and not inexact and dtype is None:
        return None
    kind = dtype or (x.dtype if inexact else torch.int64)
    wide = torch.float64 if kind.is_floating_point else torch.int64
    low = {"dtype": torch.float32} if x.dtype in _NARROW else {}
    mine = (x.prod(**low) if name == "prod" else x.sum(**low)).to(wide).reshape(1)
    every = spec.exchange(mine, name)
    total = every.prod() if name == "prod" else every.sum()
    return (total / spec.numel if name == "mean" else total).to(x.device, kind)


def _extreme(name: str, spec: IntervalSpec, x: torch.Tensor) -> torch.Tensor:
    least, inexact = name.endswith("min"), x.is_floating_point()
    if x.numel():
        mine = x.min() if least else x.max()
    else:  # the neutral element
        limits = torch.tensor((-math.inf, math.inf) if inexact else (0, 1), device="cpu")
        if not inexact and x.dtype != torch.bool:
            limits = torch.tensor(
                (torch.iinfo(x.dtype).min, torch.iinfo(x.dtype).max), device="cpu"
            )
        mine = limits[int(least)].to(x.device, x.dtype)
    wide = torch.float64 if inexact else torch.int64
    every = spec.exchange(mine.to(wide).reshape(1), name)
    return (every.min() if least else every.max()).to(x.device, x.dtype)


def _norm(name: str, spec: IntervalSpec, args: Any, kwargs: Any) -> torch.Tensor | None:
    order = "p" if name == "norm" else "ord"
    usual = {"norm": "fro", "linalg_vector_norm": 2, "linalg_norm": None}[name]
    p = args[1] if len(args) > 1 else kwargs.get(order, usual)
    more = any(v is not None and v is not False for k, v in kwargs.items() if k != order)
    matrix = name == "linalg_norm" and p is not None and len(spec.shape) != 1
    p = 2.0 if p in (None, "fro") else p
    number = isinstance(p, (int, float)) and args[0].is_floating_point()
    return norms_of([args[0]], p)[0] if number and not (len(args) > 2 or more or matrix) else None


def _equal(spec: IntervalSpec, x: torch.Tensor, other: torch.Tensor) -> bool | None:
    theirs = spec_of(other)
    if theirs is None or not spec.same_cut(theirs):
        return None
    if spec.shape != theirs.shape:
        return False
    same = torch.tensor([torch.equal(x, other)], dtype=torch.uint8, device="cpu")
    return bool(spec.exchange(same, "equal", [theirs]).all())


def _real(dtype: torch.dtype) -> torch.dtype:
    return dtype if not dtype.is_complex else dtype.to_real()
