"""One gradient buffer on its way from partial sums to the ranks that keep them: hop by hop, and on to who holds them too.

    stage 1 to 3          whole ── all ──► interval
    stage 0               whole ── all ──► interval ── all ──► whole            (a reduce-scatter and an all-gather: an all-reduce)
    over groups           whole ── inside ──► shard ── across ──► interval
    stage 0               ... ──► interval ── across ──► shard ── inside ──► whole
    HSDP, MiCS            whole ── inside ──► shard ── across ──► interval ── across ──► shard

[Note: held sums] Where gradients are divided inside a group, micro-batches before the boundary go one hop only: the group's sums are held
in the accumulation dtype, and the hop across carries them once a step.

[Note: rounded once] The mean over the ranks is computed in the accumulation dtype and rounded once to the dtype of the wire, whether it
then travels on or stays. The second half of stage 0's all-reduce thus weighs what the formula says, and stages 1 to 3 have its bits.

[Note: encoded sums] Where gradients travel encoded, every part is encoded for its receiver, decoded there and added in the accumulation
dtype: sums are never made of encoded values. A rank's own part is not encoded. What the encoding lost can be kept and added to the next
gradient.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from onefold.comm import Chain, Pending, Place
from onefold.comm.codecs import Codec, Stochastic, codec
from onefold.layout import overlap, round_up
from onefold.memory import GRADIENTS, REDUCTION, RESIDUALS
from onefold.runtime.flat import Flat
from onefold.runtime.route import Hop
from onefold.runtime.unit import Unit

if TYPE_CHECKING:
    from onefold.runtime.engine import Engine

#: Encoded parts begin at multiples of this many bytes.
_ALIGNED = 16


@dataclass
class Reduction:
    """One run of one flat buffer on its way.

    Attributes:
        run: the addresses that are reduced. span: those that `buffer` covers, on this hop.
        own: the addresses of `span` that this rank sums; `parts`: what the ranks send of them, by position in the hop's group.
        filled: which entries got a gradient here.
        lent: one buffer of which the parts are rows. sent: what travels, where that is not `buffer` itself.
        total: the sums, over `own`, or over what the rank keeps if they are spread (`covers`).
        down: the sums have left the device.
    """

    unit: Unit
    flat: Flat
    run: tuple[int, int]
    filled: list[bool]
    buffer: torch.Tensor
    span: tuple[int, int]
    at: int = 0
    own: tuple[int, int] = (0, 0)
    parts: dict[int, torch.Tensor] = field(default_factory=dict)
    pending: Pending | None = None
    lent: torch.Tensor | None = None
    sent: torch.Tensor | None = None
    total: torch.Tensor | None = None
    covers: tuple[int, int] = (0, 0)
    gathering: Pending | None = None
    down: bool = False

    @property
    def hop(self) -> Hop:
        return self.flat.hops[self.at]

    @property
    def is_last(self) -> bool:
        """No further hop follows."""
        return self.at + 1 == len(self.flat.hops)


class Summing:
    """Sends, sums and spreads the gradients of one engine."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        recipe = engine.recipe
        self.codec: Codec | None = codec(recipe.gradients.codec) if recipe.gradients.codec else None
        self.residuals: dict[tuple[int, int, int], torch.Tensor] = {}  # by flat buffer, first address and hop
        self._drawn = 0  # how far the run that this one resumes was ahead of it

    # -- sending ---------------------------------------------------------------------------------------------------------------

    def send(self, r: Reduction) -> None:
        """Start the hop that `r` stands before."""
        engine, flat, hop, group = self.engine, r.flat, r.hop, r.hop.group
        move = "all-reduce" if flat.whole_master else "reduce-scatter"
        place = Place(move, r.unit.name, engine.step, engine.phase)
        r.own = overlap(r.span, hop.own)
        if self.encodes(flat, hop):
            r.pending = self._send_encoded(r, place)
            return
        sent = r.buffer
        if r.buffer.dtype != flat.dtypes.wire:
            sent = engine.pool.take(r.buffer.numel(), flat.dtypes.wire, REDUCTION, r.unit.name).copy_(r.buffer)
            r.sent = sent
        self._places(r)
        recvs = [(p, part) for p, part in r.parts.items() if p != group.rank]
        if group.imagined:  # two messages stand for all
            a, b = r.own[0] - r.span[0], r.own[1] - r.span[0]
            sends = [(group.rank, sent[:a]), (group.rank, sent[b:])]
        else:
            sends = [(p, piece) for p, piece in enumerate(cut(sent, r.span, hop)) if p != group.rank]
        r.pending = group.exchange(sends, recvs, place, flat.index, move=move)

    def encodes(self, flat: Flat, hop: Hop) -> bool:
        """Whether gradients of `flat` travel encoded on `hop`."""
        return self.codec is not None and hop.group.size > 1 and flat.dtypes.sums == torch.float32 and not hop.group.imagined

    def _places(self, r: Reduction) -> None:
        """Where the ranks' parts go, by position with this rank's own among them: rows of one lent buffer, but for one that stays."""
        group, into, dtype, own = r.hop.group, self.summed_into(r), r.flat.dtypes.wire, r.own
        mine = r.buffer[own[0] - r.span[0] : own[1] - r.span[0]]
        places = {group.rank: mine}
        if into is not None:
            places[into] = self.engine.pool.fresh(mine.numel(), dtype)
            self.engine.memory.add(REDUCTION, _bytes(places[into]), r.unit.name)
        others = [p for p in range(group.size) if p not in places]
        r.lent = self.engine.pool.take(len(others) * mine.numel(), dtype, REDUCTION, r.unit.name) if others else None
        if r.lent is not None and not group.imagined:  # else nothing arrives there
            places |= zip(others, r.lent.view(len(others), mine.numel()).unbind(), strict=True)
        r.parts = dict(sorted(places.items()))

    def _send_encoded(self, r: Reduction, place: Place) -> Pending:
        """See [Note: encoded sums]."""
        engine, flat, group, hop = self.engine, r.flat, r.hop.group, r.hop
        assert self.codec is not None
        cuts = [overlap(r.span, there) for there in hop.ranges]
        each = max(round_up(self.codec.encoded_bytes(b - a), _ALIGNED) for a, b in cuts)
        r.sent = engine.pool.take(group.size * each, torch.uint8, REDUCTION, r.unit.name)
        r.lent = engine.pool.take(group.size * each, torch.uint8, REDUCTION, r.unit.name)
        residual = self._residual(r)
        sends, recvs, mine = [], [], self.codec.encoded_bytes(r.own[1] - r.own[0])
        plain = {p: (b - a) * flat.dtypes.wire.itemsize for p, (a, b) in enumerate(cuts)}
        for p, (a, b) in enumerate(cuts):
            piece = r.buffer[a - r.span[0] : b - r.span[0]]
            if p == group.rank or a == b:
                continue
            coded = r.sent[p * each : p * each + self.codec.encoded_bytes(b - a)]
            lost = residual[a - r.span[0] : b - r.span[0]] if residual is not None else None
            if lost is not None:
                lost.add_(piece)
                piece = lost
            self.codec.encode(piece, coded, rounding=self._rounding(r, a))
            if lost is not None:
                self.codec.keep_residual(coded, lost)
            sends.append((p, coded))
        for p in range(group.size) if mine else ():
            if p != group.rank:
                r.parts[p] = r.lent[p * each : p * each + mine]
                recvs.append((p, r.parts[p]))
        r.parts[group.rank] = r.buffer[r.own[0] - r.span[0] : r.own[1] - r.span[0]]
        r.parts = dict(sorted(r.parts.items()))
        return group.exchange(sends, recvs, place, flat.index, move=place.move, plain=plain)

    def _residual(self, r: Reduction) -> torch.Tensor | None:
        """What encoding this buffer lost so far, over its span, in fp32; made when it is first asked for."""
        if not self.engine.recipe.error_feedback:
            return None
        return self.residual((r.flat.index, r.span[0], r.at), r.span[1] - r.span[0])

    def residual(self, key: tuple[int, int, int], numel: int) -> torch.Tensor:
        """What was lost of `numel` elements, zeros at first: by flat buffer, first address and hop.

        Where more or fewer elements travel from that address on (parameters were frozen, or are trained again), what both have stays.
        """
        known = self.residuals.get(key)
        if known is None or known.numel() != numel:
            found = torch.zeros(numel, dtype=torch.float32, device=self.engine.device)
            if known is not None:
                both = min(numel, known.numel())
                found[:both] = known[:both]
                self.engine.memory.add(RESIDUALS, -_bytes(known))
            self.residuals[key] = known = found
            self.engine.memory.add(RESIDUALS, _bytes(known))
        return known

    def spans(self) -> dict[tuple[int, int, int], int]:
        """The elements of every residual that there may come to be."""
        found = {}
        for flat in (flat for unit in self.engine.units for flat in unit.flats if not flat.passive):
            for run in flat.runs:
                span = run
                for at, hop in enumerate(flat.hops):
                    found[flat.index, span[0], at] = span[1] - span[0]
                    span = overlap(span, hop.own)
        return found

    def forget(self) -> None:
        """Nothing was lost."""
        for lost in self.residuals.values():
            self.engine.memory.add(RESIDUALS, -_bytes(lost))
        self.residuals.clear()

    def forget_if(self, bad: torch.Tensor) -> None:
        """Nothing was lost, if the gradients were not finite (`bad`, a scalar, is not 0).

        Their step is left out. What encoding their finite numbers lost may be huge all the same, and must not reach the next step.
        """
        if self.residuals and bool(bad):
            self.forget()

    @property
    def draw(self) -> int:
        """The step of the training that random bits are of, runs that were resumed counted."""
        return self.engine.step + self._drawn

    @draw.setter
    def draw(self, step: int) -> None:
        self._drawn = step - self.engine.step

    def _rounding(self, r: Reduction, address: int) -> Stochastic | None:
        """Random bits by step, rank and address: the same in a repeated run, and others for each rank, lest their errors add up."""
        if self.engine.recipe.wire_rounding != "stochastic":
            return None
        seed = (r.flat.index * 2 + r.at) * self.engine.world_size + self.engine.rank
        return Stochastic(seed=seed, step=self.draw, address=address)

    # -- landing ---------------------------------------------------------------------------------------------------------------

    def land(self, r: Reduction) -> None:
        """Wait for the parts and add them up in rank order: `r.total`."""
        assert r.pending is not None
        r.pending.wait()
        pool, r.pending = self.engine.pool, None
        sent, r.sent = r.sent, None
        if sent is not None and not self.encodes(r.flat, r.hop):
            pool.give(sent)
            sent = None
        into = self.summed_into(r)
        total = self._sum_apart(r) if into is None else self._sum_in_place(r, into)
        r.parts.clear()
        lent, r.lent = r.lent, None
        for buffer in (lent, sent):
            if buffer is not None:
                pool.give(buffer)
        buffer, r.buffer = r.buffer, total
        pool.give(buffer)
        r.total = total

    def next_hop(self, r: Reduction) -> None:
        """The sums of this hop are what the next one sends."""
        assert r.total is not None
        r.buffer, r.total, r.span, r.at = r.total, None, r.own, r.at + 1

    def summed_into(self, r: Reduction) -> int | None:
        """The peer whose part becomes the sum, if sums need no other dtype and no other place."""
        group, flat = r.hop.group, r.flat
        if not r.is_last or flat.spread is not None or group.size == 1 or flat.dtypes.wire != flat.dtypes.sums:
            return None
        if r.buffer.dtype != flat.dtypes.wire or self.encodes(flat, r.hop):
            return None
        return 1 if group.rank == 0 else 0

    def _sum_in_place(self, r: Reduction, into: int) -> torch.Tensor:
        total = r.parts[into]
        r.covers = r.own
        self.engine.memory.add(REDUCTION, -_bytes(total), r.unit.name)
        self.engine.memory.add(GRADIENTS, _bytes(total))
        for rank, part in r.parts.items():  # rank 0 adds part 1 to part 0, the others part 0 to part 1: the same sum
            if rank != into:
                total.add_(part)
        return total

    def _sum_apart(self, r: Reduction) -> torch.Tensor:
        flat, pool = r.flat, self.engine.pool
        sums_dtype = flat.dtypes.sums
        if not r.is_last:  # a buffer on its way
            total = target = pool.take(r.own[1] - r.own[0], sums_dtype, REDUCTION, r.unit.name)
            r.covers = r.own
        else:
            # Who holds more than it sums puts its sums into their place there; the others' come later.
            r.covers = overlap(r.run, flat.owned) if flat.spread is not None else r.own
            sent_on = flat.whole_master or flat.spread is not None
            total = pool.fresh(r.covers[1] - r.covers[0], flat.dtypes.wire if sent_on else sums_dtype)
            target = total[r.own[0] - r.covers[0] : r.own[1] - r.covers[0]]
            self.engine.memory.add(GRADIENTS, _bytes(total))
        sums = target
        if target.dtype != sums_dtype:
            sums = pool.take(target.numel(), sums_dtype, REDUCTION, r.unit.name)
        self._add_up(r, sums)
        if r.hop.group.size > 1 and self.early_scale(flat) == 1:
            sums.mul_(1.0 / r.hop.group.size)
        if sums is not target:
            target.copy_(sums)
            pool.give(sums)
        elif r.is_last:
            self._round(r, sums)
        return total

    def _round(self, r: Reduction, sums: torch.Tensor) -> None:
        """See [Note: rounded once]; in place, by way of the memory that the parts came in, which have been added."""
        wire = r.flat.dtypes.wire
        if r.lent is None or wire == sums.dtype or torch.promote_types(wire, sums.dtype) == wire:
            return
        room = r.lent.view(torch.uint8)
        room = room[: room.numel() // wire.itemsize * wire.itemsize].view(wire)
        for part in sums.split(max(room.numel(), 1)):
            part.copy_(room[: part.numel()].copy_(part))

    def _add_up(self, r: Reduction, sums: torch.Tensor) -> None:
        """All parts into `sums`, in rank order."""
        if self.encodes(r.flat, r.hop):
            assert self.codec is not None
            sums.zero_()
            for rank, part in r.parts.items():
                if rank == r.hop.group.rank:
                    sums.add_(part)
                else:
                    self.codec.decode_add(part, sums)
            return
        first, *others = r.parts.values()
        if others and first.dtype == others[0].dtype == sums.dtype:
            torch.add(first, others[0], out=sums)
            others = others[1:]
        else:
            sums.copy_(first)
        for part in others:
            sums.add_(part)

    def early_scale(self, flat: Flat) -> float:
        """The mean's factor, if it goes into the copy that is made anyway: not where 16 bits travel, whose range it would waste."""
        return 1.0 / self.engine.group.size if flat.dtypes.wire == flat.dtypes.sums else 1.0

    # -- spreading -------------------------------------------------------------------------------------------------------------

    def spread(self, r: Reduction) -> None:
        """Start sending this rank's sums to all that hold them too, and receiving theirs; over groups across first, then inside."""
        flat, hop = r.flat, r.flat.spread
        assert hop is not None
        r.gathering = self._send_on(r, hop)
        if flat.whole_master and hop is not flat.hops[0]:
            r.gathering = Chain(self.engine.group, r.gathering, lambda: self._send_on(r, flat.hops[0]))

    def _send_on(self, r: Reduction, hop: Hop) -> Pending:
        """The sums that this rank has of the addresses of a hop, to the ranks of its group, and theirs from them."""
        assert r.total is not None
        group, place = hop.group, Place("all-reduce", r.unit.name, self.engine.step, self.engine.phase)
        span = overlap(r.covers, (hop.ranges[0][0], hop.ranges[-1][1]))
        part = cut(r.total[span[0] - r.covers[0] : span[1] - r.covers[0]], span, hop)
        peers = [p for p in range(group.size) if p != group.rank]
        recvs = [(p, part[p]) for p in peers] if not group.imagined else []
        return group.exchange([(p, part[group.rank]) for p in peers], recvs, place, r.flat.index, move="all-reduce")


def cut(buffer: torch.Tensor, span: tuple[int, int], hop: Hop) -> tuple[torch.Tensor, ...]:
    """The ranks' pieces of a buffer over `span`, by position in the hop's group."""
    cuts = [overlap(span, there) for there in hop.ranges]
    return buffer.split([b - a for a, b in cuts])


def _bytes(t: torch.Tensor) -> int:
    return t.numel() * t.element_size()
