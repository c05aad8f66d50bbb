"""What encoding gradients has lost so far (error feedback), and where its random bits come from."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch

from onefold.comm import Group
from onefold.comm.codec import Codec, Stochastic
from onefold.device import has_streams
from onefold.layout import overlap
from onefold.memory import RESIDUALS, MemoryLedger, nbytes_of
from onefold.recipe import Recipe
from onefold.runtime.progress import Progress

if TYPE_CHECKING:
    from onefold.runtime.reductions import Reduction
    from onefold.runtime.unit import Unit

#: (flat buffer, first address, hop)
Key = tuple[int, int, int]


class Residuals:
    """The residuals of one engine, in fp32, kept until the next gradient of the same addresses.

    Attributes:
        codec: what gradients are encoded with; None if they are not.
        kept: what was lost, by flat buffer, first address and hop.
    """

    def __init__(
        self,
        recipe: Recipe,
        codec: Codec | None,
        group: Group,
        device: torch.device,
        memory: MemoryLedger,
        progress: Progress,
    ) -> None:
        self.codec, self.device, self.memory, self.progress = codec, device, memory, progress
        self.kept: dict[Key, torch.Tensor] = {}
        self._feeds_back, self._stochastic = (
            recipe.error_feedback,
            recipe.wire_rounding == "stochastic",
        )
        self._rank, self._ranks = group.number, group.size
        self._drawn = 0  # how far the run that this one resumes was ahead of it

    def of(self, r: Reduction) -> torch.Tensor | None:
        """What encoding the buffer of `r` lost so far, over its span; None without error
        feedback.
        """
        if not self._feeds_back:
            return None
        return self.residual((r.flat.index, r.span[0], r.at), r.span[1] - r.span[0])

    def residual(self, key: Key, numel: int) -> torch.Tensor:
        """What was lost of `numel` elements, zeros at first.

        Where more or fewer elements travel from that address on (parameters were frozen, or are
        trained again), what both have stays.
        """
        known = self.kept.get(key)
        if known is None or known.numel() != numel:
            found = torch.zeros(numel, dtype=torch.float32, device=self.device)
            if known is not None:
                both = min(numel, known.numel())
                found[:both] = known[:both]
                self.memory.add(RESIDUALS, -nbytes_of(known))
            self.kept[key] = known = found
            self.memory.add(RESIDUALS, nbytes_of(known))
        return known

    def spans(self, units: Iterable[Unit]) -> dict[Key, int]:
        """The elements of every residual that there may come to be in the flat buffers of `units`."""
        found = {}
        for flat in (flat for unit in units for flat in unit.flats):
            for run in flat.runs:
                span = run
                for at, hop in enumerate(flat.hops):
                    found[flat.index, span[0], at] = span[1] - span[0]
                    span = overlap(span, hop.own)
        return found

    def forget(self) -> None:
        """Nothing was lost."""
        for lost in self.kept.values():
            self.memory.add(RESIDUALS, -nbytes_of(lost))
        self.kept.clear()

    def forget_if(self, bad: torch.Tensor) -> None:
        """Nothing was lost, if the gradients were not finite (`bad`, a scalar, is not 0).

        Their step is left out. What encoding their finite numbers lost may be huge all the same,
        and must not reach the next step.
        """
        if not has_streams(self.device):
            if self.kept and bool(bad):
                self.forget()
            return
        # Without asking: the answer would cost a synchronization
        for lost in self.kept.values():
            lost.masked_fill_(bad.to(lost.device, torch.bool), 0.0)

    @property
    def draw(self) -> int:
        """The step of the training that random bits are of, runs that were resumed counted."""
        return self.progress.step + self._drawn

    @draw.setter
    def draw(self, step: int) -> None:
        self._drawn = step - self.progress.step

    def rounding(self, r: Reduction, address: int) -> Stochastic | None:
        """Random bits by step, rank and address: the same in a repeated run, and others for each
        rank, lest their errors add up.
        """
        if not self._stochastic:
            return None
        seed = (r.flat.index * 2 + r.at) * self._ranks + self._rank
        return Stochastic(seed=seed, step=self.draw, address=address)
