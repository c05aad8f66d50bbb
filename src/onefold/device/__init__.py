"""Room `device`: which device this is, its streams and events, pinned memory, and copies between it and the host.

The only room that speaks of torch.cuda or torch.accelerator (Triton's kernels and the doctor's facts aside). It knows no modules, no
parameters and no collectives.

    place.py      which device, its index, the guard of a thread, its random state
    streams.py    streams and events; where a device has none, work is done when the call returns
    copies.py     CopyStream: copies behind the computing stream; Reading: numbers that the host reads later
    pinned.py     host memory that a device copies from and to by itself
    facts.py      bytes that are taken and free

CUDA, ROCm and XPU take one path, through torch.accelerator, torch.Stream and torch.Event. On a CPU, and on a device without streams (which
says so once), the same calls run synchronously.
"""

from onefold.device.copies import CopyStream, Reading, Ticket
from onefold.device.facts import MemoryFigures, device_count, device_names, free_memory, memory_figures
from onefold.device.pinned import HostBuffers, host_empty, host_pages
from onefold.device.place import available, backend_name, default_device, guard, rng_state, set_default, set_rng_state, with_index
from onefold.device.streams import (
    Clock,
    Stream,
    capturing,
    clocked,
    current_stream,
    has_streams,
    new_event,
    new_stream,
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
    "rng_state",
    "seconds_between",
    "set_default",
    "set_rng_state",
    "simulated",
    "synchronize",
    "use_stream",
    "with_index",
]
