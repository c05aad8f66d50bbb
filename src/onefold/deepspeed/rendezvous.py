"""Check that all ranks are about to do the same with parameters that no engine has yet.

    rank 0   reads a weight ──► rendezvous 7: "a constructor reads"    ─┐
    rank 1   end of Init    ──► rendezvous 7: "the model has been made" ─┴─► they differ: both raise

Each rank reports what it is about to do to the process group's store, before the collective that
would otherwise hang. The last rank to arrive compares the reports and writes the verdict. A rank
that leaves by an error writes its error in place of the verdict.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
from collections.abc import Callable, Sequence
from datetime import timedelta

import torch.distributed as dist
from torch import nn

from onefold.comm import StallError
from onefold.comm.pending import GRACE, default_store, within
from onefold.wording import few

#: The next rendezvous's number. It is the same on every rank, because no rank can skip one.
_count = itertools.count()
_SAME, _DIFFER, _LEFT = b"same", b"differ", b"left:"


class RendezvousError(StallError):
    """Ranks did different things with parameters that were made under `zero.Init`."""


def rendezvous(doing: Callable[[], str], params: Sequence[nn.Parameter]) -> None:
    """Wait until every rank is about to do the same, with parameters of the same shapes.

    Args:
        doing: returns what this rank is about to do. It is compared, and quoted in the message.

    Raises:
        RendezvousError: on every rank that arrived: another rank does something else, has failed,
            or did not arrive in time.
    """
    world = dist.get_world_size()
    if world == 1 or dist.get_backend() == "fake":
        return
    number, patience = next(_count), _patience()
    # Not the dtypes: rank 0 alone may have loaded values of another dtype
    shapes = [
        None if isinstance(p, nn.parameter.UninitializedParameter) else tuple(p.shape)
        for p in params
    ]
    same = hashlib.md5(f"{doing()} {shapes}".encode()).hexdigest()
    try:
        limit = patience.total_seconds() + GRACE
        said = within(limit, lambda: _verdict(number, same, world, patience))
    except RuntimeError as error:
        raise RendezvousError(
            f"on rank {dist.get_rank()} {doing()}, and for {patience.total_seconds():.0f} s other"
            " ranks did not come to the same. What is done with a model under deepspeed.zero.Init"
            f" every rank must do. (store: {str(error).splitlines()[0][:200]})"
        ) from None
    if said == _SAME:
        return
    if said.startswith(_LEFT):
        raise RendezvousError(
            f"{said[len(_LEFT) :].decode()}, and on rank {dist.get_rank()} {doing()}: no rank can go"
            " on without the others."
        )
    raise RendezvousError(_different(f"onefold/init/{number}", doing()))


def leave(error: BaseException) -> None:
    """Tell the ranks that wait for this one that it ended with an error."""
    alone = dist.get_world_size() == 1 or dist.get_backend() == "fake"
    if alone or isinstance(error, RendezvousError):
        return
    text = f"rank {dist.get_rank()} ended with {type(error).__name__}: {error}"[:500]
    with contextlib.suppress(RuntimeError):
        key = f"onefold/init/{next(_count)}/go"
        within(GRACE, lambda: default_store().set(key, _LEFT + text.encode()))


def _verdict(number: int, same: str, world: int, patience: timedelta) -> bytes:
    """Report what this rank does, as the digest `same`, and wait for the last rank's verdict."""
    store, place = default_store(), f"onefold/init/{number}"
    store.add(f"{place}/{same}", 1)
    if store.add(f"{place}/all", 1) == world:
        alike = store.add(f"{place}/{same}", 0)
        store.set(f"{place}/go", _SAME if alike == world else _DIFFER)
        # Every rank is here, so every rank has read the previous verdict
        for name in (same, "all", "go"):
            with contextlib.suppress(RuntimeError, NotImplementedError):
                store.delete_key(f"onefold/init/{number - 1}/{name}")
    store.wait([f"{place}/go"], patience)
    return bytes(store.get(f"{place}/go"))


def _patience() -> timedelta:
    """Return the process group's timeout for a collective."""
    group = dist.distributed_c10d._get_default_group()
    for device in group._device_types:
        options = getattr(group._get_backend(device), "options", None)
        if isinstance(found := getattr(options, "_timeout", None), timedelta):
            return found
    return timedelta(minutes=30)


def _different(place: str, mine: str) -> str:
    """Return the error message, with what each rank is about to do."""
    rank, world = dist.get_rank(), dist.get_world_size()
    said = {rank: mine}

    def exchange() -> dict[int, str]:
        store = default_store()
        store.set(f"{place}/says/{rank}", mine)
        names = [f"{place}/says/{r}" for r in range(world)]
        store.wait(names, timedelta(seconds=GRACE))
        return {r: bytes(store.get(name)).decode() for r, name in enumerate(names)}

    with contextlib.suppress(RuntimeError):
        said = within(2 * GRACE, exchange)
    told = {what: [str(r) for r in said if said[r] == what] for what in said.values()}
    each = (
        f"on {'ranks' if len(of) > 1 else 'rank'} {few(of, 8)} {what}" for what, of in told.items()
    )
    return (
        f"the ranks do different things with parameters made under deepspeed.zero.Init:"
        f" {'; '.join(each)}. Each rank keeps a part of such a parameter, so every rank must read or"
        " change it: take the condition on the rank away, or change it after the model is made,"
        " inside `with deepspeed.zero.GatheredParameters(param, modifier_rank=0):`."
    )
