"""Units that stay gathered between passes without gradients: `onefold.keep_gathered`.

    enter        pass    pass    pass with gradients    pass              leave
    gather all   ·       ·       let go                 gather all again  let go

They are also let go when their masters move (an optimizer step, a load, a write), and gathered
again by the next pass without gradients. Units that do not fit under the limit are gathered and
released in each pass as ever.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch

from onefold.runtime.parameters.parameter import disable_torch_function

if TYPE_CHECKING:
    from onefold.runtime.engine import Engine
    from onefold.runtime.unit import Unit


def gathered_bytes(unit: Unit) -> int:
    """Bytes of its gathered buffers on a rank."""
    return sum(
        flat.layout.numel * flat.dtypes.compute.itemsize for flat in unit.flats if not flat.resident
    )


def fitting(engine: Engine, limit: int | None) -> frozenset[int]:
    """The indices of the units that stay: first come, first kept, in the agreed order of the
    forward pass (the same on every rank).
    """
    chosen, left = [], limit
    for index in engine.gather.forward_order:
        nbytes = gathered_bytes(engine.units[index])
        if left is None or nbytes <= left:
            chosen.append(index)
            left = None if left is None else left - nbytes
    return frozenset(chosen)


@contextlib.contextmanager
def keep_gathered(engine: Engine, limit: int | None) -> Iterator[None]:
    """See `onefold.keep_gathered`.

    Raises:
        RuntimeError: it was entered inside a forward pass, or inside another one.
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
