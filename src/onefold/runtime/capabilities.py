"""What an engine is given from outside the core: `shard()` knows which capability a recipe needs,
and hands its maker to the engine.

| question                                              | answered by        | maker                      |
|-------------------------------------------------------|--------------------|----------------------------|
| where is a shard stored                               | `Storage`          | `Capabilities.storage`     |
| how does the whole come together                      | `Gather`           | `Capabilities.gather`      |
| how do partial gradients become sums                  | `Reduce`           | `Capabilities.reduce`      |
| where do saved activations wait for the backward pass | `Activations`      | `Capabilities.activations` |
| how is an interval written as fewer bytes             | `comm.codec.Codec` | `Capabilities.codec`       |
| what holds regions on NVMe                            | `Store`            | `Capabilities.store`       |

The engine and its parts import none of these implementations. One more is given to `Engine.start`,
since it works with the whole engine: who steps a shard, and when (`Stepper` in runtime/steps.py).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch

from onefold.comm.codec import Codec
from onefold.recipe import Recipe

if TYPE_CHECKING:
    from onefold.layout import Tiers
    from onefold.runtime.flat import Flat
    from onefold.runtime.gathers import Gather
    from onefold.runtime.progress import Resources
    from onefold.runtime.reductions import Reduce
    from onefold.runtime.storage import Storage
    from onefold.runtime.unit import Unit


class Transfer(Protocol):
    """A read or write under way."""

    def done(self) -> bool: ...

    def wait(self) -> None:
        """Raises:
        TierError: it failed.
        """


class Region(Protocol):
    """A range of elements on disk."""

    numel: int
    dtype: torch.dtype

    @property
    def nbytes(self) -> int: ...

    def read(self, first: int, into: torch.Tensor) -> Transfer: ...

    def write(self, first: int, data: torch.Tensor) -> Transfer: ...


class Store(Protocol):
    """What one rank stores on NVMe."""

    def region(self, name: str, numel: int, dtype: torch.dtype) -> Region: ...

    def close(self) -> None: ...


class Activations(Protocol):
    """Where saved activations wait; it is called when passes begin and end. `store` is None if
    activations stay on the device, and the calls then do nothing.
    """

    store: Any

    def begin_forward(self) -> None: ...
    def end_forward(self) -> None: ...
    def end_backward(self) -> None: ...
    def close(self) -> None: ...


@dataclass(frozen=True)
class Capabilities:
    """The makers. See the table of this module."""

    storage: Callable[[Flat, Tiers | None, bool, Resources], Storage]  # (..., stored encoded, ...)
    gather: Callable[[Flat, Resources], Gather]
    reduce: Callable[[Flat, int, Resources], Reduce]  # (flat buffer, hop, ...)
    activations: Callable[[list[Unit], Resources, dict[int, tuple[Unit, Flat]]], Activations]
    codec: Callable[[str], Codec]
    store: Callable[[Recipe, int, bool], Store]  # (recipe, rank, the device has streams)
