"""A machine's calibration as rows for tables."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from onefold.comm import MOVES
from onefold.machine.calibration import Calibration
from onefold.plan.times import shares_of
from onefold.wording import readable

SHORT = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}


def rows_of(found: Calibration) -> dict[str, Any]:
    """Return {title: rows or text} for `show`."""
    took = f"{found.took_s:.0f} s{', quick' if found.quick else ''}"
    when = f"{found.measured_at[:16].replace('T', ' ')} UTC on {found.device_name} in {took}"
    return {
        "measured": when,
        "Rates of one rank": list(_rates(found)),
        "Moves": list(_moves(found)),
        "and": " ".join(_lines(found)),
    }


def _rates(found: Calibration) -> Iterator[dict[str, Any]]:
    for at in found.at:
        nbytes, seconds = max(at.optimizer)
        for dtype in found.dtypes:
            block = max(p.flops_per_s for p in at.blocks if p.dtype == dtype)
            share = shares_of(found, dtype, at.ranks).step_share if at.steps else None
            yield {
                "ranks": at.ranks,
                "threads": at.threads,
                "dtype": SHORT.get(dtype, dtype),
                "best product TFLOP/s": f"{found.peak_rate(dtype, at.ranks) / 1e12:.3g}",
                "best block TFLOP/s": f"{block / 1e12:.3g}",
                "of it in a step": share and f"{share:.0%}",
                "copy GB/s": f"{found.copy_rate(at.ranks) / 1e9:.3g}",
                "AdamW GB/s": f"{nbytes / seconds / 1e9:.3g}",
            }


def _moves(found: Calibration) -> Iterator[dict[str, Any]]:
    for at in found.at:
        for move in MOVES if at.ranks > 1 else ():
            fit, (nbytes, seconds) = at.curves[move].fit, at.curves[move].points[-1]
            yield {
                "ranks": at.ranks,
                "move": move,
                "latency": _time(fit.latency_s),
                "bandwidth": _rate(fit.bytes_per_s),
                "largest measured": f"{readable(nbytes)} in {_time(seconds)}",
            }


def _lines(found: Calibration) -> Iterator[str]:
    for at in found.at:
        if at.overlap:
            yield (
                f"{at.ranks} ranks: {at.overlap.hidden:.0%} of a gather vanishes behind compute, "
                f"which takes {at.overlap.slowdown:.2f} times as long beside it."
            )
            moves = [
                f"{shares_of(found, d, at.ranks).move_share:.0%} ({SHORT.get(d, d)})"
                for d in found.dtypes
            ]
            if at.steps:
                yield (
                    f"{at.ranks} ranks: of the moves' rates a training step reaches"
                    f" {', '.join(moves)}."
                )
    if found.host_link:
        yield (
            f"host to GPU {_rate(found.host_link.to_device)}, GPU to host"
            f" {_rate(found.host_link.to_host)}."
        )
    if found.disk:
        how = (
            "from the page cache, since this system cannot drop it" if found.disk.cached else "read"
        )
        yield (
            f"disk at {found.disk.folder}: {_rate(found.disk.write)} written,"
            f" {_rate(found.disk.read)} {how}."
        )


def _rate(rate: float) -> str:
    return f"{rate / 1e9:.3g} GB/s" if rate >= 1e9 else f"{rate / 1e6:.3g} MB/s"


def _time(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.3g} µs"
