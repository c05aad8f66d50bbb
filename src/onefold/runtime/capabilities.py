"""What an engine is given beyond the core: `shard()` knows which capability a recipe needs, and
hands its maker over.

| question                                             | answered by        | maker                     |
|------------------------------------------------------|--------------------|---------------------------|
| where does a flat buffer rest that left the device   | `Offloaded`        | `Capabilities.storage`    |
| where do saved activations wait for the backward pass | `Activations`     | `Capabilities.activations` |
| how is an interval written as fewer bytes            | `comm.codec.Codec` | `Capabilities.codec`      |
| what holds regions on NVMe                           | `Store`            | `Capabilities.store`      |

The engine and its parts import none of those who answer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch

from onefold.comm.codec import Codec
from onefold.layout import Tiers
from onefold.recipe import Recipe, Tier

if TYPE_CHECKING:
    from onefold.runtime.engine import Engine
    from onefold.runtime.flat import Entry, Flat


class Transfer(Protocol):
    """A read or write under way."""

    def done(self) -> bool: ...

    def wait(self) -> None:
        """Raises:
        TierError: it did not go well.
        """


class Region(Protocol):
    """A row of elements on disk."""

    numel: int
    dtype: torch.dtype

    @property
    def nbytes(self) -> int: ...

    def read(self, first: int, into: torch.Tensor) -> Transfer: ...

    def write(self, first: int, data: torch.Tensor) -> Transfer: ...


class Store(Protocol):
    """What rests on NVMe of one rank."""

    def region(self, name: str, numel: int, dtype: torch.dtype) -> Region: ...

    def close(self) -> None: ...


class Offloaded(Protocol):
    """The storage of a flat buffer that rests off the device. Elements are counted from the first
    that this rank owns.

    Attributes:
        tiers: of parameters, gradients and states. numel: elements that this rank owns.
        rest: this rank's interval in the compute dtype, [numel], on the device or the host; None if
            it is on NVMe.
        shown: what the optimizer's parameters are views of, [numel].
        regions: what lies on NVMe, by kind. written: (kind, first element) of the chunks that hold
            something.
        scale: what gradients on NVMe are multiplied with when they are read; None is 1.
        stepped_in: the last backward pass behind which it was stepped.
    """

    tiers: Tiers
    numel: int
    rest: torch.Tensor | None
    shown: torch.Tensor
    regions: dict[str, Region]
    written: set[tuple[str, int]]
    scale: torch.Tensor | None
    stepped_in: int

    @property
    def on_disk(self) -> bool: ...
    @property
    def gradients_on_disk(self) -> bool: ...

    # masters
    def build(self) -> torch.Tensor: ...
    def bound(self) -> None: ...
    def load(self) -> torch.Tensor: ...
    def store(self, master: torch.Tensor) -> None: ...
    def touched(self) -> None: ...
    def follow(self) -> None: ...
    def stepped(self, start: int, stop: int, master: torch.Tensor) -> None: ...
    def renew(self) -> None: ...
    def chunks(self) -> Iterator[tuple[int, int]]: ...
    def resting_bytes(self) -> dict[Tier, dict[str, int]]: ...

    # what lies on NVMe
    def region(self, kind: str, dtype: torch.dtype) -> Region: ...
    def part(self, kind: str, start: int, stop: int) -> torch.Tensor: ...
    def write_part(self, kind: str, start: int, values: torch.Tensor) -> None: ...

    # gathers
    def put(self) -> None: ...
    def fetch(self) -> bool: ...
    def forget(self) -> None: ...

    # gradients
    def bring_down(self, total: torch.Tensor) -> torch.Tensor: ...
    def take_gradient(
        self, total: torch.Tensor, span: tuple[int, int], wanted: list[Entry]
    ) -> None: ...
    def norm(self, entry: Entry, addresses: tuple[int, int], p: float) -> torch.Tensor: ...
    def finite(self) -> bool: ...
    def scale_by(self, factor: torch.Tensor) -> None: ...


class Activations(Protocol):
    """What is told of an engine's passes. `store` is None where activations stay on the device:
    then nothing happens.
    """

    store: Any

    def begin_forward(self) -> None: ...
    def end_forward(self) -> None: ...
    def end_backward(self) -> None: ...
    def close(self) -> None: ...


@dataclass(frozen=True)
class Capabilities:
    """The makers. See the table of this module."""

    storage: Callable[[Flat, Tiers, Engine], Offloaded]
    activations: Callable[[Engine], Activations]
    codec: Callable[[str], Codec]
    store: Callable[[Recipe, int, bool], Store]  # (recipe, rank, the device has streams)
