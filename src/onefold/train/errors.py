"""What a user of `onefold train` can mend, told in a sentence and without a traceback."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class TrainError(ValueError):
    """Something in the configuration, the data or the model that the user can change."""


def did_you_mean(given: str, known: Iterable[str]) -> str:
    """Return "Did you mean 'x'?", or the list of what is known where nothing is near."""
    names = sorted(known)
    near = difflib.get_close_matches(given, names, 1)
    return f"Did you mean {near[0]!r}?" if near else f"Known: {', '.join(names)}."
