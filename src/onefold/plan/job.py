"""What is to be trained, and how it may be divided: the questions of a plan."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from onefold.recipe import COMPUTE_DTYPES, PLACEMENTS_OF_STAGE, Recipe

CHECKPOINTING = ("none", "selective", "full")
#: Where states may be kept besides the device, in the order of least slowdown.
OFFLOAD = ("none", "optimizer", "parameters", "nvme")


@dataclass(frozen=True)
class Job:
    """One optimizer step.

    Attributes:
        seq: tokens of a sample. micro_batch: samples that one rank computes at once; 0 lets the plan take the largest that fits.
        global_batch: samples of a step over all ranks; 0 is one micro-batch a rank.
        precision: "fp32", "bf16" or "fp16".
        checkpointing: "none", "selective" (every second block) or "full"; "" lets the plan escalate to it.
        accumulate: dtype in which gradients are summed and rest, "fp32" unless told otherwise.
        optimizer: as in `plan.states.MOMENTS_OF`.
        lora_rank: 0 trains all parameters; else adapters of this rank on every matrix of the blocks, the rest frozen.
        offload: one of `OFFLOAD`; "" lets the plan escalate to it.
    """

    seq: int = 1024
    micro_batch: int = 1
    global_batch: int = 0
    precision: str = "bf16"
    accumulate: str = "fp32"
    checkpointing: str = ""
    optimizer: str = "adamw"
    lora_rank: int = 0
    offload: str = ""

    def __post_init__(self) -> None:
        from onefold.plan.states import MOMENTS_OF

        for name, least in (("seq", 1), ("micro_batch", 0), ("global_batch", 0), ("lora_rank", 0)):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise ValueError(f"{name}={value!r}: expected a whole number, {least} or more.")
        for name, known in (
            ("precision", tuple(COMPUTE_DTYPES)),
            ("accumulate", tuple(COMPUTE_DTYPES)),
            ("checkpointing", ("", *CHECKPOINTING)),
            ("offload", ("", *OFFLOAD)),
            ("optimizer", tuple(MOMENTS_OF)),
        ):
            if getattr(self, name) not in known:
                raise ValueError(f"{name}={getattr(self, name)!r}: expected one of {', '.join(filter(None, known))}.")

    def accumulation(self, ranks: int, micro_batch: int = 0) -> int:
        """Micro-batches of one rank in a step.

        Raises:
            ValueError: the global batch does not divide, with the nearest that does.
        """
        micro = micro_batch or self.micro_batch or 1
        if not self.global_batch:
            return 1
        each = micro * ranks
        if self.global_batch % each:
            near = max(each, round(self.global_batch / each) * each)
            raise ValueError(
                f"a global batch of {self.global_batch} does not divide into micro-batches of {micro} on {ranks} ranks "
                f"({each} samples at once): use {near}, or another micro-batch."
            )
        return self.global_batch // each


@dataclass(frozen=True)
class Scheme:
    """One way to divide a job: a ZeRO stage, what is recomputed, what leaves the device, how much is computed at once."""

    stage: int
    checkpointing: str = "none"
    offload: str = "none"
    micro_batch: int = 1

    def __post_init__(self) -> None:
        if self.stage not in PLACEMENTS_OF_STAGE:
            raise ValueError(f"stage {self.stage!r}: expected 0, 1, 2 or 3.")
        if self.offload != "none" and self.stage == 0:
            raise ValueError("offload needs divided optimizer states: use stage 1, 2 or 3.")
        if self.offload in ("parameters", "nvme") and self.stage != 3:
            raise ValueError(f"offload={self.offload!r} moves parameters off the device, which needs them divided: use stage 3.")

    def with_(self, **changes: Any) -> Scheme:
        return replace(self, **changes)

    def recipe(self, job: Job) -> Recipe:
        """The rows on the device; what is offloaded is counted by the plan (the runtime has no other tier yet)."""
        return Recipe.zero(self.stage, precision=job.precision, accumulate_dtype=COMPUTE_DTYPES[job.accumulate])

    @property
    def runs(self) -> bool:
        """Whether `onefold.shard` can execute it today."""
        return self.offload == "none"

    def __str__(self) -> str:
        parts = [f"stage {self.stage}"]
        if self.checkpointing != "none":
            parts.append(f"{self.checkpointing} checkpointing")
        if self.offload != "none":
            where = {"optimizer": "optimizer on the host", "parameters": "all states on the host", "nvme": "states on NVMe"}
            parts.append(where[self.offload])
        return ", ".join(parts)
