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
"""

from __future__ import annotations

from itertools import combinations

import torch

from onefold.runtime.engine import Engine
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

    def __init__(self, engine: Engine) -> None:
        self._engine, self._group, self._mesh = engine, engine.group, engine.mesh
        self._unknown = [e for e in engine.entries if e.flat.ranks.copies > 1]
        self._next: int | None = None  # the step of the next look, counted from 0; None: the first
        self.open = bool(self._unknown)
        self.forget()

    def forget(self) -> None:
        """Begin anew, with no gradient of any parameter: its count, its sum of squares, its products.
        Also called after a backward pass that raised.
        """
        shape, device = (len(self._unknown), 2 + DRAWN), self._engine.device
        self._numbers = torch.zeros(shape, dtype=torch.float64, device=device)
        self._of = dict(zip(self._unknown, self._numbers, strict=True))

    def begin_backward(self) -> None:
        """Open the pass if it is one of a step to look at."""
        self.open = bool(self._unknown) and self._engine.step_count >= (self._next or 0)

    def note(self, entry: Entry, grad: torch.Tensor) -> None:
        """Note a gradient that has come, in a pass that is open."""
        if (numbers := self._of.get(entry)) is None:
            return
        if entry.box is not None and entry.box.came_partial:
            numbers[0] = SAID
            return
        # A random matrix is the product of a column and a row: so it is small
        matrix = (
            grad.detach().reshape(-1, max(1, grad.shape[-1] if grad.ndim else 1)).to(torch.float64)
        )
        columns, rows = (_drawn(n, seed, matrix) for seed, n in enumerate(matrix.shape))
        numbers[0] += 1
        numbers[1] += matrix.square().sum()
        numbers[2:] += (matrix @ rows).mul_(columns).sum(0)

    def compare(self) -> None:
        """After gradients were reduced, or stay for a later reduction: compare, if that is due.
        Collective over all ranks of the mesh; the host reads the numbers. See [Note: looks at marks].

        Raises:
            ValueError: on every rank, if a parameter's mark is wrong. It names the parameter.
        """
        if not self.open or (self._next is not None and self._engine.deferring):
            return
        steps = self._engine.step_count  # with the one that ends here, if it does
        self._next, self.open = max(0, 2 * steps - 1), False
        context = self._engine.context("control", "(marks of parameters)")
        table = self._group.gather_values(self._numbers, context).cpu().unbind(1)
        self._unknown = [
            entry
            for entry, numbers in zip(self._unknown, table, strict=True)
            if not self._group.alone
            and not self._is_right(entry, dict(zip(self._group.ranks, numbers, strict=True)))
        ]
        self.forget()

    def _is_right(self, entry: Entry, of_rank: dict[int, torch.Tensor]) -> bool:
        """Return whether its mark is known to be right; raise if it is wrong."""
        known, data_of = False, self._mesh.data_of
        for holders in entry.flat.ranks.groups:
            for a, b in combinations(holders, 2):
                if data_of[a] != data_of[b]:
                    continue
                equal = _equal(of_rank[a], of_rank[b])
                if equal is not None and equal == (entry.parts > 1):
                    missing = [rank for rank in (a, b) if not of_rank[rank][0]]
                    raise ValueError(self._told(entry, a, b, equal, missing))
                said = min(of_rank[a][0], of_rank[b][0]) < 0
                known = known or equal is not None or bool(said)
        return known

    def _told(self, entry: Entry, a: int, b: int, partial: bool, missing: list[int]) -> str:
        name = entry.slot.name
        shown = " and ".join(map(repr, self._mesh.axes_of((a, b))))
        if partial:
            return (
                f"{name!r} is marked partial, and ranks {a} and {b}, apart along {shown}, have the"
                " same gradient of it: adding both up would double it. Leave it out of partial=."
            )
        none = f" (rank {missing[0]} has none)" if missing else ""
        return (
            f"ranks {a} and {b} have different gradients of {name!r}{none}. They are apart along"
            f" {shown} only, which data={self._mesh.data} does not name, so their data is taken to be the"
            f" same. If they compute with different samples or tokens, add {shown} to data. If they"
            " have parts of one gradient (as of a norm under sequence parallelism), give"
            f" partial=[{name!r}]."
        )


def _equal(one: torch.Tensor, other: torch.Tensor) -> bool | None:
    """Return whether two ranks' gradients are the same, by their numbers; None if nothing is known."""
    if min(one[0], other[0]) < 0:  # parts of one, see `SAID`
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
