"""The files that a run writes into its output folder for the report.

    observed.json          by rank 0: the recipe, the plan, facts about the run
    observed-rank0.json    by every rank: its measurements, and one recorded step
    observed-rank1.json    ...

Each rank writes its own file and waits for no other rank. Every file has a version. A reader of
another version refuses the file.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from dataclasses import asdict, astuple, dataclass, field
from pathlib import Path
from typing import Any

from onefold.comm import Sent
from onefold.observe.memory import Reconciliation
from onefold.observe.trace import Held, Move, Recording, Work
from onefold.plan.schema import Account
from onefold.reading import read_json
from onefold.recipe import Recipe
from onefold.recipe.rows import GROUP

VERSION = 1
RUN_FILE = "observed.json"
RANK_FILE = "observed-rank{rank}.json"
_RANK_NAME = re.compile(r"observed-rank(\d+)\.json")


class RunFileError(ValueError):
    """A file of a run cannot be read; the message says which, why, and what to do."""


@dataclass(frozen=True)
class RecipeRow:
    """One row of the recipe's table."""

    state: str
    placement: str
    tier: str
    at_rest: str
    wire: str


@dataclass(frozen=True)
class RankObserved:
    """What one rank measured.

    Attributes:
        traffic: bytes of one step, {unit: {move: bytes}}. wire: the same by move, with the bytes
            between nodes and those without codecs.
        step: one recorded step, if there was one.
    """

    rank: int
    measured: Account
    traffic: dict[str, dict[str, int]] = field(default_factory=dict)
    wire: dict[str, Sent] = field(default_factory=dict)
    step: Recording | None = None
    machine: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Observed:
    """A run, as read from its folder.

    Attributes:
        world_size: number of ranks of the run. ranks: the ranks that have written their file, in
            order.
        recipe: its three rows. recipe_notes: sentences about them. stage: the ZeRO stage with these
            placements, or None.
        facts: other values to show (model, data, batch ...), {label: value}.
        plan: the plan's prediction before the run, or None.
    """

    world_size: int
    stage: int | None = None
    recipe: tuple[RecipeRow, ...] = ()
    recipe_notes: tuple[str, ...] = ()
    facts: dict[str, Any] = field(default_factory=dict)
    plan: Account | None = None
    ranks: tuple[RankObserved, ...] = ()

    @property
    def missing_ranks(self) -> list[int]:
        there = {r.rank for r in self.ranks}
        return [rank for rank in range(self.world_size) if rank not in there]


def recipe_table(recipe: Recipe) -> tuple[RecipeRow, ...]:
    """Return the recipe as plain text, row by row."""
    rows = []
    for state, label in (
        ("parameters", "parameters"),
        ("gradients", "gradients"),
        ("optimizer", "optimizer states"),
    ):
        row = getattr(recipe, state)
        rests, wire = recipe.in_words(state)
        wire = wire or "–"
        wire += f" as {row.codec}" if row.codec else ""
        placement = row.placement.value + (" in each group" if row.over == GROUP else "")
        rows.append(RecipeRow(label, placement, row.tier.value, rests, wire))
    return tuple(rows)


# -- writing ---------------------------------------------------------------------------------------


def write_observed(
    folder: str | Path,
    rank: int,
    world_size: int,
    measured: Account,
    *,
    recipe: Recipe | None = None,
    plan: Account | None = None,
    step: Recording | None = None,
    machine: Reconciliation | None = None,
    facts: Mapping[str, Any] | None = None,
) -> Path:
    """Write this rank's file, and on rank 0 also the run's. Returns the rank's file. No rank waits
    for another.

    Args:
        measured: the result of `measured`. step: a window from `record` of at least one step.
            machine: the result of `reconciled`.
        recipe, plan, facts: of the run; only rank 0's are written. `facts` maps labels to strings
            or numbers.

    A file appears complete or not at all. If an earlier run had more ranks, rank 0 removes the
    files of the ranks that this run does not have.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    if rank == 0:
        for path in folder.glob("observed-rank*.json"):
            found = _RANK_NAME.fullmatch(path.name)
            if found and int(found.group(1)) >= world_size:
                path.unlink(missing_ok=True)
        shared = {
            "version": VERSION,
            "world_size": world_size,
            "stage": recipe.stage if recipe is not None else None,
            "recipe": [asdict(row) for row in recipe_table(recipe)] if recipe is not None else [],
            "recipe_notes": recipe.describe().splitlines()[4:] if recipe is not None else [],
            "facts": dict(facts or {}),
            "plan": plan.to_json() if plan is not None else None,
        }
        _write(folder / RUN_FILE, shared)
    path = folder / RANK_FILE.format(rank=rank)
    own: dict[str, Any] = {
        "version": VERSION,
        "rank": rank,
        "measured": measured.to_json(),
        "traffic": {},
        "wire": {},
        "step": None,
        "machine": machine.to_json() if machine is not None else {},
    }
    if step is not None:
        steps = max(1, step.steps)
        own["traffic"] = {
            unit: {move: n // steps for move, n in moves.items()}
            for unit, moves in step.by_unit().items()
        }
        own["wire"] = {
            move: {name: n // steps for name, n in asdict(sent).items()}
            for move, sent in step.sent().items()
        }
        own["step"] = _of_recording(step)
    _write(path, own)
    return path


def _write(path: Path, values: dict[str, Any]) -> None:
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    draft.write_text(json.dumps(values, separators=(",", ":")), encoding="utf-8")
    draft.replace(path)


def _of_recording(step: Recording) -> dict[str, Any]:
    """Convert a recording for JSON: rows instead of objects, and times in seconds from the window's
    start, rounded to microseconds.
    """

    def at(seconds: float) -> float:
        return round(seconds - step.start, 6)

    def times(m: Move) -> tuple[float, float, float]:
        return at(m.launched), at(m.landed), round(m.exposed, 6)

    def of_tier(seen: Held) -> dict[str, Any]:
        return {
            "held": seen.held,
            "changes": [
                [at(t), category, unit, delta] for t, category, unit, delta in seen.changes
            ],
        }

    return {
        "rank": step.rank,
        "world_size": step.world_size,
        "seconds": at(step.end),
        "steps": step.steps,
        "began": step.epoch + step.start,
        "exposed": round(step.exposed, 6),
        "activations_watched": step.activations_watched,
        "truncated": step.truncated,
        "moves": [[*astuple(m)[:5], *times(m), *astuple(m)[8:]] for m in step.moves],
        "borders": step.borders,
        "work": [[w.kind, w.unit, w.phase, at(w.start), at(w.end)] for w in step.work],
        "io": round(step.io, 6),
        **of_tier(Held(step.held, step.changes)),
        "tiers": {tier: of_tier(held) for tier, held in step.tiers.items()},
    }


# -- reading ---------------------------------------------------------------------------------------


def read_observed(folder: str | Path) -> Observed:
    """Read the run in `folder`, with the ranks that have written their file.

    Raises:
        RunFileError: there is no `observed.json`, or a file cannot be read.
    """
    folder = Path(folder)
    path = folder / RUN_FILE
    if not path.exists():
        raise RunFileError(
            f"{folder} has no {RUN_FILE}: a run of `onefold train` writes it, your own loop does"
            " with write_observed()."
        )
    values = _read(path)
    try:
        return Observed(
            world_size=int(values["world_size"]),
            stage=values["stage"],
            recipe=tuple(RecipeRow(**row) for row in values["recipe"]),
            recipe_notes=tuple(values["recipe_notes"]),
            facts=dict(values["facts"]),
            plan=_account(values["plan"]) if values["plan"] is not None else None,
            ranks=gather_ranks(folder),
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise _unreadable(path, error) from None


def gather_ranks(folder: str | Path) -> tuple[RankObserved, ...]:
    """Read the ranks' files in `folder`, in order of rank."""
    found = []
    for path in Path(folder).glob("observed-rank*.json"):
        if not _RANK_NAME.fullmatch(path.name):
            continue
        values = _read(path)
        try:
            found.append(
                RankObserved(
                    rank=int(values["rank"]),
                    measured=_account(values["measured"]),
                    traffic={unit: dict(moves) for unit, moves in values["traffic"].items()},
                    # Older files have no "wire"
                    wire={str(move): Sent(**sent) for move, sent in values.get("wire", {}).items()},
                    step=_to_recording(values["step"]) if values["step"] is not None else None,
                    machine=dict(values["machine"]),
                )
            )
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise _unreadable(path, error) from None
    return tuple(sorted(found, key=lambda r: r.rank))


def _read(path: Path) -> dict[str, Any]:
    try:
        values = read_json(path)
    except OSError as error:
        raise RunFileError(f"{path} cannot be read ({error}).") from None
    except json.JSONDecodeError as error:
        raise RunFileError(
            f"{path} is not whole JSON (line {error.lineno}: {error.msg}): delete it, or run again."
        ) from None
    if not isinstance(values, dict) or "version" not in values:
        raise RunFileError(f"{path} is not a file that Onefold wrote: it has no version.")
    if values["version"] != VERSION:
        raise RunFileError(
            f"{path} has version {values['version']}, this Onefold reads version {VERSION}: read it"
            " with the one that wrote it."
        )
    return values


def _unreadable(path: Path, error: Exception) -> RunFileError:
    if isinstance(error, RunFileError):
        return error
    what = f"{error} is missing" if isinstance(error, KeyError) else str(error)
    return RunFileError(
        f"{path} does not hold what its version promises ({what}): it was changed, or written by"
        " another program."
    )


def _account(values: Mapping[str, Any]) -> Account:
    # An older file may lack newer fields, which have defaults. These are always there.
    if missing := {"rest", "peak", "wire", "seconds"} - set(values):
        raise ValueError(f"an account without {', '.join(sorted(missing))}")
    return Account.from_json(values)


def _to_held(values: Mapping[str, Any]) -> Held:
    changes = [
        (float(t), str(category), str(unit), int(delta))
        for t, category, unit, delta in values["changes"]
    ]
    return Held({str(k): int(v) for k, v in values["held"].items()}, changes)


def _to_recording(values: Mapping[str, Any]) -> Recording:
    device = _to_held(values)
    return Recording(
        rank=int(values["rank"]),
        world_size=int(values["world_size"]),
        start=0.0,
        end=float(values["seconds"]),
        steps=int(values["steps"]),
        moves=[Move(*row) for row in values["moves"]],
        work=[Work(*row) for row in values["work"]],
        held=device.held,
        changes=device.changes,
        epoch=float(values["began"]),
        exposed=float(values["exposed"]),
        # Older files have no tiers
        tiers={str(tier): _to_held(held) for tier, held in values.get("tiers", {}).items()},
        io=float(values.get("io", 0.0)),
        activations_watched=bool(values["activations_watched"]),
        truncated=bool(values["truncated"]),
        borders=str(values.get("borders", "")),
    )
