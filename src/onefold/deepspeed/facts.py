"""What callers read from an engine: learning rates, batch sizes, enabled features, progress."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import onefold
from onefold.deepspeed.checkpoints import make_executable
from onefold.deepspeed.config import DeepSpeedConfig
from onefold.deepspeed.scaling import LossScaler
from onefold.device import synchronize
from onefold.recipe import COMPUTE_DTYPES

#: Attributes of DeepSpeed's engine that this engine lacks: {name: why}.
NOT_OF_THE_ENGINE: Mapping[str, str] = {
    "train_batch": "it is a pipeline's; other parallel axes than data are not built yet",
    "eval_batch": "it is a pipeline's; other parallel axes than data are not built yet",
    "offload_states": "offload_optimizer and offload_param in the configuration decide this",
    "reload_states": "offload_optimizer and offload_param in the configuration decide this",
    "load_module_state_dict": "use onefold.load_full_state_dict(engine.module, state)",
    "monitor": "monitors are not part of Onefold; log from your loop",
    "flops_profiler": "profilers are not part of Onefold; see torch.utils.flop_counter",
    "mpu": "other parallel axes than data are not built yet",
}


class EngineFacts:
    """The read-only part of `DeepSpeedEngine`. The engine sets the attributes declared here."""

    module: nn.Module
    settings: DeepSpeedConfig
    config: Mapping[str, Any]
    optimizer: Any
    loss_scaler: LossScaler | None
    global_rank: int
    world_size: int
    global_steps: int
    skipped_steps: int
    _accumulation: int
    _step_applied: bool
    _norm: Tensor | None
    _seconds: dict[str, float]

    def get_lr(self) -> list[float]:
        """Return the learning rate of each parameter group."""
        return (
            []
            if self.optimizer is None
            else [float(group["lr"]) for group in self.optimizer.param_groups]
        )

    def get_mom(self) -> list[Any]:
        """Return the momentum, or the betas, of each parameter group."""
        groups = [] if self.optimizer is None else self.optimizer.param_groups
        return [group.get("momentum", group.get("betas", 0.0)) for group in groups]

    def get_global_grad_norm(self) -> float | None:
        """Return the norm of the last step's gradients before clipping, over all ranks; None if it
        was not computed.
        """
        return None if self._norm is None else float(self._norm)

    @property
    def cur_scale(self) -> float:
        """The current loss scale; 1.0 outside fp16."""
        return self.loss_scaler.scale if self.loss_scaler else 1.0

    @property
    def device(self) -> torch.device:
        """The device on which this rank computes; parameters may be stored elsewhere."""
        return onefold.engine_of(self.module).device

    @property
    def dp_world_size(self) -> int:
        return self.world_size

    @property
    def data_parallel_group(self) -> Any:
        """The process group of all ranks; None without torch.distributed."""
        return dist.group.WORLD if dist.is_initialized() else None

    dp_process_group = data_parallel_group

    @property
    def mp_world_size(self) -> int:
        """Always 1: there is no other parallel axis than data."""
        return 1

    def get_data_parallel_rank(self) -> int:
        return self.global_rank

    def optimizer_name(self) -> str | None:
        """Return the optimizer's name in the configuration, in lower case, or None."""
        named = self.settings.optimizer
        return None if named is None else named.given.lower()

    def optimizer_params(self) -> dict[str, Any] | None:
        section = self.config.get("optimizer") or {}
        return section.get("params")

    def scheduler_name(self) -> str | None:
        named = self.settings.scheduler
        return None if named is None else named.name

    def scheduler_params(self) -> dict[str, Any] | None:
        section = self.config.get("scheduler") or {}
        return section.get("params")

    def loss_scale(self) -> float:
        """Return the fixed loss scale of the configuration; 0 if the scale is dynamic.

        The current scale is `cur_scale`.
        """
        return 0.0 if self.settings.loss_scaling is None else self.settings.loss_scaling.static

    @property
    def sparse_tensor_module_names(self) -> set[str]:
        """Always empty: gradients are reduced as dense tensors."""
        return set()

    def checkpoint_tag_validation_enabled(self) -> bool:
        """Whether `save_checkpoint` compares the tags of all ranks."""
        return self.settings.tag_validation != "ignore"

    def checkpoint_tag_validation_fail(self) -> bool:
        """Whether `save_checkpoint` raises if the tags of ranks differ."""
        return self.settings.tag_validation == "fail"

    def _get_optimizer_ckpt_name(self, checkpoints_path: Any, tag: str, rank: int = 0) -> str:
        """Return the folder of a checkpoint's optimizer states: one folder holds all of it."""
        return os.path.join(checkpoints_path, tag)

    def _change_recovery_script_permissions(self, script: Any) -> None:
        """Let the owner run the script; a file system that refuses it is logged."""
        make_executable(script)

    def allreduce_gradients(self, bucket_size: int = 0) -> None:
        """Do nothing: a backward pass of the last micro-batch has reduced the gradients."""

    def empty_partition_cache(self) -> None:
        """Do nothing: gathered weights are released after each use."""

    def was_step_applied(self) -> bool:
        """Whether the latest `step()` changed the parameters."""
        return self._step_applied

    def get_batch_info(self) -> tuple[int | None, int | None, int]:
        """Return (samples in a step, samples in a micro-batch, micro-batches in a step)."""
        return self.settings.batch.train, self.settings.batch.micro, self._accumulation

    def train_batch_size(self) -> int | None:
        return self.settings.batch.train

    def train_micro_batch_size_per_gpu(self) -> int | None:
        return self.settings.batch.micro

    def gradient_accumulation_steps(self) -> int:
        return self._accumulation

    def gradient_clipping(self) -> float:
        return self.settings.gradient_clipping

    def zero_optimization_stage(self) -> int:
        return self.settings.stage

    def zero_optimization(self) -> bool:
        return self.settings.stage > 0

    def fp16_enabled(self) -> bool:
        return self.settings.precision == "fp16"

    def bfloat16_enabled(self) -> bool:
        return self.settings.precision == "bf16"

    def torch_autocast_enabled(self) -> bool:
        return self.settings.autocast is not None

    def torch_autocast_dtype(self) -> torch.dtype | None:
        return None if self.settings.autocast is None else self.settings.autocast.dtype

    def gradient_average(self) -> bool:
        """Whether gradients are averaged over the ranks; false if they are summed."""
        return not self.settings.sums_gradients

    def managed_gradient_accumulation(self) -> bool:
        return self.settings.managed_accumulation

    def dynamic_loss_scale(self) -> bool:
        return self.loss_scaler is not None and self.loss_scaler.dynamic

    def steps_per_print(self) -> int | None:
        return self.settings.steps_per_print

    def wall_clock_breakdown(self) -> bool:
        return self.settings.wall_clock_breakdown

    def compute_dtype(self) -> torch.dtype | None:
        """Return the dtype that the configuration enables; None if the model keeps its own."""
        return (
            COMPUTE_DTYPES[self.settings.precision] if self.settings.precision is not None else None
        )

    def zero_gather_16bit_weights_on_model_save(self) -> bool:
        """Whether saving the model gathers it: true, unless the configuration says false."""
        zero = self.config.get("zero_optimization") or {}
        said = [
            zero.get(f"stage3_gather_{dtype}_weights_on_model_save") for dtype in ("16bit", "fp16")
        ]
        return False not in said

    # -- progress ----------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _timed(self, phase: str) -> Iterator[None]:
        if not self.settings.wall_clock_breakdown:
            yield
            return
        synchronize(self.device)
        begin = time.perf_counter()
        yield
        synchronize(self.device)
        self._seconds[phase] = self._seconds.get(phase, 0.0) + time.perf_counter() - begin

    def _report(self) -> None:
        """Print a progress line every `steps_per_print` steps.

        If only `wall_clock_breakdown` is set, print one at every step.
        """
        every = self.settings.steps_per_print or (1 if self.settings.wall_clock_breakdown else 0)
        if not every or self.global_steps % every:
            return
        if self.global_rank == 0:
            rates = ", ".join(f"{rate:.4g}" for rate in self.get_lr())
            times = "".join(
                f", {phase} {1e3 * s / every:.1f} ms" for phase, s in self._seconds.items()
            )
            counts = f"step {self.global_steps}, skipped {self.skipped_steps}"
            print(f"{counts}, lr [{rates}], loss scale {self.cur_scale:g}{times}", flush=True)
        self._seconds.clear()
