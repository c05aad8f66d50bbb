"""The NVMe tier: what rests on disk, in regions that are read and written directly, with a bounded
amount of host memory.

    store       Nvme: one a process. Regions, buffers, counters, the end of it all
    region      Region: elements on disk, striped; the contract of alignment; what overlaps waits
    io          Transfer; the threads; short transfers, faults
    datafile    one file past the page cache
    files       the folder: its lock, its end, and stale folders of crashed runs
    buffer      memory that the disk works on directly
    preflight   what a disk gives, and whether a run will fit
"""

from onefold.memory.tier_error import TierError
from onefold.offload.nvme.buffer import PAGE, page_buffer
from onefold.offload.nvme.files import reclaim
from onefold.offload.nvme.io import Fault, Transfer
from onefold.offload.nvme.preflight import ROOM_TO_MEASURE, DiskRate, measure, refuse_unless_fits
from onefold.offload.nvme.region import Region
from onefold.offload.nvme.store import Nvme

__all__ = [
    "PAGE", "ROOM_TO_MEASURE", "DiskRate", "Fault", "Nvme", "Region", "TierError", "Transfer", "measure", "page_buffer",
    "reclaim", "refuse_unless_fits",
]  # fmt: skip
