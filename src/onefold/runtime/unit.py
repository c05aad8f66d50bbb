"""A unit: a block's flat buffers with one lifecycle.

| from      | to        | when                                                      |
|-----------|-----------|-----------------------------------------------------------|
| SHARDED   | FETCHING  | this rank's interval is being read from a disk, ahead      |
| FETCHING  | GATHERING | a gather is launched, as from SHARDED                     |
| FETCHING  | SHARDED   | it was not needed                                         |
| SHARDED   | GATHERING | a gather is launched (used, prefetched, or joined)         |
| GATHERING | GATHERED  | its bytes have arrived                                    |
| GATHERED  | SHARDED   | released: the buffer goes back to the pool                |
| GATHERED  | GATHERING | the resident copy is refreshed: its masters were written to |

Any other move is a bug of the engine and raises.
"""

from __future__ import annotations

import dataclasses
import enum
import itertools
import weakref
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

from torch import nn

from onefold.comm import Pending
from onefold.layout import LOW, Dtypes, Tiers
from onefold.layout.holders import Holders
from onefold.runtime.flat import Entry, Flat, Kind, declared_dtype
from onefold.runtime.units import Found, UnitSpec, keeps_dtype, rests_encoded

if TYPE_CHECKING:
    from onefold.runtime.engine import Engine


class State(enum.Enum):
    SHARDED = "sharded"
    FETCHING = "fetching"
    GATHERING = "gathering"
    GATHERED = "gathered"


_ALLOWED = {
    (State.SHARDED, State.FETCHING),
    (State.FETCHING, State.GATHERING),
    (State.FETCHING, State.SHARDED),
    (State.SHARDED, State.GATHERING),
    (State.GATHERING, State.GATHERED),
    (State.GATHERED, State.SHARDED),
    (State.GATHERED, State.GATHERING),
}


class Unit:
    """One unit of an engine.

    Attributes:
        name: the dotted name of its module, "(root)" for the root; path: the same, "" for the root.
        numel: elements of its flat buffers, alignment and padding included.
        gathered_bytes: bytes of its buffers while it is gathered.
        calls: its uses in forward passes with gradients since the last backward pass; set to 0 when
            the next pass begins.
        aside: those whose small gradient waits on the parameter for others.
            aside_bytes: of these gradients together.
        saved_apart: how often `saved` was ever raised while its module was not in a pass.

    Who holds a gathered unit, and until when:

    | reason              | taken when                                          | given back when                       |
    |---------------------|-----------------------------------------------------|---------------------------------------|
    | `in_use`            | the forward pass of its module begins, or is        | that pass ends, or raises             |
    | (how many passes)   | recomputed                                          |                                       |
    | `borrowed`          | other code of the pass reads a parameter            | the pass ends                         |
    | kept                | a pass without gradients under `keep_gathered`; the | that pass ends; `Gatherer.let_go`     |
    |                     | stage of a pipeline is unsharded for micro-batches  |                                       |
    | `awaiting_backward` | a forward pass ends that used it last               | the backward pass uses or passes it   |
    | `saved` (how many)  | autograd saves a part of its buffers                | autograd frees it                     |
    | `gradients` (which) | a backward pass begins                              | they arrive, one by one               |
    | `recomputing`       | its forward pass is recomputed (the count of        | the next recomputation begins         |
    |                     | `Gatherer.reached` then)                            |                                       |
    | `by_hand`           | a backward pass begins, and code has kept a         | the backward pass ends                |
    |                     | parameter without saving it (runtime/passes.py)     |                                       |

    Two are no leases. `used`: a pass uses the unit; until then it is only prefetched or joined.
    `unwanted`: the pass has gone past it without using it, so it goes.

    | asked                                                   | holds it                                            |
    |---------------------------------------------------------|-----------------------------------------------------|
    | after the forward pass of its module                    | `borrowed`, kept, and the last units                |
    | in a backward pass (`Unit.needed_in_backward`)          | `in_use`, `saved`, `gradients`; if it has frozen    |
    |                                                         | parameters, `recomputing` and `by_hand` too         |
    | at the end of a backward pass                           | `in_use`                                            |
    | by whatever releases (`Gatherer.release`)               | being kept, until masters are written to            |

    A checkpointed unit in a backward pass: `gradients` (if it is trained) from the beginning;
    `in_use` and `recomputing` while it is recomputed; then `gradients` until the last one has come,
    which releases it. What a recomputation saves has no handles, so it takes no `saved`; a frozen
    unit, which no gradient comes for, is held by `recomputing` until the next recomputation
    (`Gatherer._sweep`).
    """

    def __init__(self, name: str, index: int, module: nn.Module, flats: list[Flat]) -> None:
        self.name, self.path, self.index, self.flats = name or "(root)", name, index, flats
        self.module = weakref.ref(module)
        # The backward pass of an embedding reads no parameter
        self.looks_up_only = type(module) is nn.Embedding
        self.state = State.GATHERED if self.resident else State.SHARDED
        self.in_use = self.saved = 0
        self.used = self.unwanted = self.borrowed = self.by_hand = False
        self.awaiting_backward = False
        self.gradients: set[int] = set()  # numbers of entries
        self.recomputing: int | None = None
        self.calls = self.saved_apart = 0
        self.aside: list[Entry] = []
        self.aside_bytes = 0
        self.ready = self.launched = self.late = False
        self.pending: list[Pending] = []
        self.gathered_bytes = sum(
            f.layout.numel * f.dtypes.compute.itemsize for f in flats if not f.resident
        )

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
    def awaited(self) -> set[int]:
        """The numbers of the entries that are trainable and reduced."""
        return set[int]().union(*[flat.awaited for flat in self.flats])

    @property
    def entries(self) -> list[Entry]:
        return [e for flat in self.flats for e in flat.entries]

    @property
    def needed_in_backward(self) -> bool:
        """Whether the backward pass under way, which has used the unit, still needs its buffers."""
        if self.in_use:
            return True
        if self.looks_up_only:
            return False
        if self.saved or self.gradients:
            return True
        # A gradient that never comes would tell that a frozen parameter is no longer needed
        return (self.recomputing is not None or self.by_hand) and any(
            e.flat.unsharded or not e.active for e in self.entries
        )

    def encloses(self, other: Unit) -> bool:
        """Whether the other unit's module lies inside this one's."""
        return self is not other and (self.path == "" or other.path.startswith(self.path + "."))

    def move(self, state: State) -> None:
        if (self.state, state) not in _ALLOWED:
            raise AssertionError(
                f"unit {self.name!r} cannot go from {self.state.value} to {state.value}"
            )
        self.state = state


def bind(
    specs: Sequence[UnitSpec],
    engine: Engine,
    offloaded: Collection[int],
    holders: Holders,
) -> list[Unit]:
    """Build the units of `specs`. A unit has one flat buffer for each kind of its parameters: of
    the same dtypes (`_onefold_wire` of a parameter names another for the wire, unless the recipe
    does), trained or frozen, stored encoded or not, held by the same ranks.

    Args:
        engine: the one that parameters ask. offloaded: the indices of the units whose state is
            offloaded. holders: of the parameters that are no boxes.
    """
    recipe, numbers = engine.recipe, itertools.count()
    units = []
    for index, spec in enumerate(specs):
        kinds: dict[Kind, list[Found]] = {}
        for found in spec.found:
            dtype, trainable = declared_dtype(found.param), found.param.requires_grad
            dtypes = Dtypes.of(dtype, trainable, recipe, keeps_dtype(found))
            wire = found.param.__dict__.get("_onefold_wire")
            if wire is not None and trainable and dtype in LOW and recipe.gradients.wire is None:
                dtypes = dataclasses.replace(dtypes, wire=wire)
            held_by = holders if found.box is None else found.box.kind.holders
            encoded = rests_encoded(found, recipe)
            kinds.setdefault(Kind(dtypes, trainable, encoded, held_by), []).append(found)
        flats = []
        for kind, of_kind in kinds.items():
            tiered = index in offloaded and not kind.encoded
            tiers = Tiers.of(kind.trainable, recipe) if tiered else None
            name = spec.name or "(root)"
            flats.append(Flat(name, of_kind, kind, next(numbers), engine, tiers))
        units.append(Unit(spec.name, index, spec.module, flats))
    return units
