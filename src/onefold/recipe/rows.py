"""The rows of a recipe: what it comes to for parameters, gradients and optimizer states: the tier that
each is stored on, whether it is sharded, and the ranks that it is divided among.

| tier   | options say | stored as       | in sentences  |
|--------|-------------|-----------------|---------------|
| DEVICE | nothing     | device memory   | on the device |
| HOST   | cpu         | host memory     | on the host   |
| NVME   | nvme        | files           | on NVMe       |

Ranks are arranged in groups, usually the ranks of a node, because links inside a node are faster
than between nodes. If the launcher says that there are several nodes, everything moves over two
levels, inside nodes and between them, so each byte enters a node once. With "flat", every rank
exchanges with every other, and a byte enters a node once for each of its ranks. A row's `over` says
which ranks it is divided among: "all", or those of each "group". Each group then has a replica of
the row.

| recipe                       | parameters | gradients | optimizer | between groups, a step of m micro-batches          |
|------------------------------|------------|-----------|-----------|----------------------------------------------------|
| ZeRO-3                       | all        | all       | all       | 3mΨ                                                |
| HSDP, MiCS                   | group      | group     | group     | 2Ψ/G, once: gradients reduced                      |
| hybrid optimizer sharding    | group      | group     | all       | 2Ψ/G, once: gradients reduced, parameters gathered |
| second copy (ZeRO++ hpZ)     | group      | all       | all       | Ψ once, and mΨ: gradients                          |

Parameters over a group with an optimizer over all ranks are a second copy: each rank keeps 1/G of
the parameters, from which gathers read. The copy is refreshed once after each optimizer step.

Sources: Zhao et al. 2023 (PyTorch FSDP, hybrid sharding), Zhang et al. 2022 (MiCS), Wang et al.
2023 (ZeRO++).
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

#: Values of `Row.over`.
ALL, GROUP = "all", "group"
#: Values of `Recipe.group` besides a number of ranks.
NODE, FLAT = "node", "flat"
#: A value of `Recipe.reduce`: the backend adds gradients up.
NATIVE: Final = "native"


class Tier(enum.Enum):
    """The memory that holds one kind of state: the device's, the host's, or files on a disk.

    Its value is its name in ledgers, accounts, rows of metrics and figures.
    """

    DEVICE = "device"
    HOST = "host"
    NVME = "nvme"

    @property
    def title(self) -> str:
        """Its name in tables."""
        return "NVMe" if self.on_disk else self.value

    @property
    def where(self) -> str:
        """Where it is, in sentences."""
        return f"on {self.title}" if self.on_disk else f"on the {self.value}"

    @property
    def on_disk(self) -> bool:
        """Whether state is in files, which are read and written in chunks."""
        return self is Tier.NVME


#: {the value of the options offload_optimizer, offload_gradients and offload_param: the tier}
TIER_OF: Mapping[str | None, Tier] = {None: Tier.DEVICE, "cpu": Tier.HOST, "nvme": Tier.NVME}
#: The tiers besides the device, the fastest first.
OFF_DEVICE = (Tier.HOST, Tier.NVME)


def sharded_at(stage: int) -> tuple[bool, bool, bool]:
    """Return whether a ZeRO stage shards parameters, gradients and optimizer states. Gradients that
    are replicated stay whole until the boundary.
    """
    return stage > 2, stage > 1, stage > 0


@dataclass(frozen=True)
class Row:
    """What a recipe says of one kind of state.

    Attributes:
        sharded: each rank holds one interval of each unit's flat address space; else every rank holds
            all of it.
        dtype: the torch dtype stored. None, for parameters only: each parameter's own.
        wire: the dtype on the wire. None: not sent, or as the model or its backward pass makes it.
        tier: where the row is stored.
        over: the ranks that a sharded row is divided among: "all", or those of each "group".
        codec: the codec on the wire; None sends plain values.
    """

    sharded: bool
    dtype: Any
    wire: Any = None
    tier: Tier = Tier.DEVICE
    over: str = ALL
    codec: str | None = None
