"""The keys of DeepSpeed's configuration: one table per section, one row per key.

Each key is in one of three classes:

| class  | what happens when it is set                                                                  |
|--------|----------------------------------------------------------------------------------------------|
| read   | it changes the recipe or the engine                                                          |
| inert  | it has no effect here; it is listed once at the start, with the reason                       |
| later  | it raises if its value asks for a capability that is not built; other values are accepted    |

Key names and defaults are those of DeepSpeed 0.19.8 and, where noted, of older releases whose files
are still in use.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

Kind = Literal["flag", "count", "number", "numbers", "text", "section", "any"]


@dataclass(frozen=True)
class Key:
    """One key: its kind of value, its bounds and its class.

    Attributes:
        kind: "flag" (true/false), "count" (whole number; `5e8` is one), "number", "numbers" (one
            number, or a list with one per parameter group), "text", "section" (an object), "any"
            (not checked).
        low, high: smallest and largest value allowed (inclusive).
        above: the value must be greater than this.
        endless: whether `inf` is allowed (as in "steps_per_print": Infinity).
        choices: the texts allowed.
        inert, later: the reason, for a key of this class. A key with neither is read.
        quiet_up_to: a `later` number asks for nothing up to and including this value.
        required: whether its section needs it.
        own_auto: "auto" is the key's own default, which nobody has to fill in.
        becomes: the options of `Recipe.zero` that it decides.

    A `later` section asks if its entry "enabled" is true. Without that entry, it asks if one of its
    entries does.
    """

    kind: Kind
    low: float | None = None
    high: float | None = None
    above: float | None = None
    endless: bool = False
    choices: tuple[str, ...] = ()
    inert: str | None = None
    later: str | None = None
    quiet_up_to: float = 0
    required: bool = False
    own_auto: bool = False
    becomes: tuple[str, ...] = ()


Section = Mapping[str, Key]

# -- reasons: shared, so that the list at the start can group keys with the same reason ------------

_FLAT = (
    "parameters and gradients of a unit always live in one flat buffer, which the collectives read"
    " and write directly"
)
_BLOCK = (
    "the unit of every gather and reduction is a block of the model, never a bucket of a size in"
    " elements"
)
_TRACE = (
    "Onefold records no trace of module calls: each pass gathers a block for itself and releases it"
    " after use"
)
_SAVE = "save_16bit_model always gathers"
_MEAN = (
    "gradients are averaged over the ranks from a sum in fp32, where the place of the division does"
    " not matter"
)
_PROBE = (
    "every optimizer is probed before its first step and refused only if its update is not"
    " element-wise"
)
_HOST = "torch's own optimizers run the step on the host; no operators have to be compiled"
_PINNED = "host memory is pinned wherever a GPU copies to or from it, and nowhere else"
_PIPELINE = (
    "states on NVMe are always read ahead of their step and written behind it, through as many"
    " buffers as that takes"
)
_AHEAD = (
    "a block is read from NVMe ahead of its use and dropped behind it; none is kept on the host in"
    " between"
)
_THREADS = (
    "a read or a write is cut into blocks of 8 MiB, one to a thread; nothing is queued in the"
    " kernel"
)
_MONITOR = "DeepSpeed's monitors and profilers are not part of Onefold; log from your loop"
_MODEL = "the model itself decides about activation checkpointing, and Onefold does not change it"
_CHECKPOINT = (
    "it concerns the files that DeepSpeed writes; Onefold's checkpoints load at any stage and on any"
    " number of ranks"
)
_INTERNAL = "it steers a mechanism inside DeepSpeed that has no counterpart here"

_ZENFLOW = (
    "stepping the gradients that matter most before the others trains differently, and is not"
    " built: remove it"
)
_GDS = (
    "what lies on NVMe passes through host memory, GPUDirect Storage is not built: remove it, or"
    " set it to false"
)
_PARALLEL = "other parallel axes than data are not built yet: remove it"
REMOVED = "DeepSpeed 0.19.8 refuses it too (the feature was removed there): remove it"


def _flag(**more: Any) -> Key:
    return Key("flag", **more)


def _count(**more: Any) -> Key:
    return Key("count", **{"low": 0, "endless": True, **more})


ZERO: Section = {
    "stage": Key("count", low=0, high=3, becomes=("stage",)),
    "overlap_comm": _flag(becomes=("overlap",)),
    "compute_grad_norm": _flag(),
    "stage3_prefetch_bucket_size": _count(becomes=("prefetch",)),
    "offload_optimizer": Key("section", becomes=("offload_optimizer", "nvme")),
    "offload_param": Key("section", becomes=("offload_param", "nvme")),
    "cpu_offload": _flag(becomes=("offload_optimizer",)),
    "cpu_offload_param": _flag(becomes=("offload_param",)),
    "sub_group_size": _count(becomes=("chunk",)),
    "contiguous_gradients": _flag(inert=_FLAT),
    "reduce_scatter": _flag(inert=_FLAT),
    "allgather_partitions": _flag(inert=_FLAT),
    "use_multi_rank_bucket_allreduce": _flag(inert=_FLAT),
    "parameter_alignment": _flag(inert=_FLAT),
    "stage3_use_all_reduce_for_fetch_params": _flag(inert=_FLAT),
    "stage3_allgather_sequential": _flag(inert=_FLAT),
    "reduce_bucket_size": _count(above=0, inert=_BLOCK),
    "allgather_bucket_size": _count(inert=_BLOCK),
    "stage3_param_persistence_threshold": _count(inert=_BLOCK),
    "stage3_model_persistence_threshold": _count(inert=_BLOCK),
    "stage3_module_granularity_threshold": _count(inert=_BLOCK),
    "leaf_module": Key("any", inert=_BLOCK),
    "stage3_max_live_parameters": _count(inert=_TRACE),
    "stage3_max_reuse_distance": _count(inert=_TRACE),
    "log_trace_cache_warnings": _flag(inert=_TRACE),
    "stage3_gather_16bit_weights_on_model_save": _flag(inert=_SAVE),
    "stage3_gather_fp16_weights_on_model_save": _flag(inert=_SAVE),
    "load_from_fp32_weights": _flag(inert=_CHECKPOINT),
    "elastic_checkpoint": _flag(inert=_CHECKPOINT),
    "pipeline_loading_checkpoint": _flag(inert=_CHECKPOINT),
    "ignore_unused_parameters": _flag(),
    "round_robin_gradients": _flag(
        inert="all ranks copy the gradients of their own intervals to the host at the same time"
    ),
    "cpu_offload_use_pin_memory": _flag(inert=_PINNED),
    "save_muon_momentum_buffer_in_memory": _flag(
        inert="Muon's momenta are where the other states are"
    ),
    "legacy_stage1": _flag(inert=_INTERNAL),
    "memory_efficient_linear": _flag(inert=_INTERNAL),
    "override_module_apply": _flag(inert=_INTERNAL),
    "enable_sanity_checks": _flag(),
    "zenflow": Key("section", later=_ZENFLOW),
    "zero_hpz_partition_size": Key("count", low=0, becomes=("second_copy", "group")),
    "zero_quantized_weights": _flag(becomes=("gather_codec",)),
    "zero_quantized_nontrainable_weights": _flag(becomes=("frozen",)),
    "zero_quantized_gradients": _flag(becomes=("reduce_codec",)),
    "zeropp_loco_param": Key("section", later=REMOVED),
    "mics_shard_size": Key(
        "count", low=-1, later=f"{REMOVED}; Recipe.zero(3, shard_group=...) has it"
    ),
    "mics_hierarchical_params_gather": _flag(later=REMOVED),
}

# DeepSpeed accepts these keys without the prefix "stage3_" as well.
ZERO_ALIASES: Mapping[str, str] = {
    name.removeprefix("stage3_"): name
    for name in ZERO
    if name.startswith("stage3_") and name != "stage3_gather_fp16_weights_on_model_save"
}

_OFFLOAD: Section = {
    "device": Key("text", choices=("none", "cpu", "nvme")),
    "nvme_path": Key("text"),
    "pin_memory": _flag(inert=_PINNED),
}

# Sections inside "zero_optimization", read by tiers.py.
OFFLOAD: Mapping[str, Section] = {
    "offload_optimizer": {
        **_OFFLOAD,
        "ratio": Key("number", low=0, high=1),
        "buffer_count": _count(inert=_PIPELINE),
        "pipeline_read": _flag(inert=_PIPELINE),
        "pipeline_write": _flag(inert=_PIPELINE),
        "fast_init": _flag(
            inert="the first optimizer step creates the states on NVMe and writes them at once"
        ),
        "super_offload": _flag(inert=_HOST),
        "cpuadam_cores_perc": Key(
            "number",
            low=0,
            high=1,
            inert="the step on the host uses torch's threads (OMP_NUM_THREADS)",
        ),
    },
    "offload_param": {
        **_OFFLOAD,
        "buffer_count": _count(inert=_AHEAD),
        "buffer_size": _count(inert=_AHEAD),
        "max_in_cpu": _count(inert=_AHEAD),
    },
}

AIO: Section = {
    "queue_depth": Key("count", low=1, becomes=("nvme_threads",)),
    "intra_op_parallelism": Key("count", low=1, becomes=("nvme_threads",)),
    "block_size": _count(above=0, inert=_THREADS),
    "single_submit": _flag(inert=_THREADS),
    "overlap_events": _flag(inert=_THREADS),
    "use_gds": _flag(later=_GDS),
}

# The names of older releases.
AIO_ALIASES: Mapping[str, str] = {"thread_count": "intra_op_parallelism"}

FP16: Section = {
    "enabled": _flag(becomes=("precision",)),
    "auto_cast": _flag(becomes=("cast_inputs",)),
    "loss_scale": Key("number", low=0),
    "initial_scale_power": Key("count", low=0, high=126),
    "loss_scale_window": Key("count", low=1),
    "hysteresis": Key("count", low=1),
    "consecutive_hysteresis": _flag(),
    "min_loss_scale": Key("number", above=0),
    "fp16_master_weights_and_grads": _flag(becomes=("master_dtype",)),
}

BF16: Section = {
    "enabled": _flag(becomes=("precision",)),
    "check_grad_overflow": _flag(),
    "immediate_grad_update": _flag(inert=_FLAT),
    "bf16_master_weights_and_grads": _flag(becomes=("master_dtype",)),
    "bf16_optimizer_states": _flag(becomes=("moments",)),
}

DATA_TYPES: Section = {
    "grad_accum_dtype": Key(
        "text", choices=("fp32", "bf16", "fp16"), becomes=("accumulate_dtype",)
    ),
    "param_dtype": Key("text"),
    "buffer_dtype": Key("text"),
    "keep_in_fp32_modules": Key("any", own_auto=True),
}

TORCH_AUTOCAST: Section = {
    "enabled": _flag(),
    "dtype": Key("text"),
    "lower_precision_safe_modules": Key("any"),
}

CHECKPOINT: Section = {
    "tag_validation": Key("text", choices=("ignore", "warn", "fail")),
    **{
        name: Key("any", inert=_CHECKPOINT)
        for name in ("load_universal", "use_node_local_storage", "parallel_write", "writer")
    },
}

OPTIMIZER: Section = {
    "type": Key("text", required=True),
    "params": Key("section"),
    "legacy_fusion": _flag(inert=_INTERNAL),
}

SCHEDULER: Section = {"type": Key("text", required=True), "params": Key("section")}

TOP: Section = {
    "train_batch_size": Key("count", low=1),
    "train_micro_batch_size_per_gpu": Key("count", low=1),
    "gradient_accumulation_steps": Key("count", low=1),
    "gradient_clipping": Key("number", low=0),
    "communication_data_type": Key("text", choices=("fp32", "bf16", "fp16"), becomes=("wire",)),
    "steps_per_print": _count(low=1),
    "wall_clock_breakdown": _flag(),
    "dataloader_drop_last": _flag(),
    "zero_optimization": Key("section"),
    "fp16": Key("section"),
    "bf16": Key("section"),
    "data_types": Key("section"),
    "optimizer": Key("section"),
    "scheduler": Key("section"),
    "prescale_gradients": _flag(inert=_MEAN),
    "gradient_predivide_factor": Key("number", above=0, inert=_MEAN),
    "gradient_allreduce_op": Key("text", choices=("mean", "sum")),
    "zero_allow_untested_optimizer": _flag(inert=_PROBE),
    "zero_force_ds_cpu_optimizer": _flag(inert=_HOST),
    "aio": Key("section"),
    "disable_allgather": _flag(inert=_FLAT),
    "activation_checkpointing": Key("any", inert=_MODEL),
    **{name: Key("any", inert=_MONITOR) for name in ("tensorboard", "wandb", "comet", "csv_monitor", "timers")},
    "comms_logger": Key("any", inert=_MONITOR),
    "flops_profiler": Key("any", inert=_MONITOR),
    "memory_breakdown": _flag(inert=_MONITOR),
    "dump_state": _flag(inert=_MONITOR),
    "log_level": Key("any", inert=_MONITOR),
    "autotuning": Key("any", later="tuning by trial runs is not built: remove it"),
    "checkpoint": Key("section"),
    "checkpoint_engine": Key("any", inert=_CHECKPOINT),
    "datastates": Key("any", inert=_CHECKPOINT),
    "disable_python_gc": _flag(inert="Python's garbage collector is left alone"),
    "vocabulary_size": _count(inert=_INTERNAL),
    "seq_parallel_communication_data_type": Key("text", inert="there is no sequence axis in this configuration"),
    "use_data_before_expert_parallelism": _flag(inert="there is no expert axis in this configuration"),
    "managed_gradient_accumulation": Key("flag"),
    "torch_autocast": Key("section"),
    "compile": Key("section", later="call torch.compile on the blocks yourself: remove it"),
    "weight_quantization": Key(
        "any", later="zero_optimization.zero_quantized_nontrainable_weights stores frozen weights quantized: remove it"
    ),
    "data_efficiency": Key("section", later="curricula and data routing are not part of Onefold: remove it"),
    "hybrid_engine": Key("section", later="use onefold.full_params(model) around generate() instead: remove it"),
    "pipeline": Key("section", later=_PARALLEL),
    "tensor_parallel": Key("section", later=_PARALLEL, quiet_up_to=1),
    "inference": Key("section", later=_PARALLEL, quiet_up_to=1),
    "msamp": Key("section", later="MS-AMP's 8-bit training is not part of Onefold: remove it"),
    "expert_parallel": Key("section", later=_PARALLEL),
    "sequence_parallel_size": _count(later=_PARALLEL, quiet_up_to=1),
    "data_parallel_size": _count(inert="every rank is a data-parallel rank"),
    **{
        name: Key("any", later=REMOVED)
        for name in (
            "amp", "sparse_gradients", "sparse_attention", "compression_training", "quantize_training", "eigenvalue",
            "nebula", "elasticity", "curriculum_learning", "progressive_layer_drop", "graph_harvesting",
        )
    },
}  # fmt: skip

TOP_ALIASES: Mapping[str, str] = {"bfloat16": "bf16"}

SECTIONS: Mapping[str, Section] = {
    "zero_optimization": ZERO,
    "fp16": FP16,
    "bf16": BF16,
    "data_types": DATA_TYPES,
    "checkpoint": CHECKPOINT,
    "optimizer": OPTIMIZER,
    "scheduler": SCHEDULER,
    "aio": AIO,
    "torch_autocast": TORCH_AUTOCAST,
}

#: Every section by its path; "" is the top level.
PLACES: Mapping[str, Section] = {
    "": TOP,
    **SECTIONS,
    **{f"zero_optimization.{name}": keys for name, keys in OFFLOAD.items()},
}
