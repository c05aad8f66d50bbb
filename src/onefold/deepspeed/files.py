"""Names of files in a folder of DeepSpeed's own engine, and a version check beside them.

Onefold's engine does not write these files (docs/coming-from.md); the names help to read a folder
that DeepSpeed wrote.
"""

from __future__ import annotations

import os
from typing import Any

import torch
from torch.torch_version import TorchVersion

OPTIMIZER_STATE_DICT = "optimizer_state_dict"
FP32_FLAT_GROUPS = "fp32_flat_groups"
BASE_OPTIMIZER_STATE = "base_optimizer_state"
SINGLE_PARTITION_OF_FP32_GROUPS = "single_partition_of_fp32_groups"
PARAM_SHAPES = "param_shapes"
BUFFER_NAMES = "buffer_names"
FROZEN_PARAM_SHAPES = "frozen_param_shapes"
FROZEN_PARAM_FRAGMENTS = "frozen_param_fragments"
ZERO_STAGE = "zero_stage"
PARTITION_COUNT = "partition_count"
DS_VERSION = "ds_version"
MODEL_FILE_PREFIX, MODEL_FILE_SUFFIX = "mp_rank_", "_model_states.pt"
ZERO_FILE_PREFIX, OPTIM_FILE_SUFFIX = "zero_pp_rank_", "_optim_states.pt"
BF16_ZERO_FILE_PREFIX = f"bf16_{ZERO_FILE_PREFIX}"
CONSTANTS = tuple(name for name in dict(globals()) if name.isupper())


def get_model_ckpt_name_for_rank(base_folder: Any, mp_rank_str: str) -> str:
    """Return the path of the file of model states that DeepSpeed writes."""
    return os.path.join(base_folder, f"{MODEL_FILE_PREFIX}{mp_rank_str}{MODEL_FILE_SUFFIX}")


def get_zero_ckpt_name_for_rank(base_folder: Any, dp_rank: int, mp_rank: int) -> str:
    """Return the path of a rank's file of optimizer states that DeepSpeed writes."""
    model = f"{MODEL_FILE_PREFIX}{mp_rank:02d}"
    return os.path.join(base_folder, f"{ZERO_FILE_PREFIX}{dp_rank}_{model}{OPTIM_FILE_SUFFIX}")


def required_torch_version(min_version: Any = None, max_version: Any = None) -> bool:
    """Whether torch's version lies between these two.

    Raises:
        ValueError: neither is given.
    """
    if min_version is None and max_version is None:
        raise ValueError("required_torch_version: give min_version, max_version or both.")
    here = TorchVersion(torch.__version__)
    return (min_version is None or here >= str(min_version)) and (
        max_version is None or here <= str(max_version)
    )
