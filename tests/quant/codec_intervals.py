"""What each codec promises, by its name; intervals to encode: hypothesis strategies and small helpers
for the tests of codecs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import strategies as st

from onefold.quant import CODECS, Blockwise, Codec, Stochastic, codec
from onefold.quant.nf4 import levels

BLOCKWISE = tuple(name for name in CODECS if name != "plain")
ROUNDED = tuple(name for name in BLOCKWISE if CODECS[name].stochastic)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Promise:
    """What a block-wise codec promises.

    bits: of an element, without scales. off: (magnitudes, scales) -> how far an element may be off,
    rounded to the nearest. finest: the smallest gap between two numbers, as a share of the scale.
    lost: how much of normally distributed weights is lost, at least and at most.
    """

    bits: int
    off: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    lost: tuple[float, float]
    finest: float = 1.0


def half_a_step(size: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return scale / 2


def half_a_unit_of_e4m3(size: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return torch.maximum(size / 16, scale * 2.0**-10)


def half_the_widest_gap_of_nf4(size: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return scale * max(b - a for a, b in zip(levels(), levels()[1:], strict=False)) / 2


#: A new codec needs a line here. int4 loses a step over the square root of 12, and blocks of 64
#: normal values have a largest of some 2.4 deviations: 0.1. The gaps of nf4 are no multiples of one.
PROMISES: dict[str, Promise] = {
    "int8": Promise(8, half_a_step, (0.0, 0.01)),
    "fp8": Promise(8, half_a_unit_of_e4m3, (0.01, 0.03), finest=2.0**-9),
    "int4": Promise(4, half_a_step, (0.09, 0.12)),
    "nf4": Promise(4, half_the_widest_gap_of_nf4, (0.07, 0.105)),
}
#: Every property is tried with blocks and slabs small enough for several of each in a short
#: interval.
codecs = st.tuples(
    st.sampled_from(BLOCKWISE), st.sampled_from([16, 64, 256]), st.sampled_from([16, 320, 1 << 16])
).map(lambda fields: codec(fields[0], block=fields[1], slab=fields[2]))
rounded = codecs.filter(lambda c: c.stochastic)
roundings = st.builds(
    Stochastic, st.integers(0, 2**63 - 1), st.integers(0, 2**40), st.integers(0, 2**36)
)
lengths = st.one_of(st.integers(0, 70), st.integers(200, 700))


@st.composite
def intervals(
    draw: Any, numels: st.SearchStrategy[int] = lengths, dtypes: tuple[torch.dtype, ...] = DTYPES
) -> torch.Tensor:
    """Finite floats of any size: stretches of zeros, of one magnitude, of subnormals, of the
    largest float; and some at random places.
    """
    numel, dtype = draw(numels), draw(st.sampled_from(dtypes))
    info = torch.finfo(dtype)
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    found = torch.randn(numel, generator=generator, dtype=torch.float64)
    for start in range(0, numel, 48):  # no multiple of a block, so that blocks are mixed
        kind = draw(st.sampled_from(["ordinary", "ordinary", "zero", "tiny", "largest", "any"]))
        factor = {
            "ordinary": 1.0,
            "zero": 0.0,
            "tiny": 4 * info.smallest_normal,
            "largest": info.max / 2,
        }
        found[start : start + 48] *= (
            factor[kind] if kind in factor else 2.0 ** draw(st.integers(-149, 120))
        )
    values = found.clamp(info.min, info.max).to(dtype)
    for value in draw(
        st.lists(
            st.floats(width=32, allow_nan=False, allow_infinity=False), max_size=4 if numel else 0
        )
    ):
        values[draw(st.integers(0, numel - 1))] = max(info.min, min(info.max, value))
    return values


def encoded(by: Codec, source: torch.Tensor, rounding: Stochastic | None = None) -> torch.Tensor:
    """The bytes, over a buffer that held something else."""
    out = torch.full((by.encoded_bytes(source.numel()),), 0xA5, dtype=torch.uint8)
    by.encode(source, out, rounding=rounding)
    return out


def decoded(
    by: Codec,
    source: torch.Tensor,
    dtype: torch.dtype = torch.float32,
    rounding: Stochastic | None = None,
) -> torch.Tensor:
    out = torch.full((source.numel(),), 7.0, dtype=dtype)
    by.decode(encoded(by, source, rounding), out)
    return out


def steps(by: Blockwise, source: torch.Tensor, rounding: Stochastic | None = None) -> torch.Tensor:
    """The scale of each element's block as the bytes have it, in fp64."""
    _, kept = by.split(encoded(by, source, rounding), source.numel())
    return by.scales.read(kept).double().repeat_interleave(by.block)[: source.numel()]


def largest_of_blocks(by: Blockwise, source: torch.Tensor) -> torch.Tensor:
    """The largest magnitude of each element's block, in fp64."""
    rows = torch.nn.functional.pad(source.double().abs(), (0, -source.numel() % by.block)).view(
        -1, by.block
    )
    return rows.amax(1).repeat_interleave(by.block)[: source.numel()]
