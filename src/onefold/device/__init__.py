"""Room `device`: which device to use, its streams and events, pinned memory, and copies between it
and the host.

No other room uses torch.cuda or torch.accelerator (except for Triton kernels and the doctor's
facts and checks). It knows no modules, no parameters and no collectives.

    streams.py  the device of this rank and what it is; streams and events (on a device without streams,
                work is done when the call returns); the host's threads
    copies.py   CopyStream: copies beside the computation; reading: numbers that the host reads later;
                HostSums: sums in pinned host memory that grow by sums on the device
    pinned.py   pinned host memory

CUDA, ROCm and XPU share one path, through torch.accelerator, torch.Stream and torch.Event. On a
CPU, and on a device without streams (with one warning), the same calls run synchronously.
"""

from onefold.device.copies import CopyStream, HostSums, chunk_for, reading, within
from onefold.device.pinned import host_empty, host_pages, owners_of
from onefold.device.streams import (
    available,
    backend_name,
    capturing,
    current_stream,
    default_device,
    device_count,
    device_identity,
    device_names,
    free_memory,
    guard,
    has_streams,
    host_threads,
    memory_figures,
    new_event,
    new_stream,
    of_local_rank,
    reached,
    rng_state,
    set_default,
    set_rng_state,
    synchronize,
    use_stream,
    using_threads,
    with_index,
)
