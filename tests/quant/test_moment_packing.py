"""Codes are torchao's to the last bit; rounding by chance is right on average, and depends on
nothing but seed, step and place.
"""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from onefold.quant.bf16_rounding import key_of, to_bf16


def values(name: str, signed: bool) -> torch.Tensor:
    """Numbers of -1 to 1 that try a map: random ones of many sizes, and all places where its
    rounding changes, with their neighbours.
    """
    from onefold.quant.moment_packing import _library

    generator = torch.Generator().manual_seed(0)
    steps, _ = _library(name, signed)
    places = (steps[1:] + steps[:-1]) / 2
    size = 10.0 ** -(8 * torch.rand(20000, generator=generator))
    near = [torch.nextafter(places, torch.full_like(places, to)) for to in (-2.0, 2.0)]
    odd = torch.tensor([0.0, -0.0, 1.0, -1.0, math.nan, 1e-40, -1e-40])
    return torch.cat(
        [size * (2 * torch.rand(20000, generator=generator) - 1), places, *near, steps, odd]
    ).clamp(-1, 1)


@pytest.mark.parametrize("signed", [True, False])
@pytest.mark.parametrize("name", ["int8", "int4"])
def test_codes_are_those_of_torchaos_own_search(name: str, signed: bool) -> None:
    pytest.importorskip("torchao")
    from onefold.quant.moment_packing import MomentPacking, _library
    from onefold.recipe.moments import FORMATS

    steps, quantize = _library(name, signed)
    x = values(name, signed)
    found = MomentPacking(FORMATS[name], torch.device("cpu"))._nearest(x, signed)
    assert torch.equal(found, quantize(x, steps)), x[found != quantize(x, steps)][:5]


@pytest.mark.parametrize(
    ("name", "kind"),
    [("int8", "OptimState8bit"), ("int4", "OptimState4bit"), ("fp8", "OptimStateFp8")],
)
def test_a_packed_moment_is_what_torchaos_tensor_holds(name: str, kind: str) -> None:
    pytest.importorskip("torchao")
    import torchao.optim.subclass_4bit as bit4
    import torchao.optim.subclass_8bit as bit8
    import torchao.optim.subclass_fp8 as fp8

    from onefold.quant.moment_packing import MomentPacking
    from onefold.recipe.moments import FORMATS

    f, x = FORMATS[name], torch.randn(1024, generator=torch.Generator().manual_seed(1)) * 1e-3
    made = next(getattr(module, kind) for module in (bit8, bit4, fp8) if hasattr(module, kind))
    theirs = (
        made.zeros((1024,), block_size=f.block)
        if name == "fp8"
        else made.zeros((1024,), True, f.block)
    )
    theirs.copy_(x)
    codes, scales = torch.empty(1024 // f.grain, dtype=f.dtype), torch.empty(1024 // f.block)
    codec = MomentPacking(f, torch.device("cpu"))
    codec.encode(x, True, codes, scales)
    assert torch.equal(codes.view(torch.uint8), theirs.codes.view(torch.uint8)) and torch.equal(
        scales, theirs.scale
    )
    assert torch.equal(codec.decode(codes, scales, 1024, True), theirs.dequantize())


@given(st.integers(1, 700))
def test_a_shorter_last_block_is_packed_like_a_whole_one(numel: int) -> None:
    pytest.importorskip("torchao")
    from onefold.quant.moment_packing import MomentPacking
    from onefold.recipe.moments import FORMATS

    x = torch.randn(1024, generator=torch.Generator().manual_seed(numel))
    for name in ("int8", "int4", "fp8"):
        f, codec = FORMATS[name], MomentPacking(FORMATS[name], torch.device("cpu"))
        codes, scales = (
            torch.empty(-(-numel // f.grain), dtype=f.dtype),
            torch.empty(-(-numel // f.block)),
        )
        codec.encode(x[:numel], True, codes, scales)
        back, step = (
            codec.decode(codes, scales, numel, True),
            {"int8": 0.015, "int4": 0.17, "fp8": 1 / 16}[name],
        )
        assert codes.element_size() * codes.numel() + 4 * scales.numel() == f.nbytes(numel)
        assert (back - x[:numel]).abs().max() <= step * x[:numel].abs().max(), name


def test_rounding_by_chance_is_right_on_average() -> None:
    """n roundings of x between neighbours a distance d apart, up with probability p: their mean has
    the standard deviation d·sqrt(p(1-p)/n). Six of them are exceeded once in 500 million tries.
    """
    n = 40000
    for i, x in enumerate((1.001, -3.14159, 1e-30, 0.7501, 12345.678)):
        exact = torch.full((n,), x, dtype=torch.float32)
        rounded = to_bf16(exact, key_of(0, "weight", str(i)), torch.tensor(7.0), 0).double()
        low, high = rounded.min().item(), rounded.max().item()
        p = (exact[0].item() - low) / (high - low)
        assert low < exact[0].item() < high and 0 < p < 1, "both neighbours are met"
        bound = 6 * (high - low) * math.sqrt(p * (1 - p) / n)
        assert abs(rounded.mean().item() - exact[0].item()) < bound, (
            x,
            rounded.mean().item(),
            bound,
        )
        up = (rounded == high).double()
        together = ((up[1:] - p) * (up[:-1] - p)).mean().item()
        assert abs(together) < 6 * p * (1 - p) / math.sqrt(n), (
            f"neighbours are rounded independently: {together}"
        )


@given(st.integers(0, 1000), st.integers(1, 300), st.integers(1, 299))
def test_an_elements_chance_is_its_own_wherever_a_piece_begins(
    first: int, numel: int, cut: int
) -> None:
    x, key, step = (
        torch.randn(numel, generator=torch.Generator().manual_seed(first)),
        key_of(3, "w", "exp_avg"),
        torch.tensor(5.0),
    )
    whole, cut = to_bf16(x, key, step, first), min(cut, numel)
    assert torch.equal(
        whole,
        torch.cat([to_bf16(x[:cut], key, step, first), to_bf16(x[cut:], key, step, first + cut)]),
    )


def test_seed_step_name_and_moment_each_change_the_chance() -> None:
    x = torch.full((4096,), 1.001)

    def rounded(seed: int, name: str, what: str, step: float) -> torch.Tensor:
        return to_bf16(x, key_of(seed, name, what), torch.tensor(step), 0)

    first = rounded(0, "w", "exp_avg", 1.0)
    assert torch.equal(first, rounded(0, "w", "exp_avg", 1.0))
    for other in (
        (1, "w", "exp_avg", 1.0),
        (0, "v", "exp_avg", 1.0),
        (0, "w", "master", 1.0),
        (0, "w", "exp_avg", 2.0),
    ):
        assert not torch.equal(first, rounded(*other)), other


def test_what_bf16_can_hold_and_what_is_no_number_stays() -> None:
    x = torch.tensor([0.0, -0.0, 1.5, -2.0, math.inf, -math.inf])
    kept = to_bf16(x, 1, torch.tensor(1.0), 0)
    assert torch.equal(kept.float().view(torch.int32), x.view(torch.int32))
    nan = torch.tensor([0x7F800001, -1], dtype=torch.int32).view(torch.float32)
    assert to_bf16(nan, 1, torch.tensor(1.0), 0).isnan().all()
