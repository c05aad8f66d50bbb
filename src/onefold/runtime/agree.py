"""What the ranks tell each other at the end of a backward pass, in one exchange of a few hundred
bits (`Group.any_of`).

    checksums of four orders: of units in forward, of units in backward, of units ready, of launched collectives
        | the same bits inverted
        | background work has failed | parameters used | units late | units gathered in backward

Every rank learns which bits are set on any rank. From them it knows:

- which parameters got a gradient anywhere,
- whether a unit needs a second reduction,
- whether all ranks used the units in the same order, which then becomes the agreed order of the
  next steps. (A checksum is the same on all ranks if no bit of it is set together with its
  inverse.)

[Note: the exchange is never left out] Any of these bits may come from another rank, so no rank can
know that the exchange is needless. On a native backend it is also where the host learns that a rank
is missing or has launched other collectives. It costs log2(ranks) messages between hosts; the
device goes on meanwhile.
"""

from __future__ import annotations

import struct
import zlib
from typing import TYPE_CHECKING

import torch

from onefold.comm import CollectiveContext
from onefold.comm.messages import alike, both
from onefold.memory.tier_error import TierError
from onefold.runtime.unit import at_the_turn

if TYPE_CHECKING:
    from onefold.runtime.gather import Gatherer
    from onefold.runtime.progress import Resources
    from onefold.runtime.reduce import Reducer
    from onefold.runtime.unit import Unit

_TOLD = 512  # bytes of a message about what went wrong


def agree_and_finish(
    resources: Resources, gather: Gatherer, reduce: Reducer, used: set[int]
) -> None:
    """Exchange which parameters were used and which orders were seen; then set the gradients.

    Raises:
        StallError: the ranks launched different collectives on a native backend, so what they
            received is not what they asked for.
    """
    group, progress, units = resources.group, resources.progress, reduce.units
    late = {u.index for u in units if u.late}
    gathered = set(gather.backward_log)
    orders = [
        zlib.crc32(repr(log).encode())
        for log in (gather.forward_log, gather.backward_log, reduce.log)
    ]
    walked, launched = both(struct.pack("<III", *orders)), both(group.launched())
    sizes = (1, len(reduce.unit_of), len(units), len(units))
    parts = [
        walked,
        launched,
        *map(
            _bits,
            ({0} if progress.failure is not None else set(), used, late, gathered),
            sizes,
        ),
    ]
    context = CollectiveContext("control", "(end of backward)", progress.step, "backward")
    anywhere = group.any_of(b"".join(parts), context)
    group.heard = progress.step
    found, at = [], 0
    for part in parts:
        found.append(anywhere[at : at + len(part)])
        at += len(part)
    if not alike(found[1]):
        raise group.out_of_order(context)
    failed, used_anywhere, late_anywhere, gathered_anywhere = (
        _members(int.from_bytes(bits, "little")) for bits in found[2:]
    )
    progress.failure_agreed = bool(failed)
    reduce.finish(used_anywhere)
    if late_anywhere:
        reduce.second_round(sorted(late_anywhere), used_anywhere)
    if alike(found[0]) and not (reduce.learned and (gather.learned or not gather.sharded)):
        _learn(gather, reduce, gathered_anywhere)


def agree_on_failure(resources: Resources, error: BaseException | None, when: str) -> None:
    """Tell all ranks what went wrong with a disk, if anything did. Collective.

    Raises:
        TierError: on every rank, if any rank has an `error`.
    """
    # The error raised below is a TierError too, so this name is left out
    kind = "" if isinstance(error, TierError) else f"{type(error).__name__}: "
    said = f"{kind}{error}".encode()[:_TOLD] if error is not None else b""
    payload = torch.frombuffer(bytearray(said.ljust(_TOLD, b"\0")), dtype=torch.uint8)
    told = resources.group.exchange_control(
        payload, CollectiveContext("control", "(NVMe)", resources.progress.step, "optimizer")
    )
    messages = [
        (rank, bytes(t.tolist()).rstrip(b"\0").decode(errors="ignore"))
        for rank, t in enumerate(told)
    ]
    wrong = [(rank, message) for rank, message in messages if message]
    if wrong:
        resources.progress.failure, resources.progress.failure_agreed = None, False
        resources.transfers.forget_writes()
        rank, message = wrong[0]
        raise TierError(f"rank {resources.group.ranks[rank]}, {when}: {message}") from error


def _learn(gather: Gatherer, reduce: Reducer, gathered: set[int]) -> None:
    """Make the order that all ranks have seen the agreed order of the next steps. Units that were
    not seen keep a place in it: a later step may use them.
    """
    if gather.forward_log:
        # Units used in forward whose backward reads no parameter
        needless = set(gather.forward_log) - gathered
        gather.forward_order = _with_missing(gather.forward_log, gather.forward_order)
        unseen = set(gather.backward_order) - needless - set(gather.backward_log)
        gather.backward_order = _with_unseen(
            gather.backward_log, unseen, gather.forward_order, gather.units
        )
        gather.learned = True
        if gather.recipe.reshard_after_forward:
            first = [gather.units[i] for i in gather.backward_log]
            gather.kept_at_turn = frozenset(
                u.index for u in at_the_turn([gather.units[i] for i in gather.forward_log], first)
            )
    if reduce.log:
        reduce.order = _with_missing(reduce.log, reduce.order)
        reduce.learned = True


def _with_missing(seen: list[int], order: list[int]) -> list[int]:
    """Return `seen` with the units that only `order` has, each put after its predecessor there."""
    out, known = list(seen), set(seen)
    for at, index in enumerate(order):
        if index not in known:
            before = order[at - 1] if at else None
            out.insert(out.index(before) + 1 if before is not None else 0, index)
            known.add(index)
    return out


def _with_unseen(
    seen: list[int], unseen: set[int], forward: list[int], units: list[Unit]
) -> list[int]:
    """Return the backward order `seen` with the `unseen` units in the places where a pass that uses
    them will reach them.

    That is ahead of the units that the forward pass uses earlier. Units that enclose the unseen one
    do not count, since a backward pass reaches these both first and last.
    """
    out, at = list(seen), {index: n for n, index in enumerate(forward)}
    for index in sorted(unseen, key=lambda i: -at[i]):
        earlier = (
            n
            for n, other in enumerate(out)
            if at[other] < at[index] and not units[other].encloses(units[index])
        )
        out.insert(next(earlier, len(out)), index)
    return out


def _bits(members: set[int], size: int) -> bytes:
    return sum(1 << i for i in members).to_bytes((size + 7) // 8, "little")


def _members(bits: int) -> set[int]:
    return {i for i, bit in enumerate(reversed(f"{bits:b}")) if bit == "1"}
