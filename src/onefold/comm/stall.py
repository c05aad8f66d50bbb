"""What a rank says when the others do not come.

A wait that fails, by time or because a peer's connection closed, ends in a `StallError` on every
rank that takes part. Before raising, a rank leaves a note in the rendezvous store (who, where,
since when) and reads the notes of the others, so that the error names every rank's place. A rank
that left no note was not waiting in any collective of this model.
"""

from __future__ import annotations

import json
import time
from dataclasses import asdict, dataclass
from typing import Any

import torch.distributed as dist


class StallError(RuntimeError):
    """A rank fell out of step: the message names rank, unit, step and the collective each rank is
    waiting in.
    """


@dataclass
class CollectiveContext:
    """Where a rank stands: the move, the unit it is for, the step, the phase (forward, backward,
    state).
    """

    move: str
    unit: str
    step: int
    phase: str

    def __str__(self) -> str:
        return f"waiting in {self.move} of unit {self.unit!r} ({self.phase}, step {self.step})"


# How long a rank that gave up waits for the notes of the others, in seconds.
GRACE = 3.0


def stall_error(
    context: CollectiveContext,
    waited: float,
    cause: Exception,
    group_name: str,
    rank: int,
    ranks: list[int],
    heard: int | None,
) -> StallError:
    """Exchange notes through the store and build the error. `ranks` are global ranks; `heard` the
    last step that all ended.
    """
    notes: dict[int, str] = {rank: f"{context}, {waited:.1f} s"}
    missing = [r for r in ranks if r != rank]
    try:
        store = dist.distributed_c10d._get_default_store()
        key = f"onefold/stall/{group_name}/"
        store.set(f"{key}{rank}", json.dumps({**asdict(context), "waited": waited}))
        end = time.monotonic() + GRACE
        while missing and time.monotonic() < end:
            for other in list(missing):
                if store.check([f"{key}{other}"]):
                    note: dict[str, Any] = json.loads(store.get(f"{key}{other}"))
                    since = note.pop("waited")
                    notes[other] = f"{CollectiveContext(**note)}, {since:.1f} s"
                    missing.remove(other)
            time.sleep(0.05)
    except Exception:  # the store may be gone with its rank; the error must come out all the same
        pass
    for other in missing:
        notes[other] = (
            "not waiting in any collective of this model (ended, or busy elsewhere); "
            + (
                f"last heard of at the end of step {heard}"
                if heard is not None
                else "not heard of yet"
            )
        )
    text = str(cause).splitlines()[0] if str(cause) else type(cause).__name__
    closed = "closed" in text or "reset" in text
    lines = [
        f"rank {rank} gave up {context} after {waited:.1f} s: "
        + (
            "a peer's connection closed (a rank ended or gave up first)."
            if closed
            else "the other ranks did not come."
        ),
        "Where each rank stands:",
        *(f"  rank {r}: {notes[r]}" for r in sorted(notes)),
        (
            "Ranks must run the same forward and backward passes on a sharded model, each with a"
            " batch of its own, and with the same parameters frozen. If a rank may be slower than this, raise stall_timeout in the"
            " recipe."
        ),
        f"(backend: {text[:200]})",
    ]
    return StallError("\n".join(lines))
