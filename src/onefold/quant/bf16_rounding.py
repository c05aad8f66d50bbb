"""Rounding fp32 to bf16 up or down by chance, so that it is right on average.

    fp32   seeeeeeee mmmmmmm|rrrrrrrrrrrrrrrr        the lower half r is what bf16 has no place for
    bf16   seeeeeeee mmmmmmm (+1 with probability r / 65536)

[Note: chance depends on the place] The 16 random bits of an element are those of a hash of (seed,
what is rounded, the parameter's name, the step, the element's index in the parameter). Nobody draws
from a generator, so neither ranks nor tiers, chunks, tiles or the order of work change a bit, and a
run that goes on from a checkpoint goes on as it would have.
"""

from __future__ import annotations

import hashlib

import torch

# A hash of 64 bits serves four elements: SplitMix64 (Steele, Lea and Flood 2014), a counter whose
# bits are mixed by two multiplications.
_LANES = 4
_GAMMA, _MIX_1, _MIX_2 = (
    n - (1 << 64) for n in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
)


def key_of(seed: int, name: str, what: str) -> int:
    """64 bits, as a signed number, for one tensor: `what` is rounded of the parameter `name`."""
    return int.from_bytes(
        hashlib.blake2b(f"{seed}\0{name}\0{what}".encode(), digest_size=8).digest(),
        "little",
        signed=True,
    )


def to_bf16(values: torch.Tensor, key: int, step: torch.Tensor, first: int) -> torch.Tensor:
    """fp32 `values`, [n], in bf16; they are elements `first` and on of their parameter. `step`: a
    0-dim tensor on any device.
    """
    bits = values.view(torch.int32) + _random(values.numel(), key, step, first, values.device)
    rounded = (bits & -0x10000).view(torch.float32)
    # The sum may carry a NaN's bits into its sign
    return torch.where(values.isfinite(), rounded, values).to(torch.bfloat16)


def _random(
    numel: int, key: int, step: torch.Tensor, first: int, device: torch.device
) -> torch.Tensor:
    """Numbers from 0 to 65535, int32, for elements `first` and on."""
    begin = first // _LANES
    count = -(-(first + numel) // _LANES) - begin
    of_step = _mixed(
        step.detach().to(device, torch.int64, copy=True).reshape(1).mul_(_GAMMA).add_(key)
    )
    hashes = (
        torch.arange(begin + 1, begin + count + 1, dtype=torch.int64, device=device)
        .mul_(_GAMMA)
        .add_(of_step)
    )
    lanes = _mixed(hashes).view(torch.int16)[first - begin * _LANES :][:numel]
    return lanes.to(torch.int32) & 0xFFFF


def _mixed(z: torch.Tensor) -> torch.Tensor:
    """The bits of int64 numbers mixed, in place."""
    for shift, factor in ((30, _MIX_1), (27, _MIX_2), (31, 1)):
        z ^= (z >> shift) & ((1 << (64 - shift)) - 1)
        if factor != 1:
            z *= factor
    return z
