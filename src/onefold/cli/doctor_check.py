"""`onefold doctor --check`: run the checks, print and save what was found."""

from __future__ import annotations

import json
import os
import shlex
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from onefold.doctor.coordinator import check_here, check_with_launcher, report_of
from onefold.machine.calibration import CalibrationError
from onefold.processes.host import joins


def run_checks(
    facts: Callable[[str], dict[str, Any]],
    as_json: bool,
    file: Path | None,
    device: str,
    ranks: str | None,
) -> int:
    """Run the checks, and show the results. Returns the exit status.
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
    command = shlex.join(["onefold", *sys.argv[1:]])
    made = report_of(found, rows, command, time.monotonic() - begun)
    if file is not None:
        file.write_text(json.dumps(made, indent=1) + "\n", encoding="utf-8")
    elif as_json:
        print(json.dumps(made, indent=1))
    if file is not None or not as_json:
        from rich.console import Console

        from onefold.cli.doctor_tables import show_checks, show_facts

        console = Console(highlight=False)
        show_facts(console, found)
        show_checks(console, made)
        if file is not None:
            console.print(f"saved to {file}", markup=False, soft_wrap=True)
    return 0 if made["ok"] else 1
