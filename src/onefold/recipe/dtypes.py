"""The dtypes that options name."""

from collections.abc import Mapping

import torch

#: What a model may compute in.
COMPUTE_DTYPES: Mapping[str, torch.dtype] = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
}
#: What weights, gradients and sums may be.
DTYPES: Mapping[str, torch.dtype] = {"fp64": torch.float64, **COMPUTE_DTYPES}
