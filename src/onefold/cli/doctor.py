"""`onefold doctor`: show what this machine has. With --calibrate, measure what it can do; with
--check, check that Onefold works correctly on it.
"""

from __future__ import annotations

import json
import signal
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from onefold.cli.options import option, refuse, stopped
from onefold.processes.signals import interruptible

if TYPE_CHECKING:
    from onefold.machine.calibration import Calibration


# fmt: off
def doctor_command(
    calibrate: Annotated[
        bool, option("Measure rates of compute, memory, moves and disk, and training steps: some minutes.", None, "--calibrate")
    ] = False,
    check: Annotated[
        bool, option("Check collectives, stages, offload, checkpoints and overlap: under two minutes.", None, "--check")
    ] = False,
    as_json: Annotated[
        bool, option("Print one JSON object instead of tables; with --check and a FILE: write it there as well.", None, "--json")
    ] = False,
    file: Annotated[Path | None, typer.Argument(metavar="FILE", help="With --check --json: the file to write.", show_default=False)] = None,
    output: Annotated[Path | None, option("Calibration file to write, or show (default: onefold/doctor.json in ~/.cache).")] = None,
    device: Annotated[Literal["auto", "cpu", "cuda"], option("Where ranks compute.", shown=True)] = "auto",
    ranks: Annotated[
        str | None,
        option("With --calibrate: numbers of ranks to measure with, such as 1,2,4 (default: 1, up to what onefold train would start). "
               "With --check: how many (default: one a GPU, two on a CPU)."),
    ] = None,
    disk: Annotated[Path | None, option("With --calibrate: folder whose disk is measured (default: the working folder).")] = None,
    quick: Annotated[
        bool, option("With --calibrate: a rough picture in a fraction of the time.", None, "--quick")
    ] = False,
) -> None:
    # fmt: on
    """Show what this machine has for training: processors, memory, GPUs, backends, the ranks that
    would start.

    With --calibrate also measure what they can do. `onefold plan --here` predicts with these
    figures. With --check see whether Onefold is right here: alone it starts ranks of its own, under
    torchrun it takes part with the launcher's. Exit status 1 if a check failed.
    """
    from onefold.cli.doctor_check import run_checks
    from onefold.doctor.ranks import MeasurementError, Stopped
    from onefold.machine.calibration import CalibrationError
    from onefold.wording import TrainError

    try:
        _refuse(check, calibrate, as_json, file, output, ranks, disk, quick)
        if check:
            with interruptible():
                status = run_checks(_facts, as_json, file, device, ranks)
            raise typer.Exit(status)
        with interruptible():
            _doctor(calibrate, as_json, output, device, ranks, disk, quick)
    except (Stopped, KeyboardInterrupt) as stop:
        number = stop.number if isinstance(stop, Stopped) else signal.SIGINT
        stopped(number, "checked" if check else "measured", as_json)
    except (CalibrationError, TrainError) as error:
        refuse(error, as_json)
    except MeasurementError as error:
        refuse(error, as_json, code=1)


def _doctor(
    calibrate: bool,
    as_json: bool,
    output: Path | None,
    device: str,
    ranks: str | None,
    disk: Path | None,
    quick: bool,
) -> None:
    from onefold.machine.calibration import default_path

    found = _facts(device)
    path = output or default_path()
    calibration: Calibration | None
    if calibrate:
        from onefold.cli.doctor_progress import Progress
        from onefold.doctor.calibrate import measure_machine

        progress = partial(Progress, silent=as_json)
        measured = measure_machine(
            found, ranks, disk or Path.cwd(), path, progress, quick=quick
        )
        calibration, note = measured, measured.stale()
    else:
        calibration, note = _saved(path, asked=output is not None)
    if as_json:
        values = calibration.to_json() if calibration else None
        said = {"machine": found, "calibration": values, "file": str(path), "note": note}
        print(json.dumps(said, indent=1))
        return
    from rich.console import Console

    from onefold.cli.doctor_tables import show_calibration, show_facts

    console = Console(highlight=False)
    show_facts(console, found)
    if calibration:
        show_calibration(console, calibration)
    if calibrate:
        console.print(f"saved to {path}", markup=False, soft_wrap=True)
    if note:
        console.print(f"\n{note}", markup=False, soft_wrap=True)


def _facts(device: str) -> dict[str, Any]:
    """Return what this machine has.

    Raises:
        TrainError: cuda was asked for and torch finds no GPU.
    """
    from onefold.doctor.facts import facts
    from onefold.train.config import resolve
    from onefold.train.launch import ranks_to_start

    return facts(device, *ranks_to_start(resolve({"device": device})))


def _refuse(
    check: bool,
    calibrate: bool,
    as_json: bool,
    file: Path | None,
    output: Path | None,
    ranks: str | None,
    disk: Path | None,
    quick: bool,
) -> None:
    """Raise CalibrationError for options that cannot be combined."""
    from onefold.machine.calibration import CalibrationError

    if file is not None and not (check and as_json):
        raise CalibrationError(f"{file}: a file is written by --check --json FILE only.")
    options = {"--calibrate": calibrate, "--output": output, "--disk": disk, "--quick": quick}
    unfit = [name for name, given in options.items() if given]
    if check and unfit:
        raise CalibrationError(
            f"--check and {' and '.join(unfit)}: one at a time. The result of a check goes to"
            " --json FILE."
        )
    if file is not None and (file.is_dir() or not file.absolute().parent.is_dir()):
        raise CalibrationError(
            f"--json {file}: this is a folder, or its folder is not there; name a file."
        )
    how = {"--ranks": ranks, "--disk": disk, "--quick": quick}
    only = [name for name, given in how.items() if given]
    if only and not (calibrate or check):
        raise CalibrationError(
            f"{' and '.join(only)} say{'s' if len(only) == 1 else ''} how to measure: add"
            " --calibrate."
        )


def _saved(path: Path, asked: bool) -> tuple[Calibration | None, str]:
    """Load the calibration. Returns it, or None, and a note about it.
    `asked`: the user named the file, so an unusable one raises CalibrationError.
    """
    from onefold.machine.calibration import Calibration, CalibrationError

    try:
        found = Calibration.load(path)
    except CalibrationError as error:
        if asked:
            raise
        text = str(error)
        return None, text[:1].upper() + text[1:]
    return found, found.stale()
