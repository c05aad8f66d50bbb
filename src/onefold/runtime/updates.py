"""What clipping and optimizers did on this rank, in words: ranks must do the same.

The ranks compare a checksum of all updates since their last comparison in the exchange at the end of
the next backward pass (runtime/agree.py), and the updates themselves in a save.
"""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import zip_longest
from typing import Any

import torch
from torch.optim.optimizer import Optimizer

_ITEM, _UPDATE = "\t", "\n"
#: Options that say how torch computes an update, not which.
_HOW = ("foreach", "fused", "capturable", "differentiable")
#: Updates that are kept in words, if no backward pass comes.
_KEPT = 64


def note(updates: list[tuple[str, ...]], name: str, items: Iterator[str]) -> None:
    if len(updates) == _KEPT:
        checksum = zlib.crc32(together(updates).encode())
        updates[:] = [(f"{_KEPT} updates (checksum {checksum:08x})",)]
    updates.append((name, *items))


def together(updates: Sequence[tuple[str, ...]]) -> str:
    """Return the updates in one text. Their order is left out: that of two optimizers is free."""
    return _UPDATE.join(sorted(map(_ITEM.join, updates)))


def of_step(optimizer: Optimizer, members: Mapping[int, str]) -> Iterator[str]:
    """Yield the numbers among the optimizer's options in the groups of `members`, and these: what
    tells which parameters a group has. What code keeps in a group besides (a name, a rank) is left
    out, and so are tensors on a device: reading them would make the host wait.
    """
    for number, those in members.items():
        where = f" in group {number}"
        for key, value in optimizer.param_groups[number].items():
            option = key == "lr" or (key in optimizer.defaults and key not in _HOW)
            if option and (said := in_words(value)):
                yield f"{key}={said}{where}"
        yield those + where


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


def difference(texts: Mapping[int, str]) -> str:
    """Return in words how the updates of two ranks differ; "" if all ranks made the same.

    Args:
        texts: `together` of every rank's updates, by global rank.
    """
    (first, mine), *others = sorted(texts.items())
    other, theirs = next((each for each in others if each[1] != mine), (first, mine))
    here, there = (Counter(filter(None, text.split(_UPDATE))) for text in (mine, theirs))
    only = sorted((here - there).elements()), sorted((there - here).elements())
    for one, two in zip_longest(*only, fillvalue=""):
        items = list(zip_longest(one.split(_ITEM), two.split(_ITEM)))
        differing = next(pair for pair in items if pair[0] != pair[1])
        called = "called" if differing is items[0] else f"called {items[0][0]} with"
        said = [f"{called} {each or 'nothing more'}" for each in differing]
        return (
            f"since the last backward pass rank {first} {said[0]} where rank {other} {said[1]}."
            " Every rank must clip and step alike, with the same numbers in the optimizer's groups,"
            " after the same backward passes; a scheduler that follows the loss must be given the"
            " mean over ranks."
        )
    return ""
