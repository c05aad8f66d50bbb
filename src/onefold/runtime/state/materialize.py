"""Models built on the meta device: memory and values unit by unit, never all at once."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from functools import partial
from typing import Protocol

import torch
from torch import nn

from onefold.runtime.units import UnitSpec
from onefold.runtime.unset import is_marked, mark

Init = Callable[[nn.Module], object]


def modules_of(spec: UnitSpec, others: Iterable[UnitSpec]) -> list[tuple[str, nn.Module]]:
    """The modules of a unit that are not inside another unit, with their dotted names."""
    return _walk(spec.name, spec.module, {id(o.module) for o in others if o is not spec})


def _walk(prefix: str, module: nn.Module, without: set[int]) -> list[tuple[str, nn.Module]]:
    # Not a nested function: one that calls itself is a reference cycle, and would keep the model
    # alive until the collector runs.
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
    incoming: Collection[str] = (),
    memory: bool = False,
) -> list[tuple[str, nn.Module, str]]:
    """Give the unit's own meta tensors memory on `device`, and initialize them if `values`.

    Initial values come from `init(module)`, else from the module's `reset_parameters()`, else from
    the root's `_init_weights(module)`, which transformers models have. A parameter that nothing
    initializes stays on the meta device, or is marked (runtime/uninitialized.py).

    Args:
        values: False if another rank has the values; only buffers then get memory.
        incoming: names of parameters that will be loaded. They stay on the meta device while the
            initializer runs, so that no value is made for them.
        memory: give the parameters that are loaded, or not initialized, memory of their own.

    Returns:
        the buffers that nothing gave a value: (name, module, key).
    """
    uninitialized = []
    for name, module in modules_of(spec, others):
        dot = f"{name}." if name else ""
        buffers = [key for key, b in module._buffers.items() if b is not None and b.is_meta]
        ours = {key: p for key, p in module._parameters.items() if p is not None and p.is_meta}
        later = {key: p for key, p in ours.items() if dot + key in incoming}
        for key in buffers:
            module._buffers[key] = mark(torch.empty_like(module._buffers[key], device=device))  # type: ignore[arg-type]
        how = _initializer(module, init, root)
        # Whether the module has parameters with values, which the initializer would overwrite
        there = any(p is not None and not p.is_meta for p in module._parameters.values())
        if values and how is not None and (len(later) < len(ours) or (buffers and not there)):
            for key in ours.keys() - later.keys():
                _put(module, key, mark(_empty(ours[key], device)))  # type: ignore[arg-type]
            with torch.no_grad():
                how()
        elif values and memory:
            for key in ours.keys() - later.keys():
                _put(module, key, mark(_empty(ours[key], device)))  # type: ignore[arg-type]
        if values:
            uninitialized += [
                (dot + key, module, key)
                for key in buffers
                if (b := module._buffers[key]) is not None and is_marked(b)
            ]
        if memory:
            for key, param in later.items():
                _put(module, key, _empty(param, device))
    return uninitialized


def _empty(like: nn.Parameter, device: torch.device) -> nn.Parameter:
    param = nn.Parameter(torch.empty_like(like, device=device), requires_grad=like.requires_grad)
    # The same dicts, so that the handles that the user holds still remove hooks
    param._backward_hooks = like._backward_hooks
    if like._post_accumulate_grad_hooks is not None:
        param._post_accumulate_grad_hooks = like._post_accumulate_grad_hooks
    return param


def _put(module: nn.Module, key: str, param: nn.Parameter | None) -> None:
    # An RNN also keeps a list of its parameters, which it updates on assignment
    if isinstance(module, nn.RNNBase):
        setattr(module, key, param)
    else:
        module._parameters[key] = param


def _initializer(
    module: nn.Module, init: Init | None, root: nn.Module
) -> Callable[[], object] | None:
    """Return the function that initializes the module's own tensors; None if there is none."""
    own_way: Callable[[], object] | None = getattr(module, "reset_parameters", None)
    how = init or getattr(root, "_init_weights", None)
    if init is None and own_way is not None:
        return own_way
    return partial(how, module) if how is not None else None


def tie(specs: Iterable[UnitSpec]) -> None:
    """Tie parameters again that were one object before `materialize`, which made a new one for each
    module that refers to it.
    """
    for spec in specs:
        for found in spec.found:
            tensors = [module._parameters[key] for module, key in found.places]
            whole = next((t for t in tensors if t is not None and not is_marked(t)), tensors[0])
            for module, attribute in found.places:
                if module._parameters[attribute] is not whole:
                    _put(module, attribute, whole)


# -- values that another object keeps --------------------------------------------------------------
#
# The keeper of a parameter's values is an attribute of the parameter, named by `KEEPER`. `shard` asks
# it for a unit's values just before it lays out the unit, so no rank holds more than one unit of them.


#: The attribute of a parameter that refers to its keeper.
KEEPER = "_onefold_keeper"


class Keeper(Protocol):
    """An object that keeps the values of parameters which no engine has laid out yet."""

    def give_up(self, params: Sequence[nn.Parameter]) -> None:
        """Make the parameters whole on every rank, with rank 0's values, and forget them.
        Collective.
        """


def fetch(params: Iterable[nn.Parameter]) -> None:
    """Make those parameters whole that have a keeper; the others stay as they are. Collective if
    any has one.
    """
    kept: dict[int, tuple[Keeper, list[nn.Parameter]]] = {}
    for param in params:
        keeper = param.__dict__.get(KEEPER)
        if keeper is not None:
            kept.setdefault(id(keeper), (keeper, []))[1].append(param)
    for keeper, held in kept.values():
        keeper.give_up(held)
