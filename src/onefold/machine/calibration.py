"""The row of this machine, as `onefold doctor --calibrate` measured it and `onefold plan --here` reads it.

~/.cache/onefold/machine.toml
    [gpu.here], [host.default]    in the form of plan/hardware.toml: rates of one rank, with all ranks at work
    [measured]                    on which machine and when, and what a training step reaches of these rates
"""

from __future__ import annotations

import json
import os
import platform
import re
import tomllib
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from pydantic import AwareDatetime, BaseModel, NonNegativeFloat, PositiveFloat, PositiveInt

from onefold.cores import physical_cores
from onefold.device import device_names
from onefold.reading import formed, read_bytes

#: Days after which a calibration counts as stale: drivers, kernels and other programs change.
FRESH_DAYS = 90
#: Share of the processors above which other programs make figures doubtful.
BUSY = 0.15


class CalibrationError(ValueError):
    """A calibration is missing, unreadable or from another machine. The message says what to do."""


class Calibration(BaseModel, frozen=True, extra="forbid"):
    """The measured figures of one machine.

    Attributes:
        gpu, host: rows of `onefold.plan.hardware`.
        machine: the result of `this_machine` where it was measured.
        device: "cpu" or "cuda". ranks: those at work.
        busy: share of the processors that other programs took.
        disk: the folder whose disk was measured.
        kernel_share, hop_seconds: see `onefold.plan.hardware.Software`.
        contention: see `onefold.plan.hardware.Machine`.
    """

    gpu: dict[str, Any]
    host: dict[str, Any]
    machine: dict[str, Any]
    device: str
    ranks: PositiveInt
    measured_at: AwareDatetime
    busy: float
    disk: str
    kernel_share: PositiveFloat
    hop_seconds: NonNegativeFloat
    contention: NonNegativeFloat

    def tables(self) -> dict[str, dict[str, Any]]:
        """Return {title in the file: table}."""
        rest = self.model_dump(mode="json")
        return {
            "gpu.here": rest.pop("gpu"),
            "host.default": rest.pop("host"),
            "measured.machine": rest.pop("machine"),
            "measured": rest,
        }

    def save(self, path: Path) -> None:
        """Write the file completely or not at all. Raises CalibrationError if it cannot be written."""
        lines = []
        for title, table in self.tables().items():
            lines += [
                f"[{title}]",
                *(f"{key} = {json.dumps(value)}" for key, value in table.items()),
            ]
        partial = path.with_suffix(".partial")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            partial.write_text("\n".join(lines) + "\n", encoding="utf-8")
            partial.replace(path)
        except OSError as error:
            raise CalibrationError(
                f"the calibration cannot be written to {path}: {error.strerror}. Name another file"
                " with --output."
            ) from None

    @classmethod
    def load(cls, path: str | Path | None = None) -> Calibration:
        """Read the file at `path`, else at `default_path()`.
        Raises CalibrationError: there is none, it cannot be read, or is from another machine.
        """
        path = Path(path) if path is not None else default_path()
        again = "Measure this machine with: onefold doctor --calibrate"
        try:
            tables = tomllib.loads(read_bytes(path).decode())
            rows = {"gpu": tables["gpu"]["here"], "host": tables["host"]["default"]}
            found, now = formed(cls, {**rows, **tables["measured"]}), this_machine()
        except FileNotFoundError:
            raise CalibrationError(f"there is no calibration at {path}. {again}") from None
        except OSError as error:
            raise CalibrationError(f"{path} cannot be read: {error.strerror}.") from None
        except (KeyError, TypeError, ValueError, RecursionError) as error:
            raise CalibrationError(f"{path} is no calibration: {error}. {again}") from None
        then = found.machine
        if others := [
            f"{k} {then.get(k)} there, {own} here"
            for k, own in now.items()
            if k != "torch" and then.get(k) != own
        ]:
            raise CalibrationError(
                f"{path} was measured on another machine: {'; '.join(others)}. {again}"
            )
        return found

    def stale(self, now: datetime | None = None) -> str:
        """Say in a sentence why these figures may no longer hold; "" if they should."""
        age = (now or datetime.now(UTC)) - self.measured_at
        with_torch = self.machine.get("torch")
        reasons = {
            f"with torch {with_torch}, and this is {torch.__version__}": with_torch != torch.__version__,
            f"{age.days} days ago": age.days > FRESH_DAYS,
            f"while other programs took {self.busy:.0%} of its processors": self.busy > BUSY,
        }  # fmt: skip
        said = " and ".join(reason for reason, holds in reasons.items() if holds)
        return (
            said
            and f"The machine was measured {said}: measure again with onefold doctor --calibrate."
        )


def default_path() -> Path:
    """Return `onefold/machine.toml` in $XDG_CACHE_HOME, else in ~/.cache. A relative $XDG_CACHE_HOME
    counts as unset, by the XDG specification.
    """
    given = Path(os.environ.get("XDG_CACHE_HOME", ""))
    return (given if given.is_absolute() else Path.home() / ".cache") / "onefold" / "machine.toml"


def this_machine() -> dict[str, Any]:
    """Return the properties of this machine that speeds depend on. The host name is not among them: a
    container gets a new one at each start. Another version of torch makes a measurement stale, but not
    another machine's.
    """
    gpus = list(device_names())
    return {"cpu": cpu_name(), "cores": physical_cores(), "gpus": gpus, "torch": torch.__version__}


def cpu_name() -> str:
    """Return the processor's name from the kernel, else its architecture."""
    try:
        found = re.search(
            r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE
        )
        if found:
            return found.group(1).strip()
    except OSError:
        pass
    return platform.processor() or platform.machine() or "unknown"
