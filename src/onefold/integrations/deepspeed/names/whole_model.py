"""`deepspeed.utils.zero_to_fp32`: the whole model from a checkpoint, without an engine."""

from __future__ import annotations

import math
import os
from pathlib import Path

import torch
from torch import nn

from onefold.checkpoint.loading import source_of


def get_fp32_state_dict_from_zero_checkpoint(
    checkpoint_dir: str | os.PathLike[str],
    tag: str | None = None,
    exclude_frozen_parameters: bool = False,
    lazy_mode: bool = False,
) -> dict[str, torch.Tensor]:
    """The whole model in fp32 from a checkpoint folder, Onefold's or DeepSpeed's, without ranks.

    Args:
        lazy_mode: accepted; everything is read.

    Raises:
        CheckpointError: nothing there that can be read.
        NotImplementedError: `exclude_frozen_parameters`.
    """
    if exclude_frozen_parameters:
        raise NotImplementedError(
            "exclude_frozen_parameters: the whole model is read here; leave it out, and drop the"
            " names that you do not want."
        )
    source = source_of(Path(checkpoint_dir) / tag if tag is not None else Path(checkpoint_dir))
    try:
        out: dict[str, torch.Tensor] = {}
        for item, stored in source.items().items():
            if item.kind not in ("parameter", "buffer"):
                continue
            whole = torch.empty(math.prod(stored.shape), dtype=torch.float32)
            source.read(item, 0, whole.numel(), whole)
            out[item.name] = whole.view(stored.shape)
        return out | {alias: out[name] for alias, name in source.aliases().items()}
    finally:
        source.close()


def load_state_dict_from_zero_checkpoint(
    model: nn.Module, checkpoint_dir: str | os.PathLike[str], tag: str | None = None
) -> nn.Module:
    """Load that whole model into a plain one, on the host; returns it."""
    model = model.cpu()
    model.load_state_dict(
        get_fp32_state_dict_from_zero_checkpoint(checkpoint_dir, tag), strict=False
    )
    return model
