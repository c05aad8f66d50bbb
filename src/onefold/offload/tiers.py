"""Where masters and states are stored off the device: a `Storage` for each tier that holds them."""

from __future__ import annotations

from collections.abc import Mapping

from onefold.offload.nvme_storage import NvmeStorage
from onefold.offload.storage import HostStorage, OffloadStorage
from onefold.recipe import Tier

STORAGES: Mapping[Tier, type[OffloadStorage]] = {Tier.HOST: HostStorage, Tier.NVME: NvmeStorage}
