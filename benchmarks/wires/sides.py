"""How each side is built: the peers of `benchmarks.peers` with the arguments of
`settings.SIDES`.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from benchmarks.peers import adapters
from benchmarks.peers.settings import Setting
from benchmarks.wires.settings import SIDES


def build(name: str, setting: Setting, model: nn.Module, ranks_a_host: int, **changes: Any) -> Any:
    """The side around `model`, which holds whole fp32 weights on every rank; `changes` replace some
    of its arguments.

    Raises:
        ValueError: the name is unknown or its side has no recipe.
    """
    side = SIDES.get(name)
    if side is None or side.arguments is None:
        raise ValueError(
            f"There is no side {name!r} that could be built; `settings.SIDES` lists them."
        )
    arguments = side.arguments | changes
    if side.family == "onefold":
        return adapters.Onefold(setting, model, arguments.pop("stage"), **arguments)
    if side.family == "deepspeed":
        return adapters.DeepSpeed(setting, model, arguments.pop("stage"), **arguments)
    if side.family == "fsdp2":
        return adapters.FSDP2(
            setting,
            model,
            (setting.ranks // ranks_a_host, ranks_a_host) if arguments["hybrid"] else (),
        )
    return adapters.build(name, setting, model)
