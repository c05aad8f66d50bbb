"""Take the waits and events out of the source one by one, and see that a test notices.

    python tests/waits_taken_out.py [--only TEXT] [--seeds 6] [--write benchmarks/results/waits.md]

A wait is a call that orders streams, or makes the host wait for the device: those named in WAITS,
wherever they stand in the rooms that work with streams. Each is replaced by nothing in a copy of
the source, on which the tests of invariant 9 run, those first that the file is likely to matter to,
until one fails. A wait that no test misses is listed: the exit status is then 1.
"""

from __future__ import annotations

import argparse
import ast
import os
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SOURCE = ROOT / "src" / "onefold"
#: By their names, so that every recipe of test_waits runs (tests/conftest.py samples files).
TESTS = [
    "tests/device",
    "tests/invariants/test_waits.py::test_one_rank_has_the_same_bits_under_every_schedule",
    "tests/invariants/test_waits.py::test_ranks_have_the_same_bits_under_every_schedule",
    "tests/invariants/test_waits.py::test_masters_on_the_host_are_overwritten_behind_the_copies_of_them",
    "tests/comm/test_launching.py",
    "tests/comm/test_pending.py",
    "tests/train/test_a_step_late.py",
    "tests/runtime/test_transfers.py",
    "tests/offload/test_offload_waits.py",
    "tests/checkpoint/test_copying.py",
    "tests/runtime/test_waits_of_dropped_work.py",
]
#: Calls by the last names of what they are called on and of themselves; "*" is anything.
WAITS = {
    ("*", "wait_stream"), ("*", "wait_event"), ("*", "synchronize"), ("up", "wait"), ("down", "wait"), ("up", "order"), ("side", "order"),
    ("self", "order"), ("_copies", "order"), ("pending", "wait"), ("gathering", "wait"), ("_moving", "wait"), ("first", "wait"),
    ("second", "wait"), ("work", "wait"), ("self", "_order_after_copies"), ("*", "record_stream"),
}  # fmt: skip
#: Calls that say on which stream work goes: replaced by a context that changes nothing.
CONTEXTS = {"use_stream", "guard"}
ROOMS = [
    "device",
    "comm",
    "runtime",
    "optim",
    "offload",
    "checkpoint/copying.py",
    "data/samples.py",
]


@dataclass(frozen=True)
class Site:
    """One call. `span`: its first and last character in the file."""

    file: Path
    line: int
    text: str
    span: tuple[int, int]
    instead: str

    @property
    def name(self) -> str:
        return f"{self.file.relative_to(SOURCE)}:{self.line} {self.text}"


def sites() -> list[Site]:
    found = []
    for room in ROOMS:
        place = SOURCE / room
        for file in sorted(place.rglob("*.py")) if place.is_dir() else [place]:
            found += _of_file(file)
    return found


def _of_file(file: Path) -> list[Site]:
    text = file.read_text(encoding="utf-8")
    starts = [0]
    for line in text.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    lines = text.splitlines(keepends=True)

    def at(line: int, column: int) -> int:  # columns of ast are bytes
        return starts[line - 1] + len(lines[line - 1].encode()[:column].decode())

    found = []
    for node in ast.walk(ast.parse(text)):
        if not isinstance(node, ast.Call):
            continue
        instead = None
        if isinstance(node.func, ast.Attribute):
            on = node.func.value
            owner = (
                on.attr
                if isinstance(on, ast.Attribute)
                else on.id
                if isinstance(on, ast.Name)
                else ""
            )
            if ("*", node.func.attr) in WAITS or (owner, node.func.attr) in WAITS:
                instead = "None"
        elif isinstance(node.func, ast.Name) and node.func.id in CONTEXTS:
            instead = "__import__('contextlib').nullcontext()"
        if instead is not None:
            span = (
                at(node.lineno, node.col_offset),
                at(node.end_lineno or 0, node.end_col_offset or 0),
            )
            found.append(Site(file, node.lineno, text[slice(*span)], span, instead))
    return found


def notices(site: Site, seeds: int, copy: Path, tests: list[str]) -> tuple[str, float]:
    """(the first test that fails without the wait, or ""; seconds)."""
    target = copy / "onefold" / site.file.relative_to(SOURCE)
    text = site.file.read_text(encoding="utf-8")
    target.write_text(text[: site.span[0]] + site.instead + text[site.span[1] :], encoding="utf-8")
    begun = time.monotonic()
    try:
        path = os.pathsep.join([str(copy), str(ROOT / "tests")])
        environment = {
            **os.environ,
            "PYTHONPATH": path,
            "OMP_NUM_THREADS": "1",
            "ONEFOLD_TEST_SEEDS": str(seeds),
        }
        command = [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-x",
            "-p",
            "no:cacheprovider",
            "--tb=line",
            *tests,
        ]
        done = subprocess.run(
            command,
            cwd=ROOT,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
    finally:
        target.write_text(text, encoding="utf-8")
    failed = [
        line.split(" ", 1)[1].partition(" - ")[0]
        for line in done.stdout.splitlines()
        if line.startswith(("FAILED", "ERROR"))
    ]
    if done.returncode and not failed:
        raise RuntimeError(done.stdout[-4000:])
    return (failed[0].rpartition("::")[2] if failed else ""), time.monotonic() - begun


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", default="", help="sites whose name has this text")
    parser.add_argument("--seeds", type=int, default=6, help="schedules of each test")
    parser.add_argument("--minutes", type=float, default=1e9, help="no site is begun after these")
    parser.add_argument("--write", type=Path, help="a Markdown file for the table")
    given = parser.parse_args()
    end = time.monotonic() + 60 * given.minutes
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder)
        shutil.copytree(SOURCE, copy / "onefold", ignore=shutil.ignore_patterns("__pycache__"))
        for site in sites():
            if given.only not in site.name or time.monotonic() > end:
                continue
            failed, seconds = notices(site, given.seeds, copy, TESTS)
            rows.append((site.name, failed or "NONE", seconds))
            print(f"{seconds:5.0f} s  {failed or 'NONE NOTICES':90}  {site.name}", flush=True)
    missed = [row for row in rows if row[1] == "NONE"]
    print(f"{len(rows)} waits taken out, {len(rows) - len(missed)} noticed")
    if given.write is not None:
        lines = [
            (
                f"`python tests/waits_taken_out.py --seeds {given.seeds}`: {len(rows)} waits,"
                f" {len(rows) - len(missed)} noticed."
            ),
            "",
        ]
        lines += [
            "| taken out | the first test that fails |",
            "|---|---|",
            *(f"| `{name}` | {failed} |" for name, failed, _ in rows),
        ]
        given.write.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
