"""The drill's results as Markdown."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from benchmarks import pages


def _count(rows: list[Any], moment: str) -> str:
    return str(sum(row["moment"] == moment for row in rows))


KILLS: pages.Columns = {
    "stage": lambda rows: str(rows[0]["stage"]),
    "saves": lambda rows: "behind the training" if rows[0]["asynchronous"] else "in its way",
    "killed at the start": lambda rows: _count(rows, "start"),
    "in a step": lambda rows: _count(rows, "step"),
    "in a save": lambda rows: _count(rows, "save"),
    "wrong": lambda rows: str(sum(bool(row["wrong"]) for row in rows)),
}
INJURIES: pages.Columns = {
    "injury": lambda rows: rows[0]["kind"],
    "number": lambda rows: str(len(rows)),
    "found and named": lambda rows: str(
        sum(any(f.startswith(tuple(i["files"])) for f in i["found"]) for i in rows)
    ),
    "refused by a load": lambda rows: str(sum(set(i["loaded"]) == {"refused"} for i in rows)),
    "loaded right": lambda rows: str(sum("right" in i["loaded"] for i in rows)),
    "wrong": lambda rows: str(sum(bool(i["wrong"]) for i in rows)),
}


def _groups(found: list[dict[str, Any]], *names: str) -> list[list[dict[str, Any]]]:
    """Those that are alike in these fields, together."""
    groups: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for one in found:
        groups.setdefault(tuple(one[name] for name in names), []).append(one)
    return list(groups.values())


def markdown(found: Mapping[str, Any]) -> str:
    """The page for what `__main__` writes as JSON."""
    kills, injuries = found["kills"], found["injuries"]
    ordered = sorted(kills, key=lambda k: (k["stage"], k["asynchronous"]))
    return pages.page(
        "# Kills and injuries",
        f"{pages.where(found)}; {found['seconds']:.0f} s.",
        (
            f"{len(kills)} kills of a run on 2 ranks, {sum(k['moment'] == 'save' for k in kills)}"
            f" of them while a checkpoint was being written; {len(found['runs'])} runs came to"
            f" their end. After {sum(not k['wrong'] for k in kills)} kills the run went on with the"
            " losses and states of the run that nobody disturbed, bit for bit, from the newest"
            " checkpoint, and all that was left was whole."
        ),
        pages.table(KILLS, _groups(ordered, "stage", "asynchronous")),
        (
            f"{len(injuries)} injuries of whole checkpoints. Each was to be found by `verify` and"
            " named by file (a changed byte of a tensor also by tensor), and to be refused by a"
            " load on one rank and on two, or to load as what was saved."
        ),
        pages.table(INJURIES, _groups(injuries, "kind")),
        (
            "A load reads what it needs: damage to config.json, or for one rank to the random state"
            " of another, is found by `verify` alone."
        ),
        _wrong(found),
    )


def _wrong(found: Mapping[str, Any]) -> str:
    rows = [
        f"kill of rank {k['first']} at stage {k['stage']}: {'; '.join(k['wrong'])}"
        for k in found["kills"]
        if k["wrong"]
    ]
    rows += [f"a run: {sentence}" for sentence in found["runs"] if sentence]
    rows += [
        f"{i['kind']} of {', '.join(i['files'])} ({i['what']}): {'; '.join(i['wrong'])}"
        for i in found["injuries"]
        if i["wrong"]
    ]
    return "\n".join(["## Wrong", "", *(f"- {row}" for row in rows)]) if rows else ""
