"""The repeated blocks of a module. `checkpointed` recomputes them in backward, as `onefold train
--activation-checkpointing` does. `shortened` traces only a few of many, and `written_out` adds the
rest.

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

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

from torch import nn

from onefold.runtime.units import OwnUnit
from onefold.tracing.lifetimes import Read, Span

Checkpointing = Literal["none", "full", "selective"]


def repeated_blocks(module: nn.Module) -> list[nn.Module]:
    """Return the blocks of the largest list (by parameters) whose members are all of one class.
    [] if there is no such list.
    """
    lists = [
        m
        for m in module.modules()
        if isinstance(m, nn.ModuleList | nn.Sequential)
        and len(m) > 1
        and len({type(c) for c in m}) == 1
        and not isinstance(m[0], OwnUnit)
    ]
    largest = max(lists, key=_size, default=None)
    return list(largest) if largest is not None and _size(largest) else []


def _size(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


@contextmanager
def checkpointed(module: nn.Module, how: Checkpointing) -> Iterator[None]:
    """Checkpoint the blocks inside the context (not re-entrantly): all of them ("full") or every
    second one ("selective"). "none" changes nothing.

    transformers' layers checkpoint themselves when told to, and then leave out their caches. Other
    blocks get a wrapped forward.

    Raises:
        ValueError: `how` is none of these, or there are no repeated blocks.
    """
    if how == "none":
        yield
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
    skipped = {id(b) for b in blocks[1::2]} if how == "selective" else set()
    switched = [m for m in module.modules() if hasattr(m, "gradient_checkpointing")]
    before = [
        (m, {k: m.__dict__[k] for k in _SET if k in m.__dict__}) for m in (*switched, *blocks)
    ]
    try:
        for m in switched:
            m.gradient_checkpointing = id(m) not in skipped  # type: ignore[assignment]
            m._gradient_checkpointing_func = again  # type: ignore[assignment]
        for block in blocks:
            if block not in switched and id(block) not in skipped:
                block.forward = _wrapped(block.forward, again)
        yield
    finally:
        for m, own in before:
            for key in _SET:
                m.__dict__.pop(key, None)
            m.__dict__.update(own)


_SET = ("gradient_checkpointing", "_gradient_checkpointing_func", "forward")


def _wrapped(forward: Any, again: Any) -> Any:
    return lambda *args, **kwargs: again(forward, *args, **kwargs)


LONGEST_PERIOD = 8
# Attributes that hold a block's number
_NUMBERS = ("layer_idx", "layer_id", "layer_number", "layer_index", "block_idx")


@dataclass(frozen=True)
class Repetition:
    """Blocks `names[start:stop]` of one list, which repeat with `period`. The first `kept` of them
    are traced; the others, a whole number of periods, are left out.

    Attributes:
        container: the list. names: the names of its blocks, in order.
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
    """Return the run of equal blocks in `module` of which a trace can leave out most; None if it
    can leave out none.
    """
    best: Repetition | None = None
    layers = getattr(getattr(module, "config", None), "layer_types", None)
    for path, container in module.named_modules():
        if (
            not isinstance(container, nn.ModuleList | nn.Sequential)
            or len(container) < 6
            or isinstance(container[0], OwnUnit)
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
    """Return what must be equal in equal blocks: the classes, shapes and plain settings of all
    modules in a block, without the block's number.
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
    """Yield the longest ranges [start, stop) in which each sign equals the one `period` before."""
    start = 0
    for at in range(period, len(signs) + 1):
        if at == len(signs) or signs[at] != signs[at - period]:
            if at - start > period:
                yield start, at
            start = at - period + 1


@contextmanager
def shortened(repetition: Repetition) -> Iterator[None]:
    """Shorten the list of equal blocks inside the context. The blocks that remain get the first
    names of the list.
    """
    children = repetition.container._modules
    before = dict(children)
    blocks = list(before.values())
    left = blocks[: repetition.start + repetition.kept] + blocks[repetition.stop :]
    try:
        children.clear()
        children.update(zip(before, left, strict=False))
        yield
    finally:
        children.clear()
        children.update(before)


# -- writing out -----------------------------------------------------------------------------------


def written_out(read: Read, repetition: Repetition) -> Read | None:
    """Extend `read` of the shortened module to the whole module.
    None if the middle blocks did not all do the same.

    The second period of blocks is the pattern for those left out, and the third must equal it. The
    first and the last period stay as they were traced.
    """
    r, p, first = repetition, repetition.period, repetition.start + repetition.period
    turn = next((i for i, s in enumerate(read.spans) if s.phase == "backward"), len(read.spans))
    # The names of the blocks in the shortened module
    short = r.names[: len(r.names) - r.left_out]
    known = {name: i for i, name in enumerate(short)}
    passes = read.spans[:turn], read.spans[turn:]
    forward, backward = (_groups(s, known, by) for s, by in zip(passes, (1, -1), strict=True))
    if forward is None or backward is None:
        return None
    step = forward[first + p][0].begin - forward[first][0].begin
    for groups in (forward, backward):
        for i in range(first, first + p):
            if [_moved(s, step, r, known, p) for s in groups[i]] != groups[i + p]:
                return None
    periods = r.left_out // p

    def seen(i: int) -> tuple[int, int]:
        """Return (the traced block that block `i` equals, periods between the two)."""
        if i < first + p:
            return i, 0
        if i < first + p + r.left_out:
            return first + (i - first) % p, (i - first) // p
        return i - r.left_out, periods

    def whole(groups: dict[int, list[Span]], order: Iterable[int]) -> list[Span]:
        return [
            _moved(s, step * turns, r, known, p * turns)
            for at, turns in map(seen, order)
            for s in groups[at]
        ]

    def by_unit(sums: dict[str, int]) -> dict[str, int]:
        out = {n: b for n, b in sums.items() if _block_of(n, known) is None}
        for i, name in enumerate(r.names):
            at, _ = seen(i)
            own = ((n, b) for n, b in sums.items() if _block_of(n, known) == at)
            out |= {_renamed(n, short[at], name): b for n, b in own}
        return out

    ahead, tail = (s[: _before(s, known)] for s in passes)
    every = range(len(r.names))
    spans = (
        *ahead,
        *whole(forward, every),
        *(_moved(s, step * periods, r, {}, 0) for s in tail),
        *whole(backward, reversed(every)),
    )
    end = read.end_of_forward + step * periods
    saved, movable, largest = map(by_unit, (read.saved, read.movable, read.largest))
    return Read(spans, saved, read.saved_logits, end, movable, largest)


def _moved(span: Span, by: int, r: Repetition, known: dict[str, int], blocks: int) -> Span:
    """Return `span` with `by` more bytes in memory, for the block `blocks` further in the list."""

    def there(name: str) -> str:
        at = _block_of(name, known)
        return name if at is None else _renamed(name, r.names[at], r.names[at + blocks])

    return replace(
        span,
        unit=there(span.unit),
        arrives=there(span.arrives),
        begin=span.begin + by,
        end=span.end + by,
        peak=span.peak + by,
    )


def _renamed(name: str, old: str, new: str) -> str:
    return new + name[len(old) :]


def _block_of(name: str, known: dict[str, int]) -> int | None:
    """Return the number of the block that a unit or a parameter belongs to, None for no block."""
    parts = name.split(".")
    return next(
        (known[head] for n in range(len(parts), 0, -1) if (head := ".".join(parts[:n])) in known),
        None,
    )


def _before(spans: tuple[Span, ...], known: dict[str, int]) -> int:
    """Return the number of spans before the first block's."""
    blocks = (i for i, s in enumerate(spans) if _block_of(s.unit, known) is not None)
    return next(blocks, len(spans))


def _groups(
    spans: tuple[Span, ...], known: dict[str, int], direction: int
) -> dict[int, list[Span]] | None:
    """Group the spans by block; spans between two blocks belong to the earlier one.
    None if the blocks do not run one after the other, each once.
    """
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
    return out if len(out) == len(known) else None
