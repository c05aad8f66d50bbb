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

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.optim.optimizer import Optimizer

from onefold.quant.bf16_rounding import key_of, to_bf16
from onefold.quant.moment_packing import decode, encode
from onefold.recipe import Recipe
from onefold.recipe.moments import FORMATS, SIGNED, Format, grain_of, items_of, packed
from onefold.runtime.flat import Entry, Flat
from onefold.runtime.stepper import Part, groups_of, step_parts

#: Elements stepped at a time. On a CPU the unpacked values stay in the cache. Other devices need more
#: work per call: 2**24 elements take 256 MB of unpacked values and gradients.
CHUNK = {"cpu": 1 << 18, "other": 1 << 24}


@dataclass(frozen=True)
class MomentPolicy:
    """How the moments of one optimizer are stored.

    `format`: for large parameters. `seed`: for stochastic rounding; None rounds to the nearest.
    """

    format: Format
    seed: int | None

    def of(self, entry: Entry) -> Format:
        """Return the format of one parameter's moments."""
        return self.format.of(entry.slot.numel)

    def small(self, entry: Entry) -> bool:
        """Return whether the policy packs moments, but this parameter is too small for it."""
        return self.format.packed and not self.of(entry).packed

    def stored(self, entry: Entry, key: str) -> dict[str, torch.dtype]:
        """Return the parts of the moment `key` of a parameter: {key: dtype}."""
        format = self.of(entry)
        parts = {name: packed(name) for name in format.keys(key)}
        return {n: part.dtype if part is not None else format.dtype for n, part in parts.items()}

    def parts(self, entry: Entry, group: dict[str, Any]) -> dict[str, torch.dtype]:
        """Return the parts of all moments of a parameter."""
        out: dict[str, torch.dtype] = {}
        for key in moments_of(group):
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
    master, chance = flat.dtypes.master, 0 if recipe.stochastic_rounding else None
    name = recipe.moments or ("bf16" if chance is not None and master == torch.bfloat16 else None)
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


def moments_of(group: dict[str, Any]) -> list[str]:
    """Return the keys of Adam's element-wise states for the parameters of a group."""
    return [key for key in SIGNED if group.get("amsgrad") or not key.startswith("max")]


# -- pieces of parameters --------------------------------------------------------------------------


@dataclass
class Piece:
    """Some elements of a parameter with their gradient and state, in memory.

    Attributes:
        first: the index of the first element in the whole parameter.
        master, grad: [n].
        parts: the stored moments by key, as views. No item is shared with another piece.
        scalars: the rest of the state.
        fresh: the parameter was never stepped, and `parts` holds no values yet.
    """

    entry: Entry
    first: int
    master: torch.Tensor
    grad: torch.Tensor
    parts: dict[str, torch.Tensor]
    scalars: dict[str, Any]
    fresh: bool


def step_pieces(
    optimizer: Optimizer, groups: dict[int, int], how: MomentPolicy, pieces: Sequence[Piece]
) -> None:
    """Step `pieces`, a batch of elements at a time. Updates masters and parts in place, and
    replaces `scalars`.
    """
    batch: list[tuple[Piece, Piece]] = []
    size = 0
    for piece in pieces:
        for small in _cut(piece):
            batch.append((piece, small))
            size += small.master.numel()
            if size >= _chunk(small.master.device):
                _step_batch(optimizer, groups, how, batch)
                batch, size = [], 0
    _step_batch(optimizer, groups, how, batch)


def _step_batch(
    optimizer: Optimizer,
    groups: dict[int, int],
    how: MomentPolicy,
    batch: Sequence[tuple[Piece, Piece]],
) -> None:
    parts = [_part(how, small) for _, small in batch]
    step_parts(optimizer, groups, parts)
    for (piece, small), part in zip(batch, parts, strict=True):
        piece.scalars = _put_back(how, small, part)


def _chunk(device: torch.device) -> int:
    return CHUNK["cpu" if device.type == "cpu" else "other"]


def _cut(piece: Piece) -> Iterator[Piece]:
    """Cut `piece` into smaller ones at block boundaries, in order. Each starts with the scalars of
    the whole piece.
    """
    n, step = piece.master.numel(), _chunk(piece.master.device)
    scalars = piece.scalars
    for a in range(0, n, step):
        b = min(n, a + step)
        parts = cut(piece.parts, a, b)
        yield Piece(
            piece.entry,
            piece.first + a,
            piece.master[a:b],
            piece.grad[a:b],
            parts,
            scalars,
            piece.fresh,
        )


def cut(parts: dict[str, torch.Tensor], a: int, b: int) -> dict[str, torch.Tensor]:
    """Return the slices of `parts` for elements [a, b). Both ends are at a block boundary or at an
    end of the parameter.
    """
    return {key: part[slice(*items_of(a, b, grain_of(key)))] for key, part in parts.items()}


def _part(how: MomentPolicy, piece: Piece) -> Part:
    state: dict[str, Any] | None = None
    if not piece.fresh:
        scalars = {
            key: value.clone() if isinstance(value, torch.Tensor) else value
            for key, value in piece.scalars.items()
        }
        present = {part.key if (part := packed(key)) is not None else key for key in piece.parts}
        state = scalars | {
            key: unpacked(piece.parts, key, piece.master.numel())
            for key in SIGNED
            if key in present
        }
    alone = piece.master.numel() == piece.entry.param.numel()
    first = None if alone else piece.first == place(piece.entry)
    return Part(piece.entry.param, piece.master.float(), piece.grad.float(), state, first)


def unpacked(parts: dict[str, torch.Tensor], key: str, numel: int) -> torch.Tensor:
    """Return the moment `key` of `parts` in fp32, [numel]; the part itself if that is fp32."""
    for format in FORMATS.values():
        found = [parts.get(name) for name in format.keys(key)]
        if format.packed and found[0] is not None and found[1] is not None:
            return decode(format, found[0], found[1], numel, SIGNED[key])
    return parts[key].float()


def _put_back(how: MomentPolicy, piece: Piece, part: Part) -> dict[str, Any]:
    """Store masters and moments of `part` in `piece`. Return the rest of its state."""
    state = part.state or {}
    step = state["step"]
    if not isinstance(step, torch.Tensor):
        step = torch.tensor(step, device="cpu")
    for key in SIGNED:
        if key in state:
            pack(how, piece, key, state[key], step)
    if piece.master.dtype != torch.float32:
        _round(how, piece, "master", part.data, step, piece.master)
    return {key: value for key, value in state.items() if key not in SIGNED}


def pack(
    how: MomentPolicy,
    piece: Piece,
    key: str,
    value: torch.Tensor,
    step: torch.Tensor,
) -> None:
    """Store the fp32 moment `value`, [n], in the parts of `piece`."""
    format = how.of(piece.entry)
    if format.packed:
        codes, scales = (piece.parts[name] for name in format.keys(key))
        encode(format, value, SIGNED[key], codes, scales)
    elif piece.parts[key].data_ptr() != value.data_ptr():
        _round(how, piece, key, value, step, piece.parts[key])


def _round(
    how: MomentPolicy,
    piece: Piece,
    what: str,
    value: torch.Tensor,
    step: torch.Tensor,
    into: torch.Tensor,
) -> None:
    if how.seed is None or into.dtype != torch.bfloat16:
        into.copy_(value)
        return
    key = key_of(how.seed, piece.entry.name, what)
    to_bf16(value, key, step, piece.first, into)


# -- shards in memory ------------------------------------------------------------------------------


def step_in_memory(optimizer: Optimizer, how: MomentPolicy, entries: Iterable[Entry]) -> None:
    """Step those of `entries` that have a gradient. All their data must be in memory, on the device
    or the host.
    """
    if skipped(optimizer):
        return
    groups, pieces = groups_of(optimizer), []
    for entry in entries:
        if entry.param.grad is not None and entry.param.numel():
            pieces.append(
                _whole(optimizer, how, entry, optimizer.param_groups[groups[id(entry.param)]])
            )
    step_pieces(optimizer, groups, how, pieces)
    for piece in pieces:
        param = piece.entry.param
        # An unsharded parameter (one rank) may be non-contiguous: reshape has made a copy
        if piece.master.data_ptr() != param.data_ptr():
            param.data.copy_(piece.master.view(param.shape))
        # An element-wise moment has the parameter's shape; codes and scales are one-dimensional
        shown = {
            key: part if packed(key) is not None else part.view(param.shape)
            for key, part in piece.parts.items()
        }
        optimizer.state[param] = piece.scalars | shown
        torch.autograd.graph.increment_version(param)


def _whole(optimizer: Optimizer, how: MomentPolicy, entry: Entry, group: dict[str, Any]) -> Piece:
    """Return all of a parameter that this rank holds, as one piece."""
    parts, state, grad = (
        adopted(optimizer, how, entry, group),
        optimizer.state.get(entry.param, {}),
        entry.param.grad,
    )
    assert grad is not None
    scalars = {
        key: value for key, value in state.items() if key not in SIGNED and packed(key) is None
    }
    return Piece(
        entry,
        place(entry),
        entry.param.data.reshape(-1),
        grad.reshape(-1),
        parts,
        scalars,
        not state,
    )


def skipped(optimizer: Any) -> bool:
    """Return whether a gradient scaler has told a fused optimizer to skip this step. Then nothing
    may be packed again.
    """
    found = getattr(optimizer, "found_inf", None)
    return found is not None and bool(found.item())


def place(entry: Entry) -> int:
    """Return the index, in the whole parameter, of the first element that this rank holds."""
    return entry.owned()[0]


def adopted(
    optimizer: Optimizer, how: MomentPolicy, entry: Entry, group: dict[str, Any]
) -> dict[str, torch.Tensor]:
    """Return the moments of a parameter in the format they are stored in, [items] each.

    They are those in `optimizer.state`, converted from another format if necessary; zeros for
    moments that do not exist yet.

    Raises:
        ValueError: `load_state_dict` has rounded the scales.
    """
    param, state, n, wanted = (
        entry.param,
        optimizer.state.get(entry.param, {}),
        entry.param.numel(),
        how.parts(entry, group),
    )
    there = {
        k: _cast_back(k, v.to(param.device)).reshape(-1)
        for k, v in state.items()
        if k in SIGNED or packed(k) is not None
    }
    if all(name in there and there[name].dtype == dtype for name, dtype in wanted.items()):
        return {name: there[name] for name in wanted}
    parts = {
        key: torch.zeros(-(-n // grain_of(key)), dtype=dtype, device=param.device)
        for key, dtype in wanted.items()
    }
    piece = Piece(
        entry, place(entry), parts[next(iter(parts))], parts[next(iter(parts))], parts, {}, False
    )
    for key in moments_of(group):
        if any(name in there for format in FORMATS.values() for name in format.keys(key)):
            value, step = unpacked(there, key, n), torch.zeros((), device="cpu")
            pack(replace(how, seed=None), piece, key, value, step)
    return parts


def _cast_back(key: str, value: torch.Tensor) -> torch.Tensor:
    """Cast a state back after torch's `load_state_dict`, which casts states to the parameter's
    dtype. Codes survive that; scales only if the dtype is fp32.

    Raises:
        ValueError: scales in 16 bits.
    """
    part = packed(key)
    if part is None or value.dtype == part.dtype:
        return value
    if part.scale:
        raise ValueError(
            f"the state {key!r} was loaded in {value.dtype} and is fp32: optimizer.load_state_dict"
            " gives states the dtype of the master weights, which is too short for scales. Use"
            " onefold.save and onefold.load."
        )
    return value.to(part.dtype)
