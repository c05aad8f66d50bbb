"""`onefold doctor`: show what this machine has. With --calibrate, measure what it can do; with
--check, check that Onefold works correctly on it.
"""

from __future__ import annotations

import os
import sys
import time
from collections import Counter
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from onefold.cli.options import Json, option
from onefold.cli.show import answered, busy, show

#: Prefixes of the environment variables that a check's report lists.
TOLD = ("NCCL_", "TORCH_", "GLOO_", "CUDA_", "PYTORCH_", "OMP_NUM_THREADS", "TRITON_")


# fmt: off
@answered
def doctor_command(
    calibrate: Annotated[
        bool, option("Measure rates of compute, memory, gathers and disk, and training steps: about a minute.", None, "--calibrate")
    ] = False,
    check: Annotated[
        bool, option("Check collectives, stages, offload, checkpoints and overlap: under two minutes.", None, "--check")
    ] = False,
    as_json: Json = False,
    output: Annotated[Path | None, option("Calibration file to write, or show (default: onefold/machine.toml in ~/.cache).")] = None,
    device: Annotated[Literal["auto", "cpu", "cuda"], option("Where ranks compute.", shown=True)] = "auto",
    ranks: Annotated[
        int | None,
        typer.Option(min=1, show_default=False, help="How many ranks (default: as onefold train starts; with --check two on a CPU)."),
    ] = None,
    disk: Annotated[Path | None, option("With --calibrate: folder whose disk is measured (default: the working folder).")] = None,
) -> int:
    # fmt: on
    """Show what this machine has for training: processors, memory, GPUs, backends, the ranks that
    would start.

    With --calibrate also measure what they can do. `onefold plan --here` predicts with these
    figures. With --check see whether Onefold is right here: alone it starts ranks of its own, under
    torchrun it takes part with the launcher's. Exit status 1 if a check failed.
    """
    from onefold.doctor.facts import facts
    from onefold.train.config import resolve
    from onefold.train.launch import ranks_to_start

    if check and (calibrate or output or disk):
        raise ValueError("--check and --calibrate: one at a time, each with its own options.")
    if not check and not calibrate and (ranks or disk):
        raise ValueError("--ranks and --disk say how to measure: add --calibrate.")
    start = ranks_to_start(resolve({"device": device}))
    if check:
        return _check(device, start, ranks, as_json)
    return _calibration(facts(device, *start), calibrate, as_json, output, ranks, disk)


def _check(asked: str, start: tuple[int, str], ranks: int | None, as_json: bool) -> int:
    """Run the checks and show the results. Under a launcher, rank 0 shows them and the other ranks
    return 0.
    """
    from onefold.doctor.checks import WRONG, Outcome, check_here, check_launched
    from onefold.doctor.facts import facts, place
    from onefold.processes.host import joins

    begun, launched = time.monotonic(), joins(os.environ)
    device, gpus = place(asked)
    if ranks is not None and launched:
        raise ValueError(f"--ranks {ranks}: the launcher has said how many.")
    if device == "cuda" and (ranks or 0) > gpus > 1:
        raise ValueError(f"--ranks {ranks}: each rank takes a GPU, and {gpus} are here.")
    rows = list[Outcome]()
    for row in check_launched(device, gpus) if launched else check_here(device, gpus, ranks):
        rows.append(row)
        if sys.stderr.isatty():
            print(f"{row.name}: {row.status}", file=sys.stderr)
    if launched and os.environ["RANK"] != "0":
        return 0
    told = Counter(row.status for row in rows)
    report = {
        "ok": not told[WRONG],
        "command": " ".join(sys.argv[1:]),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "seconds": round(time.monotonic() - begun, 1),
        "machine": facts(asked, *start),
        "environment": {n: value for n, value in os.environ.items() if n.startswith(TOLD)},
        "checks": [asdict(row) for row in rows],
        "result": ", ".join(f"{count} {status}" for status, count in told.items()),
    }
    show(as_json, "check", report)
    return int(told[WRONG] > 0)


def _calibration(
    found: dict[str, Any], calibrate: bool, as_json: bool, output: Path | None, ranks: int | None, disk: Path | None
) -> int:
    """Measure if asked, and show the machine and its calibration."""
    from onefold.machine.calibration import Calibration, CalibrationError, default_path

    path, known, note = output or default_path(), None, ""
    if calibrate:
        from onefold.doctor.calibrate import measure_machine

        with busy("measuring: about a minute", as_json):
            where = disk or Path.cwd()
            known = measure_machine(found, ranks or found["ranks"], where, path)
    else:
        try:
            known = Calibration.load(path)
        except CalibrationError as error:
            if output is not None:  # the user named it
                raise
            note = str(error)
    told = {"machine": found, "file": str(path), "note": note or (known.stale() if known else "")}
    show(as_json, "doctor", told | (known.tables() if known else {}))
    return 0
