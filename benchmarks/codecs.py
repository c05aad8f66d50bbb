"""Codecs of the wire: bytes a second beside a plain copy, and whether kernels and plain operations agree: `python -m benchmarks.codecs`.

A rate counts the bytes that must be touched: read the floats and write the encoding, or the reverse; a sum is read and written. It is
printed beside the rate of `copy_` of the same floats in the same minute, which is what memory can do. On a CPU there is one thread, and
seconds are the thread's own, so that what else runs on the machine shows less. `--check` compares only: on a machine without a GPU but
with Triton, `TRITON_INTERPRET=1 python -m benchmarks.codecs --check` runs the kernels in Triton's interpreter.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, NoReturn
from unittest.mock import patch

import torch

from benchmarks.offload.cli import shown_command
from benchmarks.peers import launch, summary, worker
from onefold.comm.codecs import Blockwise, Encoded, Stochastic, codec, kernels

SCHEMA = "onefold-codecs/1"
NAMES = ("int8", "int4", "fp8", "nf4")
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
TARGETS = list(DTYPES.values())
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
    for numel in (1000, 256 * 17 + 64) if INTERPRETED else (64, 1000, 256 * 17 + 64, 1 << 20):
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


def compared() -> int:
    """Intervals that `differences` looks at."""
    return 2 * len(kernels.NAMES) * sum(1 for _ in cases("cpu"))


def _differ(by: Blockwise, source: torch.Tensor) -> Iterator[str]:
    def both(act: Callable[[torch.Tensor], object], like: torch.Tensor) -> bool:
        results = []
        for wanted in (False, True):
            results.append(like.clone())
            with by_kernels(wanted):
                act(results[-1])
        return same(*results)

    payload = Encoded.of(source, by).payload
    for rounding in (None, Stochastic(1), Stochastic(2, 3, 2**33 - 77)) if by.stochastic else (None,):
        if not both(lambda into, r=rounding: by.encode(source, into, rounding=r), torch.empty_like(payload)):
            yield f"encoded with {rounding or 'rounding to the nearest'}"
    for dtype in TARGETS:
        if not both(lambda into: by.decode(payload, into), torch.empty_like(source, dtype=dtype)):
            yield f"decoded into {dtype}"
    if not both(lambda into: by.decode_add(payload, into), source.float()):
        yield "added"
    if source.dtype in TARGETS and not both(lambda into: by.keep_residual(payload, into), source):
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


def acts(name: str, source: torch.Tensor) -> Iterator[tuple[str, int, Callable[[], object]]]:
    """What a codec does with these floats: the act, the bytes that it must touch, and the call."""
    by, payload = codec(name), Encoded.of(source, codec(name)).payload
    both, total = source.nbytes + payload.nbytes, torch.zeros(source.numel(), device=source.device)
    yield "encode", both, partial(by.encode, source, payload)
    if by.stochastic:
        yield "encode, stochastic", both, partial(by.encode, source, payload, rounding=Stochastic(1, 2, 3))
    yield "decode", both, partial(by.decode, payload, torch.empty_like(source))
    if source.dtype == torch.float32:
        yield "decode and add", payload.nbytes + 2 * total.nbytes, partial(by.decode_add, payload, total)


def measured(device: str, numel: int, rounds: int) -> list[dict[str, Any]]:
    """One row for each codec, dtype and act: nanoseconds an element, bytes a second, and the part of a copy's rate."""
    rows: list[dict[str, Any]] = []
    for spelt in ("fp32", "bf16"):
        source = torch.randn(numel, generator=torch.Generator().manual_seed(1)).to(DTYPES[spelt]).to(device)
        took = seconds_of(partial(torch.empty_like(source).copy_, source), device, rounds)
        copy = 2 * source.nbytes / took
        rows.append({"codec": "copy", "dtype": spelt, "act": "copy", "ns": 1e9 * took / numel, "bytes_per_s": copy, "of_copy": 1.0})
        for name in NAMES:
            for act, nbytes, call in acts(name, source):
                took = seconds_of(call, device, rounds)
                row = {"codec": name, "dtype": spelt, "act": act, "ns": 1e9 * took / numel, "bytes_per_s": nbytes / took}
                rows.append({**row, "of_copy": nbytes / took / copy})
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
    figures = [(f"{row['ns']:.3f}", f"{row['bytes_per_s'] / 1e9:.1f}", f"{row['of_copy']:.0%}") for row in rows]
    return [[row["codec"], row["dtype"], row["act"], *figure] for row, figure in zip(rows, figures, strict=True)]


def work() -> NoReturn:
    """`python -m benchmarks.codecs JOB.json RANK`, started by `launch.run_ranks`: a chapter of benchmarks/gpu.py."""
    worker.exit_with_the_launcher()
    job, path, rank = worker.read_job()
    device = job["device"]
    rates = measured(device, job["elements"], job["rounds"])
    worker.leave({"rates": rates, "differences": differences(device) if device == "cuda" else []}, path, rank)


def chapter(options: argparse.Namespace) -> tuple[Any, list[dict[str, Any]]]:
    """Question 6 of benchmarks/gpu.py. Kernels that differ from plain operations fail it; a rate below the goal does not."""
    from benchmarks import gpu

    columns = ("codec", "dtype", "act", "ns an element", "GB/s", "of a copy")
    table = gpu.Table(f"6. Codecs: int8 and int4 are kernels, their goal is {GOAL:.0%} of a copy", columns)
    job = {"setting": {"ranks": 1}, "device": options.device, "elements": 1 << 28 if options.device == "cuda" else 1 << 20, "rounds": 5}
    outcome = {"peer": "codecs", **launch.run_ranks("benchmarks.codecs", job, 1, threads=1, timeout=options.timeout)}
    if outcome["status"] == "ok":
        table.rows = lines(outcome["ranks"][0]["rates"])
        if found := outcome["ranks"][0]["differences"]:
            outcome |= {"status": "failed", "error": "kernels and plain operations differ:\n" + "\n".join(found)}
    return table, [outcome]


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
    if options.check:
        if options.device == "cpu" and not INTERPRETED:
            p.error("--check on a CPU needs TRITON_INTERPRET=1")
        found = differences(options.device)
        print("\n".join(found) or f"kernels and plain operations agree on every bit of {compared()} intervals")
        return int(bool(found))
    result: dict[str, Any] = {
        "schema": SCHEMA,
        "command": shown_command(sys.argv[1:] if arguments is None else arguments, "python -m benchmarks.codecs"),
        "date": datetime.datetime.now().astimezone().isoformat(timespec="seconds"),
        "machine": summary.machine(),
        "versions": {k: v for k, v in summary.versions(sys.executable).items() if k != "deepspeed"},
        "elements": options.elements,
    }
    result |= {"device": torch.cuda.get_device_name() if options.device == "cuda" else "cpu, one thread", "errors": errors()}
    result |= {"rates": measured(options.device, options.elements, options.rounds), "goal": GOAL}
    result |= {"differences": differences(options.device) if options.device == "cuda" else []}
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
    if len(sys.argv) == 3 and sys.argv[1].endswith("job.json"):
        work()
    sys.exit(main())
