"""Models built on the meta device: given memory and values unit by unit, never whole."""

from __future__ import annotations

from collections.abc import Callable, Iterable

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


def materialize(spec: UnitSpec, others: Iterable[UnitSpec], device: torch.device, init: Init | None, root: nn.Module, values: bool) -> None:
    """Give the unit's own meta tensors memory on `device` and, where `values`, initialize them.

    Without values (another rank brings them) only the buffers get memory. Values come from `init(module)`, else from the
    module's `reset_parameters()`, else from the root's `_init_weights(module)`, as transformers models have it.

    Raises:
        ValueError: a module has parameters of its own but nothing to initialize them with.
    """
    for name, module in modules_of(spec, others):
        own = [t for t in (*module._parameters.values(), *module._buffers.values()) if t is not None and t.is_meta]
        if not own:
            continue
        for key, buffer in module._buffers.items():
            if buffer is not None and buffer.is_meta:
                module._buffers[key] = torch.empty_like(buffer, device=device)
        if not values:
            continue
        for key, param in module._parameters.items():
            if param is not None and param.is_meta:
                module._parameters[key] = nn.Parameter(torch.empty_like(param, device=device), requires_grad=param.requires_grad)
        own_way = getattr(module, "reset_parameters", None) if init is None else None
        how = init or getattr(root, "_init_weights", None)
        if own_way is None and how is None:
            raise ValueError(
                f"module {name or '(root)'!r} ({type(module).__name__}) was built on the meta device and has no reset_parameters(): "
                "give shard(..., init=function) a function that initializes one module in place."
            )
        with torch.no_grad():
            if own_way is not None:
                own_way()
            elif how is not None:
                how(module)
