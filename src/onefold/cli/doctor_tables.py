"""The doctor's figures as tables."""

from __future__ import annotations

from collections.abc import Iterable

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from onefold.comm import MOVES
from onefold.machine.calibration import Calibration
from onefold.plan.efficiency import shares_of
from onefold.wording import readable

SHORT = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}


def show_calibration(console: Console, found: Calibration) -> None:
    """Print the machine's calibration."""
    took = f"{found.took_s:.0f} s{', quick' if found.quick else ''}"
    console.print(
        f"\nMeasured {found.measured_at[:16].replace('T', ' ')} UTC on {escape(found.device_name)}"
        f" in {took}."
    )
    console.print(_compute(found))
    if found.measured_ranks[-1] > 1:
        console.print(_moves(found))
    for line in _lines(found):
        console.print(escape(line))


def _compute(found: Calibration) -> Table:
    table = _table(
        "Rates of one rank",
        ["ranks", "threads", "dtype", "matrices TFLOP/s", "block TFLOP/s", "in a step", "copy GB/s", "AdamW GB/s"],
    )  # fmt: skip
    table.caption = (
        "of so many at work; matrices: the best product; block: a transformer block's two passes,"
        " the best; in a step: what of that a training step reaches"
    )
    for at in found.at:
        for dtype in found.dtypes:
            nbytes, seconds = max(at.optimizer)
            block = max(p.flops_per_s for p in at.blocks if p.dtype == dtype)
            shares = shares_of(found, dtype, at.ranks) if at.steps else None
            rates = [
                f"{found.peak_rate(dtype, at.ranks) / 1e12:.3g}",
                f"{block / 1e12:.3g}",
                f"{shares.step_share:.0%}" if shares else "–",
            ]
            once = [f"{found.copy_rate(at.ranks) / 1e9:.3g}", f"{nbytes / seconds / 1e9:.3g}"]
            first = dtype == found.dtypes[0]
            ranks = [str(at.ranks), str(at.threads)] if first else ["", ""]
            table.add_row(*ranks, SHORT.get(dtype, dtype), *rates, *(once if first else ()))
    return table


def _moves(found: Calibration) -> Table:
    table = _table("Moves", ["ranks", "move", "latency", "bandwidth", "largest measured"])
    table.caption = (
        "by the payload that each rank sends; latency and bandwidth are a line through all sizes"
    )
    for at in found.at:
        for move in MOVES if at.ranks > 1 else ():
            fit, (nbytes, seconds) = at.curves[move].fit, at.curves[move].points[-1]
            largest = f"{readable(nbytes)} in {_time(seconds)}"
            ranks = str(at.ranks) if move == MOVES[0] else ""
            table.add_row(ranks, move, _time(fit.latency_s), _rate(fit.bytes_per_s), largest)
    return table


def _lines(found: Calibration) -> Iterable[str]:
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
            f" {_rate(found.host_link.to_host)}"
        )
    if found.disk:
        how = (
            "from the page cache, since this system cannot drop it" if found.disk.cached else "read"
        )
        yield (
            f"disk at {found.disk.folder}: {_rate(found.disk.write)} written,"
            f" {_rate(found.disk.read)} {how}"
        )


def _table(title: str, columns: list[str]) -> Table:
    table = Table(
        title=title, title_justify="left", caption_justify="left", show_header=any(columns)
    )
    for column in columns:
        table.add_column(column, overflow="fold")
    return table


def _rate(rate: float) -> str:
    return f"{rate / 1e9:.3g} GB/s" if rate >= 1e9 else f"{rate / 1e6:.3g} MB/s"


def _time(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.3g} µs"
