"""Figures of a plan as people read them."""

from __future__ import annotations


def gib(nbytes: float) -> str:
    """Bytes in KiB, MiB or GiB; a dash for none."""
    if nbytes <= 0:
        return "–"
    if nbytes < 2**20:
        return f"{nbytes / 2**10:.1f} KiB"
    return f"{nbytes / 2**20:.1f} MiB" if nbytes < 2**30 else f"{nbytes / 2**30:,.2f} GiB"


def in_seconds(seconds: float) -> str:
    """Seconds, or milliseconds below one; a dash for none."""
    if not seconds:
        return "–"
    return f"{seconds * 1000:.1f} ms" if seconds < 1 else f"{seconds:,.2f} s"


def count(number: float) -> str:
    """A number of things with three digits and a unit."""
    for size, unit in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if number >= size:
            return f"{number / size:.3g}{unit}"
    return f"{number:.0f}"
