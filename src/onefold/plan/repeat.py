"""Tracing a few of many equal blocks, and writing out the rest.

    80 blocks     0 | 1 2 3 4 .................... 77 78 79         traced    0 | 1 2 | 79, as a module of four
    forward       a   b b b b                       b  b  c                   each middle block adds the same bytes, d
    backward      a'  b'b'b'b'                      b' b' c'                  and is begun with the same bytes as it ended the forward with

So a span of middle block i is the span of block 1 with (i - 1)·d bytes more beneath it. That is
exact if the blocks are equal, which
is checked twice: what they are made of before (class, shapes, settings), and what two middle blocks
were seen to do after. What fails a check is traced whole. Blocks may alternate with a period
(sliding and full attention, every second one checkpointed).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from onefold.plan.from_module import lists_of_tiles
from onefold.plan.lifetimes import Read, Span

LONGEST_PERIOD = 8
# Which block it is, as blocks call it
_NUMBERS = ("layer_idx", "layer_id", "layer_number", "layer_index", "block_idx")


@dataclass(frozen=True)
class Repetition:
    """Blocks `names[start:stop]` of one list repeat with `period`; all but the first `kept` of them
    are left out (whole periods).

    Attributes:
        container: the list. names: of its blocks, in order.
    """

    container: nn.Module
    names: tuple[str, ...]
    start: int
    stop: int
    period: int
    kept: int

    @property
    def left_out(self) -> int:
        return self.stop - self.start - self.kept


def repetition_in(module: nn.Module) -> Repetition | None:
    """The longest run of equal blocks in `module`, if tracing a part of it saves anything."""
    best: Repetition | None = None
    layers = getattr(getattr(module, "config", None), "layer_types", None)
    of_tiles = lists_of_tiles(module)
    for path, container in module.named_modules():
        if (
            not isinstance(container, nn.ModuleList | nn.Sequential)
            or len(container) < 6
            or id(container) in of_tiles
        ):
            continue
        names = tuple(f"{path}.{n}" if path else n for n, _ in container.named_children())
        kinds = (
            layers
            if isinstance(layers, list | tuple) and len(layers) == len(names)
            else [None] * len(names)
        )
        signs = [
            (_signature(block), kind)
            for block, kind in zip(container.children(), kinds, strict=True)
        ]
        if _shares_parameters(container) or len(names) != len(container):
            continue
        for period in range(1, LONGEST_PERIOD + 1):
            for start, stop in _runs(signs, period):
                kept = 4 * period + (stop - start) % period
                found = Repetition(container, names, start, stop, period, kept)
                if found.left_out > (best.left_out if best is not None else 0):
                    best = found
    return best


def _signature(block: nn.Module) -> Any:
    """What a block is made of: classes, shapes and plain settings of all modules in it, but for its
    number.
    """
    return tuple(
        (
            path,
            type(m),
            tuple(
                (k, tuple(p.shape), p.dtype, p.requires_grad)
                for k, p in m._parameters.items()
                if p is not None
            ),
            tuple((k, tuple(b.shape), b.dtype) for k, b in m._buffers.items() if b is not None),
            tuple((k, v) for k, v in m.__dict__.items() if k not in _NUMBERS and _plain(v)),
            "forward" in m.__dict__,
        )
        for path, m in block.named_modules()
    )


def _plain(value: Any) -> bool:
    if isinstance(value, tuple):
        return all(_plain(v) for v in value)
    return value is None or isinstance(value, int | float | str)


def _shares_parameters(container: nn.Module) -> bool:
    own = [{id(p) for p in block.parameters()} for block in container.children()]
    return sum(map(len, own)) != len(set().union(*own))


def _runs(signs: list[Any], period: int) -> Iterator[tuple[int, int]]:
    """The longest stretches [start, stop) in which each sign equals the one `period` before it."""
    start = 0
    for at in range(period, len(signs) + 1):
        if at == len(signs) or signs[at] != signs[at - period]:
            if at - start > period:
                yield start, at
            start = at - period + 1


@contextmanager
def shortened(repetition: Repetition) -> Iterator[None]:
    """Inside, the list holds fewer of its equal blocks, under the names that the first of them
    have.
    """
    children = repetition.container._modules
    before = dict(children)
    blocks = list(before.values())
    left = blocks[: repetition.start + repetition.kept] + blocks[repetition.stop :]
    try:
        children.clear()
        children.update(
            {str(i): b for i, b in enumerate(left)}
            if _is_numbered(before)
            else dict(zip(before, left, strict=False))
        )
        yield
    finally:
        children.clear()
        children.update(before)


def _is_numbered(names: dict[str, Any]) -> bool:
    return list(names) == [str(i) for i in range(len(names))]


# -- writing out -----------------------------------------------------------------------------------


def written_out(read: Read, repetition: Repetition) -> Read | None:
    """What `read` of the shortened module would be for the whole one; None if its middle blocks did
    not all do the same.

    The second period of blocks is the pattern, the third the check; the first and the last stay as
    they were seen.
    """
    r = repetition
    turn = next((i for i, s in enumerate(read.spans) if s.phase == "backward"), len(read.spans))
    # What the blocks are called in the shortened module
    short = r.names[: len(r.names) - r.left_out]
    forward = _groups(read.spans[:turn], short, 1)
    backward = _groups(read.spans[turn:], short, -1)
    if forward is None or backward is None:
        return None
    p, first = r.period, r.start + r.period
    step = forward[first + p][0].begin - forward[first][0].begin
    rename = {short[i]: i for i in range(len(short))}
    for groups in (forward, backward):
        for i in range(first, first + p):
            if [_moved(s, step, r, rename, p) for s in groups[i]] != groups[i + p]:
                return None
    periods = r.left_out // p

    def whole(groups: dict[int, list[Span]], order: list[int]) -> list[Span]:
        out: list[Span] = []
        for i in order:
            if i < first + p:
                out += groups[i]
            elif i < first + p + r.left_out:
                turns = (i - first) // p
                out += [
                    _moved(s, step * turns, r, rename, p * turns)
                    for s in groups[first + (i - first) % p]
                ]
            else:
                out += [
                    _moved(s, step * periods, r, rename, r.left_out) for s in groups[i - r.left_out]
                ]
        return out

    ahead = read.spans[:turn][: _before(read.spans[:turn], short)]
    tail = read.spans[turn:][: _before(read.spans[turn:], short)]
    every = list(range(len(r.names)))
    spans = [
        *ahead,
        *whole(forward, every),
        *(_moved(s, step * periods, r, {}, 0) for s in tail),
        *whole(backward, every[::-1]),
    ]

    def by_unit(sums: dict[str, int]) -> dict[str, int]:
        out = {n: b for n, b in sums.items() if _block_of(n, rename) is None}
        for i in every:
            source = (
                i
                if i < first + p
                else first + (i - first) % p
                if i < first + p + r.left_out
                else i - r.left_out
            )
            out |= {
                _renamed(n, short[source], r.names[i]): b
                for n, b in sums.items()
                if _block_of(n, rename) == source
            }
        return out

    return Read(
        tuple(spans),
        by_unit(read.saved),
        read.saved_logits,
        read.end_of_forward + step * periods,
        by_unit(read.movable),
    )


def _moved(span: Span, by: int, r: Repetition, known: dict[str, int], blocks: int) -> Span:
    """`span` with `by` more bytes beneath it, `blocks` further on in the list."""
    at = _block_of(span.unit, known)
    unit = span.unit if at is None else _renamed(span.unit, r.names[at], r.names[at + blocks])
    at = _block_of(span.arrives, known)
    arrives = (
        span.arrives if at is None else _renamed(span.arrives, r.names[at], r.names[at + blocks])
    )
    return replace(
        span,
        unit=unit,
        arrives=arrives,
        begin=span.begin + by,
        end=span.end + by,
        peak=span.peak + by,
    )


def _renamed(name: str, old: str, new: str) -> str:
    return new + name[len(old) :]


def _block_of(name: str, known: dict[str, int]) -> int | None:
    """The number of the block that a unit or a parameter belongs to."""
    parts = name.split(".")
    return next(
        (known[head] for n in range(len(parts), 0, -1) if (head := ".".join(parts[:n])) in known),
        None,
    )


def _before(spans: tuple[Span, ...], names: tuple[str, ...]) -> int:
    known = {n: i for i, n in enumerate(names)}
    return next(
        (i for i, s in enumerate(spans) if _block_of(s.unit, known) is not None), len(spans)
    )


def _groups(
    spans: tuple[Span, ...], names: tuple[str, ...], direction: int
) -> dict[int, list[Span]] | None:
    """Spans by block, each with what runs between it and the next; None if the blocks do not run
    one after the other, each once.
    """
    known = {n: i for i, n in enumerate(names)}
    out: dict[int, list[Span]] = {}
    current: int | None = None
    for span in spans:
        at = _block_of(span.unit, known)
        if at is not None and at != current:
            if at in out or (current is not None and at != current + direction):
                return None
            current = at
        if current is not None:
            out.setdefault(current, []).append(span)
    return out if len(out) == len(names) else None
