"""What a rank holds of an optimizer's states."""

from __future__ import annotations

from torch import Tensor
from torch.optim import Optimizer

from onefold.runtime.parameters.interval import disable_torch_function


def held(optimizer: Optimizer) -> list[Tensor]:
    """Every tensor of `optimizer.state` as it lies in this rank's memory (code of a user's sees the
    whole's shapes).
    """
    with disable_torch_function():
        return [
            t for state in optimizer.state.values() for t in state.values() if isinstance(t, Tensor)
        ]


def nbytes(optimizer: Optimizer) -> int:
    """Bytes of `held`."""
    with disable_torch_function():
        return sum(t.numel() * t.element_size() for t in held(optimizer))
