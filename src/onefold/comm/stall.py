"""`StallError`: the error of a rank that waited for others in vain.

A wait fails by timeout, or because a peer's connection closed. It then ends in a `StallError` on
every rank that takes part. Before raising, a rank writes a note to the rendezvous store (which
rank, which collective, for how long) and reads the notes of the others. So the error says where
every rank is. A rank without a note was not waiting in any collective of this model.
"""

from __future__ import annotations

import json
import time
from dataclasses import asdict, dataclass
from typing import Any

import torch.distributed as dist


class StallError(RuntimeError):
    """A rank waited in vain for another: the message names the rank, unit, step and the collective
    that each rank is waiting in.
    """


@dataclass
class CollectiveContext:
    """What a collective is for: the move, the unit, the step, the phase (forward, backward, state),
    for messages and the ledger.
    """

    move: str
    unit: str
    step: int
    phase: str

    def __str__(self) -> str:
        return f"waiting in {self.move} of unit {self.unit!r} ({self.phase}, step {self.step})"


#: Of a stall in a forward pass
_GENERATING = (
    " To generate texts, whose lengths differ between ranks, call generate(..., synced_gpus=True), so"
    " that every rank makes equally many passes."
)
# Seconds that a rank waits, after it gave up, for the notes of the others.
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
    """Exchange notes through the store and return the error. `ranks` are global ranks; `heard` is
    the last step that all ranks have ended, or None.
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
    except Exception:  # the store may be gone with its rank: raise the error without the notes
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
            " batch of its own, and with the same parameters frozen."
            + (_GENERATING if context.phase == "forward" else "")
            + " If a rank may be slower than this, raise stall_timeout in the recipe."
        ),
        f"(backend: {text[:200]})",
    ]
    return StallError("\n".join(lines))
