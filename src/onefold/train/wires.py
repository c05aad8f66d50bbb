"""What moves between nodes and how it is written there: what a run is told about it, and what it
says of itself.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import onefold
from onefold.recipe.options import NODES
from onefold.recipe.options import OPTIONS as TABLE
from onefold.train.errors import TrainError
from onefold.train.machine import readable

if TYPE_CHECKING:
    from onefold.train.config import TrainConfig
    from onefold.train.prepare import Run

#: The options of groups and codecs.
OPTIONS = tuple(name for name, option in TABLE.items() if option.panel == NODES)
#: What rows and checkpoints call the bytes sent so far; see `totals`.
TOTALS = ("wire_bytes_total", "wire_bytes_between_total", "wire_bytes_plain_total")


def wire_arguments(config: TrainConfig) -> dict[str, Any]:
    """The arguments of `Recipe.zero` about groups and codecs that the configuration gives; {} where
    all is as usual.
    """
    return config.arguments(NODES)


def refuse_groups(config: TrainConfig, ranks: int) -> None:
    """Say now that groups of that size do not divide the ranks.

    Raises:
        TrainError: they do not.
    """
    from onefold.layout import Topology

    for name in ("group", "shard_group"):
        size = getattr(config, name)
        if isinstance(size, int):
            try:
                Topology(ranks, size)
            except ValueError as error:
                raise TrainError(f"--{name.replace('_', '-')} {size}: {error}") from None


def refuse_frozen(config: TrainConfig, frozen: int) -> None:
    """Say that nothing is frozen that could rest encoded. `frozen`: parameters that are not
    trained.

    Raises:
        TrainError: there are none.
    """
    if config.frozen is not None and not frozen:
        raise TrainError(
            f"--frozen {config.frozen}: every parameter of {config.model} is trained, so none could"
            " rest encoded. Leave the option out (--gather-codec encodes what is trained while it"
            " travels), or give a model with frozen weights: --model module:factory, whose factory"
            " freezes them, or returns a model of peft's."
        )


def totals(run: Run) -> dict[str, int]:
    """Bytes that this rank has sent since the run began, earlier starts counted in, as the rows
    call them.

    wire_bytes_total; wire_bytes_between_total, of these between nodes, where there are several;
    wire_bytes_plain_total, what the first would have been without codecs, where that differs.
    """
    engine, earlier = onefold.engine_of(run.model), run.earlier
    all_of_them, across, uncoded = TOTALS
    before = int(earlier.get(all_of_them, 0))
    sent = before + engine.traffic.total()
    between = int(earlier.get(across, 0)) + engine.traffic.by_link()["between"]
    plain = int(earlier.get(uncoded, before)) + engine.traffic.plain()
    out = {all_of_them: sent}
    if engine.group.borders or between:
        out[across] = between
    if plain != sent:
        out[uncoded] = plain
    return out


def of_the_wire(row: Mapping[str, Any], borders: str, ending: str = "") -> str:
    """What belongs to the bytes sent, in brackets, for people; "" where there is one node and no
    codec.

    Args:
        row: of a step, or with `ending` "_total" of the whole run.
        borders: `Group.borders`.
    """
    said = []
    between, plain = row.get(f"wire_bytes_between{ending}"), row.get(f"wire_bytes_plain{ending}")
    if between is not None:
        said.append(f"{readable(between)} between {borders.partition(' ')[2] or 'nodes'}")
    if plain is not None:
        said.append(f"{readable(plain)} without codecs")
    return f" ({', '.join(said)})" if said else ""
