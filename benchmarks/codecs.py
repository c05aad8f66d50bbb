"""Codecs of the wire: bytes a second beside a plain copy, and whether kernels and plain operations agree: `python -m benchmarks.codecs`.

A rate counts the bytes that must be touched: read the floats and write the encoding, or the reverse; a sum is read and written. It is
printed beside the rate of `copy_` of the same floats in the same minute, which is what memory can do. On a CPU there is one thread, and
seconds are the thread's own, so that what else runs on the machine shows less. `--check` compares only: on a machine without a GPU but
with Triton, `TRITON_INTERPRET=1 python -m benchmarks.codecs --check` runs the kernels in Triton's interpreter.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any
from unittest.mock import patch

import torch

from onefold.comm.codecs import Blockwise, Encoded, Stochastic, codec, kernels

SCHEMA = "onefold-codecs/1"
NAMES = ("int8", "int4", "fp8", "nf4")
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
GOAL = 0.8  # of the rate of a copy, on CUDA


# --- equal? ---


@contextmanager
def by_kernels(wanted: bool) -> Iterator[None]:
    """Whole blocks of int8 and int4 are done by the kernels, or by plain operations."""
    with patch.object(kernels, "serve", lambda by, floats: wanted and by.name in kernels.NAMES and floats.numel() >= by.block):
        yield


def cases(device: str) -> Iterator[tuple[str, torch.Tensor]]:
    """Intervals with everything in them that rounds, overflows, underflows or is not a number."""
    generator = torch.Generator().manual_seed(7)
    for numel in (64, 1000, 256 * 17 + 64, 1 << 15):
        for name, dtype in DTYPES.items():
            info = torch.finfo(dtype)
            floats = torch.randn(numel, generator=generator, dtype=torch.float64)
            floats *= torch.exp2(torch.randint(-12, 6, (numel,), generator=generator))
            for at, factor in ((0, 4 * info.smallest_normal), (200, info.max / 2), (500, 0.0), (700, 2.0**-140)):
                floats[at : at + 150] *= factor
            values = floats.clamp(info.min, info.max).to(dtype)
            yield f"{name} {numel}", values.to(device)
            values[30], values[numel // 2], values[-1] = torch.inf, torch.nan, info.max
            yield f"{name} {numel} with inf and nan", values.to(device)
            halves = torch.arange(numel).remainder(255).sub(127).mul(0.5)  # ties, once the scale is a power of two
            yield f"{name} {numel} of halves", halves.to(dtype).to(device)


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal bits; one NaN is as good as another."""
    broken = a.isnan() & b.isnan() if a.is_floating_point() else torch.zeros_like(a, dtype=torch.bool)
    bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[a.element_size()]
    return bool(((a.view(bits) == b.view(bits)) | broken).all())


def differences(device: str) -> list[str]:
    """Where kernels and plain operations differ on this device: nowhere, or what and with which input."""
    found = []
    for name in kernels.NAMES:
        for block in (64, 256):
            by = codec(name, block=block)
            assert isinstance(by, Blockwise)
            for case, source in cases(device):
                found += [f"{name}, {block} a block, {case}: {what}" for what in _differ(by, source)]
    return found


def _differ(by: Blockwise, source: torch.Tensor) -> Iterator[str]:
    def both(act: Callable[[torch.Tensor], object], like: torch.Tensor) -> bool:
        results = []
        for wanted in (False, True):
            results.append(like.clone())
            with by_kernels(wanted):
                act(results[-1])
        return same(*results)

    payload = Encoded.of(source, by).payload
    for rounding in (None, Stochastic(1), Stochastic(2, 3, 2**33 - 77)):
        if not both(lambda into, r=rounding: by.encode(source, into, rounding=r), torch.empty_like(payload)):
            yield f"encoded with {rounding or 'rounding to the nearest'}"
    for dtype in DTYPES.values():
        if not both(lambda into: by.decode(payload, into), torch.empty_like(source, dtype=dtype)):
            yield f"decoded into {dtype}"
    if not both(lambda into: by.decode_add(payload, into), source.float()):
        yield "added"
    if not both(lambda into: by.keep_residual(payload, into), source):
        yield "residual"


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


def measured(device: str, numel: int, rounds: int) -> list[dict[str, Any]]:
    """One row for each codec, dtype and direction: seconds, bytes a second, and the part of a copy's rate."""
    rows = []
    for spelt, dtype in DTYPES.items():
        if spelt == "fp16":
            continue  # as bf16
        source = torch.randn(numel, generator=torch.Generator().manual_seed(1)).to(dtype).to(device)
        into, total = torch.empty_like(source), torch.zeros(numel, device=device)
        copy = 2 * source.nbytes / seconds_of(lambda s=source, i=into: i.copy_(s), device, rounds)
        rows.append({"codec": "copy", "dtype": spelt, "act": "copy", "bytes_per_s": copy, "of_copy": 1.0, "ns": 1e9 * 2 * source.nbytes / copy / numel})
        for name in NAMES:
            by, payload = codec(name), Encoded.of(source, codec(name)).payload
            both = source.nbytes + payload.nbytes
            acts: dict[str, tuple[int, Callable[[], object]]] = {
                "encode": (both, lambda b=by, s=source, p=payload: b.encode(s, p)),
                "decode": (both, lambda b=by, p=payload, i=into: b.decode(p, i)),
                "decode and add": (payload.nbytes + 2 * total.nbytes, lambda b=by, p=payload, t=total: b.decode_add(p, t)),
            }
            if by.stochastic:
                acts["encode, stochastic"] = (both, lambda b=by, s=source, p=payload: b.encode(s, p, rounding=Stochastic(1, 2, 3)))
            for act, (nbytes, call) in acts.items():
                took = seconds_of(call, device, rounds)
                rate = nbytes / took
                rows.append({"codec": name, "dtype": spelt, "act": act, "bytes_per_s": rate, "of_copy": rate / copy, "ns": 1e9 * took / numel})
    return rows


def errors(numel: int = 1 << 20) -> list[dict[str, Any]]:
    """Relative error (root mean square) of values drawn from a normal distribution, and bits an element, by codec and block."""
    source = torch.randn(numel, generator=torch.Generator().manual_seed(3))
    rows = []
    for name in NAMES:
        for block in (64, 128, 256):
            stored, back = Encoded.of(source, codec(name, block=block)), torch.empty_like(source)
            stored.decode(back)
            rows.append({"codec": name, "block": block, "bits": stored.bits, "error": float((back - source).norm() / source.norm())})
    return rows


# --- the command ---


def lines(rows: Sequence[dict[str, Any]]) -> list[list[str]]:
    """Rows as text: codec, dtype, act, ns an element, GB/s, part of a copy."""
    return [
        [row["codec"], row["dtype"], row["act"], f"{row['ns']:.3f}", f"{row['bytes_per_s'] / 1e9:.1f}", f"{row['of_copy']:.0%}"] for row in rows
    ]


def chapter(device: str, numel: int, rounds: int) -> dict[str, Any]:
    """What benchmarks/gpu.py shows: rates, and where kernels and plain operations differ."""
    return {"rates": measured(device, numel, rounds), "differences": differences(device) if device == "cuda" else [], "goal": GOAL}


def main(arguments: Sequence[str] | None = None) -> int:
    """0 unless kernels and plain operations differ."""
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    p.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=["cuda", "cpu"])
    p.add_argument("--elements", type=int, default=1 << 24)
    p.add_argument("--rounds", type=int, default=7)
    p.add_argument("--check", action="store_true", help="compare kernels and plain operations, and measure nothing")
    p.add_argument("--output", type=Path, help="a folder for codecs.json")
    options = p.parse_args(arguments)
    torch.set_num_threads(1)
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    if options.check:
        if options.device == "cpu" and not interpreted:
            p.error("--check on a CPU needs TRITON_INTERPRET=1")
        found = differences(options.device)
        print("\n".join(found) or "kernels and plain operations agree on every bit")
        return int(bool(found))
    result: dict[str, Any] = {"schema": SCHEMA, "elements": options.elements, "torch": torch.__version__}
    result |= {"device": torch.cuda.get_device_name() if options.device == "cuda" else "cpu, one thread", "errors": errors()}
    result |= chapter(options.device, options.elements, options.rounds)
    for row in result["errors"]:
        print(f"{row['codec']:5} {row['block']:4} a block  {row['bits']:.3f} bits  {row['error']:.4f} of the values")
    for line in lines(result["rates"]):
        print(f"{line[0]:5} {line[1]:5} {line[2]:20} {line[3]:>8} ns {line[4]:>8} GB/s {line[5]:>6} of a copy")
    print("\n".join(result["differences"]))
    if options.output:
        options.output.mkdir(parents=True, exist_ok=True)
        (options.output / "codecs.json").write_text(json.dumps(result, indent=1) + "\n")
    return int(bool(result["differences"]))


if __name__ == "__main__":
    sys.exit(main())
