"""`python -m tests.scripts [run WORDS | write | list]`: see the package."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from dataclasses import asdict
from pathlib import Path

TESTS = Path(__file__).parents[1]
os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path[:0] = [str(TESTS), *([str(TESTS.parent / "src")] if "onefold" not in sys.modules else [])]

from ranks import preload, stop_fork_servers
from scripts import page
from scripts.registry import COLUMNS, REFUSED, everything
from scripts.verdicts import Task, Verdict, sentence, surprises, tasks_of, verdicts_of


def main(arguments: list[str]) -> int:
    """Run the habits with these words in their title (all without any), say what surprises, and
    write the page if asked to.
    """
    parser = argparse.ArgumentParser(prog="python -m tests.scripts", description=main.__doc__)
    parser.add_argument("what", nargs="?", choices=("run", "write", "list"), default="run")
    parser.add_argument("words", nargs="*", help="run: part of `subject: title`")
    parser.add_argument("--columns", default=",".join(COLUMNS), help="run: of one,0,1,2,3")
    parser.add_argument(
        "--results",
        type=Path,
        help="a file that keeps verdicts: `run` adds to it, `write` runs only what it has not",
    )
    parser.add_argument(
        "--partial", action="store_true", help="write: only from what --results has"
    )
    parser.add_argument("--width", type=int, default=400, help="letters shown of a message")
    given = parser.parse_args(arguments)
    known, words = everything(), " ".join(given.words).lower()
    chosen = [h for h in known.values() if words in f"{h.subject}: {h.title}".lower()]
    if given.what == "list":
        print("\n".join(f"{h.subject}: {h.title}" for h in chosen))
        return 0
    columns = given.columns.split(",")
    assert given.what == "run" or (columns == list(COLUMNS) and not words), (
        "the page has all habits in all columns"
    )
    preload("scripts.verdicts", "scripts.loop", "zoo")
    began, kept = time.monotonic(), _kept(given.results)
    tasks = [
        task
        for task in tasks_of(chosen, columns)
        if given.what == "run" or (task[0][0], task[1]) not in kept
    ]
    if given.partial:
        tasks = []

    def tell(task: Task, verdict: Verdict) -> None:
        if line := surprises(known[task[0][0]], task[1], verdict):
            print(line[: given.width], flush=True)

    verdicts = verdicts_of(tasks, tell=tell)
    stop_fork_servers()
    found = kept | {
        (titles[0], column): verdict
        for (titles, column), verdict in zip(tasks, verdicts, strict=True)
    }
    if given.results:
        given.results.write_text(
            json.dumps([[*key, asdict(verdict)] for key, verdict in found.items()])
        )
    surprising = [
        line
        for h in chosen
        for c in columns
        if (h.title, c) in found and (line := surprises(h, c, found[h.title, c]))
    ]
    if words:
        for h in chosen:
            print(f"{h.title}: {', '.join(f'{c} {found[h.title, c].kind}' for c in columns)}")
            for cause in {
                f"{v.error}: {sentence(v.why)}"
                for c in columns
                if (v := found[h.title, c]).kind == REFUSED
            }:
                print(f"    {cause[: given.width]}")
    failed = {
        h.title
        for h in chosen
        for c in columns
        if (h.title, c) in found and found[h.title, c].failed
    }
    print(
        f"{len(chosen)} habits in {time.monotonic() - began:.0f} s, {len(surprising)} surprises;"
        f" {len(failed)} different, crashed or hung"
    )
    if given.what == "write":
        page.PAGE.write_text(page.text(known, found), encoding="utf-8")
        print(f"wrote {page.PAGE}")
    return 1 if surprising else 0


def _kept(file: Path | None) -> dict[tuple[str, str], Verdict]:
    rows = json.loads(file.read_text()) if file is not None and file.exists() else []
    return {(title, column): Verdict(**verdict) for title, column, verdict in rows}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
