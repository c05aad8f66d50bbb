"""A tensor stored encoded, such as the frozen base of a fine-tuning run. It exists once over all
ranks, and is gathered in its encoded form.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from onefold.comm.codec import Codec


@dataclass(frozen=True)
class Encoded:
    """A flat interval of `numel` elements, encoded by `codec`.

    `payload` (uint8) holds everything, numbers and scales. So it can be sent, saved and moved
    between tiers like any tensor. The constructor raises if the length of `payload` does not fit.
    """

    payload: torch.Tensor
    numel: int
    codec: Codec

    def __post_init__(self) -> None:
        wanted = self.codec.encoded_bytes(self.numel)
        if self.payload.dtype != torch.uint8 or self.payload.shape != (wanted,):
            raise ValueError(
                f"the payload is {self.payload.dtype} of shape {tuple(self.payload.shape)},"
                f" expected {wanted} bytes of torch.uint8 for {self.numel} elements of codec"
                f" {self.codec.name!r}"
            )

    @classmethod
    def of(cls, source: torch.Tensor, codec: Codec) -> Encoded:
        """Encode a flat interval (fp32, bf16 or fp16), rounded to the nearest. The result does not
        refer to `source`.
        """
        payload = torch.empty(
            codec.encoded_bytes(source.numel()), dtype=torch.uint8, device=source.device
        )
        codec.encode(source, payload)
        return cls(payload, source.numel(), codec)

    @property
    def nbytes(self) -> int:
        return self.payload.numel()

    @property
    def bits(self) -> float:
        """Bits per element, scales included."""
        return 8 * self.nbytes / max(self.numel, 1)

    def decode(self, into: torch.Tensor) -> None:
        """Write the elements over all of `into`: flat, `numel` long, fp32, bf16 or fp16."""
        self.codec.decode(self.payload, into)
