"""`Codec`: the interface of an encoding of flat intervals of floats as bytes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import torch

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# Elements that are processed at a time. On a CPU a slab and its scratch fit the second-level cache;
# a GPU needs larger slabs to be busy.
CPU_SLAB, GPU_SLAB = 1 << 18, 1 << 20
#: A call uses at most this many bytes of scratch memory for each element of a slab, however long
#: the interval is.
SCRATCH_BYTES = 24


@dataclass(frozen=True)
class Codec(ABC):
    """An encoding of a flat interval of fp32, bf16 or fp16 as bytes. Codecs are values: two codecs
    with equal fields write equal bytes.

    Every tensor is one-dimensional and contiguous, and all are on one device. No method allocates
    more than `SCRATCH_BYTES` for each element of a slab, so none makes a second copy of the
    interval. On CUDA the host does not wait for the device.

    Args:
        slab: elements that are processed at a time; None for the device's default. The bytes do not
            depend on it.
    """

    name: ClassVar[str]

    slab: int | None = None

    def __post_init__(self) -> None:
        if self.slab is not None and self.slab < 1:
            raise ValueError(
                f"codec {self.name!r} was given a slab of {self.slab} elements, expected at least"
                " 1, or None"
            )

    @property
    def shared(self) -> int:
        """Elements that share a scale; 0 if there are no scales."""
        return 0

    @abstractmethod
    def encoded_bytes(self, numel: int) -> int:
        """Bytes of `numel` encoded elements: payload, scales and padding, to the byte."""

    @torch.no_grad()
    def encode(self, source: torch.Tensor, into: torch.Tensor) -> None:
        """Write `source` (fp32, bf16 or fp16), rounded to the nearest, as bytes over all of `into`
        (uint8, `encoded_bytes(source.numel())` long).

        Raises:
            ValueError: a tensor has the wrong dtype, length, layout or device.
        """
        self._check(source, into, "the tensor to encode")
        self._encode(source, into)

    @torch.no_grad()
    def decode(self, encoded: torch.Tensor, into: torch.Tensor) -> None:
        """Decode `encoded` (uint8) into all of `into` (fp32, bf16 or fp16, whichever dtype was
        encoded).

        Values are computed in fp32 and rounded once to the dtype of `into`.
        """
        self._check(into, encoded, "the tensor to decode into")
        self._decode(encoded, into, 0)

    @torch.no_grad()
    def decode_add(self, encoded: torch.Tensor, into: torch.Tensor) -> None:
        """Decode `encoded`, and add the values to `into`, which must be fp32: sums are never kept
        in 16 bits or encoded.
        """
        self._check(into, encoded, "the sum to add to")
        if into.dtype != torch.float32:
            raise ValueError(
                f"the sum to add to is {into.dtype}, expected torch.float32: decode into a buffer"
                " first if 16 bits are meant"
            )
        self._decode(encoded, into, 1)

    # -- rows: intervals of one length -------------------------------------------------------------
    #
    # The same bytes and values as one call for each row.

    def encode_rows(self, source: torch.Tensor, into: torch.Tensor) -> None:
        """Encode each row of `source`, [rows, numel], into a row of `into`, [rows,
        encoded_bytes(numel)].
        """
        for floats, coded in zip(source, into, strict=True):
            self.encode(floats, coded)

    @torch.no_grad()
    def decode_rows(self, encoded: torch.Tensor, into: torch.Tensor) -> None:
        """Decode each row of `encoded`, [rows, encoded_bytes(numel)], into a row of `into`, [rows,
        numel].
        """
        for coded, floats in zip(encoded, into, strict=True):
            self.decode(coded, floats)

    @torch.no_grad()
    def decode_sum(
        self, encoded: torch.Tensor, own: torch.Tensor, rank: int, into: torch.Tensor
    ) -> None:
        """Write the sum of all rows of `encoded`, decoded, to `into` (fp32, [numel]). They are
        added in order, beginning with +0; `own`, [numel], takes the place of row `rank`.
        """
        into.zero_()
        for i, coded in enumerate(encoded):
            if i == rank:
                into.add_(own)
            else:
                self.decode_add(coded, into)

    @abstractmethod
    def bound(self, magnitudes: torch.Tensor) -> torch.Tensor:
        """Return an upper bound on the error of each element after encoding and decoding into fp32,
        for any interval whose elements have at most these magnitudes.

        Args:
            magnitudes: [numel], finite, not negative. Blocks are counted from the first element.

        Returns:
            fp64, [numel].
        """

    @abstractmethod
    def _encode(self, source: torch.Tensor, into: torch.Tensor) -> None: ...

    @abstractmethod
    def _decode(self, encoded: torch.Tensor, into: torch.Tensor, sign: int) -> None:
        """`into = decoded` if `sign` is 0, else `into += decoded`."""

    def _slab(self, device: torch.device) -> int:
        return self.slab or (CPU_SLAB if device.type == "cpu" else GPU_SLAB)

    def _check(self, floats: torch.Tensor, encoded: torch.Tensor, what: str) -> None:
        if floats.dtype not in DTYPES:
            raise ValueError(
                f"{what} is {floats.dtype}, expected one of {', '.join(str(d) for d in DTYPES)}"
            )
        if floats.dim() != 1 or not floats.is_contiguous():
            raise ValueError(
                f"{what} has shape {tuple(floats.shape)} and strides {floats.stride()}, expected a"
                " flat contiguous interval"
            )
        if encoded.dtype != torch.uint8 or encoded.dim() != 1 or not encoded.is_contiguous():
            raise ValueError(
                f"the encoded bytes are {encoded.dtype} of shape {tuple(encoded.shape)}, expected"
                " flat contiguous torch.uint8"
            )
        wanted = self.encoded_bytes(floats.numel())
        if encoded.numel() != wanted:
            raise ValueError(
                f"the encoded bytes are {encoded.numel()} long, but {self.name!r} writes"
                f" {floats.numel()} elements as {wanted}: give exactly"
                f" encoded_bytes({floats.numel()}) bytes"
            )
        if encoded.device != floats.device:
            raise ValueError(
                f"{what} is on {floats.device} and the encoded bytes are on {encoded.device},"
                " expected one device"
            )
