"""The files that a run writes into its output folder for the report.

    metrics.jsonl          by rank 0: the figures of each step
    observed.json          by rank 0: the plan, facts about the run
    observed-rank0.json    by every rank: its measurements, and one recorded step
    observed-rank1.json    ...

Each rank writes its own file and waits for no other rank.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

from onefold.observe.trace import Recording
from onefold.plan.schema import Account
from onefold.reading import parse_json, read_bytes

METRICS = "metrics.jsonl"
RUN_FILE = "observed.json"
RANK_FILE = "observed-rank{}.json"
Read = TypeVar("Read")


class RunFileError(ValueError):
    """A file of a run cannot be read; the message says which, why, and what to do."""


@dataclass(frozen=True)
class RankObserved:
    """What one rank measured. `step`: one recorded step, if there was one."""

    rank: int
    measured: Account
    step: Recording | None = None


@dataclass(frozen=True)
class Observed:
    """A run, as read from its folder.

    Attributes:
        world_size: number of ranks of the run. ranks: the ranks that have written their file, in
            order.
        facts: values to show (model, data, batch, recipe, ...), {label: value}.
        plan: the plan's prediction before the run, or None.
    """

    world_size: int
    facts: dict[str, Any] = field(default_factory=dict)
    plan: Account | None = None
    ranks: tuple[RankObserved, ...] = ()


def write_observed(
    folder: str | Path,
    rank: int,
    world_size: int,
    measured: Account,
    *,
    plan: Account | None = None,
    step: Recording | None = None,
    facts: Mapping[str, Any] | None = None,
) -> Path:
    """Write this rank's file, and on rank 0 also the run's. Returns the rank's file. No rank waits
    for another. A file appears complete or not at all.

    Args:
        measured: the result of `measured`. step: a window from `record` of at least one step.
        plan, facts: of the run; only rank 0's are written. `facts` maps labels to strings or
            numbers; "recipe" is the recipe's `describe()`.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    if rank == 0:
        _write(folder / RUN_FILE, Observed(world_size, dict(facts or {}), plan))
    return _write(folder / RANK_FILE.format(rank), RankObserved(rank, measured, step))


def _write(path: Path, values: Observed | RankObserved) -> Path:
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    draft.write_text(json.dumps(asdict(values), separators=(",", ":")), encoding="utf-8")
    return draft.replace(path)


def read_observed(folder: str | Path) -> Observed:
    """Read the run in `folder`, with the ranks that have written their file.

    Raises:
        RunFileError: a file cannot be read.
    """
    run = _read(Path(folder, RUN_FILE), Observed)
    files = [Path(folder, RANK_FILE.format(rank)) for rank in range(run.world_size)]
    return replace(run, ranks=tuple(_read(file, RankObserved) for file in files if file.exists()))


def _read(path: Path, kind: type[Read]) -> Read:
    from pydantic import TypeAdapter

    try:
        return TypeAdapter(kind).validate_json(read_bytes(path))
    except (OSError, ValueError) as error:
        raise RunFileError(
            f"{path} cannot be read ({' '.join(str(error).split())[:200]}): it was cut short, changed,"
            " or written by another version of Onefold. Run again."
        ) from None


def read_metrics(folder: Path) -> list[dict[str, Any]]:
    """Read the figures of the steps in a run's folder; none if it has no such file. An incomplete last
    line was being written when the run was killed, and is left out.

    Raises:
        RunFileError: another line cannot be read.
    """
    path, rows = folder / METRICS, []
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines() if path.exists() else []
    for number, line in enumerate(lines, 1):
        try:
            row = parse_json(line)
        except json.JSONDecodeError:
            row = None
        if isinstance(row, dict):
            rows.append(row)
        elif number < len(lines):
            raise RunFileError(f"{path}, line {number}, is not JSON: the file was changed.")
    return [row for row in rows if "step" in row]
