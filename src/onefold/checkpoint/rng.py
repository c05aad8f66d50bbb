"""The states of the random generators of one rank, and what they become on another number of ranks.

Rank r of the loading run takes over the generators of rank r of the saving one. Ranks that there
were none of take those of rank r modulo the old number, and draw from them a seed of their own, so
that no two ranks share a stream and a second load gives the same.
"""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch

from onefold.device import default_device, rng_state, set_rng_state


def capture() -> dict[str, Any]:
    """Python's, numpy's, torch's and this rank's accelerator's generator."""
    found: dict[str, Any] = {
        "python": random.getstate(),
        "numpy": np.random.get_state(),
        "torch": torch.get_rng_state(),
    }
    here = default_device()
    state = rng_state(here)
    if state is not None:
        found[here.type] = state
    return found


def restore(state: dict[str, Any], rank: int, saved_ranks: int) -> None:
    """Set the generators of `rank` from those of rank `rank % saved_ranks`."""
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])
    torch.set_rng_state(state["torch"])
    here = default_device()
    if here.type != "cpu" and here.type in state:
        set_rng_state(state[here.type], here)
    if rank >= saved_ranks:
        draws = np.random.SeedSequence(
            [*np.random.randint(0, 2**31, 4).tolist(), rank]
        ).generate_state(3)
        random.seed(int(draws[0]))
        np.random.seed(int(draws[1]))
        torch.manual_seed(int(draws[2]))
