"""Whether a pass is going to be computed again: what torch.utils.checkpoint does, seen from hooks
on saved tensors.
"""

from __future__ import annotations

from typing import Any


def is_checkpoint(pack: Any) -> bool:
    """Whether a hook on saved tensors is that of torch.utils.checkpoint: it keeps nothing of a
    tensor, and computes it again.

    [Note: a checkpoint around a pass] What is computed again is counted, so such a hook has to see
    gathered parameters in the forward
    pass, as it sees them when it recomputes: then they are gathered for the backward pass, and no
    hooks of ours are between.
    """
    return getattr(pack, "__module__", None) == "torch.utils.checkpoint"
