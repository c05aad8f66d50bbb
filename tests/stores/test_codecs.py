"""What every codec promises: errors bounded for any floats, exact sizes, bytes that depend on their own
block only, and bad input is refused.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from examples import examples
from onefold.comm.codec import SCRATCH_BYTES
from onefold.quant import CODECS, Blockwise, Codec, codec
from zoo import features_of

BLOCKWISE = tuple(name for name in CODECS if name != "plain")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
FEW = examples(60)
#: Levels of nf4 between -1 and 1 are at most this far from each other.
WIDEST_OF_NF4 = 0.3038


class Promise(NamedTuple):
    """bits: of an element, without scales. off: (magnitudes, scales) -> how far an element may be off
    when rounded to the nearest.
    """

    bits: int
    off: Callable[[Tensor, Tensor], Tensor]


#: A new codec needs a line here.
PROMISES = {
    "int8": Promise(8, lambda size, scale: scale / 2),
    "fp8": Promise(8, lambda size, scale: torch.maximum(size / 16, scale * 2.0**-10)),
    "int4": Promise(4, lambda size, scale: scale / 2),
    "nf4": Promise(4, lambda size, scale: scale * WIDEST_OF_NF4 / 2),
}
#: Blocks and slabs are small enough for several of each in a short interval.
codecs = st.tuples(
    st.sampled_from(BLOCKWISE), st.sampled_from([16, 64, 256]), st.sampled_from([16, 320, 1 << 16])
).map(lambda fields: codec(fields[0], block=fields[1], slab=fields[2]))
every = codecs | st.sampled_from([codec("plain", dtype=d, slab=33) for d in DTYPES])
lengths = st.one_of(st.integers(0, 70), st.integers(200, 700))


@st.composite
def intervals(draw: Any, numels: st.SearchStrategy[int] = lengths) -> Tensor:
    """Finite floats of any size: stretches of zeros, of one magnitude, of subnormals, of the
    largest float; and some at random places.
    """
    numel, dtype = draw(numels), draw(st.sampled_from(DTYPES))
    info = torch.finfo(dtype)
    factors = [1.0, 1.0, 0.0, 4 * info.smallest_normal, info.max / 2, None]
    found = features_of(draw(st.integers(0, 2**31)), numel, dtype=torch.float64)
    for start in range(0, numel, 48):  # no multiple of a block, so that blocks are mixed
        factor = draw(st.sampled_from(factors))
        found[start : start + 48] *= (
            2.0 ** draw(st.integers(-149, 120)) if factor is None else factor
        )
    values = found.clamp(info.min, info.max).to(dtype)
    odd = st.floats(width=32, allow_nan=False, allow_infinity=False)
    for value in draw(st.lists(odd, max_size=4 if numel else 0)):
        values[draw(st.integers(0, numel - 1))] = max(info.min, min(info.max, value))
    return values


def encoded(by: Codec, source: Tensor) -> Tensor:
    """The bytes, over a buffer that held something else."""
    out = torch.full((by.encoded_bytes(source.numel()),), 0xA5, dtype=torch.uint8)
    by.encode(source, out)
    return out


def decoded(by: Codec, source: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    out = torch.full((source.numel(),), 7.0, dtype=dtype)
    by.decode(encoded(by, source), out)
    return out


def largest_of_blocks(by: Blockwise, source: Tensor) -> Tensor:
    """The largest magnitude of each element's block, in fp64."""
    padded = torch.nn.functional.pad(source.double().abs(), (0, -source.numel() % by.block))
    largest = padded.view(-1, by.block).amax(1)
    return largest.repeat_interleave(by.block)[: source.numel()]


def allowed(by: Blockwise, source: Tensor) -> Tensor:
    """How far each element may be off in fp32, in fp64. A scale is the largest of the element's block
    in bf16.
    """
    largest = largest_of_blocks(by, source)
    scale = (largest / by.top).clamp(min=2.0**-125) * (1 + 2.0**-8)
    return PROMISES[by.name].off(source.double().abs(), scale) + largest * 2.0**-22


# -- values ----------------------------------------------------------------------------------------


@FEW
@given(codecs, intervals())
@example(codec("int8"), torch.tensor([torch.finfo(torch.float32).max, 1.0, -3e38, 0.0]))
@example(codec("int8"), torch.tensor([1e-45, -1e-45, 0.0, 1e-38]))
def test_an_element_is_off_by_half_a_step_of_its_block(by: Blockwise, source: Tensor) -> None:
    back = decoded(by, source).double()
    off, limit, bound = (back - source.double()).abs(), allowed(by, source), by.bound(source.abs())
    assert (off <= limit).all(), (by, source, off - limit)
    assert (off <= bound).all() and (bound <= limit * (1 + 2.0**-6)).all(), (by, off, bound)
    assert (back[source == 0] == 0).all()


@FEW
@given(codecs, intervals(), st.sampled_from(DTYPES))
@example(codec("int8"), torch.full((300,), torch.finfo(torch.float32).max), torch.float32)
def test_what_was_decoded_is_encoded_without_a_loss_also_through_bf16(
    by: Blockwise, source: Tensor, dtype: torch.dtype
) -> None:
    """A checkpoint in any dtype resumes with the same bits."""
    if (source.double().abs() <= torch.finfo(dtype).max).all():
        source = source.to(dtype)
    kept = decoded(by, source, source.dtype)
    assert kept.isfinite().all(), "a dtype that held the source holds what is decoded"
    for between in (kept, kept if kept.dtype == torch.float16 else kept.bfloat16()):
        assert torch.equal(decoded(by, between, between.dtype), between), (by, source)


@FEW
@given(codecs, intervals(st.integers(1, 700)), st.data())
def test_what_is_not_finite_makes_its_block_nan_and_no_other(
    by: Blockwise, source: Tensor, data: st.DataObject
) -> None:
    at, hurt = data.draw(st.integers(0, source.numel() - 1)), source.clone()
    hurt[at] = data.draw(st.sampled_from([torch.inf, -torch.inf, torch.nan]))
    inside = torch.arange(source.numel()) // by.block == at // by.block
    for dtype in DTYPES:
        got, clean = decoded(by, hurt, dtype), decoded(by, source, dtype)
        assert got[inside].isnan().all() and torch.equal(got[~inside], clean[~inside]), (by, dtype)
    total = torch.zeros(source.numel())
    by.decode_add(encoded(by, hurt), total)
    assert not total[inside].isfinite().any(), "an overflow of gradients must be seen"


def test_codes_are_the_nearest_of_the_levels_of_nf4() -> None:
    from onefold.quant.nf4 import levels

    table = torch.tensor(levels())
    assert len(table) == 16 and table[0] == -1 and table[7] == 0 and table[15] == 1
    source = torch.cat([torch.linspace(-1, 1, 63), torch.ones(1)])
    nearest = table[(source[:, None] - table).abs().argmin(1)]
    assert torch.equal(decoded(codec("nf4", block=64), source), nearest)


# -- bytes -----------------------------------------------------------------------------------------


@FEW
@given(codecs, intervals(), st.integers(0, 4))
def test_encoding_writes_each_of_its_bytes_and_no_other_in_slabs_of_any_length(
    by: Blockwise, source: Tensor, before: int
) -> None:
    """A payload to an even byte, and two bytes a block."""
    numel, before = source.numel(), 2 * before
    payload, size = -(-numel * PROMISES[by.name].bits // 8), by.encoded_bytes(numel)
    assert size == payload + payload % 2 + 2 * -(-numel // by.block)
    for slab in (by.block, 3 * by.block, None):
        same = codec(by.name, block=by.block, slab=slab)
        buffer = torch.full((before + size + 5,), 0x5A, dtype=torch.uint8)
        same.encode(source, buffer[before : before + size])
        assert torch.equal(buffer[before : before + size], encoded(by, source)), (by, slab)
        assert (buffer[:before] == 0x5A).all() and (buffer[before + size :] == 0x5A).all()
        assert torch.equal(decoded(same, source), decoded(by, source))


@FEW
@given(codecs, intervals(st.integers(1, 700)), st.floats(0, 1), st.floats(0, 0.9))
def test_intervals_cut_at_blocks_and_rows_have_the_values_of_the_whole(
    by: Blockwise, source: Tensor, at: float, which: float
) -> None:
    """Whatever the number of ranks is, they decode the same."""
    whole, rows = decoded(by, source), source.numel() // by.block
    cut = int(at * rows) * by.block
    parts = [decoded(by, source[:cut]), decoded(by, source[cut:])]
    assert torch.equal(torch.cat(parts), whole), (by, cut)
    table = source[: rows * by.block].view(rows, by.block)
    coded = torch.zeros(rows, by.encoded_bytes(by.block) + 2, dtype=torch.uint8)[:, :-2]
    back, total = torch.empty(table.shape), torch.empty(by.block)
    by.encode_rows(table, coded)
    by.decode_rows(coded, back)
    assert torch.equal(back.view(-1), whole[: rows * by.block]), by
    if rows:
        own = int(which * rows)
        by.decode_sum(coded, table[own].float(), own, total)
        expected = torch.zeros(by.block)
        for i, row in enumerate(back):
            expected += table[i] if i == own else row
        assert torch.equal(total, expected), "parts are added by rank, the own one unencoded"


@FEW
@given(every, intervals(), st.integers(0, 2**31))
def test_decode_add_adds_in_fp32(by: Codec, source: Tensor, seed: int) -> None:
    held = features_of(seed, source.numel())
    expected = held + decoded(by, source)
    by.decode_add(encoded(by, source), held)
    assert torch.equal(held, expected), by


@pytest.mark.parametrize("name", CODECS)
def test_no_call_holds_more_than_its_scratch_beside_the_interval(name: str) -> None:
    """A MiB of elements in slabs of 4,096: a copy of a sixteenth of them would show."""
    slab, source = 4096, features_of(0, 1 << 18)
    by, total, narrow = codec(name, slab=slab), torch.zeros(1 << 18), source.half()
    coded = encoded(by, source)
    by.decode(coded, narrow)  # tables that stay are made by now
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        by.encode(source, coded)
        by.encode(narrow, coded)
        by.decode(coded, total)
        by.decode(coded, narrow)
        by.decode_add(coded, total)
    held = peak = 0
    for event in sorted(seen.profiler.kineto_results.events(), key=lambda e: e.start_ns()):
        if event.name() == "[memory]":
            held += event.nbytes()
            peak = max(peak, held)
    assert held == 0 and peak <= SCRATCH_BYTES * slab, f"{peak} bytes at once, {held} left"
    assert name == "plain" or peak >= 4 * slab, "the profiler saw nothing"


# -- refusals --------------------------------------------------------------------------------------

INT8, FLOATS = codec("int8"), torch.zeros(10)
BYTES = torch.zeros(INT8.encoded_bytes(10), dtype=torch.uint8)
REFUSED: list[tuple[Callable[[], object], str]] = [
    (lambda: codec("int9"), "no codec 'int9'.*did you mean 'int8'"),
    (lambda: codec("int8", blocks=3), "has no blocks, expected some of .*block"),
    (lambda: codec("int8", block=100), "a block of 100 elements, expected a power of two"),
    (lambda: INT8.encode(FLOATS, BYTES[:-1]), "11 long, but 'int8' writes 10 elements as 12"),
]


@pytest.mark.parametrize(("act", "said"), REFUSED)
def test_bad_input_is_answered_with_what_to_give_instead(
    act: Callable[[], object], said: str
) -> None:
    with pytest.raises(ValueError, match=said):
        act()
    assert codec("int8") == codec("int8") != codec("int8", block=64)
