"""What the ranks tell each other at the end of a backward pass, in one exchange of a few hundred
bits (`Group.any_of`).

    checksums of three orders: of units in forward, of units in backward, of units ready
        | the same bits inverted
    checksum of launched collectives, and of what clipping and optimizers did
        | the same bits inverted
        | background work has failed | parameters used | units late | units gathered in backward

Every rank learns which bits are set on any rank. From them it knows:

- which parameters got a gradient anywhere,
- whether a unit needs a second reduction,
- whether all ranks used the units in the same order, which then becomes the agreed order of the
  next steps. (A checksum is the same on all ranks if no bit of it is set together with its
  inverse.)
- whether all ranks made the same updates since the last exchange.

[Note: updates in words] What clipping and optimizers did on this rank is noted in lines of words. The
checksum is that of all lines since the last exchange. A save compares the lines themselves.

[Note: the exchange is never left out] Any of these bits may come from another rank, so no rank can
know that the exchange is needless. On a native backend it is also where the host learns that a rank
is missing or has launched other collectives. It costs log2(ranks) messages between hosts; the
device goes on meanwhile.
"""

from __future__ import annotations

import io
import struct
import zlib
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.optim.optimizer import Optimizer

from onefold.comm import StallError, alike, both
from onefold.memory import TierError

if TYPE_CHECKING:
    from onefold.runtime.engine import Engine

#: Options that say how torch computes an update, not which. A load does not change them.
HOW = ("foreach", "fused", "capturable", "differentiable")


def agree_and_finish(engine: Engine, learn: bool) -> None:
    """Exchange which parameters were used and which orders were seen; then set the gradients.

    `learn`: the orders are those of a pass, and may become the agreed ones.

    Raises:
        StallError: on every rank. The ranks launched different collectives on a native backend, so
            what they received is not what they asked for; or they clipped or stepped differently.
    """
    group, units = engine.group, engine.units
    gather, reduce = engine.gather, engine.reduce
    orders = gather.forward, gather.backward, reduce.order
    seen = [zlib.crc32(repr([u.index for u in order.seen]).encode()) for order in orders]
    launched, updates = group.launched(), sorted(group.updates)
    mine = set(gather.backward.seen)
    flags = [engine.failure is not None, *(e in reduce.used for e in engine.entries)]
    flags += [u.late for u in units] + [u in mine for u in units]
    checksum = zlib.crc32(repr(updates).encode(), zlib.crc32(launched))
    told = [both(struct.pack("<III", *seen)), both(struct.pack("<I", checksum))]
    told.append(np.packbits(flags).tobytes())
    context = engine.context("control", "(end of backward)", "backward")
    anywhere = io.BytesIO(group.any_of(b"".join(told), context))
    group.shared.heard = engine.step_count
    group.updates.clear()
    walked, done, found = (anywhere.read(len(part)) for part in told)
    if not alike(done):
        texts = group.tell((launched, updates), context)
        if any(text[0] != launched for text in texts):
            raise group.out_of_order(context)
        said = {r: text for r, (_, text) in zip(group.ranks, texts, strict=True)}
        raise StallError(
            f"rank {group.ranks[group.rank]} found at the end of the backward pass of step"
            f" {context.step} that the ranks have stepped differently: " + difference(said)
        )
    bits = iter(np.unpackbits(np.frombuffer(found, np.uint8)).tolist())
    engine.failure_agreed = bool(next(bits))
    if not engine.failure_agreed:  # what a rank had, every rank has been told
        engine.last_failure = engine.failure
    used_anywhere = {e for e in engine.entries if next(bits)}
    late, gathered = ([u for u in units if next(bits)] for _ in range(2))
    reduce.finish(used_anywhere)
    if late:
        reduce.second_round(late, used_anywhere)
    if learn and alike(walked) and not all(order.agreed for order in orders):
        gather.learn(gathered)
        if reduce.order.seen:
            reduce.order.learn(reduce.order.units)


def agree_on_failure(engine: Engine, error: BaseException | None, when: str) -> None:
    """Tell all ranks what went wrong with a disk, if anything did. Collective.

    Raises:
        TierError: on every rank, if any rank has an `error`.
    """
    context = engine.context("control", "(NVMe)", "optimizer")
    if failed := engine.group.failed(error, context):
        engine.failure, engine.failure_agreed = None, False
        engine.transfers.forget_writes()
        rank, said = next(iter(failed.items()))
        raise TierError(f"rank {rank}, {when}: {said.removeprefix('TierError: ')}") from error


# -- updates in words ------------------------------------------------------------------------------

#: Lines of updates that are kept in words, if no backward pass comes.
UPDATES = 1 << 12


def note(updates: list[str], name: str, items: Iterator[str]) -> None:
    """Note an update in words. If there are many lines already, a checksum takes their place."""
    if len(updates) >= UPDATES:
        updates[:] = [f"updates with the checksum {zlib.crc32(repr(sorted(updates)).encode()):08x}"]
    updates += (name, *(f"{name} with {item}" for item in items))


def of_step(optimizer: Optimizer, members: Mapping[int, str]) -> Iterator[str]:
    """Yield the numbers among the optimizer's options in the groups of `members`, and these: what
    tells which parameters a group has. What code keeps in a group besides (a name, a rank) is left
    out, and so are tensors on a device: reading them would make the host wait.
    """
    for number, those in members.items():
        group = f"group {number}: "
        for key, value in optimizer.param_groups[number].items():
            option = key == "lr" or (key in optimizer.defaults and key not in HOW)
            if option and (said := in_words(value)):
                yield f"{group}{key}={said}"
        yield group + those


def in_words(value: Any) -> str:
    """Return a number, a switch or a few numbers in words; "" for anything else. Hosts of different
    kinds may differ in the last bit of a cosine, so it is left out.
    """
    if isinstance(value, float):
        return f"{value:.7g}"
    if isinstance(value, int):
        return str(value)
    if isinstance(value, (tuple, list)) and value and isinstance(value[0], (float, int)):
        return f"({', '.join(map(in_words, value))})"
    if type(value) is torch.Tensor and value.device.type == "cpu" and value.numel() == 1:
        return in_words(value.item())
    return ""


def difference(every: Mapping[int, list[str]]) -> str:
    """Return in words how the updates of two ranks differ; "" if all ranks made the same.

    Args:
        every: each rank's updates, sorted (the order of two optimizers is free), by global rank.
    """
    (first, mine), *others = sorted(every.items())
    for other, theirs in others:
        if theirs != mine:
            here, there = Counter(mine), Counter(theirs)
            only = (here - there).elements(), (there - here).elements()
            one, two = (min(lines, default="nothing more") for lines in only)
            return (
                f"since the last backward pass rank {first} called {one} where rank {other} called"
                f" {two}. Every rank must clip and step alike, with the same numbers in the optimizer's"
                " groups, after the same backward passes; a scheduler that follows the loss must be"
                " given the mean over ranks."
            )
    return ""
