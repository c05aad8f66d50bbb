"""Helpers for messages: suggestions, durations and sizes in words."""

from __future__ import annotations

import difflib
import errno
import re
from collections.abc import Iterable


class TrainError(ValueError):
    """Something in the configuration, the data or the model that the user can change."""


def did_you_mean(given: str, known: Iterable[str], most: int = 1) -> str:
    """Return "Did you mean 'x'?", with at most so many names, or the list of what is known where nothing
    is near.
    """
    names = sorted(known)
    near = difflib.get_close_matches(given, names, most)
    return (
        f"Did you mean {' or '.join(map(repr, near))}?" if near else f"Known: {', '.join(names)}."
    )


#: What to do where the system refuses to write.
_HINTS = {
    errno.ENOSPC: "free space there, or choose another disk",
    errno.EDQUOT: "the quota is used up: free space, or choose another disk",
    errno.EROFS: "the file system is read-only: choose another folder",
    errno.EACCES: "choose a folder that this user may write to",
    errno.ENOTDIR: "a part of the path is a file: choose another folder",
    errno.EEXIST: "a file of this name is in the way: choose another folder",
}


def in_words(error: OSError) -> str:
    """Describe an OSError, with a hint what to do."""
    where = f" ({error.filename})" if error.filename else ""
    hint = _HINTS.get(error.errno or 0)
    return f"{error.strerror or error}{where}" + (f"; {hint}" if hint else "")


def few(names: Iterable[str], count: int = 5, between: str = ", ") -> str:
    """Join names; of more than `count`, the first ones and how many more there are."""
    every = list(names)
    more = f" and {len(every) - count} more" if len(every) > count else ""
    return between.join(every[:count]) + more


_SECONDS = {"d": 86400.0, "h": 3600.0, "m": 60.0, "s": 1.0}
_PART = re.compile(r"(\d+(?:\.\d+)?)([dhms])")


def seconds_of(text: str) -> float:
    """Return a duration such as "2h50m" in seconds.

    Raises:
        ValueError: it is not a duration. A number without a unit is refused: it means minutes in
            Slurm and seconds elsewhere.
    """
    found = _PART.findall(squeezed := re.sub(r"\s+", "", text.lower()))
    total = sum(float(number) * _SECONDS[unit] for number, unit in found)
    if "".join(map("".join, found)) != squeezed or not 0 < total < 1e9:  # 30 years
        raise ValueError("expected a length of time with its units, such as 90s, 170m or 2h50m")
    return total


def worded(seconds: float) -> str:
    """Format seconds: "8.2 s", "170 s", "2 h 50 min"."""
    if seconds < 600:
        return f"{seconds:.1f} s" if seconds < 60 else f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 120 else f"{minutes // 60} h {minutes % 60} min"


def readable(amount: float) -> str:
    """Format bytes in binary units with about three digits: "513 MiB", "1.24 GiB"."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if amount < 1000:
            return (
                f"{amount:.0f} {unit}" if amount >= 100 or unit == "B" else f"{amount:.3g} {unit}"
            )
        amount /= 1024
    return f"{amount:.3g} TiB"
