"""The repeated blocks of a module: `recompute` checkpoints them, as `onefold train
--activation-checkpointing` does, `shorter` says which of many equal ones need not be traced, and
`Repetition.whole` adds to a trace what was left out.

    80 blocks     0 | 1 2 3 4 .................... 77 78 79         traced    0 | 1 2 | 79, as a module of four
    rows          a   b b b b                       b  b  c                   a   b b   c

That is exact if the blocks are equal, which is checked twice: before the trace by their classes,
shapes and settings, and after it by comparing the rows of two middle blocks. If a check fails, all
blocks are traced. Blocks may alternate with a period (sliding and full attention, every second one
checkpointed).
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import nn

from onefold.runtime.units import OwnUnit
from onefold.tracing.watch import UnitActivity

Checkpointing = Literal["none", "full", "selective"]
LONGEST_PERIOD = 8
# Attributes that hold a block's number
_NUMBERS = ("layer_idx", "layer_id", "layer_number", "layer_index", "block_idx")


def repeated_blocks(module: nn.Module) -> list[nn.Module]:
    """Return the blocks of the largest list (by parameters) whose members are all of one class.
    [] if there is no such list.
    """
    return list(_largest(module)[1].values())


def _largest(module: nn.Module) -> tuple[str, dict[str, Any]]:
    """Return (path, blocks by name) of that list."""

    def size(found: tuple[str, dict[str, nn.Module]]) -> int:
        return sum(p.numel() for block in found[1].values() for p in block.parameters())

    lists = (
        (path, inner._modules)
        for path, inner in module.named_modules()
        if isinstance(inner, nn.ModuleList | nn.Sequential)
        and len(inner) > 1
        and len(set(map(type, inner))) == 1
        and not isinstance(inner[0], OwnUnit)
    )
    return max(filter(size, lists), key=size, default=("", {}))


def recompute(module: nn.Module, how: Checkpointing) -> None:
    """Checkpoint the blocks for good (not re-entrantly): all of them ("full") or every second one
    ("selective"). "none" changes nothing.

    transformers' layers checkpoint themselves when told to, and then leave out their caches. Other
    blocks get a wrapped forward.

    Raises:
        ValueError: `how` is none of these, or there are no repeated blocks.
    """
    if how == "none":
        return
    if how not in ("full", "selective"):
        raise ValueError(f"checkpointing={how!r}: expected 'none', 'full' or 'selective'.")
    blocks = repeated_blocks(module)
    if not blocks:
        raise ValueError(
            f"checkpointing={how!r} recomputes a model's repeated blocks, and"
            f" {type(module).__name__} has none: use 'none'."
        )
    from torch.utils.checkpoint import checkpoint

    again = partial(checkpoint, use_reentrant=False)
    skipped = blocks[1::2] if how == "selective" else []
    for inner in module.modules():
        if hasattr(inner, "gradient_checkpointing"):
            inner.gradient_checkpointing = inner not in skipped  # type: ignore[assignment]
            inner._gradient_checkpointing_func = again  # type: ignore[assignment]
        elif inner in blocks and inner not in skipped:
            inner.forward = partial(again, inner.forward)


def compile_blocks(module: nn.Module, option: str, **how: Any) -> None:
    """Compile the forward of the repeated blocks, by `torch.compile(forward, **how)`. All blocks
    share one compilation. The hooks that gather and release a block stay outside the compiled code:
    `block.compile()` would take them in.

    Raises:
        ValueError: there are no repeated blocks. `option`: what asked for it.
    """
    blocks = repeated_blocks(module)
    if not blocks:
        raise ValueError(
            f"{option} compiles the repeated blocks of a model, and this {type(module).__name__} has"
            " none: leave it out."
        )
    for block in blocks:
        block.forward = torch.compile(block.forward, **how)


# -- a few of many blocks --------------------------------------------------------------------------


@dataclass(frozen=True)
class Repetition:
    """Equal blocks, of which some are left out.

    Attributes:
        blocks: the list in the module. few: those of it that are traced, under its first names.
        names: the units of all blocks, in order.
        first, period: the traced blocks `first` to `first + period` are the pattern of those left
            out, `times` as many, and those behind them do the same. The first and the last blocks
            of the list may differ.
    """

    blocks: Mapping[str, nn.Module]
    few: Mapping[str, nn.Module]
    names: Sequence[str]
    first: int
    period: int
    times: int

    def whole(self, rows: list[UnitActivity]) -> list[UnitActivity] | None:
        """Extend the rows of the traced blocks to all. None if the middle blocks did not all do the
        same.
        """
        of, first, period = [self._block(row.unit) for row in rows], self.first, self.period
        starts = first, first + period, first + 2 * period
        a, b, c = (of.index(block) if block in of else -1 for block in starts)
        again = {*of[:a], *of[c:]} & {*range(first, first + 2 * period)}
        if again or not -1 < a < b < c:
            return None
        # What stays alive from each pattern on though autograd does not keep it
        held = rows[b].forward.nbytes - rows[a].forward.nbytes
        if self._later(rows[a:b], 1, held) != rows[b:c]:
            return None
        more = [row for n in range(1, self.times) for row in self._later(rows[a:b], n, held)]
        return [*rows[:b], *more, *self._later(rows[a:], self.times, held)]

    def _block(self, unit: str) -> int | None:
        """Return the number of the block that a unit belongs to, None for no block."""
        inside = (i for i, name in enumerate(self.names) if f"{unit}.".startswith(f"{name}."))
        return next(inside, None)

    def _later(self, rows: Sequence[UnitActivity], times: int, held: int) -> list[UnitActivity]:
        """Return rows as they are `times` patterns later, above `held` bytes of each."""
        out = []
        for row in rows:
            unit, at = row.unit, self._block(row.unit)
            if at is not None and at >= self.first:
                unit = self.names[at + times * self.period] + unit[len(self.names[at]) :]
            forward, backward = (  # some rows have no backward pass
                one.plus(times * held) if one.nbytes else one for one in (row.forward, row.backward)
            )
            out.append(row._replace(unit=unit, forward=forward, backward=backward))
        return out


def shorter(
    module: nn.Module, units: Collection[str], checkpointing: Checkpointing
) -> Repetition | None:
    """Find the longest run of equal blocks, of which most need not be traced. None if there are too
    few, or if not all are `units` with parameters of their own.
    """
    path, blocks = _largest(module)
    names = [f"{path}.{key}" if path else key for key in blocks]
    own = [{id(p) for p in block.parameters()} for block in blocks.values()]
    if not set(names) <= set(units) or sum(map(len, own)) != len(set().union(*own)):
        return None
    turns = [i % 2 if checkpointing == "selective" else 0 for i in range(len(blocks))]
    signs = list(zip(map(_signature, blocks.values()), turns, strict=True))
    left_out, period, start = max(_runs(signs), key=lambda run: run[0], default=(0, 1, 0))
    if left_out <= 0:
        return None
    kept = list(blocks.values())
    del kept[start + period : start + period + left_out]
    few = dict(zip(blocks, kept, strict=False))
    return Repetition(blocks, few, names, start + period, period, left_out // period)


def _runs(signs: Sequence[Any]) -> Iterator[tuple[int, int, int]]:
    """Yield (blocks to leave out, period, first block) of each range in which each sign equals the one
    `period` before. Four periods remain.
    """
    for period in range(1, min(LONGEST_PERIOD + 1, len(signs))):
        unlike = [i for i in range(period, len(signs)) if signs[i] != signs[i - period]]
        starts, stops = [0, *(i - period + 1 for i in unlike)], [*unlike, len(signs)]
        for start, stop in zip(starts, stops, strict=True):
            yield (stop - start) // period * period - 4 * period, period, start


def _signature(block: nn.Module) -> Any:
    """Return what must be equal in equal blocks: the classes, shapes and plain settings of all
    modules in a block, without the block's number.
    """
    return [
        (
            path,
            type(m),
            [
                (k, tuple(t.shape), t.dtype, t.requires_grad)
                for k, t in (*m._parameters.items(), *m._buffers.items())
                if t is not None
            ],
            [(k, v) for k, v in vars(m).items() if k not in _NUMBERS and _plain(v)],
            "forward" in vars(m),
        )
        for path, m in block.named_modules()
    ]


def _plain(value: Any) -> bool:
    if isinstance(value, tuple):
        return all(map(_plain, value))
    return value is None or isinstance(value, int | float | str)
