"""`onefold doctor --check`: run the checks, measure the chapters where there are GPUs, print and save
what was found.
"""

from __future__ import annotations

import json
import os
import shlex
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from onefold.doctor.chapter_runs import CHAPTERS, Scope, scope_of
from onefold.doctor.coordinator import check_here, check_with_launcher, report_of
from onefold.doctor.ranks import Stopped
from onefold.machine.calibration import CalibrationError
from onefold.processes.host import joins


def run_checks(
    facts: Callable[[str], dict[str, Any]],
    as_json: bool,
    file: Path | None,
    device: str,
    ranks: str | None,
    quick: bool,
    rehearse: bool,
) -> int:
    """Run the checks and the chapters, and show the results. Returns the exit status.
    Under a launcher, rank 0 shows the results and the other ranks return 0.

    Args:
        facts: returns what this machine has.

    Raises:
        CalibrationError: an argument is impossible here.
        Stopped: a signal arrived before the checks were done.
    """
    begun = time.monotonic()
    launched = joins(os.environ)
    first = not launched or os.environ["RANK"] == "0"
    if ranks is not None and (launched or not ranks.isdigit()):
        what = "the launcher has said how many" if launched else "expected one number with --check"
        raise CalibrationError(f"--ranks {ranks}: {what}.")
    found = facts(device)

    def say(name: str) -> None:
        if first and not as_json and sys.stderr.isatty():
            print(f"\r\033[K{name}", end="", file=sys.stderr, flush=True)

    count = int(ranks) if ranks else None
    try:
        rows = check_with_launcher(found, say) if launched else check_here(found, count, say)
    finally:
        say("")
    if not first:
        return 0
    scope = scope_of(found, count, rehearse, begun, say)
    left_out = _why_not(scope, quick, launched)
    command = shlex.join(["onefold", *sys.argv[1:]])
    chapters: list[Any] = []

    def report() -> dict[str, Any]:
        seconds = time.monotonic() - begun
        made = report_of(found, rows, command, seconds, chapters, left_out)
        if file is not None:
            file.write_text(json.dumps(made, indent=1) + "\n", encoding="utf-8")
        return made

    # Each result is shown and saved at once: a call that is cut off has left the earlier ones
    console = None if as_json and file is None else _console()
    made = report()
    if console is not None:
        from onefold.cli.doctor_tables import show_chapter, show_checks, show_facts

        show_facts(console, found)
        show_checks(console, made)
    number = 0
    if scope is not None and not left_out:
        from onefold.doctor.chapters import measure_chapters

        try:
            for chapter in measure_chapters(scope):
                say("")
                chapters.append(chapter)
                made = report()
                if console is not None:
                    show_chapter(console, made["chapters"][-1])
        except (Stopped, KeyboardInterrupt) as stop:
            number = stop.number if isinstance(stop, Stopped) else signal.SIGINT
            left_out = f"stopped by {signal.Signals(number).name}"
        finally:
            say("")
    made = report()
    if console is None:
        print(json.dumps(made, indent=1))
    else:
        if left_out:
            rest = ", ".join(CHAPTERS[len(chapters) :])
            console.print(f"not measured ({rest}): {left_out}", markup=False, soft_wrap=True)
        if file is not None:
            console.print(f"saved to {file}", markup=False, soft_wrap=True)
    if number:
        return 128 + number
    return 0 if made["ok"] else 1


def _why_not(scope: Scope | None, quick: bool, launched: bool) -> str:
    """Return why no chapter is measured, "" if they are."""
    if scope is None:
        return "this needs a GPU"
    if quick:
        return "--quick leaves it out"
    if launched:
        return "run onefold doctor --check on one machine, without a launcher"
    return ""


def _console() -> Any:
    from rich.console import Console

    return Console(highlight=False)
