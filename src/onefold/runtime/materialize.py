"""Models built on the meta device: given memory and values unit by unit, never whole."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable

import torch
from torch import nn

from onefold.runtime.units import UnitSpec

Init = Callable[[nn.Module], object]


def modules_of(spec: UnitSpec, others: Iterable[UnitSpec]) -> list[tuple[str, nn.Module]]:
    """The modules of a unit that are not inside another unit, with their dotted names."""
    return _walk(spec.name, spec.module, {id(o.module) for o in others if o is not spec})


def _walk(prefix: str, module: nn.Module, without: set[int]) -> list[tuple[str, nn.Module]]:
    # Not a nested function: one that calls itself is a reference cycle, and would keep the model alive until the collector runs.
    out = [(prefix, module)]
    for name, child in module.named_children():
        if id(child) not in without:
            out += _walk(f"{prefix}.{name}" if prefix else name, child, without)
    return out


def has_meta(module: nn.Module) -> bool:
    return any(t.is_meta for t in (*module.parameters(), *module.buffers()))


def materialize(
    spec: UnitSpec,
    others: Iterable[UnitSpec],
    device: torch.device,
    init: Init | None,
    root: nn.Module,
    values: bool,
    coming: Collection[str] = (),
    memory: bool = False,
) -> list[str]:
    """Give the unit's own meta tensors memory on `device` and, where `values`, initialize them.

    Without values (another rank brings them) only the buffers get memory. Values come from `init(module)`, else from the
    module's `reset_parameters()`, else from the root's `_init_weights(module)`, as transformers models have it. The parameters
    named in `coming` are on the meta device while that runs, so that no value is made for them; somebody writes them later, into
    their shard, or with `memory` into memory of their own, which is not touched here.

    Returns:
        the names of buffers that nothing gave a value.

    Raises:
        ValueError: a module has parameters of its own but nothing to initialize them with.
    """
    unset = []
    for name, module in modules_of(spec, others):
        dot = f"{name}." if name else ""
        buffers = [key for key, b in module._buffers.items() if b is not None and b.is_meta]
        ours = {key: p for key, p in module._parameters.items() if p is not None and p.is_meta}
        later = {key: p for key, p in ours.items() if dot + key in coming}
        for key in buffers:
            module._buffers[key] = _marked(module._buffers[key], device)  # type: ignore[arg-type]
        if values and (buffers or len(later) < len(ours)):
            for key in ours.keys() - later.keys():
                _put(module, key, _empty(ours[key], device))
            _initialize(name, module, init, root, needed=len(later) < len(ours) or not coming)
            unset += [dot + key for key in buffers if (b := module._buffers[key]) is not None and _is_marked(b)]
        if memory:
            for key, param in later.items():
                _put(module, key, _empty(param, device))
    return unset


def _marked(like: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Memory for a buffer, such that it shows whether anybody writes to it."""
    buffer = torch.empty_like(like, device=device)
    if buffer.is_floating_point():
        buffer.fill_(math.nan)
    buffer._onefold_version = buffer._version  # type: ignore[attr-defined]
    return buffer


def _is_marked(buffer: torch.Tensor) -> bool:
    # Writing into a tensor counts up its version (but not through `.data`); a buffer that was assigned anew has no mark.
    if getattr(buffer, "_onefold_version", None) != buffer._version:
        return False
    return not buffer.is_floating_point() or bool(buffer.isnan().all())


def _empty(like: nn.Parameter, device: torch.device) -> nn.Parameter:
    return nn.Parameter(torch.empty_like(like, device=device), requires_grad=like.requires_grad)


def _put(module: nn.Module, key: str, param: nn.Parameter | None) -> None:
    if isinstance(module, nn.RNNBase):  # it keeps a list of its parameters besides, which follows an assignment
        setattr(module, key, param)
    else:
        module._parameters[key] = param


def _initialize(name: str, module: nn.Module, init: Init | None, root: nn.Module, needed: bool) -> None:
    own_way = getattr(module, "reset_parameters", None) if init is None else None
    how = init or getattr(root, "_init_weights", None)
    with torch.no_grad():
        if own_way is not None:
            own_way()
        elif how is not None:
            how(module)
        elif needed:
            raise ValueError(
                f"module {name or '(root)'!r} ({type(module).__name__}) was built on the meta device and has no reset_parameters(): "
                "give shard(..., init=function) a function that initializes one module in place."
            )


def tie(specs: Iterable[UnitSpec]) -> None:
    """Let parameters that were one object before `materialize` gave each of its places memory be one again."""
    for spec in specs:
        for found in spec.found:
            (first, key), *rest = found.places
            for module, attribute in rest:
                _put(module, attribute, first._parameters[key])
