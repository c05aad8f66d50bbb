"""Rows of tokens that lie on the disk: conversations of any length, and several parts as one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, overload

import numpy as np
import numpy.typing as npt

from onefold.data.shuffle import AllBut
from onefold.data.token_cache import Tokens

IGNORE = -100
#: Conversations that are looked at at a time.
_LOOK = 1 << 18
Row = npt.NDArray[np.int32]


class _Rows(Sequence[Row]):
    """A sequence of rows that are made when they are asked for, one by one."""

    def row(self, index: int) -> Row:
        raise NotImplementedError

    @overload
    def __getitem__(self, index: int) -> Row: ...
    @overload
    def __getitem__(self, index: slice) -> list[Row]: ...
    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self.row(at) for at in range(*index.indices(len(self)))]
        return self.row(int(index))


class Conversations(_Rows):
    """The first `seq` tokens of each conversation in which an assistant says a word by then."""

    def __init__(self, tokens: Tokens, seq: int) -> None:
        self.tokens, self.seq = tokens, seq
        without = [np.empty(0, np.int64)]
        for start in range(0, len(tokens.ends), _LOOK):
            first = tokens.first[start : start + _LOOK]
            without.append(start + np.flatnonzero((first < 1) | (first >= seq)))
        self._taken = AllBut(len(tokens.ends), np.concatenate(without))

    def __len__(self) -> int:
        return len(self._taken)

    def place(self, index: int) -> slice:
        """Where a row's tokens are."""
        at = int(self._taken[np.array(index)])
        begin = int(self.tokens.ends[at - 1]) if at else 0
        return slice(begin, min(int(self.tokens.ends[at]), begin + self.seq))

    def row(self, index: int) -> Row:
        return self.tokens.tokens[self.place(index)]

    def labels(self) -> Sequence[Row]:
        """The same rows with `IGNORE` for what does not count."""
        return _Labels(self)


class _Labels(_Rows):
    def __init__(self, of: Conversations) -> None:
        self.of = of

    def __len__(self) -> int:
        return len(self.of)

    def row(self, index: int) -> Row:
        place = self.of.place(index)
        tokens = self.of.tokens
        return np.where(tokens.said[place], tokens.tokens[place], np.int32(IGNORE))


class Joined(_Rows):
    """Several sequences of rows, one behind the other. `counts`: how many rows each has."""

    def __init__(self, parts: Sequence[Any]) -> None:
        self.parts, self.counts = parts, [len(part) for part in parts]
        self._ends = np.cumsum(self.counts)

    def __len__(self) -> int:
        return int(self._ends[-1])

    def place(self, index: int) -> tuple[int, int]:
        """(which part has a row, the row's number there)."""
        at = int(np.searchsorted(self._ends, index, side="right"))
        return at, int(index - (self._ends[at - 1] if at else 0))

    def row(self, index: int) -> Row:
        at, own = self.place(index)
        found: Row = self.parts[at][own]
        return found
