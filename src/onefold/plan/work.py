"""What the time model asks of a step and of software: the work of one rank, and what software makes
of the hardware.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from onefold.doctor.kernels import Kernels
from onefold.plan.offloaded import Carried
from onefold.plan.traffic import Traffic


@dataclass(frozen=True)
class Work:
    """What one rank does in one optimizer step.

    Attributes:
        flops: done, recompute included; model_flops: what MFU counts (None: the same).
        precision: of the matrix products: "fp32", "tf32", "fp16", "bf16".
        tokens: of all ranks together.
        micro_batches: of one rank.
        forward_share: of the compute, what is forward: 1/3, or 1/4 under full recompute.
        optimizer_numel, optimizer_bytes: elements that this rank's update steps on the device,
            bytes it moves (28 an element: Adam in fp32 reads p, g, m, v and writes p, m, v).
        host_optimizer_numel, host_optimizer_bytes: the same on the host.
        carried: what goes between tiers, by what it can hide behind. behind: units are stepped
            behind the backward pass.
        host_bytes, nvme_bytes: over this rank's host link, and to and from NVMe, behind any
            compute: for published systems.
        hidden, micro_tokens: width of a block and tokens of a micro-batch, for a calibrated rate at
            that shape.
        kernels: what runs in all passes of the step, where that was traced: a calibrated machine
            knows what each part of it costs.
        handed: elements of gradients that the engine takes over, all micro-batches together.
        coded_bytes: read and written by encoding and decoding. summed_bytes: by adding up, where
            moves were not measured with it.
        handled_bytes: by the engine's copies and casts.
    """

    flops: float
    traffic: Sequence[Traffic] = ()
    model_flops: float | None = None
    precision: str = "bf16"
    tokens: float = 0.0
    micro_batches: int = 1
    forward_share: float = 1 / 3
    optimizer_numel: float = 0.0
    optimizer_bytes: float = 0.0
    host_optimizer_numel: float = 0.0
    host_optimizer_bytes: float = 0.0
    carried: Sequence[Carried] = ()
    behind: bool = False
    host_bytes: float = 0.0
    nvme_bytes: float = 0.0
    hidden: int = 0
    micro_tokens: int = 0
    kernels: Kernels | None = None
    handed: float = 0.0
    coded_bytes: float = 0.0
    handled_bytes: float = 0.0
    summed_bytes: float = 0.0
