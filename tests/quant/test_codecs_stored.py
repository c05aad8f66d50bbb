"""Tensors at rest in encoded form, and the memory that codecs work in."""

from __future__ import annotations

import pytest
import torch
from codec_intervals import BLOCKWISE, DTYPES, PROMISES, ROUNDED
from torch.profiler import ProfilerActivity, profile

from onefold.comm.codec import SCRATCH_BYTES
from onefold.quant import Encoded, Stochastic, codec


def weights(numel: int = 1 << 17) -> torch.Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(0)) * 0.02


def error(name: str) -> float:
    source = weights()
    back = torch.empty_like(source)
    Encoded.of(source, codec(name)).decode(back)
    return float((back - source).norm() / source.norm())


def test_what_is_stored_decodes_into_any_dtype_and_from_wherever_it_was_moved():
    source = weights(1000).to(torch.bfloat16)
    for name in ("plain", *BLOCKWISE):
        stored = Encoded.of(source, codec(name))
        moved = Encoded(stored.payload.clone(), 1000, codec(name))
        assert stored.nbytes == codec(name).encoded_bytes(1000) == moved.nbytes
        for dtype in DTYPES:
            one, other = torch.empty(1000, dtype=dtype), torch.empty(1000, dtype=dtype)
            stored.decode(one)
            moved.decode(other)
            assert torch.equal(one, other) and float(
                (one - source).norm() / source.norm()
            ) < 0.01 + (0.0 if name == "plain" else PROMISES[name].lost[1]), (name, dtype)


def test_stored_weights_weigh_a_quarter_of_16_bits_with_4_bits_and_half_with_8():
    for name in BLOCKWISE:
        bits = PROMISES[name].bits + 16 / (256 if PROMISES[name].bits == 8 else 64)
        assert Encoded.of(weights(), codec(name)).bits == bits, name


def test_normal_weights_lose_least_in_int8_and_in_4_bits_least_in_nf4():
    off = {name: error(name) for name in BLOCKWISE}
    for name, lost in off.items():
        least, most = PROMISES[name].lost
        assert least < lost < most, (name, off)
    assert off["nf4"] < 0.9 * off["int4"], off


def test_parts_that_do_not_belong_together_are_refused():
    stored = Encoded.of(weights(100), codec("nf4"))
    with pytest.raises(
        ValueError, match=r"expected 68 bytes of torch.uint8 for 128 elements of codec 'nf4'"
    ):
        Encoded(stored.payload, 128, codec("nf4"))


@pytest.mark.parametrize("name", ["plain", *BLOCKWISE])
def test_no_call_holds_more_than_its_scratch_beside_the_interval(name):
    """1 MiB of elements in slabs of 4096: a copy of the interval, or of a sixteenth of it, would
    show.
    """
    slab, source = 4096, weights(1 << 18)
    by, total = codec(name, slab=slab), torch.zeros(1 << 18)
    payload = torch.empty(by.encoded_bytes(source.numel()), dtype=torch.uint8)
    narrow = torch.empty_like(source, dtype=torch.float16)
    by.encode(source, payload)
    by.decode(payload, narrow)  # tables that stay are made by now
    acts = {
        "encode": lambda: by.encode(source, payload),
        "encode 16 bits": lambda: by.encode(narrow, payload),
        "decode": lambda: by.decode(payload, total),
        "decode into 16 bits": lambda: by.decode(payload, narrow),
        "add": lambda: by.decode_add(payload, total),
        "residual": lambda: by.keep_residual(payload, narrow),
    }
    if name in ROUNDED:
        acts["stochastic"] = lambda: by.encode(source, payload, rounding=Stochastic(1, 2, 3))
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        for act in acts.values():
            act()
    held = peak = 0
    for event in sorted(seen.profiler.kineto_results.events(), key=lambda e: e.start_ns()):
        if event.name() == "[memory]":
            held += event.nbytes()
            peak = max(peak, held)
    assert held == 0 and peak <= SCRATCH_BYTES * slab, (
        f"{name}: {peak} bytes at once for {slab} elements a slab, {held} left"
    )
    assert name == "plain" or peak >= 4 * slab, "the profiler saw nothing"
