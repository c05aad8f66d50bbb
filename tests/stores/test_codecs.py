"""What every codec promises: errors bounded for any floats, exact sizes, bytes that depend on their own
block only.
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
from onefold.quant import codecs as of_quant
from onefold.quant.codecs import CODECS, SCRATCH_BYTES, Codec, levels
from zoo import features_of

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
    "int4": Promise(4, lambda size, scale: scale / 2),
    "nf4": Promise(4, lambda size, scale: scale * WIDEST_OF_NF4 / 2),
}
codecs = st.sampled_from(list(CODECS.values()))
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
    by.encode(source[None], out[None])
    return out


def decoded(by: Codec, source: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    out = torch.full((source.numel(),), 7.0, dtype=dtype)
    by.decode(encoded(by, source)[None], out[None])
    return out


def largest_of_blocks(by: Codec, source: Tensor) -> Tensor:
    """The largest magnitude of each element's block, in fp64."""
    padded = torch.nn.functional.pad(source.double().abs(), (0, -source.numel() % by.block))
    largest = padded.view(-1, by.block).amax(1)
    return largest.repeat_interleave(by.block)[: source.numel()]


def allowed(by: Codec, source: Tensor) -> Tensor:
    """How far each element may be off in fp32, in fp64. A scale is the largest of the element's block
    in bf16.
    """
    largest = largest_of_blocks(by, source)
    scale = (largest / by.top).clamp(min=2.0**-125) * (1 + 2.0**-8)
    return PROMISES[by.name].off(source.double().abs(), scale) + largest * 2.0**-22


# -- values ----------------------------------------------------------------------------------------


@FEW
@given(codecs, intervals())
@example(CODECS["int8"], torch.tensor([torch.finfo(torch.float32).max, 1.0, -3e38, 0.0]))
@example(CODECS["int8"], torch.tensor([1e-45, -1e-45, 0.0, 1e-38]))
def test_an_element_is_off_by_half_a_step_of_its_block(by: Codec, source: Tensor) -> None:
    back = decoded(by, source).double()
    off, limit = (back - source.double()).abs(), allowed(by, source)
    assert (off <= limit).all(), (by, source, off - limit)
    assert (back[source == 0] == 0).all()


@FEW
@given(codecs, intervals(), st.sampled_from(DTYPES))
@example(CODECS["int8"], torch.full((300,), torch.finfo(torch.float32).max), torch.float32)
def test_what_was_decoded_is_encoded_without_a_loss_also_through_bf16(
    by: Codec, source: Tensor, dtype: torch.dtype
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
    by: Codec, source: Tensor, data: st.DataObject
) -> None:
    at, hurt = data.draw(st.integers(0, source.numel() - 1)), source.clone()
    hurt[at] = data.draw(st.sampled_from([torch.inf, -torch.inf, torch.nan]))
    inside = torch.arange(source.numel()) // by.block == at // by.block
    for dtype in DTYPES:
        got, clean = decoded(by, hurt, dtype), decoded(by, source, dtype)
        assert got[inside].isnan().all() and torch.equal(got[~inside], clean[~inside]), (by, dtype)
    total = torch.zeros(source.numel())
    by.decode(encoded(by, hurt)[None], total[None], add=True)
    assert not total[inside].isfinite().any(), "an overflow of gradients must be seen"


def test_codes_are_the_nearest_of_the_levels_of_nf4() -> None:
    table = levels()
    assert len(table) == 16 and table[0] == -1 and table[7] == 0 and table[15] == 1
    source = torch.cat([torch.linspace(-1, 1, 63), torch.ones(1)])
    nearest = table[(source[:, None] - table).abs().argmin(1)]
    assert torch.equal(decoded(CODECS["nf4"], source), nearest)


# -- bytes -----------------------------------------------------------------------------------------


@FEW
@given(codecs, intervals(), st.integers(0, 4), st.sampled_from([256, 512]))
def test_encoding_writes_each_of_its_bytes_and_no_other_in_slabs_of_any_length(
    by: Codec, source: Tensor, before: int, slab: int
) -> None:
    """A payload to an even byte, and two bytes a block."""
    numel, before = source.numel(), 2 * before
    payload, size = -(-numel * PROMISES[by.name].bits // 8), by.encoded_bytes(numel)
    assert size == payload + payload % 2 + 2 * -(-numel // by.block)
    buffer = torch.full((before + size + 5,), 0x5A, dtype=torch.uint8)
    whole, values = encoded(by, source), decoded(by, source)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(of_quant, "CPU_SLAB", slab)
        by.encode(source[None], buffer[before : before + size][None])
        assert torch.equal(decoded(by, source), values)
    assert torch.equal(buffer[before : before + size], whole), by
    assert (buffer[:before] == 0x5A).all() and (buffer[before + size :] == 0x5A).all()


@FEW
@given(codecs, intervals(st.integers(1, 700)), st.floats(0, 1), st.floats(0, 0.9))
def test_intervals_cut_at_blocks_and_rows_have_the_values_of_the_whole(
    by: Codec, source: Tensor, at: float, which: float
) -> None:
    """Whatever the number of ranks is, they decode the same."""
    whole, rows = decoded(by, source), source.numel() // by.block
    cut = int(at * rows) * by.block
    parts = [decoded(by, source[:cut]), decoded(by, source[cut:])]
    assert torch.equal(torch.cat(parts), whole), (by, cut)
    table = source[: rows * by.block].view(rows, by.block)
    coded = torch.zeros(rows, by.encoded_bytes(by.block) + 2, dtype=torch.uint8)[:, :-2]
    back, total = torch.empty(table.shape), torch.empty(by.block)
    by.encode(table, coded)
    by.decode(coded, back)
    assert torch.equal(back.view(-1), whole[: rows * by.block]), by
    if rows:
        own = int(which * rows)
        by.decode_sum(coded, table[own].float(), own, total)
        expected = torch.zeros(by.block)
        for i, row in enumerate(back):
            expected += table[i] if i == own else row
        assert torch.equal(total, expected), "parts are added by rank, the own one unencoded"


@FEW
@given(codecs, intervals(), st.integers(0, 2**31))
def test_decode_add_adds_in_fp32(by: Codec, source: Tensor, seed: int) -> None:
    held = features_of(seed, source.numel())
    expected = held + decoded(by, source)
    by.decode(encoded(by, source)[None], held[None], add=True)
    assert torch.equal(held, expected), by


@pytest.mark.parametrize("name", CODECS)
def test_no_call_holds_more_than_its_scratch_beside_the_interval(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A MiB of elements in slabs of 4,096: a copy of a sixteenth of them would show."""
    slab, source = 4096, features_of(0, 1 << 18)[None]
    monkeypatch.setattr(of_quant, "CPU_SLAB", slab)
    by, total, narrow = CODECS[name], torch.zeros(1, 1 << 18), source.half()
    coded = encoded(by, source[0])[None]
    by.decode(coded, narrow)  # tables that stay are made by now
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        by.encode(source, coded)
        by.encode(narrow, coded)
        by.decode(coded, total)
        by.decode(coded, narrow)
        by.decode(coded, total, add=True)
    held = peak = 0
    for event in sorted(seen.profiler.kineto_results.events(), key=lambda e: e.start_ns()):
        if event.name() == "[memory]":
            held += event.nbytes()
            peak = max(peak, held)
    assert held == 0 and peak <= SCRATCH_BYTES * slab, f"{peak} bytes at once, {held} left"
    assert peak >= 4 * slab, "the profiler saw nothing"
