"""A wrong or missing mark is found in the first backward pass.

Ranks with the same data (`Holders.copies` of them) either have the same gradient of a parameter, or
parts of one. `shard()` is told which (`partial=`), or a DTensor's gradient says it; a wrong answer
would train on, with gradients that are too small or too large. So in the first backward pass the
ranks compare what they have:

| the parameter is            | the copies' gradients are | then                                           |
|-----------------------------|---------------------------|------------------------------------------------|
| not marked                  | equal                     | fine                                           |
| not marked                  | unequal                   | raise: it is partial, or an axis carries data  |
| marked partial              | unequal, or zero          | fine                                           |
| marked partial              | equal                     | raise: leave the mark out                      |

Each rank makes three numbers of each gradient: two sums, with all signs + and with alternating signs,
and the sum of squares. Gradients whose sums agree within `NEAR` of their norms count as equal: kernels
that add in any order differ by less, parts of a gradient by far more. With one data axis there is
nothing to compare, and nothing of this exists.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations
from typing import TYPE_CHECKING

import torch

from onefold.comm.mesh import Mesh
from onefold.runtime.resources import Resources

if TYPE_CHECKING:
    from onefold.runtime.flat import Entry

#: Of the norm: how much sums of gradients that count as equal differ.
NEAR = 0.02


class Marks:
    """What this rank has seen of the gradients of parameters that other ranks with the same data hold
    too. `open`: the first backward pass has not ended.
    """

    def __init__(self, entries: Sequence[Entry], resources: Resources, mesh: Mesh) -> None:
        self._resources, self._mesh = resources, mesh
        self._entries = [e for e in entries if e.flat.ranks.copies > 1]
        self._seen: dict[int, torch.Tensor] = {}
        self.open = bool(self._entries)

    def note(self, entry: Entry, grad: torch.Tensor) -> None:
        """Note a gradient that has come, in the first backward pass."""
        if entry.flat.ranks.copies == 1 or (entry.box is not None and entry.box.came_partial):
            return
        flat = grad.reshape(-1).to(torch.float64)
        total = flat.sum()
        numbers = torch.stack(
            [torch.ones_like(total), total, 2 * flat[::2].sum() - total, flat.square().sum()]
        )
        known = self._seen.get(entry.number)
        self._seen[entry.number] = numbers if known is None else known + numbers

    def compare(self) -> None:
        """Compare, at the end of the first backward pass. Collective over all ranks of the mesh; the
        host reads the numbers, this once.

        Raises:
            ValueError: on every rank, if a parameter's mark is wrong. It names the parameter.
        """
        self.open = False
        nothing = torch.zeros(4, dtype=torch.float64, device=self._resources.device)
        mine = torch.stack([self._seen.get(e.number, nothing) for e in self._entries])
        self._seen.clear()
        group = self._resources.group
        context = self._resources.progress.context("control", "(marks of parameters)")
        table = group.gather_values(mine, context).cpu()
        if group.alone:
            return
        row_of = {rank: table[p] for p, rank in enumerate(group.ranks)}
        data_of = self._mesh.data_of
        for i, entry in enumerate(self._entries):
            for holders in entry.flat.ranks.groups:
                for a, b in combinations(holders, 2):
                    if data_of[a] == data_of[b]:
                        self._judge(entry, a, b, row_of[a][i], row_of[b][i])

    def _judge(self, entry: Entry, a: int, b: int, one: torch.Tensor, other: torch.Tensor) -> None:
        norm = max(float(one[3]), float(other[3])) ** 0.5
        if not (one[0] and other[0]) or norm == 0 or not torch.isfinite(one + other).all():
            return
        apart = (one - other)[1:3].abs().max()
        equal, partial = float(apart) <= NEAR * norm, entry.parts > 1
        if equal == partial:
            raise ValueError(self._told(entry, a, b, partial))

    def _told(self, entry: Entry, a: int, b: int, partial: bool) -> str:
        name, axes = entry.slot.name, self._mesh.axes
        at = dict(zip(self._mesh.ranks, axes.coordinates, strict=True))
        along = [n for n, x, y in zip(axes.names, at[a], at[b], strict=True) if x != y]
        shown = " and ".join(map(repr, along))
        if partial:
            return (
                f"{name!r} is marked partial, and ranks {a} and {b}, apart along {shown}, have the"
                " same gradient of it: adding both up would double it. Leave it out of partial=."
            )
        return (
            f"ranks {a} and {b} have different gradients of {name!r}. They are apart along {shown}"
            f" only, which data={axes.data} does not name, so their data is taken to be the same. If"
            f" they compute with different samples or tokens, add {shown} to data. If they have parts"
            f" of one gradient (as of a norm under sequence parallelism), give partial=[{name!r}]."
        )
