"""How a global batch is cut into micro-batches on ranks, in integers."""

from __future__ import annotations

from onefold.train.errors import TrainError


def accumulation_steps(global_batch: int, micro_batch: int, world_size: int) -> int:
    """Micro-batches a rank computes for one optimizer step.

    Raises:
        TrainError: the global batch cannot be cut into whole micro-batches on these ranks.
    """
    at_once = micro_batch * world_size
    if global_batch % at_once:
        lower, upper = global_batch // at_once * at_once, (global_batch // at_once + 1) * at_once
        near = f"{lower} or {upper}" if lower else str(upper)
        raise TrainError(
            f"--global-batch {global_batch} cannot be cut into micro-batches of {micro_batch} on"
            f" {world_size} ranks ({at_once} sequences at once); use {near}, or another"
            " --micro-batch."
        )
    return global_batch // at_once


def micro_batch_that_divides(wanted: int, global_batch: int, world_size: int) -> int:
    """The largest micro-batch, `wanted` at most, with which the global batch of an earlier start
    can be cut on these ranks.

    Raises:
        TrainError: there is none.
    """
    share, rest = divmod(global_batch, world_size)
    if rest:
        counts = ", ".join(str(n) for n in range(1, 2 * world_size) if global_batch % n == 0)
        raise TrainError(
            f"the run goes on with its global batch of {global_batch} sequences, which {world_size}"
            f" ranks cannot share equally. It can go on with {counts} ranks; a global batch that"
            " every number of ranks divides (such as 24) is safest."
        )
    return max(size for size in range(1, min(wanted, share) + 1) if share % size == 0)
