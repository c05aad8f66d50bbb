"""The tiers: memories and disks that hold training state, and everything that differs between them.

| tier   | options say | stored as       | in sentences  | its folders |
|--------|-------------|-----------------|---------------|-------------|
| DEVICE | nothing     | device memory   | on the device |             |
| HOST   | cpu         | host memory     | on the host   |             |
| NVME   | nvme        | files           | on NVMe       | nvme        |

A new tier of files needs, in this order:

| what                                                     | where                                    |
|----------------------------------------------------------|------------------------------------------|
| a member of `Tier`, with its facts                       | here                                     |
| the option that names its folders, and its value in      | recipe/options.py; `make options`        |
| `OffloadTier`                                            |                                          |
| the `Storage` of masters and states that are there       | a line in offload/tiers.py; a file there |
|                                                          | if `NvmeStorage` does not fit            |

The rest follows from the facts of its member: the checks of recipes, ledgers, observed rows, the
plan's accounts, tables and seconds, simulations. tests/recipe/test_new_tier.py trains and plans with
one that it makes up. A recipe has state on one disk at most (checks.py).
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

#: The rows of a recipe.
RowName = Literal["parameters", "gradients", "optimizer"]
ROWS: tuple[RowName, ...] = ("parameters", "gradients", "optimizer")


@dataclass(frozen=True)
class Disk:
    """What a node has of a disk, for plans: bytes, bytes/s, and seconds until the first bytes come."""

    capacity: float
    read: float
    write: float
    latency: float = 1e-4


class Tier(enum.Enum):
    """The memory that holds one kind of state: the device's, the host's, or files on a disk.

    Attributes:
        value: its name in ledgers, accounts, rows of metrics and figures.
        option: the value of the options offload_optimizer, offload_gradients and offload_param;
            None: they are left out.
        title, where: its name in tables ("NVMe"), and in sentences ("on NVMe").
        holds: the rows that may be stored there.
        folders: the option that names its folders; "" for memory.
        disk: what a plan assumes of it; None where machines have figures of it (`Host.disk` in
            plan/hardware.py).
    """

    _value_: str
    option: str | None
    title: str
    where: str
    holds: Sequence[RowName]
    folders: str
    disk: Disk | None

    DEVICE = ("device", None, "device", "on the device")
    HOST = ("host", "cpu", "host", "on the host")
    NVME = ("nvme", "nvme", "NVMe", "on NVMe", ROWS, "nvme")

    def __new__(
        cls,
        value: str,
        option: str | None,
        title: str,
        where: str,
        holds: Sequence[RowName] = ROWS,
        folders: str = "",
        disk: Disk | None = None,
    ) -> Tier:
        self = object.__new__(cls)
        self._value_ = value
        self.option, self.title, self.where = option, title, where
        self.holds, self.folders, self.disk = holds, folders, disk
        return self

    @property
    def on_disk(self) -> bool:
        """Whether state is in files, which are read and written in chunks."""
        return bool(self.folders)


def off_device() -> list[Tier]:
    """Return the tiers besides the device, the fastest first."""
    return [tier for tier in Tier if tier is not Tier.DEVICE]


def disks() -> list[Tier]:
    """Return the tiers of files."""
    return [tier for tier in Tier if tier.on_disk]


def by_option(row: RowName) -> dict[str, Tier]:
    """Return the tiers that may hold a row, by the value of its option."""
    return {tier.option: tier for tier in Tier if tier.option is not None and row in tier.holds}
