"""Which elements of which parameter this rank is to write.

What is divided is written by its owner. What every rank holds whole (stage 0) is divided for
writing by the same layout, so that each element is written once over all ranks and a checkpoint
does not show which stage it came from.

    parameter 'h.0.weight'      0 ......................... 768
    stage 3, rank 1 holds                 [300 ... 768)             writes 300 .. 768
    stage 0, rank 1 holds       [0 ....................... 768)     writes 300 .. 768
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from onefold.checkpoint.errors import CheckpointError
from onefold.recipe.moments import grain_of, items_of, packed
from onefold.runtime.engine import Engine
from onefold.runtime.flat import Entry, Flat
from onefold.runtime.unit import Unit


@dataclass(frozen=True)
class Share:
    """Elements `[start, stop)` of an entry to be written here; the optimizer's object on this rank
    holds it from `held` on.
    """

    entry: Entry
    flat: Flat
    unit: Unit
    start: int
    stop: int
    held: int

    @property
    def name(self) -> str:
        return self.entry.part.names[0]

    @property
    def interval(self) -> tuple[int, int]:
        """The same elements of the parameter as it is known outside, of which a tile is a part."""
        return self.entry.part.first + self.start, self.entry.part.first + self.stop

    def of(self, local: torch.Tensor, grain: int = 1) -> torch.Tensor:
        """The share of a tensor with an item for every `grain` elements of the optimizer's object:
        [stop - start], or so many items.
        """
        return local.detach().reshape(-1)[
            slice(*items_of(self.start - self.held, self.stop - self.held, grain))
        ]

    def stored(self, key: str) -> tuple[tuple[int, ...], int, int]:
        """The whole shape of state `key` of the parameter as it is known outside, and this share's
        interval of it.
        """
        grain, part = grain_of(key), self.entry.part
        shape = part.shape if packed(key) is None else (-(-part.numel // grain),)
        return shape, *items_of(*self.interval, grain)


def shares(engine: Engine) -> Iterator[Share]:
    """Every parameter of the model with this rank's share of it, which may be empty."""
    for unit in engine.units:
        for flat in unit.flats:
            for entry in flat.entries:
                slot = entry.slot
                if flat.unsharded:
                    yield Share(entry, flat, unit, 0, slot.numel, 0)
                    continue
                start, stop = flat.layout.local(slot, flat.rank)
                held, _ = flat.local(entry)
                yield Share(
                    entry, flat, unit, start - slot.start, stop - slot.start, held - slot.start
                )


class States:
    """What optimizers hold for the parameters of an engine.

    Attributes:
        tensors: (share, key, tensor) of element-wise state, and of codes and scales. wholes: the
            same of state with a shape of its own.
        scalars: {parameter: {key: value}} of the rest.
        groups: for each optimizer its groups as plain values, "params" being names.
    """

    def __init__(self, engine: Engine, optimizers: list[torch.optim.Optimizer]) -> None:
        self.tensors: list[tuple[Share, str, torch.Tensor]] = []
        self.wholes: list[tuple[Share, str, torch.Tensor]] = []
        self.scalars: dict[str, dict[str, Any]] = {}
        self.groups: list[list[dict[str, Any]]] = []
        known = {id(share.entry.param): share for share in shares(engine)}
        for optimizer in optimizers:
            self.groups.append([])
            for number, group in enumerate(optimizer.param_groups):
                found = [known.get(id(p)) for p in group["params"]]
                if None in found:
                    raise CheckpointError(
                        f"parameter {found.index(None)} in group {number} of"
                        f" {type(optimizer).__name__} belongs to another model than the one given:"
                        " make the optimizer of model.parameters() after shard(), and give both to"
                        " one save or load."
                    )
                # The tiles of a parameter have one name
                names = list(dict.fromkeys(share.name for share in found if share is not None))
                self.groups[-1].append(
                    {**{k: v for k, v in group.items() if k != "params"}, "params": names}
                )
            self._sort(optimizer, known)

    def _sort(self, optimizer: torch.optim.Optimizer, known: dict[int, Share]) -> None:
        foreign = [key for key, state in optimizer.state.items() if id(key) not in known and state]
        if foreign:
            what = (
                f"a tensor of shape {tuple(foreign[0].shape)}"
                if isinstance(foreign[0], torch.Tensor)
                else repr(foreign[0])
            )
            raise CheckpointError(
                f"{type(optimizer).__name__} keeps state under {what}, which is no parameter of the"
                " model, and nothing could give it back. Keep it in a parameter group, or save it"
                " with extra=."
            )
        held = [
            (known[id(p)], p, key, v)
            for p, state in optimizer.state.items()
            if id(p) in known
            for key, v in state.items()
        ]
        # By key over all parameters: a parameter of no dimensions looks like a step count, but its
        # neighbours tell them apart.
        odd = {
            key
            for _, p, key, v in held
            if isinstance(v, torch.Tensor) and (v.shape != p.shape or key == "step")
        }
        for share, p, key, value in held:
            if packed(key) is not None:
                self.tensors.append((share, key, value))
            elif not isinstance(value, torch.Tensor) or (
                key in odd and value.numel() == 1 and (value.ndim == 0 or value.shape != p.shape)
            ):
                # Every rank has it; the one that holds the parameter's elements says it, the first
                # one for parameters without any.
                if share.stop > share.start or share.entry.slot.numel == 0:
                    self.scalars.setdefault(share.name, {})[key] = value
            elif value.shape == p.shape:
                self.tensors.append((share, key, value))
            elif (share.flat.whole_master or share.flat.unsharded) and not share.flat.tiled:
                self.wholes.append((share, key, value))
            else:
                raise CheckpointError(
                    f"{type(optimizer).__name__} keeps {key!r} of shape {tuple(value.shape)} for"
                    f" parameter {share.name!r}: neither one number nor one for each element, so it"
                    " cannot be cut for another number of ranks."
                )
