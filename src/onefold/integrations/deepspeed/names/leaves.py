"""Leaf modules of stage 3: a mark on the module, which libraries read.

The mark does not change how Onefold forms units.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from torch import nn


def set_z3_leaf_module(module: nn.Module, flag: bool = True) -> None:
    """Mark the module as a leaf, or remove the mark."""
    module._z3_leaf = flag  # type: ignore[assignment]


def z3_leaf_module(module: nn.Module) -> bool:
    return bool(getattr(module, "_z3_leaf", False))


def get_z3_leaf_modules(model: nn.Module) -> list[nn.Module]:
    return [module for module in model.modules() if z3_leaf_module(module)]


def _set_where(
    model: nn.Module, fits: Callable[[str, nn.Module], bool], what: Any, flag: bool
) -> list[nn.Module]:
    found = [module for name, module in model.named_modules() if fits(name, module)]
    if not found:
        raise ValueError(f"leaf modules {what!r}: the model has none such; give classes or names.")
    for module in found:
        set_z3_leaf_module(module, flag)
    return found


def set_z3_leaf_modules(
    model: nn.Module, leaf_module_classes: Iterable[type | str], raise_if_not_found: bool = True
) -> list[nn.Module]:
    """Mark the modules of these classes, given by class or by name, as leaves, and return them."""
    wanted = tuple(leaf_module_classes)

    def fits(name: str, module: nn.Module) -> bool:
        kind = type(module)
        return any(
            isinstance(module, w)
            if isinstance(w, type)
            else w in (kind.__name__, f"{kind.__module__}.{kind.__qualname__}")
            for w in wanted
        )

    if not raise_if_not_found and not any(fits(n, m) for n, m in model.named_modules()):
        return []
    return _set_where(model, fits, wanted, True)


def unset_z3_leaf_modules(
    model: nn.Module, leaf_module_classes: Iterable[type | str]
) -> list[nn.Module]:
    wanted = tuple(w for w in leaf_module_classes if isinstance(w, type))
    return _set_where(model, lambda _, module: isinstance(module, wanted), wanted, False)


def set_z3_leaf_modules_by_name(model: nn.Module, names: Iterable[str]) -> list[nn.Module]:
    wanted = frozenset(names)
    return _set_where(model, lambda name, _: name in wanted, sorted(wanted), True)


def set_z3_leaf_modules_by_suffix(model: nn.Module, suffixes: Iterable[str]) -> list[nn.Module]:
    wanted = tuple(suffixes)
    return _set_where(model, lambda name, _: name.endswith(wanted), wanted, True)
