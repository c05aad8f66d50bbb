"""What a rank holds on its device between steps.

With P the bytes of a unit's flat buffer (padding included), N ranks, by placement of parameters /
gradients / optimizer:

| stage | parameters | master weights        | moments (AdamW) | wire of a step with m micro-batches, × (N−1)/N        |
|-------|------------|-----------------------|-----------------|--------------------------------------------------------|
| 0     | P          | P₃₂ if 16-bit         | 2·P₃₂           | all-reduce 2P                                          |
| 1     | P          | P₃₂/N if 16-bit       | 2·P₃₂/N         | all-gather P, reduce-scatter P                         |
| 2     | P          | P₃₂/N if 16-bit       | 2·P₃₂/N         | all-gather P, reduce-scatter m·P                       |
| 3     | –          | P₃₂/N                 | 2·P₃₂/N         | all-gather 2m·P, m·P                                    |

At stage 3 some units are gathered m times only: those that only look up, and the last units (the
last unit of a forward pass and the units around it stay gathered until the backward pass). In fp32
at stages 0 to 2 the masters are (a slice of) the parameters themselves. Frozen parameters have
neither masters nor moments and are stored in the compute dtype. All of this follows from the
recipe's rows; the code never asks for the stage.

With groups of G of the N ranks (layout/spec.py; by default a group is a node), and a codec that
leaves e bytes of each byte, × (G−1)/G intra-group and (N−G)/NG inter-group:

| recipe (stage 3)          | beside the above at rest     | sent intra-group            | sent inter-group                |
|---------------------------|------------------------------|-----------------------------|---------------------------------|
| groups (all stages)       |                              | as above                    | as above                        |
| `shard_group`             | masters, moments: 1/G        | 3m·P                        | 2P, once                        |
| … `optimizer_over="all"`  | parameters (compute): P/G    | 3m·P                        | 2P, once                        |
| `second_copy`             | parameters (compute): P/G    | 3m·P                        | P once, m·P                     |
| `gather_codec`            | e·P/N (with the copy: e·P/G) | e·P for P of each gather    | e·P for P of each gather        |
| `reduce_codec`            |                              | e·P for P of each reduction | e·P for P of each reduction     |
| `frozen` (matrices)       | e·P/N instead of P/N         | e·P for P of each gather    | e·P for P of each gather        |

Sources: Wang et al. 2023 (ZeRO++, arXiv:2306.10209), section 4; Zhang et al. 2022 (MiCS,
arXiv:2205.00119), section 3; Zhao et al. 2023 (PyTorch FSDP), section 3.2.2.

Every size is that of a `ShardSpec` (layout/spec.py), by which the engine allocates and sends.

If a flat buffer's state is offloaded (`ShardSpec.tiers`), the device holds only the values that the
model computes with: the whole if it is resident, this rank's interval if it is gathered, nothing if
parameters are offloaded too.
What is off the device is in `plan/offloaded.py`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from onefold.layout import ShardSpec, Slot
from onefold.memory import MASTERS, MOMENTS, PARAMETERS
from onefold.plan.rank import UnitPlan
from onefold.recipe.moments import FORMATS
from onefold.recipe.optimizers import PLANNED


def filled(held: Mapping[str, int]) -> dict[str, int]:
    """Leave zeros out."""
    return {k: v for k, v in held.items() if v}


# -- on the device ---------------------------------------------------------------------------------


def at_rest(
    units: Sequence[UnitPlan], optimizer: str = "adamw", held: int | None = None
) -> dict[str, int]:
    """Return the bytes that a rank holds on its device between steps, by category, after gradients
    are dropped.

    Args:
        held: its bytes of moments, if it steps matrices whole (`onefold.plan.owned`).
    """
    out = Counter({MOMENTS: held or 0})
    for flat in (f for u in units for f in u.flats):
        out.update({PARAMETERS: flat.parameter_bytes, MASTERS: flat.master_bytes})
        if flat.tiers is None and held is None:
            out[MOMENTS] += moments(flat, optimizer)
    return filled(out)


def moments(flat: ShardSpec, optimizer: str) -> int:
    """Return the bytes of optimizer states for the part of `flat` that this rank steps. Some
    optimizers also keep a number for each parameter of which the rank steps any element: Adam's
    count of steps has 4 bytes. Adagrad makes it for every parameter, when it is made.
    """
    kept = PLANNED[optimizer]
    if not flat.trainable:
        return 0
    return sum(
        flat.moment_bytes(slot, kept.elementwise_states) + kept.number_bytes
        for slot in flat.layout.slots
        if kept.at_once or flat.local(slot)
    )


def stays_in_memory(flat: ShardSpec, slot: Slot) -> bool:
    """Return whether a parameter's moments are too small to be packed, and stay in memory while the
    others are on NVMe.
    """
    return (
        flat.moments is not None
        and FORMATS[flat.moments].packed
        and not FORMATS[flat.moments].of(slot.numel).packed
    )


def states_on_disk(flat: ShardSpec, numel: int, optimizer: str) -> int:
    """Return the bytes on NVMe of the moments of `numel` elements of a flat buffer."""
    if all(stays_in_memory(flat, slot) for slot in flat.layout.slots if flat.local(slot)):
        return 0
    each = numel * flat.dtypes.master.itemsize
    if flat.moments is not None:
        each = FORMATS[flat.moments].nbytes(numel)
    return PLANNED[optimizer].elementwise_states * each
