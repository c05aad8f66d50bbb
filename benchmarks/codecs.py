"""Codecs of the wire and sums: bytes a second beside a copy, and whether kernels and torch agree:
`python -m benchmarks.codecs`.

A rate counts the bytes that must be touched: read the floats and write the encoding, or the
reverse; a sum is read and written. Of the parts of a reduction (16 bits or fp32, summed in fp32)
each is read once and their sum written once. A rate is printed beside the rate of `copy_` of the
same floats in the same minute, which is what memory can do. On a CPU there is one thread, and
seconds are the thread's own, so that what else runs on the machine shows less. `--check` compares
only: on a machine without a GPU but with Triton,
`TRITON_INTERPRET=1 python -m benchmarks.codecs --check` runs the kernels in Triton's interpreter.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from statistics import median
from typing import Any, NoReturn

import torch

from benchmarks import harness
from benchmarks.peers import launch, worker
from onefold.comm.launching import INTERPRETED, served
from onefold.comm.sums import sum_parts
from onefold.quant import Encoded, Stochastic, codec
from onefold.quant.kernel_check import DTYPES, compared, differences

SCHEMA = "onefold-codecs/1"
NAMES = ("int8", "int4", "fp8", "nf4")
RANKS = 8  # whose parts are added up
GOAL = 0.8  # of the rate of a copy, on CUDA


def differing(device: str) -> list[str]:
    """Where kernels and torch differ on this device; nowhere, if no kernel runs on it."""
    return differences(device) if served(torch.empty(1, device=device)) else []


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
        yield (
            "encode, stochastic",
            both,
            partial(by.encode, source, payload, rounding=Stochastic(1, 2, 3)),
        )
    yield "decode", both, partial(by.decode, payload, torch.empty_like(source))
    if source.dtype == torch.float32:
        yield (
            "decode and add",
            payload.nbytes + 2 * total.nbytes,
            partial(by.decode_add, payload, total),
        )


def measured(device: str, numel: int, rounds: int) -> list[dict[str, Any]]:
    """One row for each codec, dtype and act, and for sums: nanoseconds an element, bytes a second,
    and the part of a copy's rate.
    """
    rows: list[dict[str, Any]] = []
    for format_ranks in ("fp32", "bf16"):
        source = (
            torch.randn(numel, generator=torch.Generator().manual_seed(1))
            .to(DTYPES[format_ranks])
            .to(device)
        )
        took = seconds_of(partial(torch.empty_like(source).copy_, source), device, rounds)
        copy = 2 * source.nbytes / took
        rows.append(
            {
                "codec": "copy",
                "dtype": format_ranks,
                "act": "copy",
                "ns": 1e9 * took / numel,
                "bytes_per_s": copy,
                "of_copy": 1.0,
            }
        )
        for name in NAMES:
            for act, nbytes, call in acts(name, source):
                took = seconds_of(call, device, rounds)
                row = {
                    "codec": name,
                    "dtype": format_ranks,
                    "act": act,
                    "ns": 1e9 * took / numel,
                    "bytes_per_s": nbytes / took,
                }
                rows.append({**row, "of_copy": nbytes / took / copy})
        parts = source[: numel // RANKS * RANKS].view(RANKS, -1)
        total = torch.empty(parts.shape[1], device=device)
        took = seconds_of(partial(sum_parts, parts, total, 1 / RANKS), device, rounds)
        row = {
            "codec": "sum",
            "dtype": format_ranks,
            "act": f"of {RANKS} parts",
            "ns": 1e9 * took / parts.numel(),
        }
        rows.append(
            {
                **row,
                "bytes_per_s": (parts.nbytes + total.nbytes) / took,
                "of_copy": (parts.nbytes + total.nbytes) / took / copy,
            }
        )
    return rows


def errors(numel: int = 1 << 20) -> list[dict[str, Any]]:
    """Relative error (root mean square) of values drawn from a normal distribution, and bits an
    element, by codec and block.
    """
    source = torch.randn(numel, generator=torch.Generator().manual_seed(3))
    rows = []
    for name in NAMES:
        for block in (64, 128, 256):
            stored, back = Encoded.of(source, codec(name, block=block)), torch.empty_like(source)
            stored.decode(back)
            rows.append(
                {
                    "codec": name,
                    "block": block,
                    "bits": stored.bits,
                    "error": float((back - source).norm() / source.norm()),
                }
            )
    return rows


# --- the command ---


def lines(rows: Sequence[dict[str, Any]]) -> list[list[str]]:
    """Rows as text: codec, dtype, act, ns an element, GB/s, part of a copy."""
    figures = [
        (f"{row['ns']:.3f}", f"{row['bytes_per_s'] / 1e9:.1f}", f"{row['of_copy']:.0%}")
        for row in rows
    ]
    return [
        [row["codec"], row["dtype"], row["act"], *figure]
        for row, figure in zip(rows, figures, strict=True)
    ]


def work() -> NoReturn:
    """`python -m benchmarks.codecs JOB.json RANK`, started by `launch.run_ranks`: a chapter of
    benchmarks/gpu.py.
    """
    job, path, rank = worker.read_job()
    device = job["device"]
    rates = measured(device, job["elements"], job["rounds"])
    worker.leave(
        {"rates": rates, "differences": differing(device) if device == "cuda" else []}, path, rank
    )


def chapter(options: argparse.Namespace) -> tuple[Any, list[dict[str, Any]]]:
    """The chapter "codecs" of benchmarks/gpu.py. Kernels that differ from torch fail it; a rate
    below the goal does not.
    """

    columns = ("codec", "dtype", "act", "ns an element", "GB/s", "of a copy")
    table = harness.Table(
        f"Codecs and sums: the goal of their kernels is {GOAL:.0%} of a copy", columns
    )
    job = {
        "setting": {"ranks": 1},
        "device": options.device,
        "elements": 1 << 28 if options.device == "cuda" else 1 << 20,
        "rounds": 5,
    }
    outcome = {
        "peer": "codecs",
        **launch.run_ranks("benchmarks.codecs", job, 1, threads=1, timeout=options.timeout),
    }
    if outcome["status"] == "ok":
        table.rows = lines(outcome["ranks"][0]["rates"])
        if found := outcome["ranks"][0]["differences"]:
            outcome |= {
                "status": "failed",
                "error": "kernels and torch differ:\n" + "\n".join(found),
            }
    return table, [outcome]


def main(arguments: Sequence[str] | None = None) -> int:
    """0 unless kernels and torch differ."""
    p = harness.parser("codecs", __doc__, rounds=7, output=None)
    p.set_defaults(name="codecs")
    p.add_argument(
        "--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=["cuda", "cpu"]
    )
    p.add_argument("--elements", type=int, default=1 << 24)
    p.add_argument(
        "--check", action="store_true", help="compare kernels and torch, and measure nothing"
    )
    options = harness.parsed(p, arguments)
    torch.set_num_threads(1)
    if options.check:
        if options.device == "cpu" and not INTERPRETED:
            p.error("--check on a CPU needs TRITON_INTERPRET=1")
        found = differences(options.device)
        print(
            "\n".join(found)
            or "kernels and torch agree on every bit of {} intervals and {} sums".format(
                *compared()
            )
        )
        return int(bool(found))
    cuda = options.device == "cuda"
    result: dict[str, Any] = {
        **harness.about(options, SCHEMA),
        "elements": options.elements,
        "device": torch.cuda.get_device_name() if cuda else "cpu, one thread",
        "errors": errors(),
        "rates": measured(options.device, options.elements, options.rounds),
        "goal": GOAL,
        "differences": differing(options.device) if cuda else [],
    }
    for row in result["errors"]:
        print(
            f"{row['codec']:5} {row['block']:4} a block  {row['bits']:.3f} bits  {row['error']:.4f}"
            " of the values"
        )
    for line in lines(result["rates"]):
        print(
            f"{line[0]:5} {line[1]:5} {line[2]:20} {line[3]:>8} ns {line[4]:>8} GB/s {line[5]:>6}"
            " of a copy"
        )
    print("\n".join(result["differences"]))
    if options.output:
        harness.keep(options, result)
    return int(bool(result["differences"]))


if __name__ == "__main__":
    if len(sys.argv) == 3 and sys.argv[1].endswith("job.json"):
        work()
    sys.exit(main())
