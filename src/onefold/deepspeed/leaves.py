"""Leaf modules of stage 3: a mark on the module, which libraries read.

The mark does not change how Onefold forms units: a block is gathered whole, whichever of its parts
a rank uses.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from torch import nn

from onefold.deepspeed.schema import LeafModules
from onefold.deepspeed.small import logger

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


def _of_class(model: nn.Module, wanted: Iterable[type | str], flag: bool) -> list[nn.Module]:
    """Mark the modules of these classes, given by class, by name or by full name."""
    known = tuple(wanted)
    if not all(isinstance(w, (type, str)) for w in known):
        raise ValueError(f"leaf modules {known!r}: expected classes, or names of classes.")
    found = []
    for module in model.modules():
        kind = type(module)
        names = (kind.__name__, f"{kind.__module__}.{kind.__qualname__}")
        if any(isinstance(module, w) if isinstance(w, type) else w in names for w in known):
            set_z3_leaf_module(module, flag)
            found.append(module)
    return found


def _named(
    model: nn.Module, wanted: Iterable[str], fits: Callable[[str, str], bool], flag: bool
) -> tuple[list[nn.Module], list[str]]:
    """Mark the modules whose names fit. Also return those of `wanted` that none fits."""
    found: dict[int, nn.Module] = {}
    missing = []
    for text in wanted:
        fitting = [module for name, module in model.named_modules() if fits(name, text)]
        for module in fitting:
            set_z3_leaf_module(module, flag)
            found[id(module)] = module
        if not fitting:
            missing.append(text)
    return list(found.values()), missing


def _none_such(what: Any) -> ValueError:
    return ValueError(f"leaf modules {what!r}: the model has none such; give classes or names.")


def set_z3_leaf_modules(
    model: nn.Module, leaf_module_classes: Iterable[type | str], raise_if_not_found: bool = True
) -> list[nn.Module]:
    """Mark the modules of these classes, given by class or by name, as leaves, and return them.

    Raises:
        ValueError: there is none, and `raise_if_not_found`.
    """
    wanted = list(leaf_module_classes)
    found = _of_class(model, wanted, True)
    if not found and raise_if_not_found:
        raise _none_such(wanted)
    return found


def unset_z3_leaf_modules(
    model: nn.Module, leaf_module_classes: Iterable[type | str], raise_if_not_found: bool = True
) -> list[nn.Module]:
    wanted = list(leaf_module_classes)
    found = _of_class(model, wanted, False)
    if not found and raise_if_not_found:
        raise _none_such(wanted)
    return found


def set_z3_leaf_modules_by_name(
    model: nn.Module,
    module_names: Iterable[str],
    flag: bool = True,
    raise_if_not_found: bool = True,
) -> tuple[list[nn.Module], list[str]]:
    """Mark the modules of these names in `named_modules()`. Returns them, and the names that the
    model does not have.

    Raises:
        ValueError: a name is missing, and `raise_if_not_found`.
    """
    found, missing = _named(model, module_names, str.__eq__, flag)
    if missing and raise_if_not_found:
        raise _none_such(missing)
    return found, missing


def set_z3_leaf_modules_by_suffix(
    model: nn.Module,
    module_name_suffixes: Iterable[str],
    flag: bool = True,
    raise_if_not_found: bool = True,
) -> tuple[list[nn.Module], list[str]]:
    """Mark the modules whose names in `named_modules()` end so. Returns them, and the suffixes that
    fit none.

    Raises:
        ValueError: a suffix fits none, and `raise_if_not_found`.
    """
    found, missing = _named(model, module_name_suffixes, str.endswith, flag)
    if missing and raise_if_not_found:
        raise _none_such(missing)
    return found, missing


def mark_configured(model: nn.Module, section: LeafModules) -> list[nn.Module]:
    """Mark the leaf modules that `zero_optimization.leaf_module` names, and return all of the
    model's. What fits no module is named in a warning.
    """
    _of_class(model, section.classes, True)
    for key, fits in (("names", str.__eq__), ("name_suffixes", str.endswith)):
        _, missing = _named(model, getattr(section, key), fits, True)
        if missing:
            logger.warning("zero_optimization.leaf_module.%s fits no module: %s", key, missing)
    return get_z3_leaf_modules(model)
