"""Code outside the core that follows the passes over a model, whoever runs them.

    a forward pass over the model, or a part of it, begins    `forward_begins`
    a backward pass that accumulates gradients begins         `backward_begins`: what its gradients are multiplied with

A training engine that divides losses, or drops the gradients of the last step, cannot rely on calls
of its own: a script may call the module itself, and `loss.backward()`.
"""

from __future__ import annotations

from typing import Protocol


class PassFollower(Protocol):
    """Set as `Progress.follower`; None follows nothing.

    Attributes:
        weight: what the gradients of every pass are multiplied with: the number of ranks turns the
            mean over ranks into a sum.
        synchronizes: the pass under way ends with reduced gradients, unless it is under `no_sync`.
    """

    weight: float

    @property
    def synchronizes(self) -> bool: ...

    def forward_begins(self) -> None:
        """A forward pass begins that no other contains, not even a backward pass."""

    def backward_begins(self) -> float:
        """A backward pass begins, and no gradient of it has arrived. Returns what its gradients are
        multiplied with, besides `weight`.
        """
        ...
