"""State that belongs to one rank: random generators, and the residuals of encoded gradients (error
feedback). This module saves it and loads it, also on another number of ranks.

Random generators: rank r takes over the generators that rank r saved. A rank beyond the number of
saved ranks starts from those of rank (r modulo that number) and draws a new seed from them. No two
ranks then share a random stream, and a second load gives the same streams. On a mesh, ranks that
compute with the same data count as one here, unless the same ranks computed with the same data
before: they must draw the same dropout.

Residuals are what encoding a gradient lost, in fp32, per rank. They have the size of the encoded
gradients: all of them on the first hop, a shard on the second. They are saved unchanged, with the
optimizer states. They are loaded only if the number of ranks and the groups are the
same. Otherwise error feedback begins anew and `Loaded.notes` says so: the residuals of one rank cannot be
divided among ranks with other shards.

    item    kind "residual", name: the rank, state: flat buffer.first address.hop
    value   "wire": {"feedback": true, "ranks": 4, "inner": 2, "drawn": 17}; drawn: position in the numbers of rounding;
            "mesh": the axes, if ranks along some axis compute with the same data
"""

from __future__ import annotations

import logging
import random
from typing import Any

import numpy as np
import torch

from onefold.checkpoint.apply import StateReader
from onefold.checkpoint.errors import DamagedCheckpoint
from onefold.checkpoint.folder_source import FolderSource
from onefold.checkpoint.source import Item
from onefold.checkpoint.together import Together
from onefold.checkpoint.values import decode
from onefold.device import default_device, rng_state, set_rng_state
from onefold.reading import parse_json
from onefold.runtime.engine import Engine


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


def stream_of(rank: int, data_of: list[int], saved: list[int]) -> tuple[int, int, int]:
    """Return (the rank whose saved generators `rank` starts from, its number among those that draw
    different numbers, how many such streams were saved).

    Args:
        data_of: the number of each rank's data coordinate. saved: the same of the ranks that saved.
    """
    if data_of == saved:
        return rank, rank, len(saved)
    firsts = [saved.index(at) for at in sorted(set(saved))]
    return firsts[data_of[rank] % len(firsts)], data_of[rank], len(firsts)


def random_of(source: FolderSource, rank: int) -> dict[str, Any]:
    """Return the state of generators that `rank` saved.
    Raises: CheckpointError: it is none. What the generators do not check themselves is checked here.
    """
    text = bytes(source.whole(Item("rng", str(rank))).numpy())
    try:
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


def restore(state: dict[str, Any], rank: int, saved_ranks: int) -> None:
    """Set the generators of `rank` from the state that rank `rank % saved_ranks` saved."""
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


Key = tuple[int, int, int]
ANEW = "error feedback begins anew"
LEFT_OUT = "what encoding gradients lost (error feedback) is in the checkpoint and left out"


def lost_here(engine: Engine) -> dict[Item, torch.Tensor]:
    """Return this rank's residuals as items to save."""
    return {_item(engine, k): lost for k, lost in engine.residuals.kept.items() if lost.numel()}


def wire_values(engine: Engine) -> dict[str, Any] | None:
    """Return the values that the first rank saves about encoding; None if there are none."""
    residuals, group = engine.residuals, engine.group
    out: dict[str, Any] = {}
    if residuals.codec is not None and engine.recipe.error_feedback:
        out |= {"feedback": True, "ranks": group.size, "inner": group.topology.inner}
        if engine.mesh.several:
            out["mesh"] = engine.mesh.describe()
    if residuals.codec is not None and engine.recipe.wire_rounding == "stochastic":
        out["drawn"] = residuals.draw
    return out or None


class Lost:
    """The residuals in a checkpoint for this rank. `note`: for `Loaded.notes`, equal on all ranks;
    "" if there is nothing to tell.
    """

    def __init__(self, engine: Engine) -> None:
        recipe, self.engine = engine.recipe, engine
        self.feedback = recipe.error_feedback and recipe.gradients.codec is not None
        self.found: dict[Key, torch.Tensor] = {}
        self.said: dict[str, Any] = {}
        self.note = ""

    @classmethod
    def read(
        cls, engine: Engine, source: FolderSource, together: Together, reading: StateReader
    ) -> Lost:
        """Read them. Collective. The first error is kept in `reading.error`."""
        lost, items = cls(engine), None
        try:
            lost.said = source.value("wire") or {}
            numbers = [lost.said.get(key, 0) for key in ("ranks", "inner", "drawn")]
            if any(type(n) is not int or not 0 <= n < 1 << 62 for n in numbers):
                raise DamagedCheckpoint(f"{source.describe} counts ranks as {numbers}.")
            items = lost._items(source)
        except Exception as failure:
            reading.error = reading.error or failure
        if lost.feedback and not all(together.all_gather(items is not None)):
            items = None
        try:
            lost.found = {key: source.whole(item) for key, item in (items or {}).items()}
        except Exception as failure:
            reading.error = reading.error or failure
        lost.note = lost._note(items is not None)
        return lost

    def _items(self, source: FolderSource) -> dict[Key, Item] | None:
        """Return this rank's items; None if the ranks, groups or units of the save were others."""
        group, engine = self.engine.group, self.engine
        there = self.said.get("ranks"), self.said.get("inner"), self.said.get("feedback")
        mesh = engine.mesh.describe() if engine.mesh.several else None
        same = there == (group.size, group.topology.inner, True) and self.said.get("mesh") == mesh
        if not self.feedback or not same:
            return None
        wanted = {
            _item(engine, key): (key, n) for key, n in engine.residuals.spans(engine.units).items()
        }
        known = source.items()
        mine = [i for i in known if i.kind == "residual" and i.name == str(engine.rank)]
        if any(i not in wanted or known[i].shape != (wanted[i][1],) for i in mine):
            return None
        return {wanted[item][0]: item for item in mine}

    def _note(self, fits: bool) -> str:
        group, said = self.engine.group, self.said
        if not self.feedback:
            return f"{LEFT_OUT}: this recipe has no error_feedback." if said.get("feedback") else ""
        if not said.get("feedback"):
            return f"{ANEW}: the checkpoint was saved without it."
        if fits:
            return ""
        return (
            f"{ANEW}: what encoding lost was kept by {said['ranks']} ranks in groups of"
            f" {said['inner']}, or of other units, and cannot be divided anew among"
            f" {group.size} in groups of {group.topology.inner}."
        )

    def apply(self) -> None:
        """Replace the engine's residuals by those read. Local."""
        residuals = self.engine.residuals
        residuals.forget()
        for key, lost in self.found.items():
            residuals.residual(key, lost.numel()).copy_(lost)
        if residuals.codec is not None:
            residuals.draw = self.said.get("drawn", residuals.draw)
        if self.note and self.engine.rank == 0:
            logging.getLogger("onefold").warning(self.note)


def _item(engine: Engine, key: Key) -> Item:
    return Item("residual", str(engine.rank), ".".join(map(str, key)))
