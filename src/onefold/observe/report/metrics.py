"""The metrics of a run: `metrics.jsonl`, a JSON object a line."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from onefold.observe.runfile import RunFileError

METRICS = "metrics.jsonl"


@dataclass(frozen=True)
class Metrics:
    """Rows of the steps in order, and the closing row ({} while a run is under way or after it
    broke off).
    """

    rows: list[Mapping[str, Any]] = field(default_factory=list)
    summary: Mapping[str, Any] = field(default_factory=dict)

    def series(self, key: str) -> tuple[list[int], list[float]]:
        """(steps, values) of the rows that have a finite number under `key`."""
        found = [
            (int(row["step"]), float(row[key])) for row in self.rows if _is_number(row.get(key))
        ]
        return [step for step, _ in found], [value for _, value in found]

    def typical(self, key: str) -> float | None:
        """The median over the run, the first tenth (warming up) left out; None if there is no such
        figure.
        """
        _, values = self.series(key)
        return median(values[len(values) // 10 if len(values) > 1 else 0 :]) if values else None


def read_metrics(folder: Path) -> Metrics | None:
    """The metrics in a run's folder, None if it has none. A last line that was cut off is left out.

    Raises:
        RunFileError: a line that is not the last cannot be read.
    """
    path = folder / METRICS
    if not path.exists():
        return None
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError as error:
        raise RunFileError(f"{path} cannot be read ({error}).") from None
    rows: list[Mapping[str, Any]] = []
    summary: Mapping[str, Any] = {}
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except json.JSONDecodeError:
            if number == len(lines):  # the run was killed while it wrote
                break
            raise RunFileError(
                f"{path}, line {number}, is not JSON: the file was changed, or written by another"
                " program."
            ) from None
        if not isinstance(row, dict):
            raise RunFileError(
                f"{path}, line {number}: expected an object with the figures of a step, found"
                f" {type(row).__name__}."
            )
        if row.get("done"):
            summary = row
        elif isinstance(row.get("step"), int):
            rows.append(row)
    return Metrics(rows, summary)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
