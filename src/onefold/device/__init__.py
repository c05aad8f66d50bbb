"""Room `device`: which device to use, its streams and events, pinned memory, and copies between it
and the host.

No other room uses torch.cuda or torch.accelerator (except for Triton kernels and the doctor's
facts). It knows no modules, no parameters and no collectives.

    place.py      the device and its index, a thread's current device, the random state
    streams.py    streams and events; on a device without streams, work is done when the call returns
    copies.py     CopyStream: copies beside the computation; Reading: numbers that the host reads later
    host_sums.py  sums in pinned host memory that grow by sums on the device
    pinned.py     pinned host memory
    threads.py    how many threads of the host work on what is stored there
    facts.py      bytes allocated and free, names of devices

CUDA, ROCm and XPU share one path, through torch.accelerator, torch.Stream and torch.Event. On a
CPU, and on a device without streams (with one warning), the same calls run synchronously.
"""

from onefold.device.copies import CopyStream, Reading, Ticket, within
from onefold.device.facts import (
    MemoryFigures,
    device_count,
    device_names,
    free_memory,
    memory_figures,
)
from onefold.device.host_sums import HostSums, chunk_for
from onefold.device.pinned import HostBuffers, host_empty, host_pages, owners_of
from onefold.device.place import (
    available,
    backend_name,
    default_device,
    device_identity,
    guard,
    of_local_rank,
    rng_state,
    set_default,
    set_rng_state,
    with_index,
)
from onefold.device.streams import (
    Clock,
    Stream,
    capturing,
    clocked,
    current_stream,
    has_streams,
    host_device,
    new_event,
    new_stream,
    on_host,
    reached,
    seconds_between,
    simulated,
    synchronize,
    use_stream,
)
from onefold.device.threads import host_threads, using_threads

__all__ = [
    "Clock",
    "CopyStream",
    "HostBuffers",
    "HostSums",
    "MemoryFigures",
    "Reading",
    "Stream",
    "Ticket",
    "available",
    "backend_name",
    "capturing",
    "chunk_for",
    "clocked",
    "current_stream",
    "default_device",
    "device_count",
    "device_identity",
    "device_names",
    "free_memory",
    "guard",
    "has_streams",
    "host_device",
    "host_empty",
    "host_pages",
    "host_threads",
    "memory_figures",
    "new_event",
    "new_stream",
    "of_local_rank",
    "on_host",
    "owners_of",
    "reached",
    "rng_state",
    "seconds_between",
    "set_default",
    "set_rng_state",
    "simulated",
    "synchronize",
    "use_stream",
    "using_threads",
    "with_index",
    "within",
]
