"""`DeepSpeedConfig`: a configuration as an object, for scripts that read one beside the engine.

It reads a file as `deepspeed.initialize` does, and has the values that scripts ask for. The engine
needs no such object: give `initialize` the dict or the path.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from onefold.deepspeed.config import read_deepspeed, resolve_batch_sizes
from onefold.deepspeed.config.file import loaded, nested
from onefold.deepspeed.errors import DeepSpeedConfigError, as_config_errors
from onefold.deepspeed.setup import world_size_of

# The names by which a configuration may call optimizers
ADAGRAD_OPTIMIZER, ADAM_OPTIMIZER, ADAMW_OPTIMIZER = "adagrad", "adam", "adamw"
LAMB_OPTIMIZER, LION_OPTIMIZER, MUON_OPTIMIZER = "lamb", "lion", "muon"
MUADAM_OPTIMIZER, MUADAMW_OPTIMIZER, MUSGD_OPTIMIZER = "muadam", "muadamw", "musgd"
DEEPSPEED_OPTIMIZERS = [
    *(ADAGRAD_OPTIMIZER, ADAM_OPTIMIZER, ADAMW_OPTIMIZER, LAMB_OPTIMIZER, LION_OPTIMIZER),
    *(MUADAM_OPTIMIZER, MUADAMW_OPTIMIZER, MUSGD_OPTIMIZER, MUON_OPTIMIZER),
]

#: Bytes below which DeepSpeed swaps no state to NVMe. Onefold has no such limit.
MIN_SWAPPABLE_BYTES = 1 << 20


class DeepSpeedConfig:
    """A configuration that was read.

    Attributes:
        train_batch_size, train_micro_batch_size_per_gpu, gradient_accumulation_steps: each
            follows from the others and `world_size`.
        world_size: number of data-parallel ranks.
        gradient_clipping, steps_per_print, wall_clock_breakdown: as in the file; DeepSpeed's
            default otherwise.
        zero_enabled, zero_optimization_stage, fp16_enabled, bfloat16_enabled: what the file enables.
        optimizer_name, optimizer_params, scheduler_name, scheduler_params: as in the file, or None.
        checkpoint_tag_validation_enabled, checkpoint_tag_validation_fail: by
            `checkpoint.tag_validation`.

    Raises:
        DeepSpeedConfigError: the configuration contradicts itself.
        NotImplementedError: it asks for something that Onefold does not do.
        FileNotFoundError: there is no such file.
    """

    def __init__(
        self,
        config: Mapping[str, Any] | str | os.PathLike[str],
        mpu: Any = None,
        mesh_device: Any = None,
    ) -> None:
        if mpu is not None or mesh_device is not None:
            raise NotImplementedError(
                "mpu and mesh_device: other parallel axes than data are not built yet; leave them"
                " out."
            )
        self.world_size = world_size_of(None)
        with as_config_errors():
            given = nested(loaded(config))
            read = read_deepspeed(given, None)
        self._param_dict, self._read = given, read
        self.train_batch_size = read.batch.train
        self.train_micro_batch_size_per_gpu = read.batch.micro
        self.gradient_accumulation_steps = read.batch.accumulation
        self._configure_train_batch_size()
        self.gradient_clipping = read.gradient_clipping
        self.steps_per_print = read.steps_per_print
        self.wall_clock_breakdown = read.wall_clock_breakdown
        self.zero_optimization_stage, self.zero_enabled = read.stage, read.stage > 0
        self.fp16_enabled = read.precision == "fp16"
        self.bfloat16_enabled = read.precision == "bf16"
        optimizer, scheduler = (given.get(name) or {} for name in ("optimizer", "scheduler"))
        self.optimizer_name = None if read.optimizer is None else read.optimizer.given.lower()
        self.scheduler_name = None if read.scheduler is None else read.scheduler.name
        self.optimizer_params, self.scheduler_params = (
            optimizer.get("params"),
            scheduler.get("params"),
        )
        self.checkpoint_tag_validation_enabled = read.tag_validation != "ignore"
        self.checkpoint_tag_validation_fail = read.tag_validation == "fail"

    def _configure_train_batch_size(self) -> None:
        """Fill in the batch sizes that are None from the others.

        Raises:
            DeepSpeedConfigError: they contradict each other, or none is given.
        """
        train, micro = self.train_batch_size, self.train_micro_batch_size_per_gpu
        if train is None and micro is None:
            raise DeepSpeedConfigError(
                "the configuration has no batch size: set train_micro_batch_size_per_gpu, or"
                " train_batch_size."
            )
        with as_config_errors():
            sizes = resolve_batch_sizes(
                train, micro, self.gradient_accumulation_steps, self.world_size
            )
        self.train_batch_size, self.train_micro_batch_size_per_gpu = sizes.train, sizes.micro
        self.gradient_accumulation_steps = sizes.accumulation

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"DeepSpeedConfig.{name} is not served here: the values that Onefold reads are listed by"
            " `onefold config explain FILE`, and the file itself is a dict."
        )
