"""A calibration: the figures measured on a machine, with answers such as how long operations or a
gather take there.

    onefold doctor --calibrate ──► measure.py on N ranks ──► Calibration ──► ~/.cache/onefold/doctor.json
                                                                  │
                                               plan --here: pass_seconds, seconds_for, ...

Every rate is that of one rank while `ranks` ranks of this machine are at work. Ranks on a CPU share
its memory and cores, so a figure means nothing without the number of ranks. Between two measured
numbers of ranks, values are interpolated.
"""

from __future__ import annotations

import json
import math
import os
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

import torch

from onefold.comm import MOVES
from onefold.machine.fit import Fit, nearest_mean
from onefold.machine.identity import Identity, this_machine
from onefold.machine.kernels import Kernels
from onefold.machine.measured import ADAMW_BYTES, AtRanks, Disk, HostLink, decode
from onefold.reading import read_json

KIND, VERSION = "onefold-calibration", 1
#: Days after which a calibration counts as stale: drivers, kernels and other programs change.
FRESH_DAYS = 90
#: Share of the processors above which other programs make figures doubtful.
BUSY = 0.15
T = TypeVar("T")


class CalibrationError(ValueError):
    """A calibration is missing, unreadable, from another machine, or lacks the figure asked for.
    The message says what to do.
    """


@dataclass(frozen=True)
class Calibration:
    """The measured figures of one machine.

    Attributes:
        identity: the machine; see `Identity`.
        device, device_name: "cpu" or "cuda", and its name.
        backend: of the moves, "gloo" or "nccl".
        device_bytes: memory of one GPU, or the memory that the ranks on a CPU share.
        host_bytes: memory of the host.
        measured_at: UTC, ISO 8601.
        took_s: seconds the measurement took.
        quick: fewer and smaller sizes were measured, for a rough picture.
        at: the figures by number of ranks, ascending.
        busy: share of the processors' time, 0 to 1, that other programs took meanwhile. It makes
            every rate too low.
    """

    identity: Identity
    device: str
    device_name: str
    backend: str
    device_bytes: int
    host_bytes: int
    measured_at: str
    took_s: float
    quick: bool
    at: tuple[AtRanks, ...]
    host_link: HostLink | None = None
    disk: Disk | None = None
    busy: float = 0.0

    def __post_init__(self) -> None:
        counts = [a.ranks for a in self.at]
        if not counts or counts != sorted(set(counts)):
            raise ValueError(
                "at: expected figures for at least one number of ranks, each once and ascending,"
                f" found {counts}."
            )
        try:
            stamp = datetime.fromisoformat(self.measured_at)
        except ValueError:
            stamp = datetime.min
        if stamp.tzinfo is None:
            raise ValueError(
                f"measured_at: expected a time such as {datetime.now(UTC).isoformat()!r}, found"
                f" {self.measured_at!r}."
            )

    # -- questions ---------------------------------------------------------------------------------

    @property
    def measured_ranks(self) -> tuple[int, ...]:
        """The numbers of ranks that were measured, ascending."""
        return tuple(a.ranks for a in self.at)

    @property
    def dtypes(self) -> tuple[str, ...]:
        """The compute dtypes that were measured."""
        return tuple(dict.fromkeys(p.dtype for a in self.at for p in a.matrices))

    def peak_rate(self, dtype: str = "float32", ranks: int = 1) -> float:
        """Return the FLOP/s of the fastest measured matrix product, the denominator of MFU on a
        machine without a data sheet.
        """
        self.check_dtype(dtype)
        return self.between(
            ranks, lambda a: max(p.flops_per_s for p in a.matrices if p.dtype == dtype)
        )

    def block_rate(self, hidden: int, tokens: int, dtype: str = "float32", ranks: int = 1) -> float:
        """Return the model FLOP/s of a transformer block's forward and backward pass, as
        `BlockPoint` counts FLOPs.
        """
        self.check_dtype(dtype)
        place = (float(hidden), float(tokens))
        return self.between(
            ranks,
            lambda a: nearest_mean(
                [((p.hidden, p.tokens), p.flops_per_s) for p in a.blocks if p.dtype == dtype], place
            ),
        )

    def knows_passes(self, dtype: str) -> bool:
        """Whether passes in `dtype` were measured. Old calibrations have none."""
        return all(any(p.dtype == dtype for p in a.passes) for a in self.at)

    def pass_seconds(self, kernels: Kernels, dtype: str = "float32", ranks: int = 1) -> float:
        """Return the seconds of passes that consist of `kernels`, by the costs of each part; see
        `Costs`.

        Raises:
            CalibrationError: no pass of that dtype, or not that number of ranks, was measured.
        """
        self.check_dtype(dtype)
        if not self.knows_passes(dtype):
            raise CalibrationError(
                f"no pass in {dtype} was measured. Measure again: onefold doctor --calibrate"
            )
        return self.between(ranks, lambda a: a.costs[dtype].seconds(kernels))

    def once(self, key: tuple[Any, ...], make: Callable[[], T]) -> T:
        """Return the result of `make`, computed once per `key` and then cached."""
        if key not in self._answers:
            self._answers[key] = make()
        found: T = self._answers[key]
        return found

    @cached_property
    def _answers(self) -> dict[Any, Any]:
        return {}

    def copy_rate(self, ranks: int = 1) -> float:
        """Return the bytes per second of a large copy within memory, bytes read plus written."""
        return self.between(ranks, lambda a: max(a.copies)[0] / max(a.copies)[1])

    def optimizer_seconds(self, numel: int, ranks: int = 1) -> float:
        """Return the seconds of a fused AdamW step over a flat fp32 shard of `numel` elements."""
        return self.between(ranks, lambda a: a.curves["optimizer"].seconds(numel * ADAMW_BYTES))

    def seconds_for(self, move: str, nbytes: float, ranks: int) -> float:
        """Return the seconds of a move in which each rank sends `nbytes` payload bytes, as the
        traffic ledger counts them.

        For a buffer of B bytes on N ranks, a gather or reduce-scatter sends B·(N-1)/N of payload,
        and an all-reduce twice that.

        Raises:
            CalibrationError: an unknown move, or a number of ranks that was not measured.
            ValueError: a negative number of bytes.
        """
        return self._move(move, ranks, lambda a: a.curves[move].seconds(nbytes))

    def fit(self, move: str, ranks: int) -> Fit:
        """Return latency + bytes/bandwidth of one move, fitted to all measured sizes."""
        latency = self._move(move, ranks, lambda a: a.curves[move].fit.latency_s)
        per_byte = self._move(move, ranks, lambda a: 1 / a.curves[move].fit.bytes_per_s)
        return Fit(latency, 1 / per_byte if per_byte else math.inf)

    def hidden(self, ranks: int) -> float:
        """Return the share of a move, 0 to 1, that is hidden behind compute; see `Overlap`.
        1 for a single rank, which moves nothing.
        """
        return self.between(ranks, lambda a: a.overlap.hidden if a.overlap else 1.0)

    def _move(self, move: str, ranks: int, value: Callable[[AtRanks], float]) -> float:
        """Return `value` at that number of ranks, 0 for a single rank, which moves nothing."""
        if move not in MOVES:
            raise CalibrationError(f"unknown move {move!r}: expected one of {', '.join(MOVES)}.")
        if ranks == 1:
            return 0.0
        return self.between(ranks, value, [a for a in self.at if a.ranks > 1])

    def between(
        self, ranks: int, value: Callable[[AtRanks], float], among: list[AtRanks] | None = None
    ) -> float:
        """Return `value` at that number of ranks: as measured, else interpolated linearly in
        log(ranks) between its neighbours.
        """
        known = list(self.at) if among is None else among
        low = max((a for a in known if a.ranks <= ranks), key=lambda a: a.ranks, default=None)
        high = min((a for a in known if a.ranks >= ranks), key=lambda a: a.ranks, default=None)
        if low is None or high is None:
            counts = ",".join(str(a.ranks) for a in known) or "none"
            wanted = ",".join(str(r) for r in sorted({*self.measured_ranks, ranks}))
            raise CalibrationError(
                f"{ranks} ranks: this machine was measured with {counts}. Measure with: onefold"
                f" doctor --calibrate --ranks {wanted}"
            )
        below, above = value(low), value(high)
        share = (
            math.log(ranks / low.ranks) / math.log(high.ranks / low.ranks)
            if high.ranks > low.ranks
            else 0.0
        )
        return below + (above - below) * share

    def check_dtype(self, dtype: str) -> None:
        """Raise CalibrationError for a dtype that was not measured."""
        if dtype not in self.dtypes:
            raise CalibrationError(
                f"dtype {dtype!r} was not measured: known are {', '.join(self.dtypes)}."
            )

    # -- the file ----------------------------------------------------------------------------------

    def to_json(self) -> dict[str, Any]:
        """Return a plain dictionary that `Calibration.from_json` reads."""
        return {"kind": KIND, "version": VERSION, **asdict(self)}

    @classmethod
    def from_json(cls, values: Any) -> Calibration:
        """Read what `to_json` returned.
        Raises CalibrationError that names the missing or wrong key.
        """
        if not isinstance(values, dict) or values.get("kind") != KIND:
            raise CalibrationError(
                f'this is no calibration: expected "kind": "{KIND}", as onefold doctor --calibrate'
                " writes it."
            )
        if values.get("version") != VERSION:
            raise CalibrationError(
                f"this calibration has version {values.get('version')!r}, this onefold reads"
                f" {VERSION}. Measure again: onefold doctor --calibrate"
            )
        try:
            found: Calibration = decode(
                cls, {k: v for k, v in values.items() if k not in ("kind", "version")}
            )
        except ValueError as error:
            raise CalibrationError(str(error)) from None
        return found

    def save(self, path: str | Path | None = None) -> Path:
        """Write the file completely or not at all, and return its path. Default: `default_path()`.

        Raises:
            CalibrationError: the folder cannot be written.
        """
        path = Path(path) if path is not None else default_path()
        temporary = ""
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile(
                "w", dir=path.parent, prefix=".doctor-", delete=False, encoding="utf-8"
            ) as file:
                temporary = file.name
                json.dump(self.to_json(), file, indent=1)
                file.write("\n")
            os.replace(temporary, path)
        except OSError as error:
            if temporary:
                Path(temporary).unlink(missing_ok=True)
            raise CalibrationError(
                f"the calibration cannot be written to {path}: {error.strerror}. Name another file."
            ) from None
        return path

    @classmethod
    def load(cls, path: str | Path | None = None, *, anywhere: bool = False) -> Calibration:
        """Read the file at `path`, else at `default_path()`.

        Args:
            anywhere: also accept a file that was measured on another machine.

        Raises:
            CalibrationError: the file does not exist, cannot be read, or is from another machine.
        """
        path = Path(path) if path is not None else default_path()
        try:
            found = cls.from_json(read_json(path))
        except FileNotFoundError:
            raise CalibrationError(
                f"there is no calibration at {path}. Measure this machine with: onefold doctor"
                " --calibrate"
            ) from None
        except OSError as error:
            raise CalibrationError(f"{path} cannot be read: {error.strerror}.") from None
        except json.JSONDecodeError as error:
            raise CalibrationError(
                f"{path} is not JSON (line {error.lineno}: {error.msg}). Measure again: onefold"
                " doctor --calibrate"
            ) from None
        except CalibrationError as error:
            raise CalibrationError(f"{path}: {error}") from None
        differences = [] if anywhere else found.identity.differences(this_machine())
        if differences:
            raise CalibrationError(
                f"{path} was measured on another machine: {', '.join(differences)}. Measure this"
                " one with: onefold doctor --calibrate"
            )
        return found

    def stale(self, now: datetime | None = None) -> str:
        """Say in a sentence why these figures may no longer hold; "" if they should."""
        age = (now or datetime.now(UTC)) - datetime.fromisoformat(self.measured_at)
        reasons = []
        if self.identity.torch != torch.__version__:
            reasons.append(f"with torch {self.identity.torch}, and this is {torch.__version__}")
        if age.days > FRESH_DAYS:
            reasons.append(f"{age.days} days ago")
        if not any(a.steps for a in self.at):
            reasons.append("before reference steps were part of it")
        if self.busy > BUSY:
            reasons.append(f"while other programs took {self.busy:.0%} of its processors")
        return (
            f"The machine was measured {' and '.join(reasons)}: measure again with onefold doctor"
            " --calibrate."
            if reasons
            else ""
        )


def default_path() -> Path:
    """Return `onefold/doctor.json` in $XDG_CACHE_HOME, else in ~/.cache. A relative $XDG_CACHE_HOME
    counts as unset, by the XDG specification.
    """
    given = os.environ.get("XDG_CACHE_HOME", "")
    folder = Path(given) if given and Path(given).is_absolute() else Path.home() / ".cache"
    return folder / "onefold" / "doctor.json"
