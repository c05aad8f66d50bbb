"""A unit: a block's flat buffers with one lifecycle.

| from      | to        | when                                                      |
|-----------|-----------|-----------------------------------------------------------|
| SHARDED   | FETCHING  | this rank's interval is being read from a disk, ahead      |
| FETCHING  | GATHERING | a gather is launched, as from SHARDED                     |
| FETCHING  | SHARDED   | it was not needed                                         |
| SHARDED   | GATHERING | a gather is launched (used, prefetched, or joined)         |
| GATHERING | GATHERED  | its bytes have arrived                                    |
| GATHERED  | SHARDED   | released: the buffer goes back to the pool                |
| GATHERED  | STALE     | masters were written to (an optimizer step)                |
| STALE     | GATHERING | the resident copy is refreshed                              |

Any other move is a bug of the engine and raises.
"""

from __future__ import annotations

import enum
import itertools
import weakref
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

import torch
from torch import nn

from onefold.comm import Pending
from onefold.device import Ticket
from onefold.layout import LOW, Dtypes, Tiers, grouped_as
from onefold.recipe import Recipe, Tier
from onefold.recipe.moments import bytes_an_element
from onefold.runtime.entry import Entry, declared_dtype
from onefold.runtime.flat import Flat
from onefold.runtime.units import Found, UnitSpec, WeightTile

if TYPE_CHECKING:
    from onefold.runtime.parameters.owning_engine import OwningEngine
    from onefold.runtime.progress import Resources


class State(enum.Enum):
    SHARDED = "sharded"
    FETCHING = "fetching"
    GATHERING = "gathering"
    GATHERED = "gathered"
    STALE = "stale"


_ALLOWED = {
    (State.SHARDED, State.FETCHING),
    (State.FETCHING, State.GATHERING),
    (State.FETCHING, State.SHARDED),
    (State.SHARDED, State.GATHERING),
    (State.GATHERING, State.GATHERED),
    (State.GATHERED, State.SHARDED),
    (State.GATHERED, State.STALE),
    (State.STALE, State.GATHERING),
}


class Unit:
    """One unit of an engine.

    Attributes:
        name: the dotted name of its module, "(root)" for the root; path: the same, "" for the root.
        numel: elements of its flat buffers, alignment and padding included.
        gathered_bytes: bytes of its buffers while it is gathered.
        handles: tensors saved for backward that stand for a part of its gathered buffers.
        depth: forward passes of its module that are open.
        calls: forward passes with gradients whose backward has not run.
        waiting: trainable parameters whose gradient has not come in this backward pass.
        aside: those whose small gradient waits on the parameter for others (`Reducer._put_aside`).
            aside_bytes: of these gradients together.
        claimed: a pass uses the gathered buffers; until then they are only prefetched or joined.
        replayed: the count of `Gatherer.reached` when its forward pass was recomputed in this
            backward pass; None if it was not.
    """

    def __init__(self, name: str, index: int, module: nn.Module, flats: list[Flat]) -> None:
        self.name, self.path, self.index, self.flats = name or "(root)", name, index, flats
        self.module = weakref.ref(module)
        # It can be released at any time: its backward reads no parameter, or (a tile) reads it only
        # for a moment, through what autograd saved.
        self.looks_up_only = type(module) is nn.Embedding or isinstance(module, WeightTile)
        # A pass uses it more than once (a tile of tied weights). Only the first step shows where.
        self.revisited = isinstance(module, WeightTile) and module.shared
        self.tile = isinstance(module, WeightTile)
        # Foreseen in forward passes only: the backward pass of a look-up in tiles uses no tile.
        self.forward_only = (
            isinstance(module, WeightTile) and module.looked_up and not module.shared
        )
        self.state = State.GATHERED if self.resident else State.SHARDED
        self.handles = self.depth = self.calls = 0
        self.claimed = self.sticky = False
        self.replayed: int | None = None
        self.waiting: set[int] = set()
        self.aside: list[Entry] = []
        self.aside_bytes = 0
        self.ready = self.launched = self.late = False
        self.pending: list[Pending] = []
        self.gathered_bytes = sum(
            f.layout.numel * f.dtypes.compute.itemsize for f in flats if not f.resident
        )
        self.arriving: list[Ticket] = []  # the copies to the device that its gather began with

    @property
    def resident(self) -> bool:
        """Whether its whole parameters exist all the time (replicated), or it has none."""
        return all(flat.resident for flat in self.flats)

    @property
    def ungathered(self) -> bool:
        """Whether its gather has not been launched."""
        return self.state in (State.SHARDED, State.FETCHING)

    @property
    def numel(self) -> int:
        return sum(flat.layout.numel for flat in self.flats)

    @property
    def awaited(self) -> frozenset[int]:
        """The numbers of the entries that are trainable and reduced."""
        return (
            self.flats[0].awaited
            if len(self.flats) == 1
            else frozenset().union(*(flat.awaited for flat in self.flats))
        )

    @property
    def entries(self) -> list[Entry]:
        return [e for flat in self.flats for e in flat.entries]

    @property
    def holds_frozen(self) -> bool:
        """Whether some of its parameters get no gradient. A gradient would tell when they are no
        longer needed.
        """
        return any(e.flat.unsharded or not e.active for e in self.entries)

    def encloses(self, other: Unit) -> bool:
        """Whether the other unit's module lies inside this one's."""
        return self is not other and (self.path == "" or other.path.startswith(self.path + "."))

    def move(self, state: State, step: int) -> None:
        if (self.state, state) not in _ALLOWED:
            raise AssertionError(
                f"unit {self.name!r} cannot go from {self.state.value} to {state.value} (step"
                f" {step})"
            )
        self.state = state


def bind(
    specs: Sequence[UnitSpec],
    resources: Resources,
    engine: OwningEngine,
    offloaded: Collection[int],
) -> list[Unit]:
    """Build the units of `specs`. A unit has one flat buffer for each kind of its parameters: of
    one dtype, trained or frozen, stored encoded or not.

    Each unit reserves eight numbers for its flat buffers. Further ones are numbered after those of
    all units.

    Args:
        engine: the one that parameters ask. offloaded: the indices of the units whose state is
            offloaded.
    """
    recipe, more = resources.recipe, itertools.count(8 * len(specs) + 1)
    units = []
    for index, spec in enumerate(specs):
        kinds: dict[tuple[torch.dtype, bool, bool], list[Found]] = {}
        for found in spec.found:
            like = grouped_as(declared_dtype(found.param), recipe)
            kind = like, found.param.requires_grad, rests_encoded(found, recipe)
            kinds.setdefault(kind, []).append(found)
        flats = []
        for i, ((_, trainable, encoded), of_kind) in enumerate(kinds.items()):
            dtypes = Dtypes.of(declared_dtype(of_kind[0].param), trainable, recipe)
            number = 8 * index + i if i < 8 else next(more)
            tiers = Tiers.of(trainable, recipe) if index in offloaded and not encoded else None
            name = spec.name or "(root)"
            flats.append(Flat(name, of_kind, dtypes, number, resources, engine, tiers, encoded))
        units.append(Unit(spec.name, index, spec.module, flats))
    return units


def at_the_turn(forward: Sequence[Unit], backward: Sequence[Unit]) -> list[Unit]:
    """Return the units that a forward pass uses last and its backward pass first, with no other
    unit in between. `forward` and `backward` are units in the order of use.

    These are the last unit of the forward pass and the units that enclose it. Two kinds are left
    out: tiles, which are small so that only one is held at a time, and units that the forward pass
    uses several times, since ranks may be at different uses of them.
    """
    last, found = forward[-1], []
    for unit in backward:
        if not (unit is last or unit.encloses(last)):
            break
        if not unit.tile and sum(used is unit for used in forward) == 1:
            found.append(unit)
    return found


# -- which units are offloaded ---------------------------------------------------------------------
#
# A unit is offloaded as a whole. If only a share of the states leaves the device, the last units of
# the model go first. Their gradients come first in the backward pass and their parameters are needed
# last in the next forward pass, so their transfers have the longest time to hide in. The choice
# depends on sizes alone, so it is the same on every rank.


def offloaded_units(specs: Sequence[UnitSpec], recipe: Recipe, ranks: int) -> set[int]:
    """Return the indices of the units whose state leaves the device."""
    return offloaded_of_sizes(
        [sum(f.param.numel() for f in spec.found if f.param.requires_grad) for spec in specs],
        recipe,
        ranks,
    )


def offloaded_of_sizes(sizes: Sequence[int], recipe: Recipe, ranks: int) -> set[int]:
    """Do the same from the number of trained elements in each unit, which is what a plan knows of a
    model. Units of frozen parameters alone have size 0.
    """
    if recipe.optimizer.tier is Tier.DEVICE and recipe.parameters.tier is Tier.DEVICE:
        return set()
    if recipe.offload_bytes is None and recipe.offload_share >= 1:
        return set(range(len(sizes)))
    a_parameter = (
        torch.float32.itemsize + bytes_an_element(recipe.moments) + recipe.sums_dtype.itemsize
    )
    divided = ranks if recipe.optimizer.placement.value == "sharded" else 1
    budget = sum(sizes) * recipe.offload_share
    if recipe.offload_bytes is not None:
        budget = min(budget, recipe.offload_bytes * divided / a_parameter)
    chosen, taken = set(), 0
    for index in reversed(range(len(sizes))):
        # Units are added until a share is reached. A budget in bytes is never exceeded.
        if taken >= budget or (recipe.offload_bytes is not None and taken + sizes[index] > budget):
            continue
        chosen.add(index)
        taken += sizes[index]
    return chosen


def offload_notes(sizes: Sequence[int], recipe: Recipe, ranks: int) -> list[str]:
    """Return a note for the user if a budget is too small for any unit. `sizes`: trained elements
    in each unit.
    """
    if recipe.offload_bytes is None or offloaded_of_sizes(sizes, recipe, ranks) or not any(sizes):
        return []
    return [
        f"offload_optimizer: {recipe.offload_bytes:,} bytes a rank are too few for the states of"
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
        and not any(isinstance(module, nn.Embedding) for module, _ in found.places)
    )
