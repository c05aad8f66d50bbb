"""A wrong or missing mark is found in the first backward pass.

Ranks with the same data (`Holders.copies` of them) either have the same gradient of a parameter, or
parts of one. `shard()` is told which (`partial=`), or a DTensor's gradient says it; a wrong answer
would train on, with gradients that are too small or too large. So in the first backward pass the
ranks compare what they have:

| the parameter is            | the copies' gradients are        | then                                           |
|-----------------------------|----------------------------------|------------------------------------------------|
| not marked                  | equal                            | fine                                           |
| not marked                  | unequal, or some rank has none   | raise: it is partial, or an axis carries data  |
| marked partial              | unequal, or zero on some         | fine                                           |
| marked partial              | equal                            | raise: leave the mark out                      |
| either                      | zero, or not finite, on all      | nothing is known yet: look again later         |

Each rank makes a few numbers of each gradient: its sum of squares, and its products with `DRAWN` random
matrices, which are the same on all ranks. Gradients whose products agree within `NEAR` of their norms
count as equal: kernels that add in any order differ by less, parts of a gradient by far more. (Sums with
fixed signs would not do: those of a gradient before a layer norm or a softmax are zero.) With one data
axis there is nothing to compare, and nothing of this exists.

[Note: looks at marks] The first look is at the end of the first backward pass. What it leaves open
(the half of an adapter whose other half starts as zeros; everything, if fp16 overflows) is looked at
again in steps 1, 2, 4, 8 and so on, until all is known: few looks, however long a parameter gets no
gradient. Steps are counted by reductions, which all ranks have; micro-batches may be unequally many.

[Note: data that is no data] Weights divided along a data axis are experts, whose gradients are divided by
all data ranks. Under tensor parallelism with its axis among data (or on a mesh of that axis alone, whose
data it then is) that is too small by its size. Nothing but the data tells them apart: where two ranks
along the axis have the same gradients of all that both hold, the first rank warns.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from itertools import combinations
from typing import TYPE_CHECKING

import torch

from onefold.comm.mesh import Mesh
from onefold.runtime.resources import Resources

if TYPE_CHECKING:
    from onefold.runtime.flat import Entry

#: Of the norm: how much products of gradients that count as equal differ.
NEAR = 0.02
#: How many products. Each takes one in 20 to 90 pairs of parts for equal.
DRAWN = 8
#: In place of a count of gradients: a DTensor whose gradient has said that it is partial.
SAID = -1e9


class Marks:
    """What this rank has seen of the gradients of parameters that other ranks hold too. `open`:
    gradients are noted in the backward pass under way.
    """

    def __init__(self, entries: Sequence[Entry], resources: Resources, mesh: Mesh) -> None:
        self._resources, self._mesh = resources, mesh
        self._unknown = [e for e in entries if e.flat.ranks.copies > 1]
        #: (a data axis, two ranks that are apart along it, what both of them hold)
        self._doubted = list(_doubted(entries, mesh))
        self._seen: dict[int, torch.Tensor] = {}
        self._looked = False
        self._next = 0  # the step of the next look, counted from 0
        self._choose()

    @staticmethod
    def wanted(entries: Sequence[Entry], mesh: Mesh) -> bool:
        """Whether there is anything to compare on this mesh."""
        return mesh.several or any(_doubted(entries, mesh))

    def _choose(self) -> None:
        """Choose whose gradients are noted from now on."""
        chosen = [*self._unknown, *(e for _, _, _, held in self._doubted for e in held)]
        self._noted = list({e.number: e for e in chosen}.values())
        self._numbers = {e.number for e in self._noted}
        self.open = bool(self._noted)

    def begin_backward(self) -> None:
        """Open the pass if it is one of a step to look at."""
        self.open = bool(self._noted) and self._resources.progress.step_count >= self._next

    def note(self, entry: Entry, grad: torch.Tensor) -> None:
        """Note a gradient that has come, in a pass that is open."""
        if entry.number not in self._numbers:
            return
        numbers = torch.zeros(2 + DRAWN, dtype=torch.float64, device=grad.device)
        if entry.box is not None and entry.box.came_partial:
            numbers[0] = SAID
        else:
            # A random matrix is the product of a column and a row: so it is small
            matrix = grad.reshape(-1, max(1, grad.shape[-1] if grad.ndim else 1)).to(torch.float64)
            columns, rows = (_drawn(n, seed, matrix) for seed, n in enumerate(matrix.shape))
            numbers[0], numbers[1] = 1, matrix.square().sum()
            numbers[2:] = (matrix @ rows).mul_(columns).sum(0)
        known = self._seen.get(entry.number)
        self._seen[entry.number] = numbers if known is None else known + numbers

    def forget(self) -> None:
        """Forget what a backward pass that raised has left."""
        self._seen.clear()

    def end_backward(self) -> None:
        """At the end of a backward pass with gradients: compare, if that is due. Collective over all
        ranks of the mesh; the host reads the numbers. See [Note: looks at marks].

        Raises:
            ValueError: on every rank, if a parameter's mark is wrong. It names the parameter.
        """
        if not self.open or (self._looked and self._resources.progress.deferring):
            return
        self._compare()

    def after_reduction(self) -> None:
        """Do the same after a reduction that no backward pass has made."""
        if self.open:
            self._compare()

    def _compare(self) -> None:
        steps = self._resources.progress.step_count  # with the one that ends here, if it does
        self._looked, self._next = True, max(0, 2 * steps - 1)
        nothing = torch.zeros(2 + DRAWN, dtype=torch.float64, device=self._resources.device)
        mine = torch.stack([self._seen.get(e.number, nothing) for e in self._noted])
        self._seen.clear()
        group = self._resources.group
        context = self._resources.progress.context("control", "(marks of parameters)")
        table = group.gather_values(mine, context).cpu()
        if group.alone:
            self._unknown, self._doubted = [], []
        else:
            row_of = {rank: table[p] for p, rank in enumerate(group.ranks)}
            at = {e.number: i for i, e in enumerate(self._noted)}
            self._unknown = [
                e for e in self._unknown if not self._is_right(e, row_of, at[e.number])
            ]
            self._doubted = [d for d in self._doubted if not self._is_told(*d, row_of, at)]
        self._choose()
        self.open = False

    def _is_right(self, entry: Entry, row_of: dict[int, torch.Tensor], i: int) -> bool:
        """Return whether its mark is known to be right; raise if it is wrong."""
        data_of = self._mesh.data_of
        pairs = [
            (a, b)
            for holders in entry.flat.ranks.groups
            for a, b in combinations(holders, 2)
            if data_of[a] == data_of[b]
        ]
        known = [self._judge(entry, a, b, row_of[a][i], row_of[b][i]) for a, b in pairs]
        return any(known)

    def _is_told(
        self,
        axis: str,
        a: int,
        b: int,
        held: Sequence[Entry],
        row_of: dict[int, torch.Tensor],
        at: dict[int, int],
    ) -> bool:
        """Return whether anything is known of the data along a doubted axis. Warns on the first rank
        if the two ranks have the same.
        """
        found = [_equal(row_of[a][at[e.number]], row_of[b][at[e.number]]) for e in held]
        known = [equal for equal in found if equal is not None]
        if known and all(known) and self._resources.group.rank == 0:
            logging.getLogger("onefold").warning(
                f"ranks {a} and {b}, apart along {axis!r}, have the same gradients of everything that"
                f" both hold, so they compute with the same data. Weights are divided along {axis!r},"
                f" and data={self._mesh.axes.data} names it: their gradients are divided by its size."
                f" Under tensor parallelism, leave {axis!r} out of data; a mesh of (1, n) ranks with"
                " mesh_dim_names=('dp', 'tp') and data='dp' has no other data. Under expert"
                " parallelism, give these ranks different samples."
            )
        return bool(known)

    def _judge(self, entry: Entry, a: int, b: int, one: torch.Tensor, other: torch.Tensor) -> bool:
        """Return whether anything can be said; raise if that is not what was marked."""
        if min(float(one[0]), float(other[0])) < 0:
            return True
        equal = _equal(one, other)
        if equal is None:
            return False
        partial = entry.parts > 1
        if equal == partial:
            missing = next((r for r, seen in ((a, one), (b, other)) if not seen[0]), None)
            raise ValueError(self._told(entry, a, b, partial, missing))
        return True

    def _told(self, entry: Entry, a: int, b: int, partial: bool, missing: int | None) -> str:
        name, axes = entry.slot.name, self._mesh.axes
        at = dict(zip(self._mesh.ranks, axes.coordinates, strict=True))
        along = [n for n, x, y in zip(axes.names, at[a], at[b], strict=True) if x != y]
        shown = " and ".join(map(repr, along))
        if partial:
            return (
                f"{name!r} is marked partial, and ranks {a} and {b}, apart along {shown}, have the"
                " same gradient of it: adding both up would double it. Leave it out of partial=."
            )
        none = "" if missing is None else f" (rank {missing} has none)"
        return (
            f"ranks {a} and {b} have different gradients of {name!r}{none}. They are apart along"
            f" {shown} only, which data={axes.data} does not name, so their data is taken to be the"
            f" same. If they compute with different samples or tokens, add {shown} to data. If they"
            " have parts of one gradient (as of a norm under sequence parallelism), give"
            f" partial=[{name!r}]."
        )


def _equal(one: torch.Tensor, other: torch.Tensor) -> bool | None:
    """Return whether two ranks' gradients are the same, by their numbers; None if nothing is known."""
    if min(float(one[0]), float(other[0])) < 0:  # parts of one, see `SAID`
        return None
    norm = max(float(one[1]), float(other[1])) ** 0.5
    if norm == 0 or not torch.isfinite(one + other).all():
        return None
    apart = (one - other)[2:].abs().max()
    return bool(one[0] and other[0] and float(apart) <= NEAR * norm)


def _drawn(n: int, seed: int, like: torch.Tensor) -> torch.Tensor:
    """Return random numbers [n, DRAWN], the same on every rank; on the device of `like`."""
    drawn = torch.randn(n, DRAWN, generator=torch.Generator().manual_seed(seed), device="cpu")
    return drawn.to(like, non_blocking=True)


def _doubted(
    entries: Sequence[Entry], mesh: Mesh
) -> Iterator[tuple[str, int, int, tuple[Entry, ...]]]:
    """Return the data axes along which weights are divided, as experts are; with the first two ranks
    along each, and what both hold. Tensor parallelism whose axis is among data looks the same.
    """
    if not any(e.box is not None and e.box.divided for e in entries):
        return
    rank_at = dict(zip(mesh.axes.coordinates, mesh.ranks, strict=True))
    first = (0,) * len(mesh.axes.names)
    for i, (axis, size) in enumerate(zip(mesh.axes.names, mesh.axes.sizes, strict=True)):
        if size == 1 or not mesh.axes.carries(axis):
            continue
        a, b = rank_at[first], rank_at[(*first[:i], 1, *first[i + 1 :])]
        held = tuple(e for e in entries if b in e.flat.ranks.group_of(a))
        if held and len(held) < len(entries):
            yield axis, a, b, held
