"""The codec without compression: the elements themselves, in a dtype."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from onefold.comm.codec import DTYPES, Codec


@dataclass(frozen=True)
class Plain(Codec):
    """Elements converted to `dtype` (fp32, bf16 or fp16). Infinities and NaN do not change."""

    name: ClassVar[str] = "plain"

    dtype: torch.dtype = torch.float32

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.dtype not in DTYPES:
            raise ValueError(
                f"codec 'plain' was given dtype {self.dtype}, expected one of"
                f" {', '.join(str(d) for d in DTYPES)}"
            )

    def encoded_bytes(self, numel: int) -> int:
        return numel * self.dtype.itemsize

    def bound(self, magnitudes: torch.Tensor) -> torch.Tensor:
        info = torch.finfo(self.dtype)
        return magnitudes.double().clamp(min=info.smallest_normal) * (info.eps / 2)

    def _encode(self, source: torch.Tensor, into: torch.Tensor) -> None:
        self._values(into).copy_(source)

    def _decode(self, encoded: torch.Tensor, into: torch.Tensor, sign: int) -> None:
        values, slab = self._values(encoded), self._slab(into.device)
        if not sign:
            into.copy_(values)
            return
        # By slabs: torch would convert all of an addend of another dtype at once
        for start in range(0, into.numel(), slab):
            into[start : start + slab].add_(values[start : start + slab], alpha=sign)

    def _values(self, encoded: torch.Tensor) -> torch.Tensor:
        if encoded.storage_offset() % self.dtype.itemsize:
            raise ValueError(
                f"the encoded bytes start at byte {encoded.storage_offset()} of their storage, "
                f"expected a multiple of {self.dtype.itemsize} for {self.dtype}"
            )
        return encoded.view(self.dtype)
