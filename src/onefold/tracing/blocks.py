"""The repeated blocks of a module: `recompute` checkpoints them, as `onefold train
--activation-checkpointing` does, `shorten` leaves out most of many equal ones, and `Repetition.whole`
adds to a trace what was left out.

    80 blocks     0 | 1 2 3 4 .................... 77 78 79         traced    0 | 1 2 | 79, as a module of four
    forward       a   b b b b                       b  b  c                   each middle block adds the same bytes, d
    backward      a'  b'b'b'b'                      b' b' c'                  and begins with the bytes that its forward ended with

A span of middle block i is therefore the span of block 1 with (i - 1)·d more bytes in memory. That
is exact if the blocks are equal, which is checked twice: before the trace by their classes, shapes
and settings, and after it by comparing what two middle blocks did. If a check fails, all blocks are
traced. Blocks may alternate with a period (sliding and full attention, every second one
checkpointed).
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

from torch import nn

from onefold.runtime.units import OwnUnit
from onefold.tracing.watch import Span

Checkpointing = Literal["none", "full", "selective"]
LONGEST_PERIOD = 8
# Attributes that hold a block's number
_NUMBERS = ("layer_idx", "layer_id", "layer_number", "layer_index", "block_idx")


def _lists(module: nn.Module) -> Iterator[tuple[str, nn.Module, list[nn.Module]]]:
    """Yield (path, list, its blocks) of each list of blocks in a module."""
    for path, inner in module.named_modules():
        if isinstance(inner, nn.ModuleList | nn.Sequential):
            blocks = list(inner)
            if len(blocks) > 1 and not isinstance(blocks[0], OwnUnit):
                yield path, inner, blocks


def _size(blocks: Sequence[nn.Module]) -> int:
    return sum(p.numel() for b in blocks for p in b.parameters())


def repeated_blocks(module: nn.Module) -> list[nn.Module]:
    """Return the blocks of the largest list (by parameters) whose members are all of one class.
    [] if there is no such list.
    """
    alike = (blocks for *_, blocks in _lists(module) if len(set(map(type, blocks))) == 1)
    largest = max(alike, key=_size, default=[])
    return largest if _size(largest) else []


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


# -- a few of many blocks --------------------------------------------------------------------------


def shorten(module: nn.Module, units: Collection[str]) -> Repetition | None:
    """Leave out most of the longest run of equal blocks in the largest list of `module`, for good. The
    blocks that remain get the first names of the list. None if there are too few, or if not all are
    `units` with parameters of their own.
    """
    path, inner, blocks = max(
        _lists(module), key=lambda found: _size(found[-1]), default=("", module, [])
    )
    keys, own = list(inner._modules), [{id(p) for p in block.parameters()} for block in blocks]
    names = tuple(f"{path}.{key}" if path else key for key in keys)
    if not set(names) <= set(units) or sum(map(len, own)) != len(set().union(*own)):
        return None
    layers = getattr(getattr(module, "config", None), "layer_types", None) or ()
    kinds = layers if len(layers) == len(blocks) else [None] * len(blocks)
    signs = [(_signature(block), kind) for block, kind in zip(blocks, kinds, strict=True)]
    left_out, period, start, stop = 0, 1, 0, 0
    for length in range(1, LONGEST_PERIOD + 1):
        first, last = _longest_run(signs, length)
        count = (last - first) // length * length - 4 * length
        if count > left_out:
            left_out, period, start, stop = count, length, first, last
    if not left_out:
        return None
    del blocks[stop - left_out : stop]
    inner._modules.clear()
    inner._modules.update(zip(keys, blocks, strict=False))
    return Repetition(names, start + period, period, left_out // period)


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


def _longest_run(signs: Sequence[Any], period: int) -> tuple[int, int]:
    """Return the longest range [start, stop) in which each sign equals the one `period` before."""
    unlike = [i for i in range(period, len(signs)) if signs[i] != signs[i - period]]
    starts, stops = [0, *(i - period + 1 for i in unlike)], [*unlike, len(signs)]
    return max(zip(starts, stops, strict=True), key=lambda run: run[1] - run[0])


@dataclass(frozen=True)
class Repetition:
    """Blocks `first` to `first + period` of the shortened list are the pattern of those left out,
    `times` as many. The blocks that follow must do the same; the first and the last ones may differ.

    Attributes:
        names: the units of all blocks of the whole list, in order.
    """

    names: tuple[str, ...]
    first: int
    period: int
    times: int

    def whole(self, spans: Sequence[Span]) -> tuple[Span, ...] | None:
        """Extend the spans of the shortened module to the whole one. None if the middle blocks did
        not all do the same.
        """
        first, period, times = self.first, self.period, self.times
        turn = next((i for i, s in enumerate(spans) if s.phase == "backward"), len(spans))

        def begins(block: int, after: int, before: int) -> int:
            found = (i for i in range(after, before) if self._block(spans[i].unit) == block)
            return next(found, before)

        # Forward: the pattern, the blocks like it, and the next. Backward: the other way round
        a, b, c = (begins(first + n * period, 0, turn) for n in range(3))
        d, e, f = (begins(first + n * period - 1, turn, len(spans)) for n in (2, 1, 0))
        middle = range(first, first + 2 * period)
        again = any(self._block(s.unit) in middle for s in (*spans[:a], *spans[c:d], *spans[f:]))
        if again or not a < b < c < turn <= d < e < f < len(spans):
            return None
        more = spans[b].peak - spans[a].peak
        pairs = ((a, b, b, c), (e, f, d, e))
        for begin, end, other, last in pairs:
            if [self._later(s, 1, more) for s in spans[begin:end]] != list(spans[other:last]):
                return None
        return (
            *spans[:b],
            *(self._later(s, n, more) for n in range(1, times + 1) for s in spans[a:b]),
            *(self._later(s, times, more) for s in spans[b:e]),
            *(self._later(s, n, more) for n in range(times, 0, -1) for s in spans[e:f]),
            *spans[e:],
        )

    def _block(self, unit: str) -> int | None:
        """Return the number of the block that a unit belongs to, None for no block."""
        inside = (i for i, name in enumerate(self.names) if f"{unit}.".startswith(f"{name}."))
        return next(inside, None)

    def _later(self, span: Span, times: int, more: int) -> Span:
        """Return `span` as it is with `times` more patterns before it, each of `more` bytes."""
        unit, at = span.unit, self._block(span.unit)
        if at is not None and at >= self.first:
            unit = self.names[at + times * self.period] + unit[len(self.names[at]) :]
        return replace(span, unit=unit, peak=span.peak + times * more)
