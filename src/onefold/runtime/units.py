"""Which modules become units, and which parameter belongs to which unit. Works on the tree of
modules and their names alone.

A unit is a block: one gather and one reduction. Unless the recipe names the units, they are:

1. the children of every repeated module list (ModuleList, or a Sequential of like children) that is
   not inside another unit;
2. of the rest, any module that holds parameters of its own as large as half a block (an embedding,
   a head);
3. modules that are units of their own (`OwnUnit`: the tiles of onefold.tiling), wherever they are,
   also if the recipe names units;
4. the root, which owns whatever is left.

A parameter that several modules share (tied weights) belongs to the unit around their lowest common
ancestor.
"""

from __future__ import annotations

import difflib
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from os.path import commonprefix

import torch
from torch import nn

from onefold.layout import LOW, Topology
from onefold.recipe import Recipe, Tier
from onefold.recipe.moments import FORMATS
from onefold.recipe.rows import GROUP
from onefold.runtime.boxes import Box, local_of


@dataclass
class Found:
    """A parameter with every place that refers to it.

    `places` are (module, attribute), `place_names` the dotted name of each place, `names` every
    name in `state_dict()` (a module that is in two lists has one place and two names). `box`: what
    this rank holds of it, if it is a DTensor. `partial`: ranks with the same data have parts of its
    gradient.
    """

    param: nn.Parameter
    names: list[str] = field(default_factory=list)
    place_names: list[str] = field(default_factory=list)
    places: list[tuple[nn.Module, str]] = field(default_factory=list)
    box: Box | None = None
    partial: bool = False

    @property
    def local(self) -> torch.Tensor:
        """What this rank holds of it."""
        return local_of(self.param)

    @property
    def room(self) -> int:
        """Elements of the largest part that any rank holds of it."""
        return self.param.numel() if self.box is None else self.box.largest


@dataclass
class UnitSpec:
    """A unit before it is built: its dotted name ("" is the root), its module, and the parameters
    that it owns, in order.
    """

    name: str
    module: nn.Module
    found: list[Found] = field(default_factory=list)

    @property
    def trained(self) -> int:
        """Elements that are trained."""
        return sum(f.param.numel() for f in self.found if f.param.requires_grad)


def find_units(root: nn.Module, wanted: Sequence[str | type] | None) -> list[UnitSpec]:
    """Return the units of `root`: the root's own first, then in the order of `named_modules()`."""
    modules, parameters = dict(root.named_modules()), parameters_of(root)
    units = {*(_blocks(root) if wanted is None else _named(modules, wanted))}
    if wanted is None:
        units |= {*_large_rest(modules, units, parameters)}
    specs = {
        name: UnitSpec(name, module)
        for name, module in modules.items()
        if not name or module in units or isinstance(module, OwnUnit)
    }
    for found in parameters:
        specs[_owner(found.place_names, specs)].found.append(found)
    return [spec for spec in specs.values() if spec.found or spec.name == ""]


def parameters_of(root: nn.Module) -> list[Found]:
    """Return every parameter of `root` with the places that refer to it, in the order of
    `root.named_parameters()`.
    """
    by_id: dict[int, Found] = {}
    modules = dict(root.named_modules(remove_duplicate=False))
    for name, param in root.named_parameters(remove_duplicate=False):
        found = by_id.setdefault(id(param), Found(param))
        found.names.append(name)
        prefix, _, attribute = name.rpartition(".")
        place = modules[prefix], attribute
        if place not in found.places:
            found.place_names.append(name)
            found.places.append(place)
    return list(by_id.values())


def _owner(names: list[str], specs: dict[str, UnitSpec]) -> str:
    common = commonprefix([name.split(".")[:-1] for name in names])  # noqa: RUF071, lists of names
    while common and ".".join(common) not in specs:
        common = common[:-1]
    return ".".join(common)


def _has_parameters(module: nn.Module) -> bool:
    return any(True for _ in module.parameters())


def _blocks(module: nn.Module) -> Iterator[nn.Module]:
    """Yield the children of every outermost repeated module list in `module`."""
    repeated = _is_repeated(module)
    for child in module.children():
        if not repeated:
            yield from _blocks(child)
        elif _has_parameters(child):
            yield child


def _is_repeated(module: nn.Module) -> bool:
    if not isinstance(module, (nn.ModuleList, nn.Sequential, nn.ModuleDict)):
        return False
    kinds = Counter(type(c) for c in module.children() if _has_parameters(c))
    if any(issubclass(kind, OwnUnit) for kind in kinds):
        return False
    return max(kinds.values(), default=0) > (not isinstance(module, nn.ModuleList))


def _large_rest(
    modules: dict[str, nn.Module], blocks: set[nn.Module], parameters: Iterable[Found]
) -> list[nn.Module]:
    """Return the modules outside of the blocks, with parameters of their own that no other module
    has, as large as half a block.
    """
    if not blocks:
        return []
    inside = tuple(f"{name}." for name, module in modules.items() if module in blocks)
    enough = max(1, sum(p.numel() for b in blocks for p in b.parameters()) / len(blocks) / 2)
    own, shared = Counter[nn.Module](), set[nn.Module]()
    for found in parameters:
        for module, _ in found.places:
            own[module] += found.param.numel()
            shared |= {module} if len(found.places) > 1 else set()
    return [
        module
        for name, module in modules.items()
        if name
        and own[module] >= enough
        and module not in shared
        and not f"{name}.".startswith(inside)
        and not isinstance(module, (nn.ParameterList, nn.ParameterDict))
    ]


def _named(modules: dict[str, nn.Module], wanted: Sequence[str | type]) -> Iterator[nn.Module]:
    for want in wanted:
        hits = [
            m
            for n, m in modules.items()
            if (isinstance(m, want) if isinstance(want, type) else want in (n, type(m).__name__))
        ]
        if not hits:
            known = sorted({*filter(None, modules), *(type(m).__name__ for m in modules.values())})
            hint = f"Its modules include {', '.join(known[:8])}."
            if near := difflib.get_close_matches(str(want), known, 3):
                hint = f"Did you mean {' or '.join(map(repr, near))}?"
            raise ValueError(
                f"units names {want!r}, which is no module name and no module class of this model."
                f" {hint}"
            )
        yield from hits


class OwnUnit(nn.Module):
    """A module that is gathered for its own computation and released after it, wherever it is."""


# -- what keeps its dtype ---------------------------------------------------------------------------


def keeps_dtype(found: Found) -> bool:
    """Return whether a parameter computes in its own dtype under any precision: the weight and bias
    of a batch norm with running statistics. As under autocast, these stay in fp32 like the
    statistics; torch refuses 16-bit weights beside them.
    """
    return any(
        isinstance(module, nn.modules.batchnorm._BatchNorm) and module.running_mean is not None
        for module, _ in found.places
    )


# -- where the state of a unit is stored -----------------------------------------------------------
#
# A unit is offloaded as a whole. If only a share of the states leaves the device, the last units of
# the model go first. Their gradients come first in the backward pass and their parameters are needed
# last in the next forward pass, so their transfers have the longest time to hide in. The choice
# depends on sizes alone, so it is the same on every rank.


def offloaded_units(sizes: Sequence[int], recipe: Recipe, ranks: Topology) -> set[int]:
    """Return the indices of the units whose state leaves the device, from the number of trained
    elements in each. Units of frozen parameters alone have size 0. `ranks`: those of the model.
    """
    if recipe.optimizer.tier is Tier.DEVICE and recipe.parameters.tier is Tier.DEVICE:
        return set()
    if recipe.offload_bytes is None and recipe.offload_share >= 1:
        return set(range(len(sizes)))
    moments = 2 * FORMATS[recipe.moments or "fp32"].each
    a_parameter = torch.float32.itemsize + moments + recipe.gradients.dtype.itemsize
    budget = sum(sizes) * recipe.offload_share
    if recipe.offload_bytes is not None:
        divided = ranks.inner if recipe.optimizer.over == GROUP else ranks.size
        divided = divided if recipe.optimizer.sharded else 1
        budget = min(budget, recipe.offload_bytes * divided / a_parameter)
    chosen, taken = set(), 0
    for index in reversed(range(len(sizes))):
        # Units are added until a share is reached. A budget in bytes is never exceeded.
        if taken >= budget or (recipe.offload_bytes is not None and taken + sizes[index] > budget):
            continue
        chosen.add(index)
        taken += sizes[index]
    return chosen


def offload_notes(sizes: Sequence[int], recipe: Recipe, ranks: Topology) -> list[str]:
    """Return a note for the user if a budget is too small for any unit. `sizes`: trained elements
    in each unit.
    """
    if recipe.offload_bytes is None or offloaded_units(sizes, recipe, ranks) or not any(sizes):
        return []
    return [
        f"offload_amount: {recipe.offload_bytes:,} bytes a rank are too few for the states of"
        " any unit, so all of them stay on the device. Give more, or a share such as 0.5 (units go"
        " as a whole)."
    ]


def rests_encoded(found: Found, recipe: Recipe) -> bool:
    """Whether a parameter is one of the frozen weights that are stored encoded: matrices, except
    those of embeddings.
    """
    frozen = recipe.frozen is not None and not found.param.requires_grad and found.param.dim() >= 2
    return (
        frozen
        and found.param.dtype in LOW
        and not any(
            isinstance(module, nn.Embedding | nn.EmbeddingBag) for module, _ in found.places
        )
    )
