"""Stochastic rounding of fp32 to bf16: up or down at random, correct on average.

    fp32   seeeeeeee mmmmmmm|rrrrrrrrrrrrrrrr        bf16 has no bits for the lower half r
    bf16   seeeeeeee mmmmmmm (+1 with probability r / 65536)

[Note: chance depends on the place] An element's 16 random bits are a hash of (kind of tensor, the
parameter's name, the step, the element's index in the parameter). No random generator is used.
So the result does not depend on ranks, tiers, chunks or the order of work, and a run resumed
from a checkpoint continues with the same bits.
"""

from __future__ import annotations

import hashlib
from typing import Any

import torch

# SplitMix64 (Steele, Lea and Flood 2014): a counter, and two multiplications that mix its bits. They
# are signed, as torch's numbers are.
_GAMMA, _MIX_1, _MIX_2 = (
    n - (1 << 64) for n in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
)
# One 64-bit hash serves four elements.
_LANES = 4


def key_of(name: str, what: str) -> int:
    """Return a 64-bit key, as a signed number, for the tensor `what` ("master", "exp_avg", ...) of
    the parameter `name`.
    """
    return int.from_bytes(
        hashlib.blake2b(f"0\0{name}\0{what}".encode(), digest_size=8).digest(),
        "little",
        signed=True,
    )


def to_bf16(
    values: torch.Tensor, key: int, step: Any, first: int, out: torch.Tensor | None = None
) -> torch.Tensor:
    """Round fp32 `values`, [n], to bf16. Returns `out`, [n], or a new tensor.

    `first`: index of the first value in its parameter. `step`: a number, or a 0-dim tensor on the
    host or on the device of `values`. The device does not wait for a step that the host has.
    """
    if not isinstance(step, torch.Tensor) or step.is_cpu:
        step = torch.full((), int(step), dtype=torch.int64, device=values.device)
    of_step = _mixed(step.detach().to(torch.int64, copy=True).reshape(1).mul_(_GAMMA).add_(key))
    if out is None:
        out = torch.empty(values.numel(), dtype=torch.bfloat16, device=values.device)
    bits = values.view(torch.int32) + _random(values.numel(), of_step, first, values.device)
    rounded = (bits & -0x10000).view(torch.float32)
    # The addition may carry a NaN's bits into the sign
    return out.copy_(torch.where(values.isfinite(), rounded, values))


def _random(numel: int, of_step: torch.Tensor, first: int, device: torch.device) -> torch.Tensor:
    """Return random numbers from 0 to 65535, int32, for `numel` elements from `first` on."""
    begin = first // _LANES
    count = -(-(first + numel) // _LANES) - begin
    hashes = (
        torch.arange(begin + 1, begin + count + 1, dtype=torch.int64, device=device)
        .mul_(_GAMMA)
        .add_(of_step)
    )
    lanes = _mixed(hashes).view(torch.int16)[first - begin * _LANES :][:numel]
    return lanes.to(torch.int32) & 0xFFFF


def _mixed(z: torch.Tensor) -> torch.Tensor:
    """Mix the bits of int64 numbers, in place."""
    for shift, factor in ((30, _MIX_1), (27, _MIX_2), (31, 1)):
        z ^= (z >> shift) & ((1 << (64 - shift)) - 1)
        if factor != 1:
            z *= factor
    return z
