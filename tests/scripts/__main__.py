"""`python -m tests.scripts [run WORDS | write]`: see the package."""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path

TESTS = Path(__file__).parents[1]
os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path[:0] = [str(TESTS), *([str(TESTS.parent / "src")] if "onefold" not in sys.modules else [])]

from ranks import preload, stop_fork_servers
from scripts import page
from scripts.registry import COLUMNS, everything
from scripts.verdicts import Task, Verdict, surprises, tasks_of, verdicts_of


def main(arguments: list[str]) -> int:
    """Run the habits with these words in their title (all without any), say what surprises, and
    write the page if asked to.
    """
    parser = argparse.ArgumentParser(prog="python -m tests.scripts", description=main.__doc__)
    parser.add_argument("what", nargs="?", choices=("run", "write"), default="run")
    parser.add_argument("words", nargs="*", help="run: part of `subject: title`")
    given = parser.parse_args(arguments)
    known, words = everything(), " ".join(given.words).lower()
    assert given.what == "run" or not words, "the page has all habits"
    chosen = [h for h in known.values() if words in f"{h.subject}: {h.title}".lower()]
    preload("scripts.verdicts", "scripts.loop", "zoo")
    began, surprising = time.monotonic(), 0

    def tell(task: Task, verdict: Verdict) -> None:
        nonlocal surprising
        (title,), column = task
        line = surprises(known[title], column, verdict)
        surprising += line is not None
        if line or words:
            print((line or f"{title}, {column}: {verdict.kind} {verdict.why}")[:400], flush=True)

    tasks = tasks_of(chosen, COLUMNS)
    verdicts = verdicts_of(tasks, tell=tell)
    stop_fork_servers()
    print(f"{len(chosen)} habits in {time.monotonic() - began:.0f} s, {surprising} surprises")
    if given.what == "write":
        found = {(t[0], column): v for (t, column), v in zip(tasks, verdicts, strict=True)}
        page.PAGE.write_text(page.text(known, found), encoding="utf-8")
        print(f"wrote {page.PAGE}")
    return 1 if surprising else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
