"""What the ranks tell each other at the end of a backward pass, in one exchange of a few hundred
bits (`Group.any_of`).

    checksums of three orders: of units in forward, of units in backward, of units ready
        | the same bits inverted
    checksum of launched collectives, and of what clipping and optimizers did (runtime/updates.py)
        | the same bits inverted
        | background work has failed | parameters used | units late | units gathered in backward

Every rank learns which bits are set on any rank. From them it knows:

- which parameters got a gradient anywhere,
- whether a unit needs a second reduction,
- whether all ranks used the units in the same order, which then becomes the agreed order of the
  next steps. (A checksum is the same on all ranks if no bit of it is set together with its
  inverse.)
- whether all ranks made the same updates since the last exchange.

[Note: the exchange is never left out] Any of these bits may come from another rank, so no rank can
know that the exchange is needless. On a native backend it is also where the host learns that a rank
is missing or has launched other collectives. It costs log2(ranks) messages between hosts; the
device goes on meanwhile.
"""

from __future__ import annotations

import io
import struct
import zlib
from typing import TYPE_CHECKING

import onefold.runtime.updates as updates_of
from onefold.comm import StallError, alike, both
from onefold.memory import TierError

if TYPE_CHECKING:
    from onefold.runtime.engine import Engine


def agree_and_finish(engine: Engine, learn: bool) -> None:
    """Exchange which parameters were used and which orders were seen; then set the gradients.

    `learn`: the orders are those of a pass, and may become the agreed ones.

    Raises:
        StallError: on every rank. The ranks launched different collectives on a native backend, so
            what they received is not what they asked for; or they clipped or stepped differently.
    """
    group, units = engine.group, engine.units
    gather, reduce = engine.gather, engine.reduce
    late = {u.index for u in units if u.late}
    gathered = {u.index for u in gather.backward.seen}
    orders = gather.forward, gather.backward, reduce.order
    seen = [zlib.crc32(repr([u.index for u in order.seen]).encode()) for order in orders]
    launched, updates = group.launched(), updates_of.together(group.updates)
    fields = (
        ({0} if engine.failure is not None else set[int](), 1),
        (reduce.used, len(engine.entries)),
        (late, len(units)),
        (gathered, len(units)),
    )
    checksum = zlib.crc32(updates.encode(), zlib.crc32(launched))
    told = [both(struct.pack("<III", *seen)), both(struct.pack("<I", checksum))]
    told += [_bits(*field) for field in fields]
    context = engine.context("control", "(end of backward)", "backward")
    anywhere = io.BytesIO(group.any_of(b"".join(told), context))
    group.shared.heard = engine.step_count
    group.updates.clear()
    walked, done, *found = (anywhere.read(len(part)) for part in told)
    if not alike(done):
        texts = group.tell((launched, updates), context)
        if any(text[0] != launched for text in texts):
            raise group.out_of_order(context)
        said = {r: text for r, (_, text) in zip(group.ranks, texts, strict=True)}
        raise StallError(
            f"rank {group.ranks[group.rank]} found at the end of the backward pass of step"
            f" {context.step} that the ranks have stepped differently: "
            + (updates_of.difference(said) or "one of the updates differs in a later group.")
        )
    failed, used_anywhere, late_anywhere, gathered_anywhere = (
        _members(int.from_bytes(bits, "little")) for bits in found
    )
    engine.failure_agreed = bool(failed)
    reduce.finish(used_anywhere)
    if late_anywhere:
        reduce.second_round(sorted(late_anywhere), used_anywhere)
    if learn and alike(walked) and not all(order.agreed for order in orders):
        gather.learn(gathered_anywhere)
        if reduce.order.seen:
            reduce.order.learn(reduce.order.units)


def agree_on_failure(engine: Engine, error: BaseException | None, when: str) -> None:
    """Tell all ranks what went wrong with a disk, if anything did. Collective.

    Raises:
        TierError: on every rank, if any rank has an `error`.
    """
    # The error raised below is a TierError too, so this name is left out
    kind = "" if isinstance(error, TierError) else f"{type(error).__name__}: "
    said = f"{kind}{error}" if error is not None else ""
    context = engine.context("control", "(NVMe)", "optimizer")
    told = engine.group.tell(said, context)
    wrong = [(rank, message) for rank, message in enumerate(told) if message]
    if wrong:
        engine.failure, engine.failure_agreed = None, False
        engine.transfers.forget_writes()
        rank, message = wrong[0]
        raise TierError(f"rank {engine.group.ranks[rank]}, {when}: {message}") from error


def _bits(members: set[int], size: int) -> bytes:
    return sum(1 << i for i in members).to_bytes((size + 7) // 8, "little")


def _members(bits: int) -> set[int]:
    return {i for i, bit in enumerate(reversed(f"{bits:b}")) if bit == "1"}
