"""Check before a run with state on a disk: measure the disks, and refuse a run that does not fit."""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Sequence
from typing import TYPE_CHECKING

from onefold.offload.nvme import (
    ROOM_TO_MEASURE,
    TierError,
    measure,
    refuse_unless_fits,
    substitute,
)
from onefold.offload.storage import OffloadStorage
from onefold.recipe.moments import FORMATS
from onefold.runtime.agree import agree_on_failure

if TYPE_CHECKING:
    from onefold.runtime.engine import Engine

#: Optimizer states with as many elements as the parameter: two, as for Adam. If an optimizer has
#: more, that shows when they are created.
MOMENTS_EXPECTED = 2
#: Bytes written to and read from each disk to measure its rate.
_SAMPLE = 16 << 20


def needed(engine: Engine) -> int:
    """Return the bytes of this rank's state on disk, with two moments in the recipe's format."""
    total = 0
    for flat in engine.offloaded_flats:
        assert isinstance(flat.storage, OffloadStorage)
        tiers, d, n = flat.storage.tiers, flat.dtypes, flat.storage.numel
        trained = any(e.param.requires_grad for e in flat.entries)
        if tiers.optimizer.on_disk:
            moment = (
                FORMATS[engine.recipe.moments].nbytes(n)
                if engine.recipe.moments is not None
                else n * d.master.itemsize
            )
            total += n * d.master.itemsize + (MOMENTS_EXPECTED * moment if trained else 0)
        if tiers.gradients.on_disk and trained:
            total += n * d.master.itemsize
        if tiers.parameters.on_disk and d.compute != d.master:
            total += n * d.compute.itemsize
    return total


def _has_room(folders: Sequence[str]) -> bool:
    """Return whether the folders have room for measuring.

    A smaller disk holds a small state, and is fast enough for it.
    """
    return min(shutil.disk_usage(folder).free for folder in folders) >= ROOM_TO_MEASURE


def preflight(engine: Engine) -> None:
    """Measure the disks and refuse a run that has no room on them. Collective.

    Raises:
        TierError: on every rank, if a folder of one rank is missing or has no room.
    """
    if not engine.on_disk or substitute() is not None:
        return
    folders = engine.recipe.nvme
    ranks = min(engine.world_size, int(os.environ.get("LOCAL_WORLD_SIZE", engine.world_size)))
    mine, error = needed(engine), None
    try:
        refuse_unless_fits(
            folders,
            mine * ranks,
            f"the state of {ranks} rank{'s' if ranks > 1 else ''} on NVMe",
        )
        if engine.rank == 0 and _has_room(folders):
            for disk in measure(folders, _SAMPLE, seconds=0.25):
                logging.getLogger("onefold").info(
                    "%s %s: %.0f MB/s written, %.0f MB/s read%s; the run takes %.2f GB of %.1f GB free (with Adam's two moments).",
                    "NVMe", disk.path, disk.write / 1e6, disk.read / 1e6, "" if disk.direct else " (no direct access here: buffered)",
                    mine * ranks / 1e9 / len(folders), disk.free / 1e9,
                )  # fmt: skip
    except TierError as failure:
        error = failure
    agree_on_failure(engine, error, "before the run")
