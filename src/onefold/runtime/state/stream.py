"""Whole tensors in a stream between rank 0 and the owners, and a model made plain again."""

from __future__ import annotations

import pickle
import struct
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from onefold.comm import CollectiveContext, StallError
from onefold.layout import overlap
from onefold.recipe.moments import BLOCK
from onefold.runtime.engine import Engine
from onefold.runtime.flat import Entry, declare
from onefold.runtime.gather_paths import state_context, whole_masters
from onefold.runtime.parameters import gradient_hooks
from onefold.runtime.parameters.parameter import ShardedParameter, disable_torch_function

# -- streams ---------------------------------------------------------------------------------------
#
# Sending one parameter's elements between the ranks that hold them and rank 0's host, in chunks,
# and the messages around that.
#
#     to_first     each rank's interval ──► rank 0: a host tensor of the whole     full_state_dict, optimizer states, averages
#     from_first   rank 0's whole ──► each rank: the elements that it holds        loading these
#
# A device never holds more than `CHUNK` elements of the parameter. Hosts other than rank 0's hold no
# more than the rank's own elements. If rank 0 holds all elements (stage 0, one rank), `to_first`
# sends nothing. Both are collective.


#: Elements moved at a time; a multiple of BLOCK, so that blocks of packed moments stay whole.
CHUNK = 8 << 20
assert not CHUNK % BLOCK

Read = Callable[[int, int], torch.Tensor]
Put = Callable[[int, int, torch.Tensor], None]


def tell_all(engine: Engine, call: str, value: Any) -> list[Any]:
    """Return every rank's `value`, in rank order. `call` is the user's call, for messages.
    Collective.

    Raises:
        StallError: another rank did not call it in time.
        RuntimeError: another rank has called something else.
    """
    group = engine.group
    if group.alone:
        return [value]
    text = pickle.dumps((call, value))
    context = CollectiveContext(
        "control", f"({call}, which every rank must call)", engine.step_count, "state"
    )
    try:
        head = group.exchange_control(
            torch.frombuffer(bytearray(struct.pack("<q", len(text))), dtype=torch.uint8),
            context,
            "call",
        )
        lengths = [struct.unpack("<q", bytes(part.tolist()))[0] for part in head]
        mine = torch.frombuffer(bytearray(text.ljust(max(lengths), b"\0")), dtype=torch.uint8)
        parts = group.exchange_control(mine, context, "call")
    except StallError as error:
        raise StallError(
            f"{call} is a collective on this model: call it on every rank, at the same place."
            f" {error}"
        ) from None
    by_number = sorted(range(group.size), key=lambda position: group.ranks[position])
    said = [pickle.loads(bytes(parts[p][: lengths[p]].numpy())) for p in by_number]
    other = next((rank for rank, (name, _) in enumerate(said) if name != call), None)
    if other is not None:
        raise RuntimeError(
            f"rank {dist_rank(engine)} called {call} while rank {sorted(group.ranks)[other]} called"
            f" {said[other][0]}: every rank must call the same, in the same order."
        )
    return [value for _, value in said]


def dist_rank(engine: Engine) -> int:
    """Return this rank's global number, for messages."""
    return engine.group.ranks[engine.group.rank]


def to_first(
    engine: Engine,
    entry: Entry,
    dtype: torch.dtype,
    read: Read,
    out: torch.Tensor | None,
    alone: bool = False,
) -> None:
    """Gather all elements of `entry` in rank 0's `out` ([numel], on the host; None on other ranks,
    unless they hold all elements themselves).

    Args:
        read: returns elements [x, y) of those that this rank holds, on any device, in `dtype`.
        alone: `read` can return only this rank's interval, even if its optimizer holds more.
    """
    group, flat, slot = engine.group, entry.flat, entry.slot
    here = entry.accounted(0) if alone else entry.owned(0)
    for x in range(0, slot.numel, CHUNK):
        y = min(x + CHUNK, slot.numel)
        mine = overlap(here, (x, y))
        if out is not None and mine[0] < mine[1]:
            out[slice(*mine)].copy_(read(*mine))
        if mine == (x, y) or group.alone:
            continue
        sends, recvs, landing = [], [], []
        for peer in _owners(entry, x, y):
            a, b = overlap(entry.accounted(peer), (x, y))
            if a == b or peer == 0 or overlap((a, b), here) == (a, b):
                continue
            if group.rank == 0:
                recvs.append((peer, torch.empty(b - a, dtype=dtype, device=engine.device)))
                landing.append((a, b))
            elif group.rank == peer:
                sends.append((0, read(a, b).to(engine.device).contiguous()))
        group.exchange(
            sends, recvs, state_context(engine.resources, flat.unit_name), flat.index, move="state"
        ).wait()
        for (a, b), (_, part) in zip(landing, recvs, strict=True):
            assert out is not None
            out[a:b].copy_(part)


def from_first(
    engine: Engine,
    entry: Entry,
    dtype: torch.dtype,
    whole: torch.Tensor | None,
    put: Put,
    alone: bool = False,
) -> None:
    """Send rank 0's `whole` ([numel], on any device; None on other ranks) to the ranks. `put` is
    called with the elements [x, y) that this rank holds.

    Args:
        alone: each rank gets only its interval, even if its optimizer holds more.
    """
    group, flat, slot = engine.group, entry.flat, entry.slot
    held = entry.accounted if alone else entry.owned
    for x in range(0, slot.numel, CHUNK):
        y = min(x + CHUNK, slot.numel)
        a, b = overlap(held(group.rank), (x, y))
        part = None
        sends, recvs = [], []
        if group.rank == 0:
            assert whole is not None
            if not group.alone:
                chunk = whole[x:y].to(engine.device, dtype)
                for peer in range(1, group.size):
                    i, j = overlap(held(peer), (x, y))
                    if i < j:
                        sends.append((peer, chunk[i - x : j - x]))
            part = whole[a:b]
        elif a < b and not group.alone:
            part = torch.empty(b - a, dtype=dtype, device=engine.device)
            recvs.append((0, part))
        group.exchange(
            sends, recvs, state_context(engine.resources, flat.unit_name), flat.index, move="state"
        ).wait()
        if a < b and part is not None:
            put(a, b, part.to(dtype))


def _owners(entry: Entry, x: int, y: int) -> range:
    """Return the positions of the ranks whose intervals have some of elements [x, y)."""
    each = entry.flat.layout.shard_numel
    return range((entry.slot.start + x) // each, (entry.slot.start + y - 1) // each + 1)


# -- unsharding ------------------------------------------------------------------------------------
#
# Turning a sharded model back into a plain module of whole parameters, which stay the same
# objects. See `onefold.unsharded`.


def refuse_unless_possible(engine: Engine) -> None:
    """Raise if this model cannot be made whole now, with the same error on every rank.

    Raises:
        RuntimeError: the model is in a pass or another context, or has unreduced gradients.
        ValueError: the recipe does not support it.
    """
    flats = [flat for unit in engine.units for flat in unit.flats]
    if engine.stack or engine.progress.backward_open:
        raise RuntimeError(
            "unsharded was entered inside a pass of the model; enter it between steps."
        )
    if engine.full_params_depth or engine.gather.kept_gathered:
        other = "full_params" if engine.full_params_depth else "keep_gathered"
        raise RuntimeError(
            f"unsharded was entered inside {other} of the same model; leave that one first."
        )
    if any(flat.grads or flat.held for flat in flats):
        raise RuntimeError(
            "unsharded was entered while gradients kept under no_sync wait to be reduced; enter it"
            " after optimizer.step()."
        )
    why = None
    if engine.offloaded_flats:
        why = "it keeps parameters or optimizer states on the host or on NVMe"
    elif any(flat.tiled for flat in flats):
        why = f"weights above tile={engine.recipe.tile} are cut into tiles"
    elif any(flat.storage.encoded for flat in flats):
        why = f"frozen={engine.recipe.frozen!r} keeps frozen weights encoded"
    elif engine.recipe.moments is not None:
        why = f"moments={engine.recipe.moments!r} keeps the optimizer's states in another format"
    if why is not None:
        raise ValueError(
            f"onefold.unsharded does not work with this recipe: {why}. Change the structure before"
            " shard(), or save a checkpoint, build the new model and load what fits"
            " (onefold.export, then shard(..., weights=folder))."
        )


def make_plain(engine: Engine) -> None:
    """Give the parameters their whole values, unit by unit, and remove everything of the engine
    from them, and its hooks from the modules. Collective.
    """
    with disable_torch_function(), torch.no_grad():
        for unit in engine.units:
            for flat in unit.flats:
                full = None if flat.unsharded else whole_masters(engine.resources, flat)
                for entry in flat.entries if full is not None else ():
                    gradient_hooks.give_back(entry)
                    entry.param.grad = None
                    entry.param.data = flat.view(full, entry).clone()  # type: ignore[arg-type]
                    _unwrap(entry.param)
                    if entry.param.dtype != entry.declared:
                        declare(entry.param, entry.declared)
        for handle in engine.handles:
            handle.remove()
        engine.handles.clear()


def _unwrap(param: nn.Parameter) -> None:
    for key in [key for key in param.__dict__ if key == "onefold" or key.startswith("_onefold")]:
        if key != "_onefold_wire":  # of the caller of shard(), which may be called again
            del param.__dict__[key]
    if isinstance(param, ShardedParameter):  # a subclass was made of the original's class
        kind: Any = type(param)
        plain: Any = nn.Parameter if kind is ShardedParameter else kind.__bases__[1]
        param.__class__ = plain
