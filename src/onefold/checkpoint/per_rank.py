"""State that belongs to one rank: random generators. This module saves and loads them, also on another
number of ranks.

Random generators: rank r takes over the generators that rank r saved. A rank beyond the number of
saved ranks starts from those of rank (r modulo that number) and draws a new seed from them. No two
ranks then share a random stream, and a second load gives the same streams. On a mesh, ranks that
compute with the same data count as one here, unless the same ranks computed with the same data
before: they must draw the same dropout.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch

from onefold.checkpoint.errors import DamagedCheckpoint
from onefold.checkpoint.folder_source import FolderSource
from onefold.checkpoint.source import Item
from onefold.checkpoint.values import decode
from onefold.device import default_device, rng_state, set_rng_state
from onefold.reading import parse_json


def capture() -> dict[str, Any]:
    """Return the state of the generators of Python, numpy, torch and this rank's accelerator."""
    here = default_device()
    state = rng_state(here)
    return {
        "python": random.getstate(),
        "numpy": np.random.get_state(),
        "torch": torch.get_rng_state(),
        **({here.type: state} if state is not None else {}),
    }


def random_of(source: FolderSource, rank: int) -> dict[str, Any]:
    """Return the state of generators that `rank` saved.
    Raises: CheckpointError: it is none. What the generators do not check themselves is checked here.
    """
    try:
        text = bytes(source.whole(Item("rng", str(rank))).numpy())
        state: dict[str, Any] = decode(parse_json(text))
        random.Random().setstate(state["python"])
        np.random.RandomState().set_state(state["numpy"])
        torch.Generator().set_state(state["torch"])
        if not 0 <= state["numpy"][2] <= 624:
            raise ValueError(f"a position of {state['numpy'][2]} in numpy's 624 numbers")
    except Exception as error:  # each generator raises errors of its own
        raise DamagedCheckpoint(
            f"{source.describe} holds no random generators of rank {rank}"
            f" ({type(error).__name__}: {error})."
        ) from None
    return state


def restored(source: FolderSource, rank: int, data_of: list[int]) -> Callable[[], None] | None:
    """Read what `rank` takes over, and return what sets its generators, if any were saved.

    `data_of`: the number of each rank's data coordinate.
    """
    saved = source.value("data_of") or list(range(sum(i.kind == "rng" for i in source.records)))
    if not saved:
        return None
    whose, new = rank, None
    if data_of != saved:
        firsts, at = [saved.index(at) for at in sorted(set(saved))], data_of[rank]
        whose, new = firsts[at % len(firsts)], at if at >= len(firsts) else None
    return partial(restore, random_of(source, whose), new)


def restore(state: dict[str, Any], new: int | None = None) -> None:
    """Set the generators from a state; with a seed of its own, drawn from them, for a `new` stream."""
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])
    torch.set_rng_state(state["torch"])
    here = default_device()
    if here.type != "cpu" and here.type in state:
        set_rng_state(state[here.type], here)
    if new is not None:
        draws = np.random.SeedSequence(
            [*np.random.randint(0, 2**31, 4).tolist(), new]
        ).generate_state(3)
        random.seed(int(draws[0]))
        np.random.seed(int(draws[1]))
        torch.manual_seed(int(draws[2]))
