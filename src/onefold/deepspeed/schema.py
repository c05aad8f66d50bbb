"""The keys of DeepSpeed's configuration, one line each: type and bounds, DeepSpeed's default, and what
becomes of it here. `deepspeed.runtime.zero.config` serves the classes of this file.

| mark                 | what happens when the key is set                                          |
|----------------------|---------------------------------------------------------------------------|
| none                 | it changes the recipe or the engine                                       |
| `Inert("why")`       | it has no effect; listed once at the start                                |
| `Later("why")`       | NotImplementedError if its value asks for something                       |

Names and defaults are those of DeepSpeed 0.19.8, and of older releases whose files are still in use.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated, Any, ClassVar, Literal

from pydantic import (
    AliasChoices,
    AliasGenerator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    model_validator,
)

__all__ = [
    "DeepSpeedZeroConfig",
    "DeepSpeedZeroOffloadOptimizerConfig",
    "DeepSpeedZeroOffloadParamConfig",
    "OffloadDeviceEnum",
]


@dataclass(frozen=True)
class Inert:
    """A key without effect."""

    why: str


@dataclass(frozen=True)
class Later:
    """A key of a capability that is not built. A number up to `upto` asks for nothing."""

    why: str
    upto: float = 0


FLAT = Inert(
    "parameters and gradients of a unit live in one flat buffer, which collectives read and write directly"
)
BLOCK = Inert("the unit of every gather and reduction is a block of the model, never a bucket")
TRACE = Inert(
    "each pass gathers a block for itself and releases it after use; no trace is recorded"
)
SAVES = Inert(
    "it concerns DeepSpeed's files; Onefold's checkpoints load at any stage and on any number of ranks"
)
HOST = Inert("torch's own optimizers run the step on the host, with torch's threads")
NVME = Inert(
    "blocks and states on NVMe are read ahead of their use and written behind it, 8 MiB to a thread"
)
PINNED = Inert("host memory is pinned wherever a GPU copies to or from it, and nowhere else")
LOOP = Inert(
    "monitors and profilers are not part of Onefold: log from your loop, or see onefold.observe"
)
INSIDE = Inert("it steers a mechanism inside DeepSpeed that has no counterpart here")
TIMES = Inert("onefold.observe.meter.Meter measures phases without waiting for the device in each")
MEAN = Inert(
    "gradients are averaged from a sum in fp32, where the place of the division does not matter"
)
MODEL = Inert("the model itself decides about activation checkpointing")
PROBE = Inert(
    "every optimizer is tried before its first step, and refused only if a rank cannot run its update"
)
AXES = Later("give onefold.shard(mesh=...) the axes beside data, and leave the key out", 1)
REMOVED = Later("DeepSpeed 0.19.8 refuses it too, the feature was removed there: leave it out")

_lower = BeforeValidator(lambda value: value.lower() if isinstance(value, str) else value)
Natural = Annotated[int, Field(ge=0)]
Positive = Annotated[int, Field(ge=1)]
#: Elements; scripts compute sizes, so a fraction passes.
Size = Annotated[float, Field(ge=0)]
Dtype = Annotated[Literal["fp32", "bf16", "fp16"], _lower]


def _either(default: Any, *names: str) -> Any:
    """A field that a file may give by any of these names."""
    return Field(default, validation_alias=AliasChoices(*names))


class Section(BaseModel):
    """An object of the configuration. Unknown keys are kept, for reading.py to speak of.

    Attributes:
        unread: further keys, whose values nothing reads: {mark: names}.
    """

    model_config = ConfigDict(extra="allow")
    unread: ClassVar[Mapping[Inert | Later, str]] = {}


class OffloadDeviceEnum(StrEnum):
    """Where `offload_optimizer` and `offload_param` put state."""

    none = "none"
    cpu = "cpu"
    nvme = "nvme"


class Offload(Section):
    device: Annotated[OffloadDeviceEnum, _lower] = OffloadDeviceEnum.none
    nvme_path: str | None = None
    pin_memory: Annotated[bool, PINNED] = True


class DeepSpeedZeroOffloadParamConfig(Offload):
    buffer_count: Annotated[Natural, NVME] = 5
    buffer_size: Annotated[Size, NVME] = 1e8
    max_in_cpu: Annotated[Size, NVME] = 1e9


class DeepSpeedZeroOffloadOptimizerConfig(Offload):
    unread = {NVME: "fast_init", HOST: "super_offload cpuadam_cores_perc"}
    ratio: Annotated[float, Field(ge=0, le=1)] = 1.0
    buffer_count: Annotated[Natural, NVME] = 4
    pipeline_read: Annotated[bool, NVME] = False
    pipeline_write: Annotated[bool, NVME] = False

    @property
    def pipeline(self) -> bool:
        return self.pipeline_read or self.pipeline_write


class LeafModules(Section):
    """Modules to mark as leaves: by class, by name, by the end of the name."""

    classes: list[str] = [
        f"transformers.models.{family}.modeling_{family}.{kind}SparseMoeBlock"
        for family, kind in (("mixtral", "Mixtral"), ("qwen2_moe", "Qwen2Moe"), ("qwen3_moe", "Qwen3Moe"))
    ]  # fmt: skip
    names: list[str] = []
    name_suffixes: list[str] = []


class DeepSpeedZeroConfig(Section):
    """Files may begin each of these names with "stage3_"."""

    model_config = ConfigDict(
        alias_generator=AliasGenerator(
            validation_alias=lambda name: AliasChoices(name, f"stage3_{name}")
        )
    )

    unread = {
        FLAT: "contiguous_gradients reduce_scatter allgather_partitions use_multi_rank_bucket_allreduce parameter_alignment"
        " stage3_use_all_reduce_for_fetch_params use_all_reduce_for_fetch_params stage3_allgather_sequential allgather_sequential",
        BLOCK: "stage3_module_granularity_threshold module_granularity_threshold"
        " stage3_model_persistence_threshold model_persistence_threshold",
        TRACE: "stage3_log_trace_cache_warnings log_trace_cache_warnings",
        SAVES: "load_from_fp32_weights elastic_checkpoint",
        HOST: "round_robin_gradients",
        PINNED: "cpu_offload_use_pin_memory",
        INSIDE: "save_muon_momentum_buffer_in_memory legacy_stage1 stage3_legacy_stage1 memory_efficient_linear override_module_apply",
        REMOVED: "zeropp_loco_param mics_hierarchical_params_gather",
        Later("stepping some gradients before others trains differently"): "zenflow",
        Later("Recipe.zero(3, shard_group=...) has it"): "mics_shard_size",
    }  # fmt: skip
    stage: Annotated[int, Field(ge=0, le=3)] = 0
    overlap_comm: bool | None = None
    compute_grad_norm: bool = True
    prefetch_bucket_size: Size = 5e7
    offload_optimizer: DeepSpeedZeroOffloadOptimizerConfig | None = None
    offload_param: DeepSpeedZeroOffloadParamConfig | None = None
    cpu_offload: bool | None = None
    cpu_offload_param: bool | None = None
    sub_group_size: Size = 1e9
    ignore_unused_parameters: bool = True
    enable_sanity_checks: bool = False
    zero_hpz_partition_size: Natural = 1
    zero_quantized_weights: bool = False
    zero_quantized_nontrainable_weights: bool = False
    zero_quantized_gradients: bool = False
    leaf_module: LeafModules = LeafModules()
    gather_16bit_weights_on_model_save: bool | None = _either(
        None, *(f"{stage3}gather_{dtype}_weights_on_model_save" for dtype in ("16bit", "fp16") for stage3 in ("stage3_", ""))
    )  # fmt: skip
    param_persistence_threshold: Annotated[Size, BLOCK] = 1e5
    max_live_parameters: Annotated[Size, TRACE] = 1e9
    max_reuse_distance: Annotated[Size, TRACE] = 1e9
    reduce_bucket_size: Annotated[float, Field(gt=0), BLOCK] = 5e8
    allgather_bucket_size: Annotated[Size, BLOCK] = 5e8
    pipeline_loading_checkpoint: Annotated[bool, SAVES] = False

    @model_validator(mode="before")
    @classmethod
    def _older_keys(cls, given: Any) -> Any:
        for old, new in (
            ("cpu_offload", "offload_optimizer"),
            ("cpu_offload_param", "offload_param"),
        ):
            if isinstance(given, dict) and given.get(old):
                section = given.get(new) or {}
                if section.get("device", "cpu") != "cpu":
                    raise ValueError(
                        f'{old} means {new}.device="cpu", and that is {section["device"]!r}: remove {old}'
                    )
                given = {**given, new: {**section, "device": "cpu"}}
        return given

    @model_validator(mode="after")
    def _overlap_by_stage(self) -> DeepSpeedZeroConfig:
        if self.overlap_comm is None:  # past `model_fields_set`: the file has not said it
            self.__dict__["overlap_comm"] = self.stage == 3
        return self


class AIO(Section):
    unread = {
        NVME: "block_size single_submit overlap_events",
        Later("what lies on NVMe passes through host memory, set it to false"): "use_gds",
    }
    queue_depth: Positive = 8
    intra_op_parallelism: Positive = _either(1, "intra_op_parallelism", "thread_count")


class FP16(Section):
    """Loss scaling besides: a `loss_scale` above 0 is fixed, 0 starts at 2**initial_scale_power."""

    enabled: bool = False
    auto_cast: bool | None = None
    loss_scale: Annotated[float, Field(ge=0)] = 0
    initial_scale_power: Annotated[int, Field(ge=0, le=126)] = 16
    loss_scale_window: Positive = 1000
    hysteresis: Positive = 2
    consecutive_hysteresis: bool = False
    min_loss_scale: Annotated[float, Field(gt=0)] = 1
    fp16_master_weights_and_grads: bool = False


class BF16(Section):
    unread = {FLAT: "immediate_grad_update"}
    enabled: bool = False
    check_grad_overflow: bool = True
    bf16_master_weights_and_grads: bool = False
    bf16_optimizer_states: bool = False


class DataTypes(Section):
    unread = {
        Inert("fp16.enabled and bf16.enabled decide in which dtype is computed"): "param_dtype"
    }
    grad_accum_dtype: Dtype | None = None
    buffer_dtype: str | None = None
    keep_in_fp32_modules: list[str] | None = None


class Autocast(Section):
    enabled: bool = False
    dtype: str | None = None
    lower_precision_safe_modules: list[str] | None = None


class Checkpoint(Section):
    unread = {SAVES: "load_universal use_node_local_storage parallel_write writer"}
    tag_validation: Annotated[Literal["ignore", "warn", "fail"], _lower] = "warn"


class Params(Section):
    """The arguments of an optimizer or a schedule, which named.py checks."""

    @property
    def given(self) -> dict[str, Any]:
        return self.model_extra or {}


class Named(Section):
    """An optimizer or a schedule."""

    unread = {INSIDE: "legacy_fusion"}
    type: str
    params: Params = Params()


class Root(Section):
    """The top level."""

    unread = {
        LOOP: "tensorboard wandb comet csv_monitor timers comms_logger flops_profiler memory_breakdown dump_state log_level",
        SAVES: "checkpoint_engine datastates",
        INSIDE: "vocabulary_size seq_parallel_communication_data_type use_data_before_expert_parallelism data_parallel_size"
        " disable_python_gc",
        MEAN: "prescale_gradients gradient_predivide_factor",
        PROBE: "zero_allow_untested_optimizer",
        HOST: "zero_force_ds_cpu_optimizer",
        FLAT: "disable_allgather",
        MODEL: "activation_checkpointing",
        AXES: "pipeline tensor_parallel inference expert_parallel sequence_parallel_size",
        REMOVED: "amp sparse_gradients sparse_attention compression_training quantize_training eigenvalue nebula elasticity"
        " curriculum_learning progressive_layer_drop graph_harvesting",
        Later("tuning by trial runs is not built"): "autotuning",
        Later("call torch.compile on the blocks yourself"): "compile",
        Later("zero_quantized_nontrainable_weights stores frozen weights quantized"): "weight_quantization",
        Later("curricula and data routing are not part of Onefold"): "data_efficiency",
        Later("use onefold.full_params(model) around generate()"): "hybrid_engine",
        Later("MS-AMP's 8-bit training is not part of Onefold"): "msamp",
    }  # fmt: skip
    train_batch_size: Positive | None = None
    train_micro_batch_size_per_gpu: Positive | None = None
    gradient_accumulation_steps: Positive | None = None
    gradient_clipping: Annotated[float, Field(ge=0)] = 1.0
    communication_data_type: Dtype | None = None
    steps_per_print: Annotated[int | float | None, LOOP] = None
    wall_clock_breakdown: Annotated[bool, TIMES] = False
    dataloader_drop_last: bool = False
    gradient_allreduce_op: Annotated[Literal["mean", "sum"], _lower] = "mean"
    managed_gradient_accumulation: bool = True
    zero_optimization: DeepSpeedZeroConfig = DeepSpeedZeroConfig()
    fp16: FP16 = FP16()
    bf16: BF16 = _either(BF16(), "bf16", "bfloat16")
    data_types: DataTypes = DataTypes()
    torch_autocast: Autocast = Autocast()
    checkpoint: Checkpoint = Checkpoint()
    optimizer: Named | None = None
    scheduler: Named | None = None
    aio: AIO = AIO()
