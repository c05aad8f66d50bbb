"""Steps of optimizers whose moments are stored in another format than the step computes in.

    stored     codes and scales, or bf16                 master weights in fp32 or bf16
    a piece      ─► fp32 moments                           ─► themselves, or in fp32
    step       the optimizer's own, over plain fp32 tensors of about 260,000 elements
    stored     packed or rounded again                   rounded: to nearest, or stochastically

| requested by                                             | format                     | stepped by                     |
|----------------------------------------------------------|----------------------------|--------------------------------|
| the recipe's `moments`, with torch's Adam or AdamW       | the recipe's               | the optimizer itself           |
| stochastic rounding of bf16 master weights               | bf16, or the recipe's      | the optimizer itself           |

[Note: blocks are the parameter's] Blocks are counted from the beginning of the whole parameter, and
the size of the whole parameter decides whether it is packed. If the recipe packs moments, the
layout cuts ranks at block boundaries. So the bits of weights and moments do not depend on
the number of ranks, the stage, the tier or the size of a chunk.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.optim.optimizer import Optimizer

from onefold.memory import storage_of
from onefold.quant.bf16_rounding import key_of, to_bf16
from onefold.quant.moment_packing import decode, encode
from onefold.recipe import Recipe
from onefold.recipe.moments import FORMATS, SIGNED, Format, grain_of, items_of, moment_of, packed
from onefold.runtime.flat import Entry, Flat
from onefold.runtime.stepper import Part, step_parts

#: Elements stepped at a time. On a CPU the unpacked values stay in the cache. Other devices need more
#: work per call: 2**24 elements take 256 MB of unpacked values and gradients.
CHUNK = {"cpu": 1 << 18, "other": 1 << 24}


@dataclass(frozen=True)
class MomentPolicy:
    """How the moments of one optimizer are stored.

    `format`: for large parameters. `stochastic`: how bf16 is rounded to; else to the nearest.
    """

    format: Format
    stochastic: bool

    def of(self, entry: Entry) -> Format:
        """Return the format of one parameter's moments."""
        return self.format.of(entry.slot.numel)

    def small(self, entry: Entry) -> bool:
        """Return whether the policy packs moments, but this parameter is too small for it."""
        return self.format.packed and not self.of(entry).packed

    def stored(self, entry: Entry, key: str) -> dict[str, torch.dtype]:
        """Return the parts of the moment `key` of a parameter: {key: dtype}."""
        return {name: part.dtype for name, part in self.of(entry).parts(key).items()}

    def parts(self, entry: Entry, group: dict[str, Any]) -> dict[str, torch.dtype]:
        """Return the parts of all of Adam's moments of a parameter in a group: {key: dtype}."""
        out: dict[str, torch.dtype] = {}
        for key in SIGNED:
            if group.get("amsgrad") or not key.startswith("max"):
                out |= self.stored(entry, key)
        return out


def moment_policy(optimizer: Optimizer, recipe: Recipe, flat: Flat) -> MomentPolicy | None:
    """Return how to store the moments of the parameters of `flat`; None: as `optimizer` makes them.

    Raises:
        ValueError: recipe and optimizer contradict each other.
    """
    kind = type(optimizer)
    if kind.__module__.partition(".")[0] == "torchao":
        raise ValueError(
            f"{kind.__name__} of torchao packs its own moments. Use torch.optim.AdamW (or Adam), and"
            " give the recipe moments='int8' or 'int4'."
        )
    master, chance = flat.dtypes.master, recipe.stochastic_rounding
    name = recipe.moments or ("bf16" if chance and master == torch.bfloat16 else None)
    if (
        name is None
        or master not in (torch.float32, torch.bfloat16, torch.float16)
        or (name, master) == ("fp32", torch.float32)
    ):
        return None
    if not isinstance(optimizer, (torch.optim.Adam, torch.optim.AdamW)):
        asked = (
            f"moments={recipe.moments!r}"
            if recipe.moments
            else "stochastic_rounding=True with master weights in bf16"
        )
        raise ValueError(
            f"the recipe says {asked}, which is about the moments of torch.optim.Adam and AdamW;"
            f" {kind.__name__} keeps other states. Use one of those, or leave the option"
            " out."
        )
    return MomentPolicy(FORMATS[name], chance)


# -- pieces of parameters --------------------------------------------------------------------------


@dataclass
class Piece:
    """Some elements of a parameter with their gradient and state, in memory.

    Attributes:
        first: the index of the first element in the whole parameter.
        master, grad: [n].
        stored: the element-wise states by key as they are stored, views that are written to. No item is
            shared with another piece.
        numbers: the rest of the state.
        fresh: the parameter was never stepped, and `stored` holds no values yet.
        new: makes what a state of this key and dtype is stored in, if only the step tells which there
            are.
    """

    entry: Entry
    first: int
    master: torch.Tensor
    grad: torch.Tensor
    stored: dict[str, torch.Tensor]
    numbers: dict[str, Any]
    fresh: bool
    new: Callable[[str, torch.dtype], torch.Tensor] | None = None


def step_pieces(
    optimizer: Optimizer,
    groups: dict[int, int],
    how: MomentPolicy | None,
    pieces: Sequence[Piece],
    device: torch.device | None = None,
) -> None:
    """Step `pieces`. Updates masters and what is stored in place, and replaces `numbers`. What is
    stored in another format is stepped a batch of elements at a time.

    `device`: that of the model, see `step_parts`.
    """
    batch: list[tuple[Piece, Piece]] = []
    size = 0
    for piece in pieces:
        for small in _cut(piece) if how is not None else [piece]:
            batch.append((piece, small))
            size += small.master.numel()
            if how is not None and size >= _chunk(small.master.device):
                _step_batch(optimizer, groups, how, batch, device)
                batch, size = [], 0
    _step_batch(optimizer, groups, how, batch, device)


def _step_batch(
    optimizer: Optimizer,
    groups: dict[int, int],
    how: MomentPolicy | None,
    batch: Sequence[tuple[Piece, Piece]],
    device: torch.device | None,
) -> None:
    parts = [_part(how, small) for _, small in batch]
    step_parts(optimizer, groups, parts, device)
    for (piece, small), part in zip(batch, parts, strict=True):
        piece.numbers = _put_back(how, small, part)


def _chunk(device: torch.device) -> int:
    return CHUNK["cpu" if device.type == "cpu" else "other"]


def _cut(piece: Piece) -> Iterator[Piece]:
    """Cut `piece` into smaller ones at block boundaries, in order. Each starts with the numbers of
    the whole piece.
    """
    n, step, whole = piece.master.numel(), _chunk(piece.master.device), replace(piece)
    for a in range(0, n, step):
        b = min(n, a + step)
        master, grad, stored = piece.master[a:b], piece.grad[a:b], cut(piece.stored, a, b)
        yield replace(whole, first=piece.first + a, master=master, grad=grad, stored=stored)


def cut(stored: dict[str, torch.Tensor], a: int, b: int) -> dict[str, torch.Tensor]:
    """Return the slices of `stored` for elements [a, b). Both ends are at a block boundary or at an
    end of the parameter.
    """
    return {key: part[slice(*items_of(a, b, grain_of(key)))] for key, part in stored.items()}


def _part(how: MomentPolicy | None, piece: Piece) -> Part:
    master, grad, n = piece.master, piece.grad, piece.master.numel()
    # A 0-dim parameter keeps its shape. Its states are 0-dim too
    shape = (n,) if piece.entry.param.dim() else ()
    state: dict[str, Any] | None = None
    if not piece.fresh:
        state = {
            key: value.clone() if isinstance(value, torch.Tensor) else value
            for key, value in piece.numbers.items()
        }
        stored = unpacked(piece.stored, n)
        state |= {k: v.view(shape) if how is None else v.float().view(shape) for k, v in stored}
    if how is not None:
        master, grad = master.float(), grad.float()
    param = piece.entry.param
    return Part(param, master.view(shape), grad.view(shape), state, n < param.numel())


def unpacked(stored: dict[str, torch.Tensor], numel: int) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield each state that is `stored`: (key, values [numel]), packed ones in fp32, others as they are."""
    packing = [format for format in FORMATS.values() if format.packed]
    for key in dict.fromkeys(map(moment_of, stored)):
        format = next((f for f in packing if f.parts(key).keys() <= stored.keys()), None)
        if format is None:
            yield key, stored[key]
        else:
            codes, scales = (stored[name] for name in format.parts(key))
            yield key, decode(format, codes, scales, numel, SIGNED[key])


def as_stored(format: Format, key: str, value: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return what is stored of the state `key`, values from a block's begin on: {key: part}."""
    if not format.packed:
        return {key: value}
    parts = encode(format, value.float(), SIGNED[key])
    return dict(zip(format.parts(key), parts, strict=True))


def is_stored(how: MomentPolicy | None, key: str, value: Any, param: torch.Tensor) -> bool:
    """Return whether a state is stored element by element; else it is a number."""
    if packed(key) is not None or how is not None:
        return packed(key) is not None or key in SIGNED
    return isinstance(value, torch.Tensor) and value.dim() > 0 and value.shape == param.shape


def stored_apart(
    how: MomentPolicy | None, state: dict[str, Any], param: torch.Tensor
) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Return the states that are stored element by element, and the others."""
    stored = {key: v for key, v in state.items() if is_stored(how, key, v, param)}
    return stored, {key: v for key, v in state.items() if key not in stored}


def _put_back(how: MomentPolicy | None, piece: Piece, part: Part) -> dict[str, Any]:
    """Store masters and states of `part` in `piece`. Return the numbers among its state."""
    state, numbers = part.state or {}, dict[str, Any]()
    for key, value in state.items():
        if not is_stored(how, key, value, part.data):
            numbers[key] = value
        elif how is not None and how.of(piece.entry).packed:
            for name, part_of in as_stored(how.of(piece.entry), key, value).items():
                piece.stored[name].copy_(part_of)
        else:
            if key not in piece.stored:
                assert piece.new is not None
                piece.stored[key] = piece.new(key, value.dtype)
            _round(how, piece, key, value, state, piece.stored[key])
    _round(how, piece, "master", part.data, state, piece.master)
    return numbers


def _round(
    how: MomentPolicy | None,
    piece: Piece,
    what: str,
    value: torch.Tensor,
    state: dict[str, Any],
    into: torch.Tensor,
) -> None:
    """Store `value` in the dtype of `into`, where it may be already."""
    if how is not None and how.stochastic and into.dtype == torch.bfloat16:
        to_bf16(value, key_of(piece.entry.name, what), state["step"], piece.first, into)
    # Fake tensors have no address
    elif (storage_of(into), into.storage_offset()) != (storage_of(value), value.storage_offset()):
        into.copy_(value.view(into.shape))


# -- shards in memory ------------------------------------------------------------------------------


def step_in_memory(
    optimizer: Optimizer, groups: dict[int, int], how: MomentPolicy, entries: Iterable[Entry]
) -> None:
    """Step `entries`, which have gradients. All their data must be in memory, on the device or the
    host.
    """
    if skipped(optimizer):
        return
    pieces = []
    for entry in (entry for entry in entries if entry.param.numel()):
        param = entry.param
        assert param.grad is not None
        adopt(optimizer, how, entry, optimizer.param_groups[groups[id(param)]])
        stored, numbers = stored_apart(how, optimizer.state[param], param)
        rows = {key: value.view(-1) for key, value in stored.items()}
        master, grad = param.data.reshape(-1), param.grad.reshape(-1)
        pieces.append(Piece(entry, entry.owned()[0], master, grad, rows, numbers, not numbers))
    step_pieces(optimizer, groups, how, pieces)
    for piece in pieces:
        param = piece.entry.param
        # An unsharded parameter (one rank) may be non-contiguous: reshape has made a copy
        if piece.master.data_ptr() != param.data_ptr():
            param.data.copy_(piece.master.view(param.shape))
        state = optimizer.state[param]
        optimizer.state[param] = piece.numbers | {key: state[key] for key in piece.stored}
        torch.autograd.graph.increment_version(param)


def skipped(optimizer: Any) -> bool:
    """Return whether a gradient scaler has told a fused optimizer to skip this step. Then nothing
    may be packed again.
    """
    found = getattr(optimizer, "found_inf", None)
    return found is not None and bool(found.item())


def adopt(
    optimizer: Optimizer, how: MomentPolicy | None, entry: Entry, group: dict[str, Any]
) -> None:
    """Bring the element-wise states of a parameter, which a load or a step before shard() may have made,
    to the place and the format in which its step keeps them. Moments that do not exist yet are zeros;
    on a disk undefined, if the parameter was never stepped.
    """
    state = optimizer.state.get(entry.param)
    if state is None:  # `setdefault` would bring in the states of all parameters
        state = optimizer.state[entry.param] = {}
    storage, held = entry.flat.storage, entry.owned()
    there, numbers = stored_apart(how, state, entry.param)
    wanted, format = {key: value.dtype for key, value in there.items()}, FORMATS["fp32"]
    if how is not None:
        wanted, format = how.parts(entry, group), how.of(entry)
    apart = storage.on_disk and not (how is not None and how.small(entry))
    device = torch.device("meta") if apart else entry.param.device
    found = {key: (v.dtype, v.device, v.is_contiguous()) for key, v in there.items()}
    if found == {key: (dtype, device, True) for key, dtype in wanted.items()}:
        return
    old = {key: storage.read(entry, key, value, *held) for key, value in there.items()}
    new = {key: storage.new_state(entry, key, wanted[key], in_memory=not apart) for key in wanted}
    for key in there:
        del state[key]
    state.update(new)
    for key in new if old or numbers else ():
        storage.write(entry, key, new[key], *held, torch.zeros((), dtype=wanted[key]))
    for key, value in unpacked(old, entry.param.numel()):
        for name, part in as_stored(format, key, value).items():
            if name in new:
                storage.write(entry, name, new[name], *held, part)
