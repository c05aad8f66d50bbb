"""The drill's results as Markdown."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks import harness


def markdown(found: Mapping[str, Any]) -> str:
    """The page for what `__main__` writes as JSON."""
    kills, injuries = found["kills"], found["injuries"]
    lines = [
        "# Kills and injuries",
        "",
        f"{harness.where(found)}; {found['seconds']:.0f} s.",
        "",
        (
            f"{len(kills)} kills of a run on 2 ranks, {sum(k['moment'] == 'save' for k in kills)}"
            f" of them while a checkpoint was being written; {len(found['runs'])} runs came to"
            f" their end. After {sum(not k['wrong'] for k in kills)} kills the run went on with the"
            " losses and states of the run that nobody disturbed, bit for bit, from the newest"
            " checkpoint, and all that was left was whole."
        ),
        "",
    ]
    table: list[list[Any]] = [
        ["stage", "saves", "killed at the start", "in a step", "in a save", "wrong"]
    ]
    for stage in sorted({k["stage"] for k in kills}):
        for behind in (False, True):
            rows = [k for k in kills if k["stage"] == stage and k["asynchronous"] is behind]
            if rows:
                moments = Counter(k["moment"] for k in rows)
                how = "behind the training" if behind else "in its way"
                table.append(
                    [
                        stage,
                        how,
                        moments["start"],
                        moments["step"],
                        moments["save"],
                        sum(bool(k["wrong"]) for k in rows),
                    ]
                )
    lines += [
        harness.markdown(table),
        (
            f"{len(injuries)} injuries of whole checkpoints. Each was to be found by `verify` and"
            " named by file (a changed byte of a tensor also by tensor), and to be refused by a"
            " load on one rank and on two, or to load as what was saved."
        ),
        "",
    ]
    table = [["injury", "number", "found and named", "refused by a load", "loaded right", "wrong"]]
    for kind in dict.fromkeys(i["kind"] for i in injuries):
        rows = [i for i in injuries if i["kind"] == kind]
        named = sum(any(f.startswith(tuple(i["files"])) for f in i["found"]) for i in rows)
        refused = sum(set(i["loaded"]) == {"refused"} for i in rows)
        right = sum("right" in i["loaded"] for i in rows)
        wrong = sum(bool(i["wrong"]) for i in rows)
        table.append([kind, len(rows), named, refused, right, wrong])
    rest = (
        "A load reads what it needs: damage to config.json, or for one rank to the random state of"
        " another, is found by `verify` alone."
    )
    lines += [harness.markdown(table), rest, *_wrong(found)]
    return "\n".join(lines) + "\n"


def _wrong(found: Mapping[str, Any]) -> list[str]:
    rows: Sequence[str] = [
        *(
            f"kill of rank {k['first']} at stage {k['stage']}: {'; '.join(k['wrong'])}"
            for k in found["kills"]
            if k["wrong"]
        ),
        *(f"a run: {sentence}" for sentence in found["runs"] if sentence),
        *(
            f"{i['kind']} of {', '.join(i['files'])} ({i['what']}): {'; '.join(i['wrong'])}"
            for i in found["injuries"]
            if i["wrong"]
        ),
    ]
    return ["", "## Wrong", "", *(f"- {row}" for row in rows)] if rows else []
