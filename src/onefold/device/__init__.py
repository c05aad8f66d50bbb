"""Room `device`: which device to use, its streams and events, pinned memory, and copies between it
and the host.

No other room uses torch.cuda or torch.accelerator (except for Triton kernels and the doctor's
facts). It knows no modules, no parameters and no collectives.

    place.py      the device and its index, a thread's current device, the random state
    streams.py    streams and events; on a device without streams, work is done when the call returns
    copies.py     CopyStream: copies beside the computation; Reading: numbers that the host reads later
    pinned.py     pinned host memory
    facts.py      bytes allocated and free, names of devices

CUDA, ROCm and XPU share one path, through torch.accelerator, torch.Stream and torch.Event. On a
CPU, and on a device without streams (with one warning), the same calls run synchronously.
"""

from onefold.device.copies import CopyStream, Reading, Ticket
from onefold.device.facts import (
    MemoryFigures,
    device_count,
    device_names,
    free_memory,
    memory_figures,
)
from onefold.device.pinned import HostBuffers, host_empty, host_pages, owners_of
from onefold.device.place import (
    available,
    backend_name,
    default_device,
    guard,
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
    new_event,
    new_stream,
    reached,
    seconds_between,
    simulated,
    synchronize,
    use_stream,
)

__all__ = [
    "Clock",
    "CopyStream",
    "HostBuffers",
    "MemoryFigures",
    "Reading",
    "Stream",
    "Ticket",
    "available",
    "backend_name",
    "capturing",
    "clocked",
    "current_stream",
    "default_device",
    "device_count",
    "device_names",
    "free_memory",
    "guard",
    "has_streams",
    "host_empty",
    "host_pages",
    "memory_figures",
    "new_event",
    "new_stream",
    "owners_of",
    "reached",
    "rng_state",
    "seconds_between",
    "set_default",
    "set_rng_state",
    "simulated",
    "synchronize",
    "use_stream",
    "with_index",
]
