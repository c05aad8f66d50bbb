"""The tiers: memories and disks that hold training state, and everything that differs between them.

| tier   | options say | stored as       | in sentences  |
|--------|-------------|-----------------|---------------|
| DEVICE | nothing     | device memory   | on the device |
| HOST   | cpu         | host memory     | on the host   |
| NVME   | nvme        | files           | on NVMe       |

The option `nvme` names the folders of files.
"""

from __future__ import annotations

import enum


class Tier(enum.Enum):
    """The memory that holds one kind of state: the device's, the host's, or files on a disk.

    Its value is its name in ledgers, accounts, rows of metrics and figures.
    """

    DEVICE = "device"
    HOST = "host"
    NVME = "nvme"

    @property
    def option(self) -> str | None:
        """The value of the options offload_optimizer, offload_gradients and offload_param; None:
        they are left out.
        """
        return {Tier.HOST: "cpu", Tier.NVME: "nvme"}.get(self)

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


#: The tiers besides the device, the fastest first.
OFF_DEVICE = (Tier.HOST, Tier.NVME)
