"""How to tell that torch.utils.checkpoint is going to recompute a pass: by its hooks on saved
tensors.
"""

from __future__ import annotations

from typing import Any


def is_checkpoint(pack: Any) -> bool:
    """Whether a hook on saved tensors is that of torch.utils.checkpoint, which saves no tensor and
    computes it again.

    [Note: a checkpoint around a pass] torch compares how many tensors a pass saves with how many
    its recomputation saves. So its hook has to see gathered parameters in the forward pass as it
    sees them in the recomputation. The engine's own hooks must not take them before.
    """
    return getattr(pack, "__module__", None) == "torch.utils.checkpoint"
