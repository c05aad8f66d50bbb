"""The names under `deepspeed`: which are served, and which are refused.

`SERVED` is {module: {name: location}}. "init:Init" means `Init` in `init.py` of this package. A
location with a dot before the colon, such as "torch.distributed:barrier", and the location "torch",
mean another package. Parents of these modules exist without a row of their own. Nothing is imported
before it is used.
"""

from __future__ import annotations

from collections.abc import Mapping

#: The version in `deepspeed.__version__` and the package's metadata: the release whose configuration
#: and calls are served.
VERSION = "0.19.8+onefold"
MAJOR, MINOR, PATCH, BRANCH = 0, 19, 8, "onefold"

_ENGINE = "engine:DeepSpeedEngine"
_ZERO = {
    "Init": "init:Init",
    "GatheredParameters": "gathered:GatheredParameters",
    "register_external_parameter": "gathered:register_external_parameter",
    "unregister_external_parameter": "gathered:unregister_external_parameter",
    "ZeroParamStatus": "parameter_facts:ZeroParamStatus",
    "unwrap_model_for_generation": "gathered:unwrap_model_for_generation",
}
_ACCESS = {
    name: f"access:{name}"
    for name in (
        "safe_get_full_fp32_param",
        "safe_get_full_grad",
        "safe_get_full_optimizer_state",
        "safe_get_local_fp32_param",
        "safe_get_local_grad",
        "safe_get_local_optimizer_state",
        "safe_set_full_fp32_param",
        "safe_set_full_grad",
        "safe_set_full_optimizer_state",
        "safe_set_local_fp32_param",
        "safe_set_local_grad",
        "safe_set_local_optimizer_state",
        "safe_update_full_grad_vectorized",
    )
}
_LEAVES = {
    name: f"leaves:{name}"
    for name in (
        "get_z3_leaf_modules",
        "set_z3_leaf_module",
        "set_z3_leaf_modules",
        "set_z3_leaf_modules_by_name",
        "set_z3_leaf_modules_by_suffix",
        "unset_z3_leaf_modules",
        "z3_leaf_module",
        "z3_leaf_parameter",
    )
}
#: Constants that name a key of a schedule's params.
_SCHEDULE_KEYS = (
    "COS_MIN_RATIO",
    "CYCLE_FIRST_STAIR_COUNT",
    "CYCLE_FIRST_STEP_SIZE",
    "CYCLE_MAX_LR",
    "CYCLE_MAX_MOM",
    "CYCLE_MIN_LR",
    "CYCLE_MIN_MOM",
    "CYCLE_MOMENTUM",
    "CYCLE_SECOND_STAIR_COUNT",
    "CYCLE_SECOND_STEP_SIZE",
    "DECAY_LR_RATE",
    "DECAY_MOM_RATE",
    "DECAY_STEP_SIZE",
    "LR_RANGE_TEST_MIN_LR",
    "LR_RANGE_TEST_STAIRCASE",
    "LR_RANGE_TEST_STEP_RATE",
    "LR_RANGE_TEST_STEP_SIZE",
    "TOTAL_NUM_STEPS",
    "WARMUP_MAX_LR",
    "WARMUP_MIN_LR",
    "WARMUP_MIN_RATIO",
    "WARMUP_NUM_STEPS",
    "WARMUP_TYPE",
)
_SCHEDULES = ("WarmupLR", "WarmupDecayLR", "WarmupCosineLR", "OneCycle", "LRRangeTest")
_OF_TORCH = (
    "ProcessGroup",
    "ReduceOp",
    "all_gather",
    "all_gather_into_tensor",
    "all_gather_object",
    "all_reduce",
    "all_to_all",
    "all_to_all_single",
    "barrier",
    "batch_isend_irecv",
    "broadcast",
    "broadcast_object_list",
    "destroy_process_group",
    "gather",
    "get_backend",
    "get_global_rank",
    "irecv",
    "is_available",
    "is_initialized",
    "isend",
    "monitored_barrier",
    "new_group",
    "recv",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_tensor",
    "scatter",
    "send",
)

_COMM = {
    "configure": "communication:configure",
    "get_all_ranks_from_group": "torch.distributed:get_process_group_ranks",
    "get_local_rank": "communication:get_local_rank",
    "get_rank": "communication:get_rank",
    "get_world_group": "communication:get_world_group",
    "get_world_size": "communication:get_world_size",
    "inference_all_reduce": "torch.distributed:all_reduce",
    "init_distributed": "communication:init_distributed",
    "log_summary": "communication:log_summary",
    **{name: f"torch.distributed:{name}" for name in _OF_TORCH},
}
_CHECKPOINTING = {
    "checkpoint": "recompute:checkpoint",
    "configure": "recompute:configure_checkpointing",
    "is_configured": "recompute:checkpointing_is_configured",
    "non_reentrant_checkpoint": "recompute:checkpoint",
    "reset": "recompute:reset_checkpointing",
}
_OPTIMIZERS = {
    "adagrad": {"DeepSpeedCPUAdagrad": "cpu_adagrad"},
    "adam": {"DeepSpeedCPUAdam": "cpu_adam", "FusedAdam": "fused_adam"},
    "lion": {"DeepSpeedCPULion": "cpu_lion", "FusedLion": "fused_lion"},
}

_ZERO_CONFIGS = (
    "DeepSpeedZeroConfig",
    "DeepSpeedZeroOffloadOptimizerConfig",
    "DeepSpeedZeroOffloadParamConfig",
)
_BUILDERS = (
    "AsyncIOBuilder", "CPUAdagradBuilder", "CPUAdamBuilder", "CPULionBuilder", "EvoformerAttnBuilder",
    "FPQuantizerBuilder", "FusedAdamBuilder", "FusedLambBuilder", "FusedLionBuilder", "GDSBuilder",
    "InferenceBuilder", "QuantizerBuilder", "RandomLTDBuilder", "SpatialInferenceBuilder",
    "StochasticTransformerBuilder", "TransformerBuilder",
)  # fmt: skip

SERVED: Mapping[str, Mapping[str, str]] = {
    "deepspeed": {
        "DeepSpeedConfig": "meaning:DeepSpeedConfig",
        "DeepSpeedConfigError": "reading:DeepSpeedConfigError",
        "DeepSpeedEngine": _ENGINE,
        "DeepSpeedOptimizer": "optimizers:DeepSpeedOptimizer",
        "OnDevice": "accelerator:OnDevice",
        "__git_branch__": "table:BRANCH",
        "__git_hash__": "table:BRANCH",
        "__version__": "table:VERSION",
        "__version_major__": "table:MAJOR",
        "__version_minor__": "table:MINOR",
        "__version_patch__": "table:PATCH",
        "add_config_arguments": "setup:add_config_arguments",
        "get_accelerator": "accelerator:get_accelerator",
        "init_distributed": "communication:init_distributed",
        "initialize": "setup:initialize",
        "log_dist": "logs:log_dist",
        "logger": "logs:logger",
    },
    "deepspeed.accelerator": {"get_accelerator": "accelerator:get_accelerator"},
    "deepspeed.accelerator.real_accelerator": {"get_accelerator": "accelerator:get_accelerator"},
    "deepspeed.checkpoint.constants": {
        name: f"files:{name}"
        for name in (
            "BASE_OPTIMIZER_STATE",
            "BF16_ZERO_FILE_PREFIX",
            "BUFFER_NAMES",
            "DS_VERSION",
            "FP32_FLAT_GROUPS",
            "FROZEN_PARAM_FRAGMENTS",
            "FROZEN_PARAM_SHAPES",
            "MODEL_FILE_PREFIX",
            "MODEL_FILE_SUFFIX",
            "OPTIMIZER_STATE_DICT",
            "OPTIM_FILE_SUFFIX",
            "PARAM_SHAPES",
            "PARTITION_COUNT",
            "SINGLE_PARTITION_OF_FP32_GROUPS",
            "ZERO_FILE_PREFIX",
            "ZERO_STAGE",
        )
    },
    "deepspeed.checkpoint.utils": {
        "clone_tensors_for_torch_save": "data:clone_tensors_for_torch_save",
        "get_model_ckpt_name_for_rank": "files:get_model_ckpt_name_for_rank",
        "get_zero_ckpt_name_for_rank": "files:get_zero_ckpt_name_for_rank",
    },
    "deepspeed.checkpointing": _CHECKPOINTING,
    "deepspeed.comm": _COMM,
    "deepspeed.comm.comm": _COMM,
    "deepspeed.launcher.runner": {"DEEPSPEED_ENVIRONMENT_NAME": "communication:ENVIRONMENT_FILE"},
    "deepspeed.moe.utils": {
        "is_moe_param": "groups:is_moe_param",
        "split_params_into_different_moe_groups_for_optimizer": (
            "groups:split_params_into_different_moe_groups_for_optimizer"
        ),
    },
    "deepspeed.ops": {"__compatible_ops__": "operators:COMPATIBLE"},
    "deepspeed.ops.aio": {"AsyncIOBuilder": "operators:AsyncIOBuilder"},
    "deepspeed.ops.op_builder": {name: f"operators:{name}" for name in _BUILDERS},
    **{
        f"deepspeed.ops.{kind}": {name: f"optimizers:{name}" for name in names}
        for kind, names in _OPTIMIZERS.items()
    },
    **{
        f"deepspeed.ops.{kind}.{file}": {name: f"optimizers:{name}"}
        for kind, names in _OPTIMIZERS.items()
        for name, file in names.items()
    },
    "deepspeed.runtime.activation_checkpointing.checkpointing": _CHECKPOINTING,
    "deepspeed.runtime.base_optimizer": {
        "DeepSpeedOptimizer": "optimizers:DeepSpeedOptimizer",
        "ZeROOptimizer": "optimizers:ZeROOptimizer",
    },
    "deepspeed.runtime.bf16_optimizer": {"BF16_Optimizer": "optimizers:BF16_Optimizer"},
    "deepspeed.runtime.config": {
        name: f"configuration:{name}"
        for name in (
            "ADAGRAD_OPTIMIZER",
            "ADAMW_OPTIMIZER",
            "ADAM_OPTIMIZER",
            "DEEPSPEED_OPTIMIZERS",
            "DeepSpeedConfig",
            "LAMB_OPTIMIZER",
            "LION_OPTIMIZER",
            "MUADAMW_OPTIMIZER",
            "MUADAM_OPTIMIZER",
            "MUON_OPTIMIZER",
            "MUSGD_OPTIMIZER",
        )
    }
    | {"DeepSpeedConfigError": "reading:DeepSpeedConfigError"},
    "deepspeed.runtime.engine": {"DeepSpeedEngine": _ENGINE},
    "deepspeed.runtime.fp16.fused_optimizer": {"FP16_Optimizer": "optimizers:FP16_Optimizer"},
    "deepspeed.runtime.fp16.unfused_optimizer": {
        "FP16_UnfusedOptimizer": "optimizers:FP16_UnfusedOptimizer"
    },
    "deepspeed.runtime.lr_schedules": {
        **{
            name: f"schedules:{name}"
            for name in (
                "LR_RANGE_TEST",
                "ONE_CYCLE",
                "VALID_LR_SCHEDULES",
                "WARMUP_COSINE_LR",
                "WARMUP_DECAY_LR",
                "WARMUP_LINEAR_RATE",
                "WARMUP_LOG_RATE",
                "WARMUP_LR",
                *_SCHEDULE_KEYS,
            )
        },
        **{name: f"schedules:{name}" for name in _SCHEDULES},
    },
    "deepspeed.runtime.swap_tensor": {"MIN_SWAPPABLE_BYTES": "configuration:MIN_SWAPPABLE_BYTES"},
    "deepspeed.runtime.torch_autocast": {
        name: f"autocast:{name}"
        for name in (
            "PARAM_COMM_DTYPE_ATTR_NAME",
            "get_comm_dtype",
            "get_default_autocast_lower_precision_modules",
            "has_comm_dtype",
        )
    },
    "deepspeed.runtime.utils": {
        "move_to_device": "data:move_to_device",
        "see_memory_usage": "logs:see_memory_usage",
    },
    "deepspeed.runtime.zero": _ZERO,
    "deepspeed.runtime.zero.config": {name: f"schema:{name}" for name in _ZERO_CONFIGS},
    "deepspeed.runtime.zero.offload_config": {
        name: f"schema:{name}" for name in ("OffloadDeviceEnum", *_ZERO_CONFIGS[1:])
    },
    "deepspeed.runtime.zero.stage3": {
        "DeepSpeedZeroOptimizer_Stage3": "optimizers:DeepSpeedZeroOptimizer_Stage3",
    },
    "deepspeed.runtime.zero.stage_1_and_2": {
        "DeepSpeedZeroOptimizer": "optimizers:DeepSpeedZeroOptimizer",
    },
    "deepspeed.runtime.zero.utils": {"ZeRORuntimeException": "errors:ZeRORuntimeException"},
    "deepspeed.runtime.zero.partition_parameters": {
        **_ZERO,
        "_orig_torch_arange": "torch:arange",
        "get_accelerator": "accelerator:get_accelerator",
        "MultipleAllGatherHandles": "gathered:MultipleAllGatherHandles",
        "zero_wrapper_for_fp_tensor_constructor": "init:zero_wrapper_for_fp_tensor_constructor",
    },
    "deepspeed.utils": {
        **_ACCESS,
        **_LEAVES,
        "OnDevice": "accelerator:OnDevice",
        "RepeatingLoader": "data:RepeatingLoader",
        "instrument_w_nvtx": "logs:instrument_w_nvtx",
        "is_initialized": "torch.distributed:is_initialized",
        "log_dist": "logs:log_dist",
        "logger": "logs:logger",
    },
    "deepspeed.utils.init_on_device": {"OnDevice": "accelerator:OnDevice"},
    "deepspeed.utils.nvtx": {"instrument_w_nvtx": "logs:instrument_w_nvtx"},
    "deepspeed.utils.tensor_fragment": _ACCESS,
    "deepspeed.utils.torch": {"required_torch_version": "files:required_torch_version"},
    "deepspeed.utils.z3_leaf_module": _LEAVES,
    "deepspeed.utils.logging": {"log_dist": "logs:log_dist", "logger": "logs:logger"},
    "deepspeed.utils.zero_to_fp32": {
        name: f"whole_model:{name}"
        for name in (
            "convert_zero_checkpoint_to_fp32_state_dict",
            "get_fp32_state_dict_from_zero_checkpoint",
            "get_model_state_file",
            "get_optim_files",
            "load_state_dict_from_zero_checkpoint",
        )
    },
    "deepspeed.runtime.dataloader": {"RepeatingLoader": "data:RepeatingLoader"},
    "deepspeed.zero": _ZERO,
}

_OTHER_AXES = "other parallel axes than data are not built yet"
_COMPILED = "Onefold has no compiled operators; the optimizers on the host are torch's own"
_GENERATION = "generate under onefold.full_params(model) or onefold.keep_gathered(model)"
_ESTIMATE = 'print(onefold.plan(model, gpus=8, gpu="h100-80")) tells what each stage holds'
_INSIDE = "it is inside DeepSpeed's engine; Onefold's has no such part"
_LOOP = "monitors and profilers are not part of Onefold; log from your loop"
_TILES = (
    "onefold.tiling.tile_linears(model, '256MB') puts tiles in the place of large linear layers"
)

#: Known names that are refused: {name: why}. Every name below one of them is refused as well.
REFUSED: Mapping[str, str] = {
    "deepspeed.DeepSpeedHybridEngine": _GENERATION,
    "deepspeed.InferenceEngine": _GENERATION,
    "deepspeed.PipelineModule": _OTHER_AXES,
    "deepspeed.add_tuning_arguments": "write the schedule into the configuration",
    "deepspeed.autotuning": "tuning by trial runs is not built; onefold.plan compares stages",
    "deepspeed.checkpoint.DeepSpeedCheckpoint": "onefold.load reads DeepSpeed's folders",
    "deepspeed.checkpoint.ds_to_universal": (
        "every checkpoint of engine.save_checkpoint loads on any number of ranks as it is"
    ),
    "deepspeed.checkpointing.get_cuda_rng_tracker": _OTHER_AXES,
    "deepspeed.checkpointing.model_parallel_cuda_manual_seed": _OTHER_AXES,
    "deepspeed.compression": "compression of models is not part of Onefold",
    "deepspeed.elasticity": "a checkpoint loads on any number of ranks; nothing is to be planned",
    "deepspeed.inference": _GENERATION,
    "deepspeed.init_inference": _GENERATION,
    "deepspeed.linear": (
        "use peft's adapters; Recipe.zero(frozen=...) stores frozen weights encoded"
    ),
    "deepspeed.module_inject": _GENERATION,
    **{
        f"deepspeed.moe.{name}": _OTHER_AXES
        for name in ("MoE", "experts", "layer", "mappings", "sharded_moe", "utils.has_moe_layers")
    },
    "deepspeed.monitor": _LOOP,
    "deepspeed.ops.aio.aio_handle": _COMPILED,
    "deepspeed.ops.lamb": "torch has no LAMB: build one yourself and pass it to initialize(optimizer=...)",
    "deepspeed.ops.sparse_attention": _COMPILED,
    "deepspeed.ops.transformer": _COMPILED,
    "deepspeed.pipe": _OTHER_AXES,
    "deepspeed.profiling": _LOOP,
    "deepspeed.runtime.data_pipeline": "curricula and data routing are not part of Onefold",
    "deepspeed.runtime.fp16.loss_scaler": _INSIDE,
    "deepspeed.runtime.fp16.onebit": _INSIDE,
    "deepspeed.runtime.hybrid_engine": _GENERATION,
    "deepspeed.runtime.lr_schedules.add_tuning_arguments": "write the schedule into the configuration",
    "deepspeed.runtime.pipe": _OTHER_AXES,
    "deepspeed.runtime.sequence_parallel": _OTHER_AXES,
    "deepspeed.runtime.zero.MiCS_Init": "Recipe.zero(3, shard_group=...) divides inside groups",
    "deepspeed.runtime.zero.TiledLinear": _TILES,
    "deepspeed.runtime.zero.stage3.estimate_zero3_model_states_mem_needs": _ESTIMATE,
    "deepspeed.runtime.zero.stage3.estimate_zero3_model_states_mem_needs_all_cold": _ESTIMATE,
    "deepspeed.runtime.zero.stage3.estimate_zero3_model_states_mem_needs_all_live": _ESTIMATE,
    "deepspeed.runtime.zero.stage_1_and_2.estimate_zero2_model_states_mem_needs": _ESTIMATE,
    "deepspeed.runtime.zero.stage_1_and_2.estimate_zero2_model_states_mem_needs_all_cold": _ESTIMATE,
    "deepspeed.runtime.zero.stage_1_and_2.estimate_zero2_model_states_mem_needs_all_live": _ESTIMATE,
    "deepspeed.runtime.zero.tiling": _TILES,
    "deepspeed.sequence": _OTHER_AXES,
    "deepspeed.tp_model_init": _OTHER_AXES,
    "deepspeed.utils.groups": _OTHER_AXES,
    "deepspeed.zero.MiCS_Init": "Recipe.zero(3, shard_group=...) divides inside groups",
    "deepspeed.zero.TiledLinear": _TILES,
}


def refusal(name: str) -> str | None:
    """Return why the full name, or a module that contains it, is refused; None if it is not."""
    known = (row for row in REFUSED if name == row or name.startswith(f"{row}."))
    return next((REFUSED[row] for row in known), None)


def modules() -> frozenset[str]:
    """Return all modules that can be imported: those of the table, and their parents."""
    parts = (name.split(".") for name in SERVED)
    return frozenset(".".join(p[: n + 1]) for p in parts for n in range(len(p)))


def is_served(name: str) -> bool:
    """Whether the full name is a served module, or a name in one."""
    module, _, last = name.rpartition(".")
    return name in modules() or last in SERVED.get(module, {})
