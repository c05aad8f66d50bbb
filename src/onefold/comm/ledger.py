"""The traffic ledger: payload bytes that this rank sent, by move and by unit. Exact, and without any synchronization."""

from __future__ import annotations

from collections import Counter


class TrafficLedger:
    """Counts payload bytes sent by this rank. `control` messages (a few hundred bytes a step) are kept apart from the payload."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self._moves: Counter[tuple[str, str]] = Counter()
        self.control_bytes = 0

    def record(self, move: str, unit: str, nbytes: int) -> None:
        self._moves[move, unit] += nbytes

    def total(self) -> int:
        """Payload bytes sent since the last reset."""
        return sum(self._moves.values())

    def by_move(self) -> dict[str, int]:
        """Bytes by move: 'all-gather', 'reduce-scatter', 'all-reduce', and 'state' (saving, loading, full_params)."""
        out: Counter[str] = Counter()
        for (move, _), nbytes in self._moves.items():
            out[move] += nbytes
        return dict(out)

    def by_unit(self) -> dict[str, dict[str, int]]:
        """Bytes by unit, then by move."""
        out: dict[str, dict[str, int]] = {}
        for (move, unit), nbytes in self._moves.items():
            out.setdefault(unit, {})[move] = nbytes
        return out
