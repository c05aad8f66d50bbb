"""`onefold doctor`: what this machine has, and with --calibrate what it can do."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from onefold.train.interrupt import interruptible

if TYPE_CHECKING:
    from onefold.plan.calibrate import Calibration


def doctor_command(
    calibrate: Annotated[
        bool, typer.Option("--calibrate", help="Measure rates of compute, memory, moves and disk, and training steps: some minutes.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of tables.")] = False,
    output: Annotated[
        Path | None,
        typer.Option("--output", help="Calibration file to write, or show (default: onefold/doctor.json in ~/.cache).", show_default=False),
    ] = None,
    device: Annotated[Literal["auto", "cpu", "cuda"], typer.Option("--device", help="Where ranks compute.")] = "auto",
    ranks: Annotated[
        str | None,
        typer.Option(
            "--ranks", help="With --calibrate: numbers of ranks to measure with, such as 1,2,4 (default: 1, up to what onefold train "
            "would start).", show_default=False,
        ),
    ] = None,
    disk: Annotated[
        Path | None,
        typer.Option("--disk", help="With --calibrate: folder whose disk is measured (default: the working folder).", show_default=False),
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="With --calibrate: a rough picture in a fraction of the time.")] = False,
) -> None:  # fmt: skip
    """Show what this machine has for training: processors, memory, GPUs, backends, the ranks that would start.

    With --calibrate also measure what they can do. `onefold plan --here` predicts with these figures.
    """
    from onefold.cli.doctor_facts import facts  # noqa: F401, imports torch: from here on a Ctrl-C finds nothing half imported
    from onefold.cli.doctor_ranks import MeasurementError, Stopped
    from onefold.plan.calibrate import CalibrationError
    from onefold.train.errors import TrainError

    try:
        only = [name for name, given in (("--ranks", ranks), ("--disk", disk), ("--quick", quick)) if given]
        if only and not calibrate:
            raise CalibrationError(f"{' and '.join(only)} say{'s' if len(only) == 1 else ''} how to measure: add --calibrate.")
        with interruptible():
            _doctor(calibrate, as_json, output, device, ranks, disk, quick)
    except Stopped as stop:
        _tell(f"stopped by {stop}; nothing was measured.", as_json, "Stopped")
        raise typer.Exit(128 + stop.number) from None
    except KeyboardInterrupt:
        _tell("stopped by SIGINT; nothing was measured.", as_json, "Stopped")
        raise typer.Exit(130) from None
    except (CalibrationError, TrainError) as error:
        _tell(f"error: {error}", as_json, type(error).__name__, str(error))
        raise typer.Exit(2) from None
    except MeasurementError as error:
        _tell(f"error: {error}", as_json, type(error).__name__, str(error))
        raise typer.Exit(1) from None


def _doctor(calibrate: bool, as_json: bool, output: Path | None, device: str, ranks: str | None, disk: Path | None, quick: bool) -> None:
    from onefold.cli.doctor_facts import facts
    from onefold.plan.calibrate import default_path

    found = facts(device)
    path = output or default_path()
    calibration: Calibration | None
    if calibrate:
        from onefold.cli.doctor_calibrate import measure_machine

        measured = measure_machine(found, ranks, disk or Path.cwd(), path, quick=quick, silent=as_json)
        calibration, note = measured, measured.stale()
    else:
        calibration, note = _saved(path, asked=output is not None)
    if as_json:
        values = calibration.to_json() if calibration else None
        print(json.dumps({"machine": found, "calibration": values, "file": str(path), "note": note}, indent=1))
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


def _saved(path: Path, asked: bool) -> tuple[Calibration | None, str]:
    """The calibration that is there, and what is to be said about it. One that was asked for by name must be good."""
    from onefold.plan.calibrate import Calibration, CalibrationError

    try:
        found = Calibration.load(path)
    except CalibrationError as error:
        if asked:
            raise
        text = str(error)
        return None, text[:1].upper() + text[1:]
    return found, found.stale()


def _tell(text: str, as_json: bool, kind: str, message: str = "") -> None:
    if as_json:
        print(json.dumps({"event": "error", "kind": kind, "message": message or text}))
    print(text, file=sys.stderr)
