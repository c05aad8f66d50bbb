"""`onefold doctor --calibrate` around the measuring ranks: choose their numbers and the sizes,
measure, and save the file.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable
from datetime import UTC, datetime
from math import log2
from pathlib import Path
from typing import Any

import torch

from onefold.doctor.benchmark_blocks import MIB, Sizes
from onefold.doctor.disk import measure_disk
from onefold.doctor.ranks import measure_with_ranks
from onefold.machine.calibration import KIND, VERSION, Calibration, CalibrationError
from onefold.machine.identity import this_machine
from onefold.wording import readable

#: Bytes of host memory that a rank takes before it measures, for torch and its libraries.
RANK_BYTES = 400 * MIB


def measure_machine(
    found: dict[str, Any],
    ranks: str | None,
    disk: Path,
    path: Path,
    say: Callable[[str], None],
    *,
    quick: bool,
) -> Calibration:
    """Measure this machine and save the figures at `path`.

    Args:
        found: the result of `facts.facts`.
        ranks: numbers of ranks as the user gave them, "1,2,4"; None chooses.
        disk: the folder whose disk is measured.
        say: called with the name of each measurement when it begins.

    Raises:
        CalibrationError: an argument is impossible here.
        MeasurementError, Stopped: see `measure_with_ranks`.
    """
    if "RANK" in os.environ:
        raise CalibrationError(
            f"RANK={os.environ['RANK']} is set: onefold doctor starts its own ranks. Run it once,"
            " without a launcher."
        )
    counts = parse_ranks(ranks, found) if ranks is not None else default_ranks(found["ranks"])
    _check_writable(path)
    sizes = Sizes.for_device(found["device"], quick, _half_dtypes(found["device"])).within(
        _free_for_a_rank(found, counts[-1])
    )
    begin, busy = time.monotonic(), _others()
    say("disk")
    try:
        disk_rates = measure_disk(disk, sizes.disk_bytes)
    except ValueError as error:
        raise CalibrationError(str(error)) from None
    say("starting ranks")
    figures = measure_with_ranks(
        sizes, threads_of(counts, found["cpu"]["physical_cores"]), found["device"], say
    )
    gpu = found["gpus"][0] if found["device"] == "cuda" else None
    calibration = Calibration.from_json({
        "kind": KIND,
        "version": VERSION,
        "identity": vars(this_machine()),
        "device": found["device"],
        "device_name": gpu["name"] if gpu else found["cpu"]["name"],
        "backend": found["backend"],
        "device_bytes": gpu["total"] if gpu else found["memory"]["total"],
        "host_bytes": found["memory"]["total"],
        "measured_at": datetime.now(UTC).isoformat(timespec="seconds"),
        "took_s": time.monotonic() - begin,
        "busy": busy(),
        "quick": quick,
        "disk": vars(disk_rates),
        **figures,
    })  # fmt: skip
    calibration.save(path)
    return calibration


def parse_ranks(given: str, found: dict[str, Any]) -> list[int]:
    """Parse numbers of ranks such as "1,2,4". Returns them ascending.

    Raises:
        CalibrationError: it is no such list, or the machine lacks GPUs or memory for so many ranks.
    """
    try:
        counts = sorted({int(part) for part in given.split(",")})
    except ValueError:
        counts = [0]
    if counts[0] < 1:
        raise CalibrationError(
            f"--ranks {given}: expected numbers of ranks, each 1 or more, such as 1,2,4."
        )
    most = counts[-1]
    gpus = len(found["gpus"])
    if found["device"] == "cuda" and most > gpus:
        raise CalibrationError(
            f"--ranks {given}: each rank takes a GPU, and {gpus} {'is' if gpus == 1 else 'are'}"
            " here. Or: --device cpu."
        )
    free, taken = found["memory"]["free"], most * RANK_BYTES
    if most > 1 and taken > free:
        raise CalibrationError(
            f"--ranks {given}: {most} ranks take {readable(taken)} before they measure anything,"
            f" and {readable(free)} are free. Use at most {max(1, free // RANK_BYTES)}."
        )
    return counts


def default_ranks(most: int) -> list[int]:
    """Return 1, 2, about the root of twice `most`, and `most`. Figures between are interpolated."""
    return sorted({c for c in (1, 2, 1 << round(log2(2 * most) / 2), most) if c <= most})


def threads_of(counts: list[int], cores: int) -> dict[int, int]:
    """Return {number of ranks: threads of one rank}, as `onefold train` sets them."""
    asked = os.environ.get("OMP_NUM_THREADS", "")
    fixed = int(asked) if asked.isdigit() else 0
    return {count: fixed or max(1, cores // count) for count in counts}


def _others() -> Callable[[], float]:
    """Watch other programs from now on. Returns a function that gives the share of all processors'
    time that they have taken since, 0.0 if the system does not tell.

    Other programs are all processes but this one and its children that have ended.
    """

    def spent() -> tuple[float, float]:
        numbers = [int(n) for n in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]]
        user, nice, system, _idle, _waiting, *rest = numbers
        tick = os.sysconf("SC_CLK_TCK")
        mine = sum(os.times()[:4])
        return (user + nice + system + sum(rest)) / tick - mine, sum(numbers) / tick

    try:
        before = spent()
    except (OSError, ValueError):
        return lambda: 0.0

    def share() -> float:
        taken, passed = (after - earlier for after, earlier in zip(spent(), before, strict=True))
        return min(1.0, max(0.0, taken / passed)) if passed > 0 else 0.0

    return share


def _half_dtypes(device: str) -> tuple[str, ...]:

    if device == "cpu":
        return ("bfloat16",)
    return (
        ("bfloat16", "float16")
        if torch.cuda.is_bf16_supported(including_emulation=False)
        else ("float16",)
    )


def _free_for_a_rank(found: dict[str, Any], ranks: int) -> int:
    """Return the bytes free for one rank's buffers, on its GPU or as its share of the host."""
    if found["device"] == "cuda":
        return int(min(gpu["free"] for gpu in found["gpus"][:ranks]))
    return max(0, int(found["memory"]["free"]) // ranks - RANK_BYTES)


def _check_writable(path: Path) -> None:
    """Check that the result can be written, before it takes a minute to measure.

    Raises:
        CalibrationError: it cannot be written.
    """
    if path.is_dir():
        raise CalibrationError(
            f"--output {path}: this is a folder; name a file in it, such as {path / 'doctor.json'}."
        )
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path.parent):
            pass
    except OSError as error:
        raise CalibrationError(
            f"the calibration cannot be written to {path}: {error.strerror}. Name another file with"
            " --output."
        ) from None
