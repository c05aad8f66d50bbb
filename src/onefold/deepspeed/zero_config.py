"""The section "zero_optimization" as an object, for scripts that check one.

The values are checked as `deepspeed.initialize` checks them. A key that is not given has DeepSpeed's
default; names begin with "stage3_" or not.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from enum import StrEnum
from typing import Any, ClassVar

from onefold.deepspeed.config.keys import OFFLOAD, SECTIONS, ZERO_ALIASES, Section
from onefold.deepspeed.config.reading import Reading
from onefold.deepspeed.errors import as_config_errors

_BILLION = 10**9


class OffloadDeviceEnum(StrEnum):
    """Where `offload_optimizer` and `offload_param` put state."""

    none = "none"
    cpu = "cpu"
    nvme = "nvme"


class _Section:
    """A section of the configuration. Keys are attributes; one that is not known raises."""

    path: ClassVar[str]
    known: ClassVar[Section]
    aliases: ClassVar[Mapping[str, str]] = {}
    defaults: ClassVar[Mapping[str, Any]]

    def __init__(self, **given: Any) -> None:
        reading = Reading()
        with as_config_errors():
            self._values = reading.section(self.path, given, self.known, self.aliases)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        key = self.aliases.get(name, name)
        for values in (self._values, self.defaults):
            if key in values:
                return values[key]
        raise AttributeError(
            f"{type(self).__name__} has no {name!r} here: `onefold config explain FILE` lists the"
            " keys of a file and what became of them."
        )


class DeepSpeedZeroOffloadParamConfig(_Section):
    """The section "offload_param"."""

    path = "zero_optimization.offload_param"
    known = OFFLOAD["offload_param"]
    defaults: ClassVar[Mapping[str, Any]] = {
        "device": "none", "nvme_path": None, "buffer_count": 5, "buffer_size": 10**8,
        "max_in_cpu": _BILLION, "pin_memory": True,
    }  # fmt: skip


class DeepSpeedZeroOffloadOptimizerConfig(_Section):
    """The section "offload_optimizer". `pipeline`: whether reads or writes are pipelined."""

    path = "zero_optimization.offload_optimizer"
    known = OFFLOAD["offload_optimizer"]
    defaults: ClassVar[Mapping[str, Any]] = {
        "device": "none", "nvme_path": None, "buffer_count": 4, "pin_memory": True, "ratio": 1.0,
        "pipeline_read": False, "pipeline_write": False, "fast_init": False, "super_offload": False,
        "cpuadam_cores_perc": 0.8,
    }  # fmt: skip

    @property
    def pipeline(self) -> bool:
        return bool(self.pipeline_read or self.pipeline_write)


class DeepSpeedZeroConfig(_Section):
    """The section "zero_optimization". `offload_param` and `offload_optimizer` are objects, or None
    if nothing asks for them.
    """

    path = "zero_optimization"
    known = SECTIONS["zero_optimization"]
    aliases = ZERO_ALIASES
    defaults: ClassVar[Mapping[str, Any]] = {
        "stage": 0, "contiguous_gradients": True, "reduce_scatter": True, "allgather_partitions": True,
        "use_multi_rank_bucket_allreduce": True, "reduce_bucket_size": 5 * 10**8,
        "allgather_bucket_size": 5 * 10**8, "compute_grad_norm": True, "load_from_fp32_weights": True,
        "elastic_checkpoint": False, "sub_group_size": _BILLION, "stage3_prefetch_bucket_size": 5 * 10**7,
        "stage3_param_persistence_threshold": 10**5, "stage3_model_persistence_threshold": sys.maxsize,
        "stage3_max_live_parameters": _BILLION, "stage3_max_reuse_distance": _BILLION,
        "stage3_gather_16bit_weights_on_model_save": False, "stage3_module_granularity_threshold": 0,
        "stage3_use_all_reduce_for_fetch_params": False, "stage3_allgather_sequential": False,
        "ignore_unused_parameters": True, "round_robin_gradients": False, "zero_hpz_partition_size": 1,
        "zero_quantized_weights": False, "zero_quantized_gradients": False,
        "zero_quantized_nontrainable_weights": False, "memory_efficient_linear": True,
        "pipeline_loading_checkpoint": False, "override_module_apply": True,
        "log_trace_cache_warnings": False, "enable_sanity_checks": False,
    }  # fmt: skip

    @property
    def overlap_comm(self) -> bool:
        return bool(self._values.get("overlap_comm", self.stage == 3))

    @property
    def gather_16bit_weights_on_model_save(self) -> bool:
        names = ("16bit", "fp16")
        found = (self._values.get(f"stage3_gather_{n}_weights_on_model_save") for n in names)
        return any(found)

    @property
    def offload_param(self) -> DeepSpeedZeroOffloadParamConfig | None:
        given = self._values.get(
            "offload_param", {} if self._values.get("cpu_offload_param") else None
        )
        return None if given is None else DeepSpeedZeroOffloadParamConfig(**given)

    @property
    def offload_optimizer(self) -> DeepSpeedZeroOffloadOptimizerConfig | None:
        given = self._values.get(
            "offload_optimizer", {} if self._values.get("cpu_offload") else None
        )
        return None if given is None else DeepSpeedZeroOffloadOptimizerConfig(**given)
