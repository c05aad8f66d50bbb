"""What encoding has lost of gradients so far (error feedback), and the random bits of rounding."""

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
from onefold.runtime.resources import Progress

if TYPE_CHECKING:
    from onefold.runtime.reduce_paths import Reduction
    from onefold.runtime.unit import Unit

#: (flat buffer, first address, hop)
Key = tuple[int, int, int]


class Residuals:
    """The residuals of one engine, in fp32, kept until the next gradient of the same addresses.

    Attributes:
        codec: what gradients are encoded with; None if they are not encoded.
        kept: the residuals: what was lost, by flat buffer, first address and hop.
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
        """Raises ValueError: the codec cannot round as the recipe asks."""
        self.codec, self.device, self.memory, self.progress = codec, device, memory, progress
        self.kept: dict[Key, torch.Tensor] = {}
        self._feeds_back, self._stochastic = (
            recipe.error_feedback,
            recipe.wire_rounding == "stochastic",
        )
        # Otherwise the first backward pass would raise it
        if self._stochastic and codec is not None and not codec.stochastic:
            raise ValueError(
                f"wire_rounding='stochastic' with reduce_codec={codec.name!r}: this codec rounds to the"
                " nearest value only; leave wire_rounding out, or choose another codec."
            )
        self._rank, self._ranks = group.number, group.size
        self._drawn = 0  # how far the run that this one resumes was ahead of it

    def of(self, r: Reduction) -> torch.Tensor | None:
        """Return what encoding the buffer of `r` has lost so far, over its span; None without error
        feedback.
        """
        if not self._feeds_back:
            return None
        return self.residual((r.flat.index, r.span[0], r.at), r.span[1] - r.span[0])

    def residual(self, key: Key, numel: int) -> torch.Tensor:
        """Return what was lost of `numel` elements, zeros at first.

        If more or fewer elements travel now from that address on (parameters were frozen, or are
        trained again), the residuals of those that both spans have stay.
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
        """Return how many elements each residual that the flat buffers of `units` may get has."""
        found = {}
        for flat in (flat for unit in units for flat in unit.flats):
            for run in flat.runs:
                span = run
                for at, hop in enumerate(flat.hops):
                    found[flat.index, span[0], at] = span[1] - span[0]
                    span = overlap(span, hop.own)
        return found

    def forget(self) -> None:
        """Drop all residuals, as if nothing had been lost."""
        for lost in self.kept.values():
            self.memory.add(RESIDUALS, -nbytes_of(lost))
        self.kept.clear()

    def forget_if(self, bad: torch.Tensor) -> None:
        """Drop all residuals if the gradients were not finite (`bad`, a scalar, is not 0).

        The step of such gradients is skipped. What encoding their finite numbers lost may still be
        huge, and must not reach the next step.
        """
        if not has_streams(self.device):
            if self.kept and bool(bad):
                self.forget()
            return
        # Without reading `bad` on the host, which would cost a synchronization
        for lost in self.kept.values():
            lost.masked_fill_(bad.to(lost.device, torch.bool), 0.0)

    @property
    def draw(self) -> int:
        """The step of the training that random bits depend on. It counts the steps of the runs that
        this one resumes.
        """
        return self.progress.step_count + self._drawn

    @draw.setter
    def draw(self, step: int) -> None:
        self._drawn = step - self.progress.step_count

    def rounding(self, r: Reduction, address: int) -> Stochastic | None:
        """Return random bits by step, rank and address: the same bits in a repeated run, and other
        bits for each rank, so that the ranks' errors do not add up.
        """
        if not self._stochastic:
            return None
        seed = (r.flat.index * 2 + r.at) * self._ranks + self._rank
        return Stochastic(seed=seed, step=self.draw, address=address)
