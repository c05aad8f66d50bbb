"""Whether a pass is going to be computed again: what torch.utils.checkpoint does, seen from hooks
on saved tensors.
"""

from __future__ import annotations

from typing import Any


def is_checkpoint(pack: Any) -> bool:
    """Whether a hook on saved tensors is that of torch.utils.checkpoint: it keeps nothing of a
    tensor, and computes it again.

    [Note: a checkpoint around a pass] torch compares how many tensors a pass saved with how many its
    recomputation saves. So its hook has to see gathered parameters in the forward pass as it does
    in the recomputation, and hooks of ours must not stand between.
    """
    return getattr(pack, "__module__", None) == "torch.utils.checkpoint"
