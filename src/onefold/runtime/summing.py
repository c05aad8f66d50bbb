"""One gradient buffer on its way from partial sums to the ranks that keep them: hop by hop, and on
to who holds them too.

    stage 1 to 3          whole ── all ──► interval
    stage 0               whole ── all ──► interval ── all ──► whole            (a reduce-scatter and an all-gather: an all-reduce)
    over groups           whole ── inside ──► shard ── across ──► interval
    stage 0               ... ──► interval ── across ──► shard ── inside ──► whole
    HSDP, MiCS            whole ── inside ──► shard ── across ──► interval ── across ──► shard

[Note: held sums] Where gradients are divided inside a group, micro-batches before the boundary go
one hop only: the group's sums are held in the accumulation dtype, and the hop across carries them
once a step.

[Note: rounded once] The mean over the ranks is computed in the accumulation dtype and rounded once
to the dtype of the wire, whether it then travels on or stays. The second half of stage 0's
all-reduce thus weighs what the formula says, and stages 1 to 3 have its bits.

[Note: all parts at once] On a native backend one operation brings the parts of all ranks into the
rows of one buffer, and one kernel adds them (comm/sums.py). This rank's part comes along, unless it
is in a wider dtype than what travels: then it stays where it is, since it is not rounded on gloo
either. With `reduce="native"` the backend adds, in the dtype of the wire and an order of its own.

[Note: encoded sums] Where gradients travel encoded, every part is encoded for its receiver, decoded
there and added in the accumulation
dtype: sums are never made of encoded values. A rank's own part is not encoded. What the encoding
lost can be kept and added to the next gradient.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from onefold.comm import Chain, CollectiveContext, Pending
from onefold.comm.codec import Codec, Stochastic
from onefold.comm.group import Cut
from onefold.comm.sums import sum_parts
from onefold.device import has_streams
from onefold.layout import overlap
from onefold.memory import GRADIENTS, REDUCTION, RESIDUALS, nbytes_of
from onefold.recipe.groups import NATIVE
from onefold.runtime.flat import Flat
from onefold.runtime.route import Hop
from onefold.runtime.unit import Unit

if TYPE_CHECKING:
    from onefold.runtime.engine import Engine


@dataclass
class Reduction:
    """One run of one flat buffer on its way.

    Attributes:
        run: the addresses that are reduced. span: those that `buffer` covers, on this hop.
        own: the addresses of `span` that this rank sums; `parts`: what the ranks send of them, by
            position in the hop's group.
        filled: which entries got a gradient here.
        lent: one buffer of which the parts are rows. sent: what travels, where that is not `buffer`
            itself.
        rows: how many parts lie in `receive_buffer` without being in `parts`; see [Note: all parts
            at once].
        summed: the backend adds them up: one row. whole: the backend sums the whole run for every
            rank.
        total: the sums, over `own`, or over what the rank keeps if they are spread
            (`result_range`).
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
    receive_buffer: torch.Tensor | None = None
    sent: torch.Tensor | None = None
    rows: int = 0
    summed: bool = False
    whole: bool = False
    total: torch.Tensor | None = None
    result_range: tuple[int, int] = (0, 0)
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
        self.codec: Codec | None = (
            engine.capabilities.codec(recipe.gradients.codec) if recipe.gradients.codec else None
        )
        self.by_backend = recipe.reduce == NATIVE
        self._cuts: dict[tuple[int, tuple[int, int], int], Cut] = {}  # by flat buffer, span and hop
        # By flat buffer, first address and hop
        self.residuals: dict[tuple[int, int, int], torch.Tensor] = {}
        self._drawn = 0  # how far the run that this one resumes was ahead of it

    # -- sending -----------------------------------------------------------------------------------

    def send(self, r: Reduction) -> None:
        """Start the hop that `r` stands before."""
        engine, flat, hop, group = self.engine, r.flat, r.hop, r.hop.group
        move = "all-reduce" if flat.whole_master else "reduce-scatter"
        place = CollectiveContext(move, r.unit.name, engine.step, engine.phase)
        r.own = overlap(r.span, hop.own)
        if self.encodes(flat, hop):
            r.pending = self._send_encoded(r, place)
            return
        if group.native or (self.by_backend and group.size > 1):
            cut = self._cut(flat, r.span, r.at)
            if not self.by_backend:
                self._send_at_once(r, cut, place)
            elif flat.whole_master:
                self._send_to_all(r, place)
            elif group.can_reduce(cut):
                self._send_to_be_summed(r, cut, place)
            else:  # parts of a buffer whose other parameters are frozen
                self._send_at_once(r, cut, place)
            return
        sent = r.buffer
        if r.buffer.dtype != flat.dtypes.wire:
            sent = engine.pool.take(
                r.buffer.numel(), flat.dtypes.wire, REDUCTION, r.unit.name
            ).copy_(r.buffer)
            r.sent = sent
        self._places(r)
        recvs = [(p, part) for p, part in r.parts.items() if p != group.rank]
        if group.fake:  # two messages stand for all
            a, b = r.own[0] - r.span[0], r.own[1] - r.span[0]
            sends = [(group.rank, sent[:a]), (group.rank, sent[b:])]
        else:
            sends = [
                (p, piece) for p, piece in enumerate(pieces(sent, r.span, hop)) if p != group.rank
            ]
        r.pending = group.exchange(sends, recvs, place, flat.index, move=move)

    def _cut(self, flat: Flat, span: tuple[int, int], at: int) -> Cut:
        """How hop `at` divides a buffer over `span`. As many are kept as there are ways in which
        parameters have been frozen.
        """
        key, hop = (flat.index, span, at), flat.hops[at]
        if key not in self._cuts:
            self._cuts[key] = hop.group.cut(
                [b - a for a, b in (overlap(span, there) for there in hop.ranges)]
            )
        return self._cuts[key]

    def _send_at_once(self, r: Reduction, cut: Cut, place: CollectiveContext) -> None:
        """See [Note: all parts at once]."""
        pool, wire, group, sent = self.engine.pool, r.flat.dtypes.wire, r.hop.group, r.buffer
        room = r.flat.spec.exchange(r.at, sent.dtype, r.span, "at once")
        r.rows = room.rows
        if sent.dtype != wire:
            a, b = r.own[0] - r.span[0], r.own[1] - r.span[0]
            sent = r.sent = pool.take(room.sent, wire, REDUCTION, r.unit.name)
            sent[:a].copy_(r.buffer[:a])
            sent[a:].copy_(r.buffer[b:])
        r.receive_buffer = pool.take(room.received, wire, REDUCTION, r.unit.name)
        r.pending = group.scatter_parts(
            sent, cut, r.receive_buffer.view(room.rows, room.part), place, r.flat.index, place.move
        )

    def _send_to_be_summed(self, r: Reduction, cut: Cut, place: CollectiveContext) -> None:
        """The backend adds the parts up, in the dtype of the wire."""
        sent, r.rows, r.summed = self._on_the_wire(r), 1, True
        r.receive_buffer = self.engine.pool.take(cut.own, sent.dtype, REDUCTION, r.unit.name)
        mean = self.early_scale(r.flat) == 1
        r.pending = r.hop.group.reduce_scatter(
            sent, cut, r.receive_buffer, place, r.flat.index, place.move, mean
        )

    def _send_to_all(self, r: Reduction, place: CollectiveContext) -> None:
        """The backend adds everything up for everybody."""
        # On however many levels the backend likes
        sent, r.whole, r.at = self._on_the_wire(r), True, len(r.flat.hops) - 1
        r.total = self.engine.pool.fresh(sent.numel(), sent.dtype).copy_(sent)
        self.engine.memory.add(GRADIENTS, nbytes_of(r.total))
        r.pending = self.engine.group.all_reduce(
            r.total, place, r.flat.index, self.early_scale(r.flat) == 1
        )

    def _on_the_wire(self, r: Reduction) -> torch.Tensor:
        """The whole buffer in the dtype of the wire."""
        if r.buffer.dtype != r.flat.dtypes.wire:
            r.sent = self.engine.pool.take(
                r.buffer.numel(), r.flat.dtypes.wire, REDUCTION, r.unit.name
            ).copy_(r.buffer)
        return r.buffer if r.sent is None else r.sent

    def encodes(self, flat: Flat, hop: Hop) -> bool:
        """Whether gradients of `flat` travel encoded on `hop`."""
        return (
            self.codec is not None
            and hop.group.size > 1
            and flat.dtypes.sums == torch.float32
            and not hop.group.fake
        )

    def _places(self, r: Reduction) -> None:
        """Where the ranks' parts go, by position with this rank's own among them: rows of one lent
        buffer, but for one that stays.
        """
        group, into, dtype, own = r.hop.group, self.summed_into(r), r.flat.dtypes.wire, r.own
        mine = r.buffer[own[0] - r.span[0] : own[1] - r.span[0]]
        places = {group.rank: mine}
        if into is not None:
            places[into] = self.engine.pool.fresh(mine.numel(), dtype)
            self.engine.memory.add(REDUCTION, nbytes_of(places[into]), r.unit.name)
        room = r.flat.spec.exchange(r.at, r.buffer.dtype, r.span, "pairwise")
        r.receive_buffer = (
            self.engine.pool.take(room.received, dtype, REDUCTION, r.unit.name)
            if room.rows
            else None
        )
        if r.receive_buffer is not None and not group.fake:  # else nothing arrives there
            others = (p for p in range(group.size) if p not in (group.rank, into))
            parts = r.receive_buffer.view(room.rows, room.part).unbind()
            places |= zip(others, parts, strict=True)
        r.parts = dict(sorted(places.items()))

    def _send_encoded(self, r: Reduction, place: CollectiveContext) -> Pending:
        """See [Note: encoded sums]."""
        engine, flat, group, hop = self.engine, r.flat, r.hop.group, r.hop
        assert self.codec is not None
        cuts = [overlap(r.span, there) for there in hop.ranges]
        room = flat.spec.exchange(r.at, r.buffer.dtype, r.span)
        each = room.part
        r.sent = engine.pool.take(room.sent, torch.uint8, REDUCTION, r.unit.name)
        r.receive_buffer = engine.pool.take(room.received, torch.uint8, REDUCTION, r.unit.name)
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
                r.parts[p] = r.receive_buffer[p * each : p * each + mine]
                recvs.append((p, r.parts[p]))
        r.parts[group.rank] = r.buffer[r.own[0] - r.span[0] : r.own[1] - r.span[0]]
        r.parts = dict(sorted(r.parts.items()))
        if group.native and {self.codec.encoded_bytes(b - a) for a, b in cuts} == {each}:
            even, received = group.cut([each] * group.size), r.receive_buffer.view(group.size, each)
            return group.scatter_parts(
                r.sent, even, received, place, flat.index, place.move, plain=plain[group.rank]
            )
        return group.exchange(sends, recvs, place, flat.index, move=place.move, plain=plain)

    def _residual(self, r: Reduction) -> torch.Tensor | None:
        """What encoding this buffer lost so far, over its span, in fp32; made when it is first
        asked for.
        """
        if not self.engine.recipe.error_feedback:
            return None
        return self.residual((r.flat.index, r.span[0], r.at), r.span[1] - r.span[0])

    def residual(self, key: tuple[int, int, int], numel: int) -> torch.Tensor:
        """What was lost of `numel` elements, zeros at first: by flat buffer, first address and hop.

        Where more or fewer elements travel from that address on (parameters were frozen, or are
        trained again), what both have stays.
        """
        known = self.residuals.get(key)
        if known is None or known.numel() != numel:
            found = torch.zeros(numel, dtype=torch.float32, device=self.engine.device)
            if known is not None:
                both = min(numel, known.numel())
                found[:both] = known[:both]
                self.engine.memory.add(RESIDUALS, -nbytes_of(known))
            self.residuals[key] = known = found
            self.engine.memory.add(RESIDUALS, nbytes_of(known))
        return known

    def spans(self) -> dict[tuple[int, int, int], int]:
        """The elements of every residual that there may come to be."""
        found = {}
        for flat in (
            flat for unit in self.engine.units for flat in unit.flats if not flat.unsharded
        ):
            for run in flat.runs:
                span = run
                for at, hop in enumerate(flat.hops):
                    found[flat.index, span[0], at] = span[1] - span[0]
                    span = overlap(span, hop.own)
        return found

    def forget(self) -> None:
        """Nothing was lost."""
        for lost in self.residuals.values():
            self.engine.memory.add(RESIDUALS, -nbytes_of(lost))
        self.residuals.clear()

    def forget_if(self, bad: torch.Tensor) -> None:
        """Nothing was lost, if the gradients were not finite (`bad`, a scalar, is not 0).

        Their step is left out. What encoding their finite numbers lost may be huge all the same,
        and must not reach the next step.
        """
        if not has_streams(self.engine.device):
            if self.residuals and bool(bad):
                self.forget()
            return
        # Without asking: the answer would cost a synchronization
        for lost in self.residuals.values():
            lost.masked_fill_(bad.to(lost.device, torch.bool), 0.0)

    @property
    def draw(self) -> int:
        """The step of the training that random bits are of, runs that were resumed counted."""
        return self.engine.step + self._drawn

    @draw.setter
    def draw(self, step: int) -> None:
        self._drawn = step - self.engine.step

    def _rounding(self, r: Reduction, address: int) -> Stochastic | None:
        """Random bits by step, rank and address: the same in a repeated run, and others for each
        rank, lest their errors add up.
        """
        if self.engine.recipe.wire_rounding != "stochastic":
            return None
        seed = (r.flat.index * 2 + r.at) * self.engine.world_size + self.engine.rank
        return Stochastic(seed=seed, step=self.draw, address=address)

    # -- landing -----------------------------------------------------------------------------------

    def land(self, r: Reduction) -> None:
        """Wait for the parts and add them up in rank order: `r.total`."""
        assert r.pending is not None
        r.pending.wait()
        pool, r.pending = self.engine.pool, None
        sent, r.sent = r.sent, None
        if sent is not None and not self.encodes(r.flat, r.hop):
            pool.give(sent)
            sent = None
        if r.whole:
            assert r.total is not None
            total, r.result_range = r.total, r.run
        elif (into := self.summed_into(r)) is None:
            total = self._sum_apart(r)
        else:
            total = self._sum_in_place(r, into)
        r.parts.clear()
        receive_buffer, r.receive_buffer = r.receive_buffer, None
        for buffer in (receive_buffer, sent):
            if buffer is not None:
                pool.give(buffer)
        buffer, r.buffer = r.buffer, total
        pool.give(buffer)
        r.total = total

    def drop(self, r: Reduction) -> None:
        """Wait for the parts, unless they will never come, and give back what `send` took."""
        pending, r.pending = r.pending, None
        if pending is not None and self.engine.group.broken is None:
            pending.wait()
        del pending
        into = None if r.whole or not r.parts else self.summed_into(r)
        if into is not None:
            self.engine.memory.add(REDUCTION, -nbytes_of(r.parts[into]), r.unit.name)
        r.parts.clear()
        nothing = r.buffer.new_empty(0)
        for buffer in (r.buffer, r.sent, r.receive_buffer):
            if buffer is not None:
                self.engine.pool.give(buffer)
        r.buffer, r.sent, r.receive_buffer = nothing, None, None

    def next_hop(self, r: Reduction) -> None:
        """The sums of this hop are what the next one sends."""
        assert r.total is not None
        r.buffer, r.total, r.span, r.at = r.total, None, r.own, r.at + 1
        r.rows, r.summed = 0, False

    def summed_into(self, r: Reduction) -> int | None:
        """The peer whose part becomes the sum, if sums need no other dtype and no other place."""
        group, flat = r.hop.group, r.flat
        if (
            r.rows
            or not r.is_last
            or flat.broadcast_back is not None
            or group.size == 1
            or flat.dtypes.wire != flat.dtypes.sums
        ):
            return None
        if r.buffer.dtype != flat.dtypes.wire or self.encodes(flat, r.hop):
            return None
        return 1 if group.rank == 0 else 0

    def _sum_in_place(self, r: Reduction, into: int) -> torch.Tensor:
        total = r.parts[into]
        r.result_range = r.own
        self.engine.memory.add(REDUCTION, -nbytes_of(total), r.unit.name)
        self.engine.memory.add(GRADIENTS, nbytes_of(total))
        # Rank 0 adds part 1 to part 0, the others part 0 to part 1: the same sum
        for rank, part in r.parts.items():
            if rank != into:
                total.add_(part)
        return total

    def _sum_apart(self, r: Reduction) -> torch.Tensor:
        flat, pool = r.flat, self.engine.pool
        sums_dtype = flat.dtypes.sums
        if not r.is_last:  # a buffer on its way
            total = target = pool.take(r.own[1] - r.own[0], sums_dtype, REDUCTION, r.unit.name)
            r.result_range = r.own
        else:
            # Who holds more than it sums puts its sums into their place there; the others' come
            # later.
            r.result_range = (
                overlap(r.run, flat.owned) if flat.broadcast_back is not None else r.own
            )
            sent_on = flat.whole_master or flat.broadcast_back is not None
            total = pool.fresh(
                r.result_range[1] - r.result_range[0], flat.dtypes.wire if sent_on else sums_dtype
            )
            target = total[r.own[0] - r.result_range[0] : r.own[1] - r.result_range[0]]
            self.engine.memory.add(GRADIENTS, nbytes_of(total))
        scale = (
            1.0 / r.hop.group.size if r.hop.group.size > 1 and self.early_scale(flat) == 1 else 1.0
        )
        if r.rows:
            self._add_rows(r, target, scale)
            return total
        sums = target
        if target.dtype != sums_dtype:
            sums = pool.take(target.numel(), sums_dtype, REDUCTION, r.unit.name)
        self._add_up(r, sums)
        if scale != 1:
            sums.mul_(scale)
        if sums is not target:
            target.copy_(sums)
            pool.give(sums)
        elif r.is_last:
            self._round(r, sums)
        return total

    def _add_rows(self, r: Reduction, target: torch.Tensor, scale: float) -> None:
        """The rows of `receive_buffer`, and this rank's part if it is not among them, into
        `target`: one kernel.
        """
        assert r.receive_buffer is not None
        group, dtypes = r.hop.group, r.flat.dtypes
        own = None
        if r.summed:
            scale = 1.0  # it has been applied: early, or by the backend, which made the mean
        elif r.rows < group.size:
            own = r.buffer[r.own[0] - r.span[0] : r.own[1] - r.span[0]]
        round_to = dtypes.wire if r.is_last else None
        sum_parts(
            r.receive_buffer.view(r.rows, target.numel()),
            target,
            scale,
            own=own,
            rank=group.rank,
            round_to=round_to,
            dtype=dtypes.sums,
        )

    def _round(self, r: Reduction, sums: torch.Tensor) -> None:
        """See [Note: rounded once]; in place, by way of the memory that the parts came in, which
        have been added.
        """
        wire = r.flat.dtypes.wire
        if (
            r.receive_buffer is None
            or wire == sums.dtype
            or torch.promote_types(wire, sums.dtype) == wire
        ):
            return
        room = r.receive_buffer.view(torch.uint8)
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
        """The mean's factor, if it goes into the copy that is made anyway: not where 16 bits
        travel, whose range it would waste.
        """
        return 1.0 / self.engine.group.size if flat.dtypes.wire == flat.dtypes.sums else 1.0

    # -- spreading ---------------------------------------------------------------------------------

    def broadcast_back(self, r: Reduction) -> None:
        """Start sending this rank's sums to all that hold them too, and receiving theirs; over
        groups across first, then inside.
        """
        flat, hop = r.flat, r.flat.broadcast_back
        assert r.total is not None and hop is not None
        if r.whole:  # the backend has done it
            r.gathering = Pending(self.engine.group, [], self._place_of_sums(r))
            return
        last = len(flat.hops) - 1
        r.gathering = self._broadcast_on(r, last)
        if flat.whole_master and last:
            r.gathering = Chain(self.engine.group, r.gathering, lambda: self._broadcast_on(r, 0))

    def _broadcast_on(self, r: Reduction, at: int) -> Pending:
        """The sums that this rank has of the addresses of hop `at`, to the ranks of its group, and
        theirs from them.
        """
        assert r.total is not None
        hop, place = r.flat.hops[at], self._place_of_sums(r)
        group, span = hop.group, overlap(r.result_range, (hop.ranges[0][0], hop.ranges[-1][1]))
        total = r.total[span[0] - r.result_range[0] : span[1] - r.result_range[0]]
        if group.native or group.fake:
            division = self._cut(r.flat, span, at)
            if group.can_reduce(division):
                return group.gather_sums(total, division, place, r.flat.index)
        part = pieces(total, span, hop)
        peers = [p for p in range(group.size) if p != group.rank]
        recvs = [(p, part[p]) for p in peers] if not group.fake else []
        return group.exchange(
            [(p, part[group.rank]) for p in peers], recvs, place, r.flat.index, move="all-reduce"
        )

    def _place_of_sums(self, r: Reduction) -> CollectiveContext:
        return CollectiveContext("all-reduce", r.unit.name, self.engine.step, self.engine.phase)


def pieces(buffer: torch.Tensor, span: tuple[int, int], hop: Hop) -> tuple[torch.Tensor, ...]:
    """The ranks' pieces of a buffer over `span`, by position in the hop's group."""
    cuts = [overlap(span, there) for there in hop.ranges]
    return buffer.split([b - a for a, b in cuts])
