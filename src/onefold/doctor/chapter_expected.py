"""What the chapters should find, by the plan's own formulas for the GPU that is here (for an H100 if
it is in no table).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from onefold.doctor.chapter_runs import Scope
from onefold.plan import hardware
from onefold.plan.alternatives import reduction_seconds
from onefold.plan.hardware import Machine
from onefold.plan.reserve import CHANNEL, COMMUNICATOR, CONTEXT, channels_to_a_peer
from onefold.plan.traffic import Software, Traffic
from onefold.recipe import Recipe

#: Blocks of a training.
BLOCKS = 4


def machine_of(scope: Scope, ranks: int) -> Machine:
    """Return the table's machine that is most like this one: `ranks` GPUs in one node."""
    return hardware.machine(ranks, ranks, kind_of(scope.gpu, scope.capacity))


def kind_of(name: str, capacity: int) -> str:
    """Return the table's kind of a GPU, by the name that the driver gives it and its bytes of
    memory: of "a100-40" and "a100-80" the one of that size; H100 if it is in no table.
    """
    told = name.lower().replace(" ", "")
    known = {k: gpu for k, gpu in hardware.builtin().gpus.items() if k.partition("-")[0] in told}
    if not known:
        return "h100-80"

    def unlike(kind: str) -> tuple[int, bool, int]:
        # "l4" is also in the name of an L40S: the longest one that fits is meant
        wrong_bus = ("pcie" in kind) != ("pcie" in told)
        return -len(kind.partition("-")[0]), wrong_bus, abs(known[kind].capacity - capacity)

    return min(known, key=unlike)


def numel_of(shape: Sequence[int]) -> int:
    """Return the parameters of one block, without its norms.
    `shape`: width, feed-forward, heads, heads of keys and values.
    """
    width, forward, heads, shared = shape
    return 2 * width * width + 2 * width * (width // heads) * shared + 3 * width * forward


def expected_step(machine: Machine, shape: Sequence[int], tokens: int) -> dict[str, float]:
    """Return the seconds of a step of stage 3 over `BLOCKS` blocks: computing, communication, and
    what is exposed of it: the first gather, or what computing does not cover.
    """
    numel, soft, n = numel_of(shape), Software(), machine.ranks
    attention = 6.0 * tokens * tokens * shape[0]  # causal, forward and backward
    compute = BLOCKS * (6.0 * numel * tokens + attention) / machine.matrix_rate("bf16")
    if n == 1:
        return {"compute_s": compute, "comm_s": 0.0, "exposed_s": 0.0}
    gather = Traffic.ring("all-gather", 2 * numel * (n - 1) / n, 1, machine).seconds(machine, soft)
    reduction = expected_reduction(machine, 2 * numel, "ordered")
    # The last block stays gathered from the forward to the backward pass
    comm = (2 * BLOCKS - 1) * gather + BLOCKS * reduction
    exposed = max(gather, comm - soft.overlap * compute)
    return {"compute_s": compute, "comm_s": comm, "exposed_s": exposed}


def expected_reduction(machine: Machine, nbytes: float, reduce: Any) -> float:
    """Return the seconds of one reduction of `nbytes` in 16 bits, its sum included."""
    recipe = Recipe.zero(2, precision="bf16", reduce=reduce)
    return reduction_seconds(recipe, machine, Software(), nbytes, 2, 4)


def expected_memory(machine: Machine) -> dict[str, float]:
    """Return the MiB that the driver should count more, by what was made."""
    peers = (machine.ranks - 1) * channels_to_a_peer(machine.gpu.link) * CHANNEL
    return {
        "the context": CONTEXT / 2**20,
        "the process group": 0.0,
        "the communicator of gathers": COMMUNICATOR / 2**20,
        "the communicator of reductions: all-to-all": (COMMUNICATOR + peers) / 2**20,
        "one of native sums: reduce-scatter": COMMUNICATOR / 2**20,
    }
