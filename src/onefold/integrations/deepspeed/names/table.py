"""Names under `deepspeed`: {module: {name: where it is found}}, and the names that are refused.

"init:Init" is `Init` in the file `init` of this package; "torch.distributed:barrier" has a dot, and
is a name of another package. Modules without a row of their own are there because their children
are. Nothing is imported before it is asked for.
"""

from __future__ import annotations

from collections.abc import Mapping

#: What `deepspeed.__version__` and the package's metadata say. From 0.18.2 on, accelerate would ask
#: for sequence parallelism.
VERSION = "0.18.1+onefold"

_ENGINE = "onefold.integrations.deepspeed:DeepSpeedEngine"
_ZERO = {
    "Init": "init:Init",
    "GatheredParameters": "gathered:GatheredParameters",
    "register_external_parameter": "gathered:register_external_parameter",
    "unregister_external_parameter": "gathered:unregister_external_parameter",
    "ZeroParamStatus": "parameter_offload:ZeroParamStatus",
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
    )
}
_SCHEDULES = ("WarmupLR", "WarmupDecayLR", "WarmupCosineLR", "OneCycle", "LRRangeTest")
_OF_TORCH = (
    "ReduceOp",
    "all_gather",
    "all_gather_object",
    "all_reduce",
    "all_to_all_single",
    "barrier",
    "broadcast",
    "broadcast_object_list",
    "gather",
    "get_world_size",
    "irecv",
    "is_available",
    "is_initialized",
    "isend",
    "new_group",
    "recv",
    "reduce",
    "reduce_scatter",
    "scatter",
    "send",
)

SERVED: Mapping[str, Mapping[str, str]] = {
    "deepspeed": {
        "DeepSpeedEngine": _ENGINE,
        "OnDevice": "accelerator:OnDevice",
        "__version__": "table:VERSION",
        "add_config_arguments": "onefold.integrations.deepspeed:add_config_arguments",
        "get_accelerator": "accelerator:get_accelerator",
        "init_distributed": "communication:init_distributed",
        "initialize": "training:initialize",
    },
    "deepspeed.accelerator": {"get_accelerator": "accelerator:get_accelerator"},
    "deepspeed.checkpoint.utils": {
        "clone_tensors_for_torch_save": "data:clone_tensors_for_torch_save"
    },
    "deepspeed.checkpointing": {
        "checkpoint": "recompute:checkpoint",
        "configure": "recompute:configure_checkpointing",
        "is_configured": "recompute:checkpointing_is_configured",
        "reset": "recompute:reset_checkpointing",
    },
    "deepspeed.comm": {
        "get_local_rank": "communication:get_local_rank",
        "get_rank": "communication:get_rank",
        "init_distributed": "communication:init_distributed",
        **{name: f"torch.distributed:{name}" for name in _OF_TORCH},
    },
    "deepspeed.launcher.runner": {"DEEPSPEED_ENVIRONMENT_NAME": "communication:ENVIRONMENT_FILE"},
    "deepspeed.ops.adagrad": {"DeepSpeedCPUAdagrad": "optimizers:DeepSpeedCPUAdagrad"},
    "deepspeed.ops.adam": {
        "DeepSpeedCPUAdam": "optimizers:DeepSpeedCPUAdam",
        "FusedAdam": "optimizers:FusedAdam",
    },
    "deepspeed.ops.lion": {
        "DeepSpeedCPULion": "optimizers:DeepSpeedCPULion",
        "FusedLion": "optimizers:FusedLion",
    },
    "deepspeed.runtime.base_optimizer": {"DeepSpeedOptimizer": "training:DeepSpeedOptimizer"},
    "deepspeed.runtime.engine": {"DeepSpeedEngine": _ENGINE},
    "deepspeed.runtime.lr_schedules": {
        "VALID_LR_SCHEDULES": "lr_schedules:VALID_LR_SCHEDULES",
        **{name: f"lr_schedules:{name}" for name in _SCHEDULES},
    },
    "deepspeed.runtime.utils": {"move_to_device": "data:move_to_device"},
    "deepspeed.runtime.zero": _ZERO,
    "deepspeed.runtime.zero.partition_parameters": {
        **_ZERO,
        "_orig_torch_arange": "torch:arange",
        "get_accelerator": "accelerator:get_accelerator",
        "zero_wrapper_for_fp_tensor_constructor": "init:zero_wrapper_for_fp_tensor_constructor",
    },
    "deepspeed.utils": {
        **_ACCESS,
        **_LEAVES,
        "RepeatingLoader": "data:RepeatingLoader",
        "is_initialized": "torch.distributed:is_initialized",
        "log_dist": "logs:log_dist",
        "logger": "logs:logger",
    },
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

#: Known and refused: {name: why}. A name that begins so is refused as well.
REFUSED: Mapping[str, str] = {
    "deepspeed.DeepSpeedHybridEngine": _GENERATION,
    "deepspeed.PipelineModule": _OTHER_AXES,
    "deepspeed.inference": _GENERATION,
    "deepspeed.init_inference": _GENERATION,
    "deepspeed.moe": _OTHER_AXES,
    "deepspeed.ops.__compatible_ops__": _COMPILED,
    "deepspeed.ops.aio": _COMPILED,
    "deepspeed.ops.lamb": "its update needs norms of whole matrices, and a rank holds a part of them",
    "deepspeed.pipe": _OTHER_AXES,
    "deepspeed.runtime.sequence_parallel": _OTHER_AXES,
    "deepspeed.tp_model_init": _OTHER_AXES,
    "deepspeed.utils.groups": _OTHER_AXES,
}


def refusal(name: str) -> str | None:
    """Why the full name, or the module that it is in, is refused; None if it is not."""
    known = (row for row in REFUSED if name == row or name.startswith(f"{row}."))
    return next((REFUSED[row] for row in known), None)


def modules() -> frozenset[str]:
    """Every module that can be imported: those of the table, and what they lie in."""
    parts = (name.split(".") for name in SERVED)
    return frozenset(".".join(p[: n + 1]) for p in parts for n in range(len(p)))


def is_served(name: str) -> bool:
    """Whether the full name is a module, or a name in one."""
    module, _, last = name.rpartition(".")
    return name in modules() or last in SERVED.get(module, {})
