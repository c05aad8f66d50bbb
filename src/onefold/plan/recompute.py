"""A module for a while with its repeated blocks recomputed in backward, as
`onefold train --activation-checkpointing` has them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, Literal

from torch import nn

from onefold.plan.from_module import lists_of_tiles

Checkpointing = Literal["none", "full", "selective"]


def repeated_blocks(module: nn.Module) -> list[nn.Module]:
    """The blocks of the largest list (by parameters) whose members are all of one class; [] if
    there is none.
    """
    of_tiles = lists_of_tiles(module)
    lists = [
        m
        for m in module.modules()
        if isinstance(m, nn.ModuleList | nn.Sequential)
        and len(m) > 1
        and len({type(c) for c in m}) == 1
    ]
    lists = [m for m in lists if id(m) not in of_tiles]
    largest = max(lists, key=_size, default=None)
    return list(largest) if largest is not None and _size(largest) else []


def _size(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


@contextmanager
def checkpointed(module: nn.Module, how: Checkpointing) -> Iterator[None]:
    """Inside, blocks are checkpointed (not re-entrantly): all of them ("full"), every second
    ("selective"), none changed ("none").

    Transformers' layers are asked to do it themselves, since they leave their caches out; others
    have their forward wrapped.

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
