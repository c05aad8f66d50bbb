"""Read a DeepSpeed configuration, a dict or a JSON file, into a `DeepSpeedConfig`.

    config -> one nested dict -> each key checked against its row in keys.py -> DeepSpeedConfig
                                 |- unknown: listed, or raised with "did you mean" if it is close to a known key
                                 |- inert:   listed with the reason
                                 '- later:   raised if it asks for something

No key is ignored silently: `DeepSpeedConfig.notes` has a sentence for each key without effect.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from onefold.deepspeed.config.auto import BATCH, OF_RECIPES, refuse_auto, undecided
from onefold.deepspeed.config.dtypes import (
    Autocast,
    BufferDtypes,
    master_arguments,
    read_autocast,
    read_buffer_dtypes,
)
from onefold.deepspeed.config.file import loaded, nested
from onefold.deepspeed.config.groups import read_groups
from onefold.deepspeed.config.keys import SECTIONS, TOP, TOP_ALIASES, ZERO_ALIASES
from onefold.deepspeed.config.reading import Reading
from onefold.deepspeed.config.specs import (
    OptimizerSpec,
    SchedulerSpec,
    read_optimizer,
    read_scheduler,
)
from onefold.deepspeed.config.tiers import read_tiers
from onefold.recipe import Recipe


@dataclass(frozen=True)
class BatchSizes:
    """Batch sizes in samples: train = micro x accumulation x world size.

    None means that the value was not given and cannot be derived.
    """

    train: int | None
    micro: int | None
    accumulation: int | None


@dataclass(frozen=True)
class LossScaling:
    """fp16 loss scaling, with DeepSpeed's defaults.

    `static` above 0 fixes the scale. 0 makes it dynamic, starting at 2**initial_power.
    """

    static: float = 0.0
    initial_power: int = 16
    window: int = 1000
    hysteresis: int = 2
    consecutive_hysteresis: bool = False
    minimum: float = 1.0


#: Of autocast in fp16: the rule of torch.amp.GradScaler, which has no minimum.
_OF_AUTOCAST = LossScaling(window=2000, hysteresis=1, minimum=2.0**-24)


@dataclass(frozen=True)
class DeepSpeedConfig:
    """A DeepSpeed configuration in Onefold's terms.

    Attributes:
        recipe_arguments: the arguments of `Recipe.zero`.
        batch: batch sizes, made consistent if the world size was given.
        optimizer, scheduler: the ones that the file names, or None.
        gradient_clipping: the largest gradient norm, 1.0 if the file names none; 0 does not clip.
        loss_scaling: None unless fp16 is enabled.
        skip_nonfinite: whether steps with gradients that are not finite are skipped on every rank
            (16-bit precisions only).
        compute_grad_norm: whether the norm is computed at each step even without clipping.
        steps_per_print: steps between two lines of progress; None prints none.
        wall_clock_breakdown: whether these lines show the time of forward, backward and step.
        drop_last: whether the data loader drops an incomplete last micro-batch.
        sums_gradients: whether gradients are summed over the ranks instead of averaged.
        managed_accumulation: whether the engine counts micro-batches; if not, every `step()` is a
            boundary.
        refuses_unused: whether a step raises if a trainable parameter has no gradient.
        autocast: torch.autocast around forward passes, or None.
        buffer_dtypes: the dtypes of floating-point buffers.
        short_states: whether the file asks for optimizer states in bf16.
        tag_validation: "ignore", "warn" or "fail": what happens if ranks save under different tags.
        without_effect: (path, reason) of each key that has no effect here.
        unknown: paths that neither DeepSpeed nor Onefold knows.
        left_auto: paths at "auto" of keys that would have an effect. They count as not set; see
            `undecided`.
        remarks: other sentences for the start of the run.
        given: the configuration itself, as one nested dict.
    """

    recipe_arguments: dict[str, Any]
    batch: BatchSizes
    optimizer: OptimizerSpec | None
    scheduler: SchedulerSpec | None
    gradient_clipping: float
    loss_scaling: LossScaling | None
    skip_nonfinite: bool
    compute_grad_norm: bool
    steps_per_print: int | None
    wall_clock_breakdown: bool
    drop_last: bool
    sums_gradients: bool
    managed_accumulation: bool
    refuses_unused: bool
    autocast: Autocast | None
    buffer_dtypes: BufferDtypes
    short_states: bool
    tag_validation: str
    without_effect: tuple[tuple[str, str], ...]
    unknown: tuple[str, ...]
    left_auto: tuple[str, ...]
    remarks: tuple[str, ...]
    given: dict[str, Any] = field(default_factory=dict, compare=False, repr=False)

    @property
    def stage(self) -> int:
        return int(self.recipe_arguments["stage"])

    @property
    def precision(self) -> str | None:
        """The enabled precision, "fp16" or "bf16". None if neither is: as in DeepSpeed, the model
        then keeps its dtypes.
        """
        found = self.recipe_arguments["precision"]
        return None if found is None else str(found)

    @property
    def notes(self) -> tuple[str, ...]:
        """Sentences to show once at the start of a run: what has no effect, and the remarks."""
        by_reason: dict[str, list[str]] = {}
        for path, reason in self.without_effect:
            by_reason.setdefault(reason, []).append(path)
        lines = [
            f"accepted, without effect: {', '.join(paths)} (because {reason})"
            for reason, paths in by_reason.items()
        ]
        if self.unknown:
            lines.append(f"unknown, without effect: {', '.join(self.unknown)}")
        if self.left_auto:
            lines.append(
                '"auto" counts as not set, since nothing fills it in here:'
                f" {', '.join(self.left_auto)}"
            )
        return (*lines, *self.remarks)

    def undecided(self, optimizer: bool = False, scheduler: bool = False) -> list[str]:
        """Return paths left at "auto" that decide what is trained, and that nothing else decides.

        Args:
            optimizer, scheduler: whether one was given beside the configuration, in place of the
                configuration's own.
        """
        settled = (
            ["fp16."] if self.precision == "bf16" else ["bf16."] if self.precision == "fp16" else []
        )
        settled += ["optimizer."] if optimizer else []
        settled += ["scheduler."] if scheduler else []
        if self.batch.train is not None and sum(path in BATCH for path in self.left_auto) == 1:
            settled += BATCH
        return undecided(self.left_auto, settled)

    @property
    def recipe_notes(self) -> tuple[str, ...]:
        """`notes`, and a sentence with the settings that only `onefold.initialize` applies, because
        they are not part of a recipe.
        """
        parts = {
            "optimizer": self.optimizer,
            "scheduler": self.scheduler,
            "gradient_clipping": self.gradient_clipping,
            "the batch sizes": self.batch.train or self.batch.micro or self.batch.accumulation,
            "loss scaling": self.loss_scaling,
            "sums of gradients": self.sums_gradients,
            "torch_autocast": self.autocast,
            "data_types.buffer_dtype": self.buffer_dtypes.dtype,
            "managed_gradient_accumulation": not self.managed_accumulation,
        }
        named = [name for name, value in parts.items() if value]
        if not named:
            return self.notes
        return (
            *self.notes,
            (
                f"not part of a recipe: {', '.join(named)}; use onefold.initialize, or apply them"
                " in your loop"
            ),
        )


def read_deepspeed(
    config: Mapping[str, Any] | str | os.PathLike[str], world_size: int | None = None
) -> DeepSpeedConfig:
    """Read a DeepSpeed configuration.

    Args:
        config: a dict, the path of a JSON file, or the same JSON in URL-safe base64 (as some
            launchers pass it).
        world_size: number of data-parallel ranks, to check train = micro x accumulation x ranks;
            None does not check.

    Raises:
        ValueError: a misspelt key, a wrong value, keys that contradict each other.
        NotImplementedError: a key asks for a capability that is not built.
        FileNotFoundError: there is no such file.
    """
    read = Reading()
    tree = nested(loaded(config))
    top = read.section("", tree, TOP, TOP_ALIASES)
    zero = read.section(
        "zero_optimization",
        top.get("zero_optimization", {}),
        SECTIONS["zero_optimization"],
        ZERO_ALIASES,
    )
    parts = {
        name: read.section(name, top[name], SECTIONS[name], {}) if name in top else {}
        for name in ("fp16", "bf16", "data_types", "torch_autocast", "checkpoint")
    }
    optimizer = (
        read_optimizer(read.section("optimizer", top["optimizer"], SECTIONS["optimizer"], {}), read)
        if "optimizer" in top
        else None
    )
    scheduler, auto = (
        read_scheduler(read.section("scheduler", top["scheduler"], SECTIONS["scheduler"], {}))
        if "scheduler" in top
        else (None, [])
    )
    read.left_auto += auto
    if zero.get("stage3_prefetch_bucket_size", 0) > 0:
        read.without_effect.append(
            (
                "zero_optimization.stage3_prefetch_bucket_size",
                "blocks are prefetched one at a time, whatever their size; 0 turns prefetching off",
            )
        )
    arguments = _recipe_arguments(top, zero, parts) | read_tiers(read, zero, top.get("aio", {}))
    if zero.get("ignore_unused_parameters") is False and arguments["stage"] not in (1, 2):
        read.without_effect.append(
            (
                "zero_optimization.ignore_unused_parameters",
                "parameters without a gradient are looked for at stages 1 and 2 only",
            )
        )
    arguments |= master_arguments(
        parts["fp16"],
        parts["bf16"],
        None if optimizer is None else optimizer.name in ("Adam", "AdamW"),
        read,
    )
    arguments |= read_groups(read, zero, arguments, world_size)
    if "gradient_clipping" not in top:
        read.remarks.append(
            "gradient_clipping is not set: gradients are clipped to norm 1.0, as in DeepSpeed"
            " 0.19.8; write 0 to clip nothing"
        )
    fp16, bf16 = parts["fp16"], parts["bf16"]
    autocast = read_autocast(parts["torch_autocast"])
    in_fp16 = bool(fp16.get("enabled") or (autocast and autocast.dtype == torch.float16))
    steps = top.get("steps_per_print")
    return DeepSpeedConfig(
        recipe_arguments=arguments,
        batch=resolve_batch_sizes(
            top.get("train_batch_size"),
            top.get("train_micro_batch_size_per_gpu"),
            top.get("gradient_accumulation_steps"),
            world_size,
        ),
        optimizer=optimizer,
        scheduler=scheduler,
        gradient_clipping=top.get("gradient_clipping", 1.0),
        loss_scaling=(
            _loss_scaling(fp16) if fp16.get("enabled") else _OF_AUTOCAST if in_fp16 else None
        ),
        skip_nonfinite=bool(
            in_fp16 or (bf16.get("enabled") and bf16.get("check_grad_overflow", True))
        ),
        refuses_unused=(
            zero.get("ignore_unused_parameters") is False and arguments["stage"] in (1, 2)
        ),
        autocast=autocast,
        buffer_dtypes=read_buffer_dtypes(parts["data_types"], arguments["precision"]),
        short_states=parts["bf16"].get("bf16_optimizer_states", False),
        compute_grad_norm=zero.get("compute_grad_norm", True),
        steps_per_print=None if steps is None or math.isinf(steps) else int(steps),
        wall_clock_breakdown=top.get("wall_clock_breakdown", False),
        drop_last=top.get("dataloader_drop_last", False),
        sums_gradients=top.get("gradient_allreduce_op") == "sum",
        managed_accumulation=top.get("managed_gradient_accumulation", True),
        tag_validation=parts["checkpoint"].get("tag_validation", "warn"),
        without_effect=tuple(read.without_effect),
        unknown=tuple(read.unknown),
        left_auto=tuple(read.left_auto),
        remarks=tuple(read.remarks),
        given=tree,
    )


def recipe_from(config: Mapping[str, Any] | str, world_size: int | None = None) -> Recipe:
    """Return the recipe of a DeepSpeed configuration (a dict, or the path of a JSON file).

    The recipe's `notes` list the keys that have no effect here. Batch sizes are checked against
    `world_size` if it is given.

    Raises:
        ValueError: the configuration contradicts itself, or says "auto" for a value that decides
            the recipe.
        NotImplementedError: the configuration asks for a capability that is not built.
    """
    read = read_deepspeed(config, world_size)
    refuse_auto(
        [path for path in read.undecided() if path.startswith(("zero_optimization.", *OF_RECIPES))]
    )
    return Recipe.zero(**read.recipe_arguments).replace(remarks=tuple(read.recipe_notes))


def resolve_batch_sizes(
    train: int | None, micro: int | None, accumulation: int | None, world_size: int | None
) -> BatchSizes:
    """Fill in what the rule train = micro x accumulation x world size determines.

    With only `train` or only `micro` given, accumulation is 1, as in DeepSpeed. Without a world
    size, nothing is filled in.

    Raises:
        ValueError: the three contradict the rule, or `train` is not divisible by the others.
    """
    if world_size is None or (train is None and micro is None):
        return BatchSizes(train, micro, accumulation)
    rule = (
        "train_batch_size must be train_micro_batch_size_per_gpu x gradient_accumulation_steps x"
        f" {world_size} ranks"
    )
    if train is not None and micro is not None and accumulation is None:
        accumulation, rest = divmod(train, micro * world_size)
        if rest or not accumulation:
            raise ValueError(
                f"train_batch_size={train} does not divide into micro-batches of {micro}: {rule};"
                " change one."
            )
    accumulation = accumulation or 1
    if micro is None:
        assert train is not None
        micro, rest = divmod(train, accumulation * world_size)
        if rest or not micro:
            raise ValueError(
                f"train_batch_size={train} is not divisible by {accumulation} micro-batches:"
                f" {rule}."
            )
    if train is None:
        train = micro * accumulation * world_size
    if train != micro * accumulation * world_size:
        fitting = micro * accumulation * world_size
        raise ValueError(
            f"train_batch_size={train}, but {micro} x {accumulation} x {world_size} = {fitting}:"
            f" {rule}; leave one of the three out."
        )
    return BatchSizes(train, micro, accumulation)


# -- the pieces ------------------------------------------------------------------------------------


def _recipe_arguments(
    top: Mapping[str, Any], zero: Mapping[str, Any], parts: Mapping[str, Mapping[str, Any]]
) -> dict[str, Any]:
    fp16, bf16 = parts["fp16"], parts["bf16"]
    if fp16.get("enabled") and bf16.get("enabled"):
        raise ValueError(
            "fp16.enabled and bf16.enabled are both true: a run computes in one of them; set the"
            " other to false."
        )
    arguments: dict[str, Any] = {
        "stage": zero.get("stage", 0),
        "precision": "fp16" if fp16.get("enabled") else "bf16" if bf16.get("enabled") else None,
    }
    if "overlap_comm" in zero:
        arguments["overlap"] = zero["overlap_comm"]
    if zero.get("stage3_prefetch_bucket_size") == 0:
        arguments["prefetch"] = 0
    if fp16.get("enabled") and "auto_cast" in fp16:
        arguments["cast_inputs"] = fp16["auto_cast"]
    if "communication_data_type" in top:
        arguments["wire"] = top["communication_data_type"]
    if "grad_accum_dtype" in parts["data_types"]:
        arguments["accumulate_dtype"] = parts["data_types"]["grad_accum_dtype"]
    return arguments


def _loss_scaling(fp16: Mapping[str, Any]) -> LossScaling:
    names = {
        "loss_scale": "static",
        "initial_scale_power": "initial_power",
        "loss_scale_window": "window",
        "hysteresis": "hysteresis",
        "consecutive_hysteresis": "consecutive_hysteresis",
        "min_loss_scale": "minimum",
    }
    return LossScaling(**{ours: fp16[theirs] for theirs, ours in names.items() if theirs in fp16})
