"""Repeat the tests of processes, signals and time on a busy machine: they must not depend on how
fast it is.

    python tests/under_load.py [--times 10] [--minutes 60] [--busy 2] [FILE or FILE::test ...]

A loop that computes runs beside them on each core (`--busy` says how many). The files are run in
turn, `--times` times each, until `--minutes` are over. What pytest says of a failure is printed at
once. A table at the end says how often each passed; the exit status is 1 if one failed.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import subprocess
import sys
import time
from collections import Counter, defaultdict
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
#: What starts processes, sends signals, kills or waits.
FILES = [
    "tests/test_ranks.py",
    "tests/failures",
    "tests/scripts/test_scripts.py",
    "tests/processes/test_claim.py",
    "tests/train/test_starts.py",
    "tests/train/test_survival.py",
    "tests/train/test_drill.py",
    "tests/train/test_examples.py",
    "tests/train/test_nonfinite.py",
    "tests/train/test_resume.py",
    "tests/cli/test_train_command.py",
    "tests/cli/test_doctor_command.py",
    "tests/cli/test_checkpoint_command.py",
    "tests/promises/test_from_outside.py",
    "tests/checkpoints/test_whole_or_absent.py",
    "tests/checkpoints/test_asynchronous.py",
    "tests/stores/test_nvme.py",
    "tests/observe/test_ranks_observed.py",
    "tests/observe/test_what_a_run_leaves.py",
    "tests/doctor/test_measure.py",
]


def compute(parent: int) -> None:
    """Until the process that asked for it has gone."""
    while os.getppid() == parent:
        sum(i * i for i in range(100_000))


def main() -> int:
    parser = argparse.ArgumentParser(description="Repeat the tests of processes on a busy machine.")
    parser.add_argument(
        "files",
        nargs="*",
        default=FILES,
        help="default: all that start processes, send signals or wait",
    )
    parser.add_argument("--times", type=int, default=10, help="how often each file is run")
    parser.add_argument("--minutes", type=float, default=60.0, help="no file is begun after these")
    parser.add_argument(
        "--busy", type=int, default=os.cpu_count() or 2, help="loops that compute beside the tests"
    )
    parser.add_argument(
        "--all", action="store_true", help="every test of the files that a run takes a sample of"
    )
    given = parser.parse_args()
    end = time.monotonic() + 60 * given.minutes
    context = multiprocessing.get_context("spawn")
    loops = [
        context.Process(target=compute, args=(os.getpid(),), daemon=True) for _ in range(given.busy)
    ]
    for loop in loops:
        loop.start()
    passed, failed, seconds = Counter[str](), Counter[str](), defaultdict[str, float](float)
    try:
        for _ in range(given.times):
            for file in given.files:
                if time.monotonic() > end:
                    break
                begun = time.monotonic()
                command = [
                    sys.executable,
                    "-m",
                    "pytest",
                    "-q",
                    "-x",
                    *(["--all"] if given.all else []),
                    file,
                ]
                done = subprocess.run(
                    command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
                )
                seconds[file] += time.monotonic() - begun
                bad = done.returncode not in (0, 5)  # 5: all its tests are slow
                if bad:
                    print(done.stdout, flush=True)
                (failed if bad else passed)[file] += 1
                print(
                    f"{'FAILED' if bad else 'passed'}  {time.monotonic() - begun:4.0f} s  {file}",
                    flush=True,
                )
    finally:
        for loop in loops:
            loop.kill()
            loop.join()
    print(f"\n{'passed':>6} {'failed':>6} {'s each':>6}  with {given.busy} busy loops")
    for file in given.files:
        runs = passed[file] + failed[file]
        print(f"{passed[file]:6} {failed[file]:6} {seconds[file] / max(runs, 1):6.0f}  {file}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
