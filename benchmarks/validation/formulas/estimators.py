"""What DeepSpeed's estimators print, so that their figures can be compared: model states only, with
their buffer factor.

Source: DeepSpeed's documentation (memory.rst) and the functions it documents. They print "GB" and
mean GiB; here it is bytes.
"""

from __future__ import annotations

from dataclasses import dataclass

BUFFER_FACTOR = 1.5


@dataclass(frozen=True)
class Estimate:
    """Bytes on the host of one node and on one GPU."""

    host: float
    gpu: float


def zero3_estimate(
    numel: float,
    largest_layer: float,
    gpus_per_node: int,
    nodes: int = 1,
    *,
    offload_optimizer: bool = False,
    offload_parameters: bool = False,
    zero_init: bool = True,
    buffer_factor: float = BUFFER_FACTOR,
) -> Estimate:
    """Stage 3: 18 bytes a parameter spread over all GPUs, or 16 or 18 of them on the hosts; the
    largest layer gathered (4 bytes).

    Without `zero_init` each process first builds the whole model in fp32 on the host.
    """
    share = 1 / nodes
    gathered = 4 * largest_layer
    built = 4 * numel * gpus_per_node
    if offload_optimizer:
        kept = (18 if offload_parameters else 16) * numel * share
        gpu = gathered + (0.0 if offload_parameters else 2 * numel / (gpus_per_node * nodes))
        host = kept if zero_init else max(built, kept)
    else:
        gpu = gathered + 18 * numel / (gpus_per_node * nodes)
        host = 4 * largest_layer * gpus_per_node if zero_init else built
    return Estimate(host * buffer_factor, gpu)
