"""Frozen weights that are stored encoded, and the encoding of a flat buffer's intervals."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from onefold.quant.codecs import CODECS
from onefold.runtime.storage import Storage

if TYPE_CHECKING:
    from onefold.runtime.engine import Engine
    from onefold.runtime.flat import Entry, Flat


class EncodedIntervals:
    """Encodes and decodes the ranks' intervals of a flat buffer. Each interval is encoded
    separately and takes `each` bytes, so the bytes do not depend on the groups.

        values   | interval 0 | interval 1 | interval 2 | ...     shard_numel elements each
        bytes    | each       | each       | each       | ...     a multiple of 16
    """

    def __init__(self, flat: Flat, codec: str | None) -> None:
        self.codec, self.numel = CODECS[codec or ""], flat.layout.shard_numel
        self.used = self.codec.encoded_bytes(self.numel)
        self.each = flat.spec.each

    def bytes_of(self, addresses: tuple[int, int]) -> tuple[int, int]:
        """Return where the bytes of whole intervals, given by their addresses, begin and end."""
        a, b = (edge // max(self.numel, 1) * self.each for edge in addresses)
        return a, b

    def encode(self, values: torch.Tensor, coded: torch.Tensor) -> None:
        """Encode `values` of some intervals into their bytes `coded`."""
        if self.numel and values.numel():
            self.codec.encode(values.view(-1, self.numel), self.rows(coded))

    def decode(self, coded: torch.Tensor, values: torch.Tensor) -> None:
        """Decode the bytes `coded` of some intervals into `values`."""
        if self.numel and values.numel():
            self.codec.decode(self.rows(coded), values.view(-1, self.numel))

    def rows(self, coded: torch.Tensor) -> torch.Tensor:
        """Return the bytes of intervals without their padding, [intervals, used]."""
        return coded.view(-1, self.each)[:, : self.used]


class EncodedStorage(Storage):
    """Frozen weights that are stored only as the bytes that gathers send (QLoRA's base).

    Attributes:
        payload: the intervals that this rank owns, encoded.
    """

    in_place = False
    payload: torch.Tensor

    def __init__(self, flat: Flat, engine: Engine) -> None:
        super().__init__(flat)
        self.intervals = EncodedIntervals(flat, engine.recipe.frozen)

    def build(self, device: torch.device) -> torch.Tensor:
        self.payload = torch.empty(self.flat.spec.cached_bytes, dtype=torch.uint8, device=device)
        return torch.empty(self.numel, dtype=self.flat.dtypes.master, device=device)

    def decoded(self) -> torch.Tensor:
        values = torch.empty(self.numel, dtype=self.flat.dtypes.master, device=self.payload.device)
        self.intervals.decode(self.payload, values)
        return values

    def store(self, values: torch.Tensor) -> None:
        self.intervals.encode(values, self.payload)

    def refuse_training(self, entry: Entry) -> None:
        raise ValueError(
            f"parameter {entry.slot.name!r} was frozen when the model was sharded, so it is stored"
            " encoded, and cannot be trained now. Leave requires_grad=True while calling shard()"
            " and freeze it afterwards, or leave frozen out of the recipe."
        )

    def put(self, full: torch.Tensor) -> None:
        """Do nothing: `EncodedGather` sends the bytes."""
