"""What moments rest in: their sizes and names."""

from __future__ import annotations

from onefold.recipe.moments import bytes_of_moments


def test_two_moments_take_the_bytes_of_codes_and_scales() -> None:
    for format, numel, nbytes in (
        (None, 10_000, 2 * 40_000),
        ("bf16", 10_000, 2 * 20_000),
        ("int8", 10_000, 2 * (10_000 + 4 * 40)),
        ("int4", 10_001, 2 * (5_001 + 4 * 79)),
        ("int4", 4_095, 2 * 4 * 4_095),  # too small to be packed
    ):
        assert bytes_of_moments(numel, format) == nbytes, format


def test_the_size_of_the_whole_parameter_decides_whether_a_part_is_packed() -> None:
    assert bytes_of_moments(512, "int8", whole=100_000) == 2 * (512 + 8)
    assert bytes_of_moments(512, "int8") == 2 * 4 * 512
