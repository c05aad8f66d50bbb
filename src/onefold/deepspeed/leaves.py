"""Leaf modules of stage 3: a mark on the module, which libraries read.

The mark does not change how Onefold forms units: a block is gathered whole, whichever of its parts
a rank uses.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from typing import Any

from torch import nn

__all__ = [
    "get_z3_leaf_modules",
    "set_z3_leaf_module",
    "set_z3_leaf_modules",
    "set_z3_leaf_modules_by_name",
    "set_z3_leaf_modules_by_suffix",
    "unset_z3_leaf_modules",
    "z3_leaf_module",
]


def set_z3_leaf_module(module: nn.Module, flag: bool = True) -> None:
    """Mark the module as a leaf, or remove the mark."""
    module._z3_leaf = flag  # type: ignore[assignment]


def z3_leaf_module(module: nn.Module) -> bool:
    return bool(getattr(module, "_z3_leaf", False))


def get_z3_leaf_modules(model: nn.Module) -> list[nn.Module]:
    return [module for module in model.modules() if z3_leaf_module(module)]


def _is_a(name: str, module: nn.Module, wanted: Any) -> bool:
    """Whether the module is of this class, given by class, by name or by full name."""
    if not isinstance(wanted, (type, str)):
        raise ValueError(f"leaf module {wanted!r}: expected a class, or the name of one.")
    kind = type(module)
    if isinstance(wanted, type):
        return isinstance(module, wanted)
    return wanted in (kind.__name__, f"{kind.__module__}.{kind.__qualname__}")


def _mark(
    fits: Callable[[str, nn.Module, Any], bool],
    model: nn.Module,
    names: Iterable[Any],
    flag: bool = True,
    raise_if_not_found: bool = True,
) -> tuple[list[nn.Module], list[Any]]:
    """Mark the modules that fit one of `names` as leaves, or remove the mark. Returns them, and those
    of `names` that none fits.

    Args:
        fits: whether a module, and its name in `named_modules()`, fit one of them.

    Raises:
        ValueError: with `raise_if_not_found`, no module is of the classes, or a name or a suffix fits
            none.
    """
    named = list(model.named_modules())
    fitting = {one: [m for name, m in named if fits(name, m, one)] for one in names}
    found = list(dict.fromkeys(itertools.chain.from_iterable(fitting.values())))
    missing = [one for one, modules in fitting.items() if not modules]
    for module in found:
        set_z3_leaf_module(module, flag)
    if raise_if_not_found and missing and not (fits is _is_a and found):
        raise ValueError(
            f"leaf modules {missing!r}: the model has none such; give classes or names."
        )
    return found, missing


def set_z3_leaf_modules(
    model: nn.Module, leaf_module_classes: Iterable[type | str], raise_if_not_found: bool = True
) -> list[nn.Module]:
    """Mark the modules of these classes, given by class or by name, as leaves. Returns them.

    Raises:
        ValueError: there is none, and `raise_if_not_found`.
    """
    return _mark(_is_a, model, leaf_module_classes, True, raise_if_not_found)[0]


def unset_z3_leaf_modules(
    model: nn.Module, leaf_module_classes: Iterable[type | str], raise_if_not_found: bool = True
) -> list[nn.Module]:
    """Remove the marks of `set_z3_leaf_modules`, likewise."""
    return _mark(_is_a, model, leaf_module_classes, False, raise_if_not_found)[0]


def set_z3_leaf_modules_by_name(
    model: nn.Module,
    module_names: Iterable[str],
    flag: bool = True,
    raise_if_not_found: bool = True,
) -> tuple[list[nn.Module], list[str]]:
    """Mark the modules of these names in `named_modules()`: see `_mark`."""
    return _mark(
        lambda name, _, wanted: name == wanted, model, module_names, flag, raise_if_not_found
    )


def set_z3_leaf_modules_by_suffix(
    model: nn.Module,
    module_name_suffixes: Iterable[str],
    flag: bool = True,
    raise_if_not_found: bool = True,
) -> tuple[list[nn.Module], list[str]]:
    """Mark the modules whose names end so: see `_mark`."""
    return _mark(
        lambda name, _, wanted: name.endswith(wanted),
        model,
        module_name_suffixes,
        flag,
        raise_if_not_found,
    )
