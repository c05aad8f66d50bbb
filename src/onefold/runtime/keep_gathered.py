"""Units that stay gathered between passes without gradients: `onefold.keep_gathered`.

    enter        pass    pass    pass with gradients    pass              leave
    gather all   ·       ·       release                gather all again  release

They are also released when their masters are written to (an optimizer step, a load, a write); the
next pass without gradients gathers them again. Units that do not fit under the limit are gathered
and released in each pass as usual.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch

from onefold.runtime.parameters.parameter import disable_torch_function

if TYPE_CHECKING:
    from onefold.runtime.engine import Engine


def fitting(engine: Engine, limit: int | None) -> frozenset[int]:
    """Return the indices of the units that stay gathered: those that fit under `limit` bytes, taken
    in the agreed order of the forward pass, which is the same on every rank.
    """
    chosen, left = [], limit
    for index in engine.gather.forward_order:
        nbytes = engine.units[index].gathered_bytes
        if left is None or nbytes <= left:
            chosen.append(index)
            left = None if left is None else left - nbytes
    return frozenset(chosen)


@contextlib.contextmanager
def keep_gathered(engine: Engine, limit: int | None) -> Iterator[None]:
    """See `onefold.keep_gathered`.

    Raises:
        RuntimeError: it was entered inside a pass, or inside `keep_gathered` of the same model.
    """
    gather = engine.gather
    if engine.stack or engine.progress.backward_open:
        raise RuntimeError(
            "keep_gathered was entered inside a pass of the model; enter it outside."
        )
    if gather.kept_gathered:
        raise RuntimeError(
            "keep_gathered was entered inside keep_gathered of the same model; leave the outer one"
            " first."
        )
    gather.kept_gathered = fitting(engine, limit)
    try:
        with disable_torch_function(), torch.no_grad():
            engine.transfers.check()
            engine.copies.look_for_writes()
            gather.gather_kept()
            for index in gather.kept_gathered:
                gather.wait(engine.units[index])
        yield
    finally:
        if not engine.closed:
            with disable_torch_function():
                gather.release_kept()
            gather.kept_gathered = frozenset()
