"""`onefold doctor --calibrate` around the measuring ranks: start them, measure the disk, save the row."""

from __future__ import annotations

import errno
import json
import os
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from onefold.doctor.measure import RESULT
from onefold.doctor.ranks import launch
from onefold.machine.calibration import Calibration, CalibrationError, this_machine
from onefold.wording import readable

#: Bytes of host memory that a rank takes before it measures, for torch and its libraries.
RANK_BYTES = 400 << 20
#: Bytes of one write or read, and of all.
CHUNK, MOST = 4 << 20, 256 << 20
#: Seconds after which writing stops, whatever is left: a slow disk shows its rate with fewer bytes.
LONGEST = 8.0


def measure_machine(found: dict[str, Any], ranks: int, disk: Path, path: Path) -> Calibration:
    """Measure this machine with so many ranks and save the figures at `path`.

    Args:
        found: the result of `facts.facts`.
        disk: the folder whose disk is measured.

    Raises:
        CalibrationError: an argument is impossible here, or a rank failed.
    """
    if "RANK" in os.environ:
        raise CalibrationError(
            f"RANK={os.environ['RANK']} is set: onefold doctor starts its own ranks. Run it once,"
            " without a launcher."
        )
    gpus, free = found["gpus"], found["memory"]["free"]
    if found["device"] == "cuda" and ranks > len(gpus):
        raise CalibrationError(
            f"--ranks {ranks}: each rank takes a GPU, and there are {len(gpus)}. Or: --device cpu."
        )
    if ranks * RANK_BYTES > free:
        raise CalibrationError(
            f"--ranks {ranks}: {ranks} ranks take {readable(ranks * RANK_BYTES)} before they measure"
            f" anything, and {readable(free)} are free. Use at most {max(1, free // RANK_BYTES)}."
        )
    _check_writable(path)
    busy = min(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))
    host: dict[str, Any] = {"memory": found["memory"]["total"], **measure_disk(disk)}
    with tempfile.TemporaryDirectory(prefix="onefold-doctor-", ignore_cleanup_errors=True) as name:
        asked = "onefold.doctor.measure", name, found["device"]
        if failed := launch(ranks, Path(name), *asked):
            hint = " Use fewer --ranks." if "SIGKILL" in failed else ""
            raise CalibrationError(f"the measurement failed: {failed}.{hint}")
        figures = json.loads(Path(name, RESULT).read_text(encoding="utf-8"))
    one = gpus[0] if found["device"] == "cuda" else {**found["memory"], **found["cpu"]}
    capacity = one["total"] // (1 if found["device"] == "cuda" else ranks)
    gpu = figures.pop("gpu") | {"title": one["name"], "capacity": capacity}
    host |= {"link_bandwidth": gpu["host_link"] * ranks} if "host_link" in gpu else {}
    calibration = Calibration(
        gpu=gpu,
        host=host,
        machine=this_machine(),
        device=found["device"],
        ranks=ranks,
        measured_at=datetime.now(UTC).replace(microsecond=0),
        busy=busy,
        disk=str(disk.resolve()),
        **figures,
    )
    calibration.save(path)
    return calibration


def _check_writable(path: Path) -> None:
    """Raise CalibrationError if the result cannot be written, before anything is measured."""
    try:
        if path.is_dir():
            raise IsADirectoryError(errno.EISDIR, "this is a folder")
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path.parent):
            pass
    except OSError as error:
        raise CalibrationError(
            f"the calibration cannot be written to {path}: {error.strerror}. Name another file with"
            " --output."
        ) from None


def measure_disk(folder: Path) -> dict[str, float]:
    """Write at most `MOST` bytes, flush them to the disk, and
    read them past the page cache, where the system can drop it. Returns bytes per second.
    Raises OSError: the folder does not exist, cannot be written, or is full.
    """
    # Random bytes, because some file systems compress, and write zeros as holes in no time
    chunk, buffer, written = os.urandom(CHUNK), bytearray(CHUNK), 0
    with tempfile.TemporaryFile(dir=folder, buffering=0) as file:
        begin = time.perf_counter()
        while written < MOST and time.perf_counter() - begin < LONGEST:
            written += file.write(chunk)
        os.fsync(file.fileno())
        flushed = time.perf_counter()
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        file.seek(0)
        middle = time.perf_counter()
        while file.readinto(buffer):
            pass
        end = time.perf_counter()
    return {"nvme_write": written / (flushed - begin), "nvme_bandwidth": written / (end - middle)}
