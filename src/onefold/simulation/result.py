"""The result of a simulation: the account of the engine's ledgers, and every event."""

from __future__ import annotations

import dataclasses
from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from onefold.plan.schema import Account


@dataclass(frozen=True)
class Event:
    """One thing that the engine did.

    Attributes:
        what: a move ("all-gather", "reduce-scatter", "all-reduce"), or a category of memory
            ("gathered units", ...).
        nbytes: payload sent, or the change in bytes held (negative if they are released).
        moved: whether it is a move.
    """

    what: str
    unit: str
    nbytes: int
    moved: bool = False


@dataclass(frozen=True)
class UnitSummary:
    """One unit's step: elements with padding, number of moves by kind, bytes sent."""

    elements: int
    moves: Mapping[str, int]
    sent: int


@dataclass(frozen=True)
class Simulation:
    """The ledgers of rank `rank` of `ranks`, for one optimizer step in the steady state.

    Attributes:
        account: bytes at rest on the device (moments are the optimizer's own tensors), the engine's
            ledger at its peak, bytes on the wire and between tiers by move. Activations that move
            are left out.
        predicted: the same by closed forms and replay, without an engine.
        events: every move and every change of memory, in order.
        units: summaries by the unit's name.
        source: whose forward pass ran: "the module", "transformers' code", "a stand-in of the same
            parameters".
        seconds: wall-clock time of the simulation.
        notes: assumptions about values.
    """

    name: str
    parameters: int
    rank: int
    ranks: int
    micro_batches: int
    account: Account
    predicted: Account
    events: tuple[Event, ...]
    units: Mapping[str, UnitSummary]
    source: str
    seconds: float
    notes: tuple[str, ...] = ()

    @property
    def exact(self) -> bool:
        """Whether the closed forms agree on bytes at rest, on the wire and between tiers, to the
        byte.
        """
        ours, told = self.account, self.predicted
        return (ours.rest, ours.wire, ours.moved) == (told.rest, told.wire, told.moved)

    def to_json(self) -> dict[str, Any]:
        """Return plain data, with events as [what, unit, bytes, is a move]."""
        own = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        own |= {
            "account": self.account.to_json(),
            "predicted": self.predicted.to_json(),
            "exact": self.exact,
        }
        own["events"] = [list(dataclasses.astuple(e)) for e in self.events]
        own["units"] = {name: dataclasses.asdict(u) for name, u in self.units.items()}
        return own


def events_of(engine: Any) -> tuple[Event, ...]:
    rows = [(at, Event(kind, unit, nbytes)) for at, kind, unit, nbytes in engine.memory.timeline]
    rows += [(e.launched, Event(e.move, e.unit, e.nbytes, True)) for e in engine.traffic.events]
    return tuple(event for _, event in sorted(rows, key=lambda row: row[0]))


def summaries_of(engine: Any) -> dict[str, UnitSummary]:
    moves: dict[str, Counter[str]] = defaultdict(Counter)
    for event in engine.traffic.events:
        moves[event.unit][event.move] += 1
    sent = engine.traffic.by_unit()
    return {
        u.name: UnitSummary(u.numel, dict(moves[u.name]), sum(sent.get(u.name, {}).values()))
        for u in engine.units
    }
