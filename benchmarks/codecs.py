"""Codecs of the wire and sums: bytes a second beside a copy: `python -m benchmarks codecs`.

A rate counts the bytes that must be touched: read the floats and write the encoding, or the
reverse; a sum is read and written. Of the parts of a reduction (16 bits or fp32, summed in fp32)
each is read once and their sum written once. A rate is printed beside the rate of `copy_` of the
same floats in the same minute, which is what memory can do. On a CPU there is one thread, and
seconds are the thread's own, so that what else runs on the machine shows less.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from statistics import median
from typing import Any

import torch

from benchmarks import harness, pages
from onefold.quant.codecs import CODECS
from onefold.runtime.hops import add_up

SCHEMA = "onefold-codecs/1"
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
RANKS = 8  # whose parts are added up
GOAL = 0.8  # of the rate of a copy, on CUDA
COLUMNS = ("codec", "dtype", "act", "ns an element", "GB/s", "of a copy")


# --- how quick? ---


def seconds_of(act: Callable[[], object], device: str, rounds: int) -> float:
    """Of one call, the median of `rounds` after one to warm up."""
    act()
    found = []
    for _ in range(rounds):
        if device == "cuda":
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            act()
            end.record()
            end.synchronize()
            found.append(start.elapsed_time(end) / 1000)
        else:
            began = time.thread_time()
            act()
            found.append(time.thread_time() - began)
    return median(found)


def acts(name: str, source: torch.Tensor) -> Iterator[tuple[str, int, Callable[[], object]]]:
    """What a codec does with these floats: the act, the bytes that it must touch, and the call."""
    by, source = CODECS[name], source[None]
    payload = torch.empty(
        1, by.encoded_bytes(source.numel()), dtype=torch.uint8, device=source.device
    )
    by.encode(source, payload)
    both, total = source.nbytes + payload.nbytes, torch.zeros(source.shape, device=source.device)
    yield "encode", both, partial(by.encode, source, payload)
    yield "decode", both, partial(by.decode, payload, torch.empty_like(source))
    if source.dtype == torch.float32:
        yield (
            "decode and add",
            payload.nbytes + 2 * total.nbytes,
            partial(by.decode, payload, total, add=True),
        )


def measured(device: str, numel: int, rounds: int) -> list[dict[str, Any]]:
    """A row for each codec, dtype and act, and for sums; rates beside that of a copy."""
    rows: list[dict[str, Any]] = []
    drawn = torch.randn(numel, generator=torch.Generator().manual_seed(1))
    for dtype, kind in DTYPES.items():
        source = drawn.to(kind).to(device)
        parts = source[: numel // RANKS * RANKS].view(RANKS, -1)
        total = torch.empty(parts.shape[1], device=device)
        copied, added = torch.empty_like(source), parts.nbytes + total.nbytes
        tasks: list[tuple[str, str, int, Callable[[], object]]] = [
            ("copy", "copy", 2 * source.nbytes, partial(copied.copy_, source)),
            *((name, *act) for name in CODECS for act in acts(name, source)),
            ("sum", f"of {RANKS} parts", added, partial(add_up, parts.unbind(), total, 1 / RANKS)),
        ]
        copy = 0.0
        for name, act, nbytes, call in tasks:
            took = seconds_of(call, device, rounds)
            rate, count = nbytes / took, parts.numel() if name == "sum" else numel
            copy = rate if name == "copy" else copy
            row = {"codec": name, "dtype": dtype, "act": act, "ns": 1e9 * took / count}
            rows.append({**row, "bytes_per_s": rate, "of_copy": rate / copy})
    return rows


# --- the command ---


def lines(rows: Sequence[dict[str, Any]]) -> list[list[str]]:
    """Rows as text: codec, dtype, act, ns an element, GB/s, part of a copy."""
    return [
        [
            *(row[key] for key in ("codec", "dtype", "act")),
            f"{row['ns']:.3f}",
            f"{row['bytes_per_s'] / 1e9:.1f}",
            f"{row['of_copy']:.0%}",
        ]
        for row in rows
    ]


HERE = "cuda" if torch.cuda.is_available() else "cpu"


@harness.command(
    "codecs",
    __doc__,
    rounds=7,
    device=(HERE, "where they run", ["cuda", "cpu"]),
    elements=(1 << 24, "floats that are encoded"),
)
def main(options: harness.Options) -> int:
    torch.set_num_threads(1)
    rates = measured(options.device, options.elements, options.rounds)
    device = torch.cuda.get_device_name() if options.device == "cuda" else "cpu, one thread"
    harness.keep(options, SCHEMA, elements=options.elements, device=device, rates=rates)
    pages.show(pages.markdown([COLUMNS, *lines(rates)], left=3))
    return 0
