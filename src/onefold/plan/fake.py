"""A module for a while without contents: its tensors swapped for fake ones of the dtype that it
computes in, then put back.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils._pytree import tree_map_only

if TYPE_CHECKING:
    from onefold.plan.values import Integers

_CAST = (torch.float32, torch.float16, torch.bfloat16)


@dataclass
class Faked:
    """Attributes:
    parameters: every parameter once, by its first name.
    storages: identities of all storages that are not activations (parameters, buffers, constants).
    """

    parameters: dict[str, nn.Parameter] = field(default_factory=dict)
    storages: set[int] = field(default_factory=set)


@contextmanager
def faked(module: nn.Module, dtype: torch.dtype | None, integers: Integers) -> Iterator[Faked]:
    """Inside (and inside a FakeTensorMode), `module` holds fake tensors on the CPU; afterwards its
    own, untouched.

    Args:
        dtype: what parameters in fp32, bf16 or fp16 become (None: they stay). Buffers keep their
            dtype, as the engine keeps it.
        integers: learns the contents of integer buffers that are not on the meta device.
    """
    out = Faked()
    seen: dict[int, torch.Tensor] = {}
    undo: list[tuple[dict[str, Any], dict[str, Any]]] = []

    def fake(t: torch.Tensor) -> torch.Tensor:
        if id(t) not in seen:
            is_param = isinstance(t, nn.Parameter)
            kind = dtype if dtype is not None and is_param and t.dtype in _CAST else t.dtype
            new: torch.Tensor = torch.empty_strided(t.size(), t.stride(), dtype=kind)
            if is_param:
                new = nn.Parameter(new, requires_grad=t.requires_grad)
            elif (
                not (t.is_meta or t.dtype.is_floating_point or t.dtype.is_complex)
                and t.layout is torch.strided
            ):
                integers.learn(new, _copy(t))
            out.storages.add(new.untyped_storage()._cdata)
            seen[id(t)] = new
        return seen[id(t)]

    try:
        for prefix, inner in module.named_modules():
            for table in (inner._parameters, inner._buffers, inner.__dict__):
                own = {k: v for k, v in table.items() if _holds_tensors(v)}
                undo.append((table, own))
                for key, value in own.items():
                    table[key] = new = tree_map_only(torch.Tensor, fake, value)
                    if table is inner._parameters and all(
                        new is not p for p in out.parameters.values()
                    ):
                        out.parameters[f"{prefix}.{key}" if prefix else key] = new
        yield out
    finally:
        for table, own in undo:
            table.update(own)


def _holds_tensors(value: Any) -> bool:
    return isinstance(value, torch.Tensor) or (
        isinstance(value, list | tuple) and any(isinstance(v, torch.Tensor) for v in value)
    )


def _copy(t: torch.Tensor) -> torch.Tensor:
    from torch._subclasses.fake_tensor import unset_fake_temporarily

    with unset_fake_temporarily(), torch.no_grad():
        return t.detach().cpu().clone()


def fake_batch(batch: Any, dtype: torch.dtype | None, integers: Integers) -> Any:
    """A batch of fake tensors on the CPU, sizes and strides kept; integers keep their contents,
    floats become `dtype` (None: keep theirs).

    Integers on the meta device are taken as zeros.
    """

    seen: dict[int, torch.Tensor] = {}

    def fake(t: torch.Tensor) -> torch.Tensor:
        if id(t) in seen:
            return seen[id(t)]
        kind = dtype if dtype is not None and t.dtype in _CAST else t.dtype
        seen[id(t)] = new = torch.empty_strided(t.size(), t.stride(), dtype=kind)
        if not t.dtype.is_floating_point and not t.dtype.is_complex:
            integers.learn(new, _zeros(t) if t.is_meta else _copy(t))
        return new

    return tree_map_only(torch.Tensor, fake, batch)


def _zeros(t: torch.Tensor) -> torch.Tensor:
    from torch._subclasses.fake_tensor import unset_fake_temporarily

    with unset_fake_temporarily():
        return torch.zeros(t.size(), dtype=t.dtype)


@contextmanager
def passing_as_real() -> Iterator[None]:
    """Inside, transformers takes fake tensors for real ones.

    It asks no questions of fake tensors, and so builds attention masks of length x length that it
    leaves out in training. Here such questions have answers (plan/values.py), and a trace must see
    what training does.
    """
    asked = [
        m
        for m in map(
            sys.modules.get, ("transformers.utils.import_utils", "transformers.utils.generic")
        )
        if m is not None
    ]
    before = [(m, m.__dict__["is_fake_tensor"]) for m in asked if "is_fake_tensor" in m.__dict__]
    try:
        for module, _ in before:
            module.__dict__["is_fake_tensor"] = lambda _: False
        yield
    finally:
        for module, own in before:
            module.__dict__["is_fake_tensor"] = own
