"""What is to be trained, and how it may be divided: the questions of a plan."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from onefold.plan.formulas.states import Convention
from onefold.recipe import COMPUTE_DTYPES, PLACEMENTS_OF_STAGE, Recipe
from onefold.recipe.checks import did_you_mean

CHECKPOINTING = ("none", "selective", "full")
#: Where states may be kept besides the device, in the order of least slowdown.
OFFLOAD = ("none", "optimizer", "parameters", "nvme")
#: What may be said of a recipe beside the stage and the precision.
RECIPE_OPTIONS = set(inspect.signature(Recipe.zero).parameters) | set(Recipe.__dataclass_fields__)
RECIPE_OPTIONS -= {"stage", "precision", "options", "parameters", "gradients", "optimizer", "notes"}


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
        options: further arguments of `Recipe.zero` by name (reduce_at, units, wire, ...), which the plan follows as the run would.
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
    options: tuple[tuple[str, Any], ...] = ()

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
        self.recipe(2)  # what no recipe can be is said now, whatever stage is taken in the end

    @classmethod
    def of(cls, given: Mapping[str, Any], asker: str) -> Job:
        """A job from its own fields and the arguments of `Recipe.zero`, by name in one dictionary.

        Raises:
            ValueError: a name that is neither's, said of `asker` with the nearest known one; a value that cannot be.
        """
        own = {f.name for f in fields(cls)} - {"options"}
        unknown = sorted(set(given) - own - RECIPE_OPTIONS)
        if unknown:
            near = did_you_mean(unknown[0], own | RECIPE_OPTIONS)
            raise ValueError(f"{asker} does not know {', '.join(unknown)}. {near}")
        options = {k: tuple(v) if isinstance(v, list) else v for k, v in given.items() if k in RECIPE_OPTIONS}
        return cls(**{k: v for k, v in given.items() if k in own}, options=tuple(options.items()))

    def recipe(self, stage: int) -> Recipe:
        """The recipe at a stage; `reduce_at` is taken where there is a choice (stages 0 and 1 reduce at the boundary)."""
        given = {k: v for k, v in self.options if k != "reduce_at" or stage >= 2}
        accumulate = COMPUTE_DTYPES[self.accumulate]
        return Recipe.zero(stage, precision=self.precision, **{"accumulate_dtype": accumulate, **given})

    @property
    def convention(self) -> Convention:
        """Bytes of a trained parameter by kind of state, as the recipe's rows have them."""
        from onefold.plan.states import MOMENTS_OF

        rows = self.recipe(2)
        master = rows.optimizer.dtype
        copies = MOMENTS_OF[self.optimizer] + (rows.compute_dtype != master)
        return Convention(rows.compute_dtype.itemsize, rows.gradients.dtype.itemsize, copies * master.itemsize)

    @property
    def units(self) -> tuple[str | type, ...] | None:
        """The modules that become units, None for those that are found."""
        return dict(self.options).get("units")

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
        return job.recipe(self.stage)

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
