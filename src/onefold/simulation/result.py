"""The result of a simulation: the account of the engine's ledgers, and every event."""

from __future__ import annotations

from dataclasses import asdict, astuple, dataclass
from typing import Any

from onefold.plan.degrees import Degrees
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
class Simulation:
    """The ledgers of one rank, for one optimizer step in the steady state.

    Attributes:
        account: bytes at rest on the device (moments are the optimizer's own tensors), the engine's
            ledger at its peak, bytes on the wire and between tiers by move. Activations that move
            are left out. Of a mesh also `sent`, by the axes along which the receivers lie
            ("dp × cp"): what the engine has sent, and along "pp" what torch's schedule has.
        predicted: the same by the plan's walk, without an engine.
        events: every move and every change of memory, in order.
        source: whose forward pass ran: "the module", "transformers' code", "a stand-in of the same
            parameters".
        seconds: wall-clock time of the simulation.
        notes: assumptions about values.
        degrees, stage: the mesh, and the stage of its pipeline; None for data ranks alone.
    """

    name: str
    rank: int
    ranks: int
    micro_batches: int
    account: Account
    predicted: Account
    events: tuple[Event, ...]
    source: str
    seconds: float
    notes: tuple[str, ...] = ()
    degrees: Degrees | None = None
    stage: int = 0

    @property
    def exact(self) -> bool:
        """Whether the walk agrees on bytes at rest, on the wire and between tiers, to the byte."""
        ours, told = self.account, self.predicted
        return all(getattr(ours, f) == getattr(told, f) for f in ("rest", "wire", "moved", "sent"))

    def to_json(self) -> dict[str, Any]:
        """Return plain data, with events as [what, unit, bytes, is a move]."""
        return {**asdict(self), "events": [*map(astuple, self.events)], "exact": self.exact}


def events_of(engine: Any) -> tuple[Event, ...]:
    rows = [(at, Event(kind, unit, nbytes)) for at, kind, unit, nbytes in engine.memory.timeline]
    rows += [(e.launched, Event(e.move, e.unit, e.nbytes, True)) for e in engine.traffic.events]
    return tuple(event for _, event in sorted(rows, key=lambda row: row[0]))
