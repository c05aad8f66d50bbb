"""The NVMe tier: regions on disk, read and written with direct I/O and a bounded amount of
host memory.

    store       Nvme: one per process. Regions, buffers, counters, clean-up
    region      Region: elements on disk, striped; alignment rules; order of overlapping transfers
    io          Transfer; the threads; short transfers, faults
    datafile    one file, accessed past the page cache
    files       the folder: its lock, its removal, and stale folders of crashed runs
    buffer      host memory for direct I/O
    preflight   the rate of a disk, and whether a run will fit
"""

from onefold.memory import TierError
from onefold.offload.nvme.buffer import PAGE, page_buffer
from onefold.offload.nvme.files import reclaim
from onefold.offload.nvme.io import Fault, Transfer
from onefold.offload.nvme.preflight import ROOM_TO_MEASURE, DiskRate, measure, refuse_unless_fits
from onefold.offload.nvme.region import Region
from onefold.offload.nvme.store import Nvme, stores_from, substitute

__all__ = [
    "PAGE", "ROOM_TO_MEASURE", "DiskRate", "Fault", "Nvme", "Region", "TierError", "Transfer", "measure", "page_buffer",
    "reclaim", "refuse_unless_fits", "stores_from", "substitute",
]  # fmt: skip
