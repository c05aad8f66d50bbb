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


def _is_a(name: str, module: nn.Module, wanted: Any) -> bool:
    """Whether the module is of this class, given by class, by name or by full name."""
    if not isinstance(wanted, (type, str)):
        raise ValueError(f"leaf module {wanted!r}: expected a class, or the name of one.")
    kind = type(module)
    if isinstance(wanted, type):
        return isinstance(module, wanted)
    return wanted in (kind.__name__, f"{kind.__module__}.{kind.__qualname__}")


def _is_called(name: str, module: nn.Module, wanted: Any) -> bool:
    return bool(name == wanted)


def _ends_so(name: str, module: nn.Module, wanted: Any) -> bool:
    return name.endswith(wanted)


def _mark(
    model: nn.Module,
    wanted: Iterable[Any],
    fits: Callable[[str, nn.Module, Any], bool],
    flag: bool = True,
    must: bool = False,
) -> tuple[list[nn.Module], list[Any]]:
    """Mark the modules that fit one of `wanted`. Returns them, and those of `wanted` that none fits.

    Raises:
        ValueError: with `must`, no module is of the classes, or a name or a suffix fits none.
    """
    found: dict[int, nn.Module] = {}
    missing = []
    for one in wanted:
        fitting = [module for name, module in model.named_modules() if fits(name, module, one)]
        for module in fitting:
            set_z3_leaf_module(module, flag)
            found[id(module)] = module
        if not fitting:
            missing.append(one)
    if must and missing and not (fits is _is_a and found):
        raise ValueError(
            f"leaf modules {missing!r}: the model has none such; give classes or names."
        )
    return list(found.values()), missing


def set_z3_leaf_modules(
    model: nn.Module, leaf_module_classes: Iterable[type | str], raise_if_not_found: bool = True
) -> list[nn.Module]:
    """Mark the modules of these classes, given by class or by name, as leaves, and return them.

    Raises:
        ValueError: there is none, and `raise_if_not_found`.
    """
    return _mark(model, leaf_module_classes, _is_a, True, raise_if_not_found)[0]


def unset_z3_leaf_modules(
    model: nn.Module, leaf_module_classes: Iterable[type | str], raise_if_not_found: bool = True
) -> list[nn.Module]:
    return _mark(model, leaf_module_classes, _is_a, False, raise_if_not_found)[0]


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
    return _mark(model, module_names, _is_called, flag, raise_if_not_found)


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
    return _mark(model, module_name_suffixes, _ends_so, flag, raise_if_not_found)


def mark_configured(model: nn.Module, section: LeafModules) -> list[nn.Module]:
    """Mark the leaf modules that `zero_optimization.leaf_module` names, and return all of the
    model's. What fits no module is named in a warning.
    """
    _mark(model, section.classes, _is_a)
    for key, fits in (("names", _is_called), ("name_suffixes", _ends_so)):
        _, missing = _mark(model, getattr(section, key), fits)
        if missing:
            logger.warning("zero_optimization.leaf_module.%s fits no module: %s", key, missing)
    return get_z3_leaf_modules(model)
