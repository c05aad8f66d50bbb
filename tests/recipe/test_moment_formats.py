"""What moments rest in: their sizes and names."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from onefold import Recipe
from onefold.recipe.moments import FORMATS, bytes_of_moments, grain_of, items_of, packed


@pytest.mark.parametrize(
    ("format", "numel", "nbytes"),
    [
        (None, 10_000, 2 * 40_000),
        ("fp32", 10_000, 2 * 40_000),
        ("bf16", 10_000, 2 * 20_000),
        ("int8", 10_000, 2 * (10_000 + 4 * 40)),
        ("fp8", 10_240, 2 * (10_240 + 4 * 40)),
        ("int4", 10_001, 2 * (5_001 + 4 * 79)),
        ("int4", 4_095, 2 * 4 * 4_095),
        ("bf16", 7, 2 * 14),
    ],
)
def test_two_moments_take_the_bytes_of_codes_and_scales(
    format: str | None, numel: int, nbytes: int
) -> None:
    assert bytes_of_moments(numel, format) == nbytes


def test_the_size_of_the_whole_parameter_decides_whether_a_part_is_packed() -> None:
    assert bytes_of_moments(512, "int8", whole=100_000) == 2 * (512 + 8)
    assert bytes_of_moments(512, "int8") == 2 * 4 * 512
    with pytest.raises(ValueError, match=r"moments='int2': expected one of fp32"):
        bytes_of_moments(512, "int2")


@given(
    st.lists(st.integers(0, 40), min_size=1, max_size=8),
    st.integers(0, 255),
    st.sampled_from([1, 2, 128, 256]),
)
def test_the_items_of_parts_that_end_with_blocks_tile_the_items_of_the_whole(
    blocks: list[int], rest: int, grain: int
) -> None:
    ends = [256 * sum(blocks[:i]) for i in range(len(blocks) + 1)]
    ends[-1] += rest
    found = [items_of(a, b, grain) for a, b in zip(ends, ends[1:], strict=False)]
    assert [i for a, b in found for i in range(a, b)] == list(range(-(-ends[-1] // grain)))


def test_keys_of_packed_moments_tell_what_they_are() -> None:
    for name in ("int8", "fp8", "int4"):
        codes, scales = (packed(key) for key in FORMATS[name].keys("exp_avg_sq"))
        assert codes is not None and (codes.key, codes.format.name, codes.scale) == (
            "exp_avg_sq",
            name,
            False,
        )
        assert (
            scales is not None
            and scales.scale
            and scales.grain == FORMATS[name].block
            and scales.dtype == torch.float32
        )
    for other in (
        "exp_avg",
        "step",
        "momentum.int8",
        "exp_avg.int9",
        "exp_avg.bf16",
        "exp_avg.int8.zero",
        3,
        None,
    ):
        assert packed(other) is None and grain_of(other) == 1, other


def test_only_recipes_that_pack_ask_for_whole_blocks() -> None:
    assert {moments: Recipe.zero(3, moments=moments).block for moments in (None, *FORMATS)} == {
        None: 0, "fp32": 0, "bf16": 0, "int8": 256, "fp8": 256, "int4": 256,
    }  # fmt: skip
