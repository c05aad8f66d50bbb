"""The NVMe tier: what rests on disk, in regions that are read and written directly, with a bounded amount of host memory.

    store       Nvme: one a process. Regions, buffers, counters, the end of it all
    region      Region: elements on disk, striped; the contract of alignment; what overlaps waits
    io          Transfer; the threads; short transfers, faults
    datafile    one file past the page cache
    files       the folder: its lock, its end, and what the dead have left
    buffer      memory that the disk works on directly
    preflight   what a disk gives, and whether a run will fit
"""

from onefold.memory.nvme.buffer import PAGE, page_buffer
from onefold.memory.nvme.errors import TierError
from onefold.memory.nvme.files import reclaim
from onefold.memory.nvme.io import Fault, Transfer
from onefold.memory.nvme.preflight import ROOM_TO_MEASURE, DiskRate, measure, refuse_unless_fits
from onefold.memory.nvme.region import Region
from onefold.memory.nvme.store import Nvme

__all__ = [
    "PAGE", "ROOM_TO_MEASURE", "DiskRate", "Fault", "Nvme", "Region", "TierError", "Transfer", "measure", "page_buffer",
    "reclaim", "refuse_unless_fits",
]  # fmt: skip
