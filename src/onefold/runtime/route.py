"""How the whole of a flat buffer comes together, and how its gradient is divided: over which
groups, in which form.

    over all ranks, no groups        interval ──────────── all ───────────► whole
    over all ranks, in groups        interval ── across ──► shard ── inside ──► whole
    parameters over a group          shard ──────────── inside ───────────► whole
    a second copy                    interval ── across ──► shard (kept until the next step) ── inside ──► whole

`interval` is a rank's part among all ranks, `shard` its part among those of its group (see [Note:
positions] in comm/topology.py); the gradient goes the same way back, hop by hop, and is summed at
each in the accumulation dtype. Where parameters travel encoded, each interval is encoded once after
a step, moved and kept as bytes, and decoded into the flat buffer behind the last hop.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn

from onefold.comm import Chain, CollectiveContext, Group, Pending
from onefold.comm.codec import Codec
from onefold.memory import GATHERED, PARAMETERS
from onefold.recipe.groups import FLAT, GROUP, NATIVE

if TYPE_CHECKING:
    from onefold.recipe import Recipe
    from onefold.runtime.engine import Engine
    from onefold.runtime.flat import Flat
    from onefold.runtime.units import Found

#: Makes a context whose work may go to another stream than the computing one.
Beside = Callable[[], AbstractContextManager[Any]]
_LOW = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Hop:
    """One step of a reduction: the ranks of `group` divide a range of addresses among themselves,
    `ranges` by position.
    """

    group: Group
    ranges: tuple[tuple[int, int], ...]

    @property
    def own(self) -> tuple[int, int]:
        """The addresses that this rank sums."""
        return self.ranges[self.group.rank]


def hops_of(flat: Flat, group: Group) -> tuple[Hop, ...]:
    """The hops of the gradient of `flat`, from the whole to this rank's interval."""
    of_level = {
        "all": lambda: group,
        "intra-group": lambda: group.intra_group,
        "inter-group": lambda: group.inter_group,
    }
    return tuple(Hop(of_level[hop.level](), hop.ranges) for hop in flat.spec.hops)


class Route:
    """The gathers of one flat buffer.

    Attributes:
        second: the shard in the compute dtype, or encoded as bytes, kept to gather from; None
            without a second copy.
        fresh: `secondary` (or the encoded interval) is of the masters as they are.
        stored: the encoded interval is all there is: frozen weights that rest as they travel.
    """

    def __init__(self, flat: Flat, engine: Engine, stored: bool = False) -> None:
        spec, group = flat.spec, engine.group
        self.flat, self.engine, self.group = flat, engine, group
        self.stored: bool = stored
        self.codec = cast("Codec | None", spec.gather_codec)
        self.has_secondary = spec.has_secondary
        self.secondary: torch.Tensor | None = None
        self.fresh = False
        self.outer, self.shard = group.topology.outer, spec.shard
        # Bytes of an encoded interval, and where those that are kept lie among all
        self.each = spec.each if self.codec is not None else 0
        self._kept = spec.kept[0] * self.each, spec.kept[1] * self.each

    @property
    def group_of_owners(self) -> Group:
        """The ranks whose masters together are the whole, each once."""
        return self.group.intra_group if self.flat.owned == self.shard else self.group

    def build(self, device: torch.device) -> None:
        """Take the memory of what is kept: a second copy, or the own part encoded."""
        if self.codec is not None:
            self.secondary = torch.empty(
                self.flat.spec.kept_bytes, dtype=torch.uint8, device=device
            )
        elif self.has_secondary:
            self.secondary = torch.empty(
                self.shard[1] - self.shard[0], dtype=self.flat.dtypes.compute, device=device
            )

    @property
    def resting_bytes(self) -> dict[str, int]:
        """Bytes kept between steps, by category."""
        return (
            {}
            if self.secondary is None
            else {PARAMETERS: self.secondary.numel() * self.secondary.element_size()}
        )

    @property
    def reads_masters(self) -> bool:
        """The next gather begins with this rank's masters, not with what is kept of them."""
        return not (self.fresh and self.secondary is not None)

    def masters_changed(self) -> None:
        """The masters have new values."""
        self.fresh = self.stored  # where they are stored, `store` is how they get them

    # -- weights that rest encoded -----------------------------------------------------------------

    def store(self, values: torch.Tensor) -> None:
        """New values, [owned], for what rests encoded."""
        assert self.codec is not None and self.secondary is not None
        numel = self.flat.layout.shard_numel
        for index in range(values.numel() // max(numel, 1)):
            self.codec.encode(
                values[index * numel : (index + 1) * numel], self._bytes_of(self.secondary, index)
            )
        self.fresh = True

    def load(self) -> torch.Tensor:
        """What rests encoded, [owned], in the master dtype."""
        assert self.codec is not None and self.secondary is not None
        flat, numel = self.flat, self.flat.layout.shard_numel
        out = torch.empty(
            flat.owned[1] - flat.owned[0], dtype=flat.dtypes.master, device=self.secondary.device
        )
        for index in range(out.numel() // max(numel, 1)):
            self.codec.decode(
                self._bytes_of(self.secondary, index), out[index * numel : (index + 1) * numel]
            )
        return out

    # -- gathering ---------------------------------------------------------------------------------

    def start(
        self, full: torch.Tensor, put: Callable[[], None], place: CollectiveContext, beside: Beside
    ) -> Pending:
        """Start gathering the whole into `full`; `put` writes this rank's part of the masters
        there. Both go where `beside` says.
        """
        if self.codec is not None:
            return self._start_encoded(full, put, place, beside)
        with beside():
            return self._start(full, put, place)

    def _start(
        self, full: torch.Tensor, put: Callable[[], None], place: CollectiveContext
    ) -> Pending:
        if not self.has_secondary:
            put()
            return self.group_of_owners.all_gather(full, place, self.flat.index)
        mine, second = full[slice(*self.shard)], self.secondary
        assert second is not None
        if self.fresh:
            mine.copy_(second)
            return self.group.intra_group.all_gather(full, place, self.flat.index)
        put()
        self.fresh = True

        def keep() -> Pending:
            second.copy_(mine)
            return self.group.intra_group.all_gather(full, place, self.flat.index)

        return Chain(
            self.group, self.group.inter_group.all_gather(mine, place, self.flat.index), keep
        )

    def _start_encoded(
        self, full: torch.Tensor, put: Callable[[], None], place: CollectiveContext, beside: Beside
    ) -> Pending:
        # Taken on the computing stream, in whose order it is handed on.
        coded = self.engine.pool.take(
            self.flat.spec.coded_bytes, torch.uint8, GATHERED, self.flat.unit_name
        )
        with beside():
            return self._send_encoded(full, coded, put, place)

    def _send_encoded(
        self,
        full: torch.Tensor,
        coded: torch.Tensor,
        put: Callable[[], None],
        place: CollectiveContext,
    ) -> Pending:
        kept, group = self.secondary, self.group
        plain = full.numel() * full.element_size()
        assert kept is not None
        a, b = self._kept
        renewed = not self.fresh
        if renewed:
            put()
            self._encode(full, coded)
            if not self.has_secondary:
                kept.copy_(coded[a:b])
        else:
            coded[a:b].copy_(kept)
        self.fresh = True
        inner = group.intra_group if self.has_secondary else self.group_of_owners
        if not (self.has_secondary and renewed):
            return _Decoded(
                inner.all_gather(coded, place, self.flat.index, plain=plain), self, full, coded
            )
        low = group.inter_group.all_gather(
            coded[a:b], place, self.flat.index, plain=plain * self.outer // group.size
        )

        def keep() -> Pending:
            kept.copy_(coded[a:b])
            return inner.all_gather(coded, place, self.flat.index, plain=plain)

        return _Decoded(Chain(group, low, keep), self, full, coded)

    def _encode(self, full: torch.Tensor, coded: torch.Tensor) -> None:
        """What this rank owns, interval by interval: each is encoded by itself, so that the bytes
        are the same over any groups.
        """
        assert self.codec is not None
        each, (start, stop) = self.flat.layout.shard_numel, self.flat.owned
        for index in range(start // max(each, 1), stop // max(each, 1)):
            self.codec.encode(full[index * each : (index + 1) * each], self._bytes_of(coded, index))

    def decode(self, full: torch.Tensor, coded: torch.Tensor) -> None:
        """All intervals, this rank's own too: every rank computes with the same values."""
        assert self.codec is not None
        each = self.flat.layout.shard_numel
        for index in range(self.group.size):
            self.codec.decode(self._bytes_of(coded, index), full[index * each : (index + 1) * each])

    def _bytes_of(self, coded: torch.Tensor, index: int) -> torch.Tensor:
        assert self.codec is not None
        return coded[
            index * self.each : index * self.each
            + self.codec.encoded_bytes(self.flat.layout.shard_numel)
        ]


def rests_encoded(found: Found, recipe: Recipe) -> bool:
    """Whether a parameter is one of the frozen weights that rest encoded: matrices, but for what is
    looked up in (embeddings).
    """
    frozen = recipe.frozen is not None and not found.param.requires_grad and found.param.dim() >= 2
    return (
        frozen
        and found.param.dtype in _LOW
        and not any(isinstance(module, nn.Embedding) for module, _ in found.places)
    )


def route_notes(engine: Engine) -> list[str]:
    """A sentence for each thing that the recipe asks of groups and of frozen weights and that
    changes nothing in this run.
    """
    recipe, said = engine.recipe, []
    divides = GROUP in (recipe.parameters.over, recipe.gradients.over, recipe.optimizer.over)
    if engine.world_size == 1:
        named = {"gather_codec": recipe.parameters.codec, "reduce_codec": recipe.gradients.codec}
        idle = [f"{name}={value!r}" for name, value in named.items() if value]
        idle += ["a division inside groups"] if divides else []
        idle += [f"reduce={NATIVE!r}"] if recipe.reduce == NATIVE else []
        if idle:
            said.append(f"{' and '.join(idle)}: no effect on one rank, from which nothing travels.")
    # By itself a recipe takes nodes for groups, and does without.
    if recipe.group not in (None, FLAT) and engine.group.topology.outer == 1 < engine.world_size:
        node = (
            "the launcher says that all are on one node, or that nodes are uneven, or nothing of"
            " nodes (LOCAL_WORLD_SIZE)"
        )
        why = node if recipe.group == "node" else "they are all"
        said.append(
            f"group={recipe.group!r} makes one group of the {engine.world_size} ranks ({why}):"
            " nothing is divided inside groups only."
        )
    if recipe.frozen and not any(flat.route.stored for unit in engine.units for flat in unit.flats):
        said.append(
            f"frozen={recipe.frozen!r} has no effect: no matrix but embeddings was frozen when"
            " shard() was called."
        )
    return said


class _Decoded(Pending):
    """A gather of bytes that ends with the values."""

    __slots__ = ("_coded", "_full", "_moving", "_route")

    def __init__(
        self, moving: Pending, route: Route, full: torch.Tensor, coded: torch.Tensor
    ) -> None:
        self._moving, self._route, self._full = moving, route, full
        self._coded: torch.Tensor | None = coded
        self.place, self.event = moving.place, moving.event

    def wait(self) -> None:
        coded, self._coded = self._coded, None
        if coded is not None:
            self._moving.wait()
            self._route.decode(self._full, coded)
            self._route.engine.pool.give(coded)
