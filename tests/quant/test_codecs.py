"""What every codec promises: errors bounded for any floats, exact sizes, bytes that depend on their
own block only.
"""

from __future__ import annotations

import pytest
import torch
from codec_intervals import (
    BLOCKWISE,
    DTYPES,
    PROMISES,
    codecs,
    decoded,
    encoded,
    intervals,
    largest_of_blocks,
    lengths,
    rounded,
    roundings,
    steps,
)
from hypothesis import example, given
from hypothesis import strategies as st

from examples import examples
from onefold.quant import CODECS, Blockwise, codec
from onefold.quant.nf4 import levels

FEW = examples(60)


def allowed(by: Blockwise, source: torch.Tensor) -> torch.Tensor:
    """How far each element may be off in fp32, in fp64: what its codec promises, and fp32's rounding
    of a value.
    """
    half = PROMISES[by.name].off(source.double().abs(), steps(by, source))
    return half + largest_of_blocks(by, source) * 2.0**-22


@FEW
@given(codecs, intervals())
@example(codec("int8"), torch.tensor([torch.finfo(torch.float32).max, 1.0, -3e38, 0.0]))
@example(codec("int4"), torch.tensor([torch.finfo(torch.float32).min] * 65))
@example(codec("int8"), torch.tensor([1e-45, -1e-45, 0.0, 1e-38]))
def test_an_element_is_off_by_half_a_step_of_its_block_at_most(by, source):
    off = (decoded(by, source).double() - source.double()).abs()
    bound = allowed(by, source)
    worst = int((off - bound).argmax()) if source.numel() else 0
    assert (off <= bound).all(), (by, source[worst], off[worst], bound[worst])


@FEW
@given(codecs, intervals(), st.none() | roundings)
def test_a_step_is_the_blocks_largest_over_the_codecs_largest_in_bf16(by, source, rounding):
    """Off by one part in 256; where rounding is stochastic, up by one in 128, so that the largest
    is not cut off. Scales have 16 bits.
    """
    rounding = rounding if by.stochastic else None
    scale, wanted = (
        steps(by, source, rounding),
        (largest_of_blocks(by, source) / by.top).clamp(min=2.0**-125),
    )
    low, high = (0, 2.0**-7) if rounding else (-(2.0**-8), 2.0**-8)
    end = torch.full_like(wanted, torch.finfo(torch.bfloat16).max / by.top)
    assert (scale >= torch.minimum(wanted * (1 + low), end) * (1 - 2.0**-15)).all(), (
        by,
        scale,
        wanted,
    )
    assert (scale <= wanted * (1 + high) * (1 + 2.0**-22)).all(), (by, scale, wanted)


@FEW
@given(codecs, intervals(), st.none() | roundings)
def test_no_error_is_above_the_bound_of_its_magnitudes(by, source, rounding):
    rounding = rounding if by.stochastic else None
    off = (decoded(by, source, rounding=rounding).double() - source.double()).abs()
    bound = by.bound(source.abs(), stochastic=rounding is not None)
    assert (off <= bound).all(), (by, source, off - bound)
    assert (
        by.bound(source.abs().double() * 1.5 + 1e-30, stochastic=rounding is not None) >= bound
    ).all(), by
    assert (
        bound <= allowed(by, source) * (1.0 if rounding is None else 2.0) * (1 + 2.0**-6)
    ).all(), "the bound is looser than the codec"


@FEW
@given(codecs, intervals(), st.sampled_from(DTYPES), st.booleans())
@example(
    codec("int8"),
    torch.full((300,), torch.finfo(torch.float16).max, dtype=torch.float16),
    torch.float16,
    False,
)
@example(codec("int8"), torch.full((300,), torch.finfo(torch.float32).max), torch.float32, True)
# Every scale that bf16 has
@example(
    codec("int8"),
    torch.arange(128, 256).float().repeat_interleave(256) * 127,
    torch.bfloat16,
    False,
)
@example(
    codec("fp8"), torch.arange(128, 256).float().repeat_interleave(256) * 448, torch.bfloat16, True
)
@example(
    codec("int4"), torch.arange(128, 256).float().repeat_interleave(64) * 7, torch.bfloat16, True
)
def test_what_was_decoded_encodes_to_the_same_bytes(by, source, kept_in, through_bf16):
    """Whatever it was kept in meanwhile: saved in fp32 or in the dtype that is computed in, or
    exported in bf16.
    """
    source = (
        source.to(kept_in) if (source.double().abs() <= torch.finfo(kept_in).max).all() else source
    )
    kept = decoded(by, source, source.dtype)
    if through_bf16 and source.dtype != torch.float16:
        kept = kept.to(torch.bfloat16)
    again = torch.empty_like(kept)
    by.decode(encoded(by, kept), again)
    assert torch.equal(again, kept), (by, source)
    # Near zero the dtype's own steps may be coarser than a block's: other bytes, the same values.
    own = torch.finfo(kept.dtype).smallest_normal * torch.finfo(kept.dtype).eps
    finest = steps(by, source) * PROMISES[by.name].finest
    if (finest > 2 * own).all():
        assert torch.equal(encoded(by, kept), encoded(by, source)), (by, source)


@FEW
@given(codecs, intervals(), st.sampled_from(DTYPES))
def test_decoding_into_16_bits_is_decoding_in_fp32_and_rounding_once(by, source, dtype):
    got, exact, limit = decoded(by, source, dtype), decoded(by, source), torch.finfo(dtype).max
    inside = exact.abs() <= limit
    assert torch.equal(got[inside], exact[inside].to(dtype)), (by, source)


@FEW
@given(codecs, intervals())
@example(codec("int8"), torch.full((300,), torch.finfo(torch.float16).max, dtype=torch.float16))
@example(codec("int8"), torch.full((300,), torch.finfo(torch.bfloat16).min, dtype=torch.bfloat16))
def test_what_a_dtype_could_hold_comes_back_finite_in_it(by, source):
    assert decoded(by, source, source.dtype).isfinite().all(), (by, source)


def test_what_a_narrower_dtype_cannot_hold_becomes_infinite_in_it():
    for name in BLOCKWISE:
        got = decoded(codec(name), torch.tensor([1e6, -1e6, 0.0]), torch.float16)
        assert got.tolist() == [torch.inf, -torch.inf, 0.0], (name, got)


@FEW
@given(codecs, intervals(st.integers(1, 700)), st.data())
def test_an_infinity_or_nan_makes_its_block_nan_and_no_other(by, source, data):
    at, bad = (
        data.draw(st.integers(0, source.numel() - 1)),
        data.draw(st.sampled_from([torch.inf, -torch.inf, torch.nan])),
    )
    hurt = source.clone()
    hurt[at] = bad
    inside = torch.arange(source.numel()) // by.block == at // by.block
    for dtype in DTYPES:
        got, clean = decoded(by, hurt, dtype), decoded(by, source, dtype)
        assert got[inside].isnan().all() and torch.equal(got[~inside], clean[~inside]), (
            by,
            dtype,
            got,
        )
    total = torch.zeros(source.numel())
    by.decode_add(encoded(by, hurt), total)
    assert not total.sum().isfinite() and torch.equal(
        total[~inside], decoded(by, source)[~inside]
    ), (by, total)
    assert (
        not by.split(encoded(by, hurt), hurt.numel())[0]
        .view(-1)[inside.nonzero()[0] // by.packed[0] : 1]
        .any()
    ), by


def test_the_plain_codec_hands_infinities_nan_and_every_bit_on():
    for dtype in DTYPES:
        info = torch.finfo(dtype)
        source = torch.tensor(
            [0.0, -0.0, 1.5, torch.inf, -torch.inf, torch.nan, info.max, info.tiny / 2], dtype=dtype
        )
        got = decoded(codec("plain", dtype=dtype), source, dtype)
        assert torch.equal(got.view(torch.uint8), source.view(torch.uint8)), (dtype, got)


@given(codecs, lengths)
def test_encoded_bytes_are_the_payload_to_an_even_byte_and_two_a_block(by, numel):
    elements, nbytes = by.packed
    assert nbytes * 8 == elements * PROMISES[by.name].bits, by
    payload = (numel + elements - 1) // elements * nbytes
    expected = payload + payload % 2 + 2 * ((numel + by.block - 1) // by.block)
    assert by.encoded_bytes(numel) == expected, (by, numel)


def test_scales_weigh_under_three_percent_of_an_int8_gather_and_an_int4_reduction():
    numel = 110_000_000
    sent = codec("int8").encoded_bytes(numel) + codec("int4").encoded_bytes(numel)
    assert 1.5 * numel < sent < 1.03 * 1.5 * numel, (
        f"{sent} bytes for {numel} elements: {sent / (1.5 * numel):.4f} of 0.75 times 16 bits"
    )


@FEW
@given(codecs, intervals(), st.integers(0, 4).map(lambda n: 2 * n))
def test_encoding_writes_each_of_its_bytes_and_no_other(by, source, before):
    size = by.encoded_bytes(source.numel())
    found = []
    for filling in (0x00, 0xFF):
        buffer = torch.full((before + size + 5,), filling, dtype=torch.uint8)
        by.encode(source, buffer[before : before + size])
        assert (buffer[:before] == filling).all() and (buffer[before + size :] == filling).all(), (
            by,
            buffer,
        )
        found.append(buffer[before : before + size])
    assert torch.equal(*found), by


@FEW
@given(codecs, intervals(), st.none() | roundings)
def test_bytes_do_not_depend_on_the_slab_they_are_made_in(by, source, rounding):
    rounding = rounding if by.stochastic else None
    other = [codec(by.name, block=by.block, slab=slab) for slab in (by.block, 3 * by.block, None)]
    expected = encoded(by, source, rounding)
    for same in other:
        assert torch.equal(encoded(same, source, rounding), expected), (by, same)
        assert torch.equal(decoded(same, source), decoded(by, source)), (by, same)


@FEW
@given(codecs, intervals(st.integers(1, 700)), st.none() | roundings, st.data())
def test_an_interval_cut_at_a_blocks_boundary_has_the_bytes_of_the_whole(
    by, source, rounding, data
):
    rounding = rounding if by.stochastic else None
    cut = data.draw(st.integers(0, source.numel() // by.block)) * by.block
    parts = []
    for start, part in ((0, source[:cut]), (cut, source[cut:])):
        mine = (
            type(rounding)(rounding.seed, rounding.step, rounding.address + start)
            if rounding
            else None
        )
        parts.append(by.split(encoded(by, part, mine), part.numel()))
    payload, scales = by.split(encoded(by, source, rounding), source.numel())
    assert torch.equal(torch.cat([parts[0][0], parts[1][0]]), payload), (by, cut)
    assert torch.equal(
        torch.cat([parts[0][1], parts[1][1]]).view(torch.int16), scales.view(torch.int16)
    ), (by, cut)


@FEW
@given(
    codecs | st.sampled_from([codec("plain", dtype=d, slab=33) for d in DTYPES]),
    intervals(),
    st.integers(0, 2**31),
)
def test_decode_add_adds_in_fp32_what_decode_writes(by, source, seed):
    held = torch.randn(source.numel(), generator=torch.Generator().manual_seed(seed))
    expected = held + decoded(by, source)
    by.decode_add(encoded(by, source), held)
    assert torch.equal(held, expected), by


@FEW
@given(codecs | st.sampled_from([codec("plain", dtype=d, slab=33) for d in DTYPES]), intervals())
def test_the_residual_is_what_encoding_lost(by, source):
    lost = source.clone()
    by.keep_residual(encoded(by, source), lost)
    expected = (source.float() - decoded(by, source)).to(source.dtype)
    assert torch.equal(lost, expected.nan_to_num(0.0, 0.0, 0.0)), (by, lost, expected)


@FEW
@given(rounded, st.integers(0, 2**31))
def test_with_error_feedback_the_sum_of_what_was_sent_is_off_by_one_step_at_most(by, seed):
    """Each time the residual is within a step, and it is all that the sums differ by."""
    source = torch.randn(300, generator=torch.Generator().manual_seed(seed))
    residual, sent = torch.zeros(300), torch.zeros(300, dtype=torch.float64)
    for _ in range(12):
        offered = source + residual
        sent += decoded(by, offered).double()
        residual.copy_(offered)
        by.keep_residual(encoded(by, offered), residual)
    bound = allowed(by, offered) + 12 * 4 * 2.0**-24 * largest_of_blocks(by, offered)
    assert ((sent - 12 * source.double()).abs() <= bound).all(), by


def test_a_residual_of_what_is_not_finite_is_zero():
    source = torch.tensor([1.0, torch.inf, torch.nan, 2.0])
    for name in BLOCKWISE:
        lost = source.clone()
        codec(name).keep_residual(encoded(codec(name), source), lost)
        assert lost.tolist() == [0.0] * 4, (name, lost)


def test_fp8_is_torchs_own_e4m3_of_the_scaled_value():
    by, source = codec("fp8"), torch.randn(1000, generator=torch.Generator().manual_seed(1))
    inverse = 1.0 / steps(by, source).float()
    assert torch.equal(
        by.split(encoded(by, source), 1000)[0].view(torch.float8_e4m3fn),
        (source * inverse).to(torch.float8_e4m3fn),
    )


def test_nf4_takes_the_nearest_of_16_levels_of_which_zero_is_one():
    table = torch.tensor(levels(), dtype=torch.float64)
    assert (
        len(table) == 16
        and table[0] == -1
        and table[7] == 0
        and table[15] == 1
        and (table.diff() > 0).all()
    ), table
    by, source = codec("nf4"), torch.randn(1000, generator=torch.Generator().manual_seed(2))
    scale = steps(by, source)
    gaps = ((source.double() / scale)[:, None] - table).abs()
    taken = ((decoded(by, source).double() / scale)[:, None] - table).abs()
    assert (taken.amin(1) < 1e-6).all() and (
        gaps.gather(1, taken.argmin(1)[:, None])[:, 0] <= gaps.amin(1) + 1e-6
    ).all()


def test_the_codecs_of_equal_names_and_fields_are_equal():
    assert set(CODECS) >= {"plain", "int8", "int4", "fp8", "nf4"}
    for name in CODECS:
        assert (
            codec(name) == codec(name)
            and hash(codec(name)) == hash(codec(name))
            and codec(name).name == name
        )
    assert codec("int8", block=64) != codec("int8"), "the block is part of what bytes mean"


def test_bad_input_is_answered_with_what_to_give_instead():
    int8, source = codec("int8"), torch.randn(10)
    buffer = torch.empty(int8.encoded_bytes(10), dtype=torch.uint8)
    for act, said in (
        (lambda: codec("int9"), "no codec 'int9'.*did you mean 'int8'"),
        (lambda: codec("int8", blocks=3), "has no blocks, expected some of .*block"),
        (lambda: codec("int8", block=100), "a block of 100 elements, expected a power of two"),
        (lambda: codec("int8", slab=0), "a slab of 0 elements, expected at least 1"),
        (
            lambda: codec("plain", dtype=torch.float64),
            "dtype torch.float64, expected one of torch.float32",
        ),
        (
            lambda: int8.encode(source.double(), buffer),
            "is torch.float64, expected one of torch.float32",
        ),
        (
            lambda: int8.encode(source.view(2, 5), buffer),
            r"has shape \(2, 5\).*expected a flat contiguous interval",
        ),
        (lambda: int8.encode(source[::2], buffer), "expected a flat contiguous interval"),
        (lambda: int8.encode(source, buffer[:-1]), "11 long, but 'int8' writes 10 elements as 12"),
        (
            lambda: int8.encode(source, buffer.view(torch.int8)),
            "are torch.int8 of shape.*expected flat contiguous torch.uint8",
        ),
        (
            lambda: int8.encode(source, torch.empty(13, dtype=torch.uint8)[1:]),
            "start at byte 1 of their storage, expected an even one",
        ),
        (
            lambda: int8.decode_add(buffer, source.half()),
            "is torch.float16, expected torch.float32",
        ),
        (
            lambda: int8.decode(buffer, torch.empty(10, device="meta")),
            "is on meta and the encoded bytes are on cpu",
        ),
    ):
        with pytest.raises(ValueError, match=said):
            act()
