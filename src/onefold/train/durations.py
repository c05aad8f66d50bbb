"""Lengths of time as people write them: 90s, 170m, 2h50m, 1.5d."""

from __future__ import annotations

import re

_SECONDS = {"d": 86400.0, "h": 3600.0, "m": 60.0, "s": 1.0}
_WHOLE = re.compile(r"(?:\d+(?:\.\d+)?[dhms])+")
_PART = re.compile(r"(\d+(?:\.\d+)?)([dhms])")


def seconds_of(text: str) -> float:
    """The length in seconds.

    Raises:
        ValueError: it is not one; a number alone is refused, since Slurm means minutes by it and
            others seconds.
    """
    squeezed = re.sub(r"\s+", "", text.lower())
    total = (
        sum(float(number) * _SECONDS[unit] for number, unit in _PART.findall(squeezed))
        if _WHOLE.fullmatch(squeezed)
        else 0.0
    )
    if total <= 0:
        raise ValueError("expected a length of time with its units, such as 90s, 170m or 2h50m")
    return total


def worded(seconds: float) -> str:
    """Seconds for people: "8.2 s", "170 s", "2 h 50 min"."""
    if seconds < 600:
        return f"{seconds:.1f} s" if seconds < 60 else f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 120 else f"{minutes // 60} h {minutes % 60} min"
