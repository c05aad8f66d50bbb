"""Leaf modules of stage 3: a mark on the module, which libraries read.

The mark does not change how Onefold forms units: a block is gathered whole, whichever of its parts
a rank uses.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Iterable
from typing import Any

from torch import nn

from onefold.deepspeed.schema import LeafModules
from onefold.deepspeed.utilities import logger

__all__ = [
    "get_z3_leaf_modules",
    "set_z3_leaf_module",
    "set_z3_leaf_modules",
    "set_z3_leaf_modules_by_name",
    "set_z3_leaf_modules_by_suffix",
    "unset_z3_leaf_modules",
    "z3_leaf_module",
    "z3_leaf_parameter",
]


def set_z3_leaf_module(module: nn.Module, flag: bool = True) -> None:
    """Mark the module as a leaf, or remove the mark."""
    module._z3_leaf = flag  # type: ignore[assignment]


def z3_leaf_module(module: nn.Module) -> bool:
    return bool(getattr(module, "_z3_leaf", False))


def z3_leaf_parameter(param: nn.Parameter) -> bool:
    """Whether an engine at stage 3 has found the parameter in a leaf module."""
    return hasattr(param, "ds_z3_leaf_module")


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


#: {key of `zero_optimization.leaf_module`: whether a module, and its name in `named_modules()`, fit}
_FITS: dict[str, Callable[[str, nn.Module, Any], bool]] = {
    "classes": _is_a,
    "names": lambda name, module, wanted: bool(name == wanted),
    "name_suffixes": lambda name, module, wanted: name.endswith(wanted),
}


def _mark(
    kind: str,
    model: nn.Module,
    names: Iterable[Any],
    flag: bool = True,
    raise_if_not_found: bool = True,
) -> tuple[list[nn.Module], list[Any]]:
    """Mark the modules that fit one of `names` as leaves, or remove the mark. Returns them, and those
    of `names` that none fits.

    Args:
        kind: what `names` are: a key of `_FITS`.

    Raises:
        ValueError: with `raise_if_not_found`, no module is of the classes, or a name or a suffix fits
            none.
    """
    named = list(model.named_modules())
    fitting = {one: [m for name, m in named if _FITS[kind](name, m, one)] for one in names}
    found = list(dict.fromkeys(itertools.chain.from_iterable(fitting.values())))
    missing = [one for one, modules in fitting.items() if not modules]
    for module in found:
        set_z3_leaf_module(module, flag)
    if raise_if_not_found and missing and not (kind == "classes" and found):
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
    return _mark("classes", model, leaf_module_classes, True, raise_if_not_found)[0]


def unset_z3_leaf_modules(
    model: nn.Module, leaf_module_classes: Iterable[type | str], raise_if_not_found: bool = True
) -> list[nn.Module]:
    """Remove the marks of `set_z3_leaf_modules`, likewise."""
    return _mark("classes", model, leaf_module_classes, False, raise_if_not_found)[0]


def set_z3_leaf_modules_by_name(
    model: nn.Module,
    module_names: Iterable[str],
    flag: bool = True,
    raise_if_not_found: bool = True,
) -> tuple[list[nn.Module], list[str]]:
    """Mark the modules of these names in `named_modules()`: see `_mark`."""
    return _mark("names", model, module_names, flag, raise_if_not_found)


def set_z3_leaf_modules_by_suffix(
    model: nn.Module,
    module_name_suffixes: Iterable[str],
    flag: bool = True,
    raise_if_not_found: bool = True,
) -> tuple[list[nn.Module], list[str]]:
    """Mark the modules whose names end so: see `_mark`."""
    return _mark("name_suffixes", model, module_name_suffixes, flag, raise_if_not_found)


def mark_configured(model: nn.Module, section: LeafModules, optimizer: Any) -> None:
    """Mark the leaf modules that `zero_optimization.leaf_module` names. What fits no module is named
    in a warning.

    Sets `optimizer.leaf_parameters`, {leaf module: its trainable parameters}, and
    `ds_z3_leaf_module` of these parameters. Neither keeps the model alive.
    """
    for kind in _FITS:
        _, missing = _mark(kind, model, getattr(section, kind), raise_if_not_found=False)
        if missing and kind != "classes":
            logger.warning("zero_optimization.leaf_module.%s fits no module: %s", kind, missing)
    if optimizer is None:
        return
    optimizer.leaf_parameters = weakref.WeakKeyDictionary()
    for leaf in get_z3_leaf_modules(model):
        parameters = [p for p in leaf.parameters() if p.requires_grad]
        optimizer.leaf_parameters[leaf] = parameters
        for parameter in parameters:
            parameter.__dict__["ds_z3_leaf_module"] = weakref.proxy(leaf)
