"""What moments rest in: their sizes and names."""

from __future__ import annotations

from onefold.recipe.moments import FORMATS


def test_a_moment_takes_the_bytes_of_codes_and_scales() -> None:
    for format, numel, nbytes in (
        ("fp32", 10_000, 40_000),
        ("bf16", 10_000, 20_000),
        ("int8", 10_000, 10_000 + 4 * 40),
        ("int4", 10_001, 5_001 + 4 * 79),
        ("int4", 4_095, 4 * 4_095),  # too small to be packed
    ):
        assert FORMATS[format].of(numel).nbytes(numel) == nbytes, format


def test_the_size_of_the_whole_parameter_decides_whether_a_part_is_packed() -> None:
    assert FORMATS["int8"].of(100_000).nbytes(512) == 512 + 8
    assert FORMATS["int8"].of(512).nbytes(512) == 4 * 512
