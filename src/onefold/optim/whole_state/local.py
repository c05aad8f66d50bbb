"""This rank's part of an optimizer's state. It loads on the same rank of the same number of ranks,
without collectives.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

from torch.optim.optimizer import Optimizer

import onefold.optim.faced_states as faced_states
from onefold.optim.whole_state.landing import LOCAL
from onefold.optim.whole_state.outline import Outline, locally
from onefold.runtime.parameters.parameter import disable_torch_function
from onefold.runtime.state.stream import dist_rank


def local_state_dict(optimizer: Optimizer) -> dict[str, Any]:
    """Return this rank's part of the optimizer's state. Local.

    Tensors alias the optimizer's. States on NVMe are represented by placeholders, which cannot be
    copied or pickled.
    """
    with disable_torch_function(), _only_local(optimizer):
        faced_states.make_all_plain(optimizer)
        state = optimizer.state_dict()
    return {**state, LOCAL: _rank_and_size(optimizer)}


def load_local_state_dict(optimizer: Optimizer, state_dict: Mapping[str, Any]) -> None:
    """Load what `local_state_dict` returned on this rank. Local.

    Raises:
        ValueError: it is not such a part, or is that of another rank or number of ranks.
    """
    if LOCAL not in state_dict:
        raise ValueError(
            "load_local_state_dict was given no part of one rank: give a whole state dict to"
            " optimizer.load_state_dict()."
        )
    said, here = state_dict[LOCAL], _rank_and_size(optimizer)
    if said != here:
        raise ValueError(
            f"load_local_state_dict was given the part of rank {said['rank']} of {said['ranks']} on"
            f" rank {here['rank']} of {here['ranks']}. What optimizer.state_dict() returns loads on"
            " any number of ranks."
        )
    with _only_local(optimizer):
        optimizer.load_state_dict({key: value for key, value in state_dict.items() if key != LOCAL})


@contextlib.contextmanager
def _only_local(optimizer: Optimizer) -> Iterator[None]:
    locally.add(optimizer)
    try:
        yield
    finally:
        locally.discard(optimizer)


def _rank_and_size(optimizer: Optimizer) -> dict[str, int]:
    with disable_torch_function():
        engine = Outline.of(optimizer).engine
    if engine is None:
        return {"rank": 0, "ranks": 1}
    return {"rank": dist_rank(engine), "ranks": engine.group.size}
