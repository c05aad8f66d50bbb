"""Take the waits out of the source one by one, and see that a test notices.

    python tests/waits_taken_out.py [--only TEXT] [--seeds 6] [--write benchmarks/results/waits.md]

A wait is a call that orders streams, makes the host wait for the device, another rank or the disk,
or says on which stream work goes: those named in WAITS and CONTEXTS, in every package but those of
OUTSIDE, without those of NOT_WAITS. A copy of the source has a switch at each (waits_switch.py).

1. All TESTS run with every wait in its place. They must pass. It is noted which waits each test
   comes to, and how long it takes.
2. Each wait is taken out. The tests that come to it run, those first that are quick and likely to
   notice (`Runner.likelihood`), until one fails. A test that takes much longer than before hangs,
   and has failed.

A wait that no test misses is listed: the exit status is then 1. `--map FILE` keeps what the first
part has found for the next run on the same source; only tests that are new run again there.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import hashlib
import json
import os
import queue
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

import pytest

import on_ranks
import waits_switch

ROOT = Path(__file__).resolve().parents[1]
SOURCE = ROOT / "src" / "onefold"
#: Those of test_waits by their names, so that every recipe runs (tests/conftest.py samples files).
TESTS = [
    "tests/standin/test_standin.py",
    "tests/promises/test_native.py",
    "tests/pretrained/test_whole_tensors.py",
    "tests/stores",
    "tests/promises/test_copies.py",
    "tests/core",
    "tests/scripts/test_late.py",
    "tests/scripts/test_meta.py",
    "tests/promises/test_steps_of_tiers.py",
    "tests/checkpoints/test_asynchronous.py",
    "tests/train/test_a_step_late.py",
    "tests/optim/test_whole.py::test_scaling_and_clipping_come_before_the_whole_step",
    "tests/parallel/test_dtensor_parameters.py::test_a_gradient_under_way_is_waited_for",
    "tests/waits/test_waits.py",
]
#: Methods by the last names of what they are called on and of themselves; "*" is anything. `flush`
#: and `forget_writes` are not among them: they say when failed writes are told. What orders reads
#: and writes of one place stands in offload/nvme.py.
WAITS = {
    ("*", "wait_stream"), ("*", "wait_event"), ("*", "synchronize"), ("*", "record_stream"), ("*", "set_stream"),
    ("*", "wait"), ("*", "wait_for"), ("*", "order"), ("*", "_order_after_copies"), ("*", "settle"), ("*", "result"), ("*", "comes"),
    ("self", "_reach"), ("early", "join"), ("_in_backward", "join"), ("self", "join"),
    ("*", "about_to_write"), ("*", "wait_before_write"), ("*", "gradients_are_down"), ("transfers", "risen"), ("self", "risen"),
}  # fmt: skip
#: Functions.
FUNCTIONS = {"copying", "wait_before_write", "reached"}
#: Functions and methods that return a context in which work goes to another stream or device.
CONTEXTS = {"use_stream", "_Using", "guard", "device_index", "on_copy_stream", "on_stream"}
#: Packages whose waits are not those of a training step on a device.
OUTSIDE = {
    "cli", "data/tokens.py", "deepspeed", "doctor", "hf", "hosts.py", "inspection", "lightning", "machine", "models", "observe",
    "plan", "processes", "simulation", "tracing", "train",
}  # fmt: skip
_DISK = "for a disk"
_WRITER = "for a thread that writes files"
#: {file: {how a call begins: why it is none of these waits}}.
NOT_WAITS = {
    "checkpoint/checkpointer.py": {"self.wait": _WRITER, "saving.wait": _WRITER, "self._saving.wait": _WRITER},
    "checkpoint/dcp.py": {"self.engine.settle": _WRITER, "self.engine.about_to_write": "refuses: `_check` has waited"},
    "checkpoint/together.py": {
        "engine.settle": _WRITER, "work.wait()": "raises what has failed", "self._group.recv": "closes connections",
    },
    "comm/ledger.py": {"self.settle": "enters what was measured"},
    "offload/nvme.py": {"self.settle": _DISK, "wait": _DISK, "transfer.settle": _DISK},
    "offload/step.py": {"window.settle": _DISK},
    "offload/storage.py": {
        "self.transfers.risen()": "asks, and does not wait", "transfers.risen()": "asks, and does not wait",
        "self.settle": _DISK, "window.settle": _DISK,
    },
    "offload/transfers.py": {"self.risen()": "asks, and does not wait"},
    "runtime/engine.py": {"self.settle": _WRITER},
    "runtime/gather.py": {"self.join": "takes part in a gather"},
    "runtime/parameters/values.py": {"e.box.settle": "brings a gradient into its placements"},
    "sharding.py": {"incoming.settle": "gives parameters their values"},
}  # fmt: skip


#: Behind the name of a test that did not end.
HANGS = " (hangs)"
#: Seconds that a test gets to end by itself beyond its limit.
GRACE = 15.0


@dataclass(frozen=True)
class Site:
    """One call. `span`: the first and last character of what is called, in the file."""

    file: Path
    line: int
    text: str
    span: tuple[int, int]
    context: bool

    @property
    def name(self) -> str:
        return f"{self.file.relative_to(SOURCE)}:{self.line} {self.text}"


def sites() -> list[Site]:
    found = []
    for file in sorted(SOURCE.rglob("*.py")):
        within = file.relative_to(SOURCE)
        if within.parts[0] not in OUTSIDE and str(within) not in OUTSIDE:
            found += list(_of_file(file, NOT_WAITS.get(str(within), {})))
    return found


def _of_file(file: Path, not_waits: dict[str, str]) -> Iterator[Site]:
    text = file.read_text(encoding="utf-8")
    lines = text.splitlines(keepends=True)
    starts = [0]
    for line in lines:
        starts.append(starts[-1] + len(line))

    def at(line: int, column: int) -> int:  # columns of ast are bytes
        return starts[line - 1] + len(lines[line - 1].encode()[:column].decode())

    calls = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Call)]
    for node in sorted(calls, key=lambda node: (node.lineno, node.col_offset)):
        owner, name = _called(node.func)
        method = isinstance(node.func, ast.Attribute)
        context = name in CONTEXTS
        wait = ("*", name) in WAITS or (owner, name) in WAITS if method else name in FUNCTIONS
        if not (context or wait):
            continue
        begin = at(node.lineno, node.col_offset)
        whole = text[begin : at(node.end_lineno or 0, node.end_col_offset or 0)]
        end = at(node.func.end_lineno or 0, node.func.end_col_offset or 0)
        if not whole.startswith(tuple(not_waits)):
            yield Site(file, node.lineno, " ".join(whole.split()), (begin, end), context)


def _called(function: ast.expr) -> tuple[str, str]:
    """(the last name of what it is called on, its own name); "" where there is none."""
    if isinstance(function, ast.Name):
        return "", function.id
    if not isinstance(function, ast.Attribute):
        return "", ""
    on = function.value
    if isinstance(on, ast.Call):
        on = on.func
    if isinstance(on, ast.Attribute):
        return on.attr, function.attr
    return (on.id if isinstance(on, ast.Name) else ""), function.attr


def with_switches(found: list[Site], copy: Path) -> None:
    """Copy the source, with a switch at each of the sites. Lines stay where they are."""
    shutil.copytree(SOURCE, copy / "onefold", ignore=shutil.ignore_patterns("__pycache__"))
    for file in {site.file for site in found}:
        text = file.read_text(encoding="utf-8")
        inside = [(number, site) for number, site in enumerate(found) if site.file == file]
        # The text from here on has its switches: one call may stand in another's arguments
        marks = sorted(
            [(site.span[1], 0, f", {site.context})") for _, site in inside]
            + [
                (site.span[0], 1, f"__import__('waits_switch').switched({number}, ")
                for number, site in inside
            ],
            reverse=True,
        )
        for at, _, mark in marks:
            text = text[:at] + mark + text[at:]
        (copy / "onefold" / file.relative_to(SOURCE)).write_text(text, encoding="utf-8")


# ------------------------------------------------------------------------------- inside of pytest


class Runner:
    """Runs tests with and without waits, in the place of pytest's own loop. What it finds goes to
    the process that has started pytest, a line of JSON each.
    """

    def __init__(self, folder: Path, tell: Any) -> None:
        self.folder, self.tell = folder, tell
        asked = json.loads((folder / "asked").read_text())
        self.known: dict[str, Any] = asked["known"]
        self.wanted: list[int] = asked["wanted"]
        self.within: list[str] = asked["within"]
        self.seconds: float = asked["seconds"]
        self.failed = self.hung = False
        # {(test, file or ""): [times that it noticed, times that it ran]}
        self.history: dict[tuple[str, str], list[int]] = defaultdict(lambda: [0, 0])
        for name, within, failed in asked["history"]:
            self.learn(name, within, failed)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.failed = self.failed or report.failed
        self.hung = self.hung or "from pytest-timeout" in report.longreprtext

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        if session.testsfailed:  # a file could not be imported
            raise session.Interrupted("errors during collection")
        items = {item.nodeid: item for item in session.items}
        for name, item in items.items():
            if name not in self.known:
                failed, seconds = self.runs(item, out=None, limit=600)
                reached = {int(x) for x in (self.folder / "reached").read_text().split()}
                self.known[name] = [sorted(reached), seconds]
                self.say(test=name, reached=sorted(reached), seconds=seconds, failed=failed)
                if failed:
                    return True
        for number in self.wanted:
            begun = time.monotonic()
            by = next(self.missed(number, items), "")
            self.say(site=number, by=by, seconds=time.monotonic() - begun)
        self.say(end=True)
        return True

    def missed(self, number: int, items: dict[str, pytest.Item]) -> Iterator[str]:
        """The tests that fail without the wait."""
        within, begun = self.within[number], time.monotonic()
        those = [name for name in items if number in self.known[name][0]]
        expected = {
            name: self.known[name][1] / self.likelihood(items[name], within) for name in those
        }
        for name in sorted(those, key=lambda name: expected[name]):
            if time.monotonic() - begun > self.seconds:
                return
            limit = 20 + 3 * self.known[name][1]
            self.say(site=number, begins=name, limit=limit)
            failed, _ = self.runs(items[name], number, limit)
            self.learn(name, within, failed)
            self.say(learned=[name, within, failed])
            if failed:
                yield name + HANGS * self.hung

    def learn(self, name: str, within: str, failed: bool) -> None:
        for place in ("", within):
            self.history[name, place][0] += failed
            self.history[name, place][1] += 1

    def likelihood(self, item: pytest.Item, within: str) -> float:
        """How likely the test notices a wait in the file `within`: by what it has noticed so far,
        there above all. At first, by whether it uses the device whose streams are late.
        """
        likely = 0.3 if "virtual" in vars(item.module) else 0.03  # type: ignore[attr-defined]
        for place in ("", within):
            noticed, ran = self.history[item.nodeid, place]
            likely = (noticed + 2 * likely) / (ran + 2)
        return likely

    def runs(self, item: pytest.Item, out: int | None, limit: float) -> tuple[bool, float]:
        """(whether a test failed without the wait `out`, its seconds)."""
        (self.folder / "out").write_text("" if out is None else str(out))
        (self.folder / "reached").write_text("")
        waits_switch.forget()
        # Alone: of tests that share a start, it would be told what an earlier one has found
        on_ranks._told.clear()
        kept = [m for m in item.own_markers if m.name not in ("timeout", "xdist_group")]
        item.own_markers = kept
        item.add_marker(pytest.mark.timeout(limit, method="signal"))
        self.failed, self.hung, begun = False, False, time.monotonic()
        item.ihook.pytest_runtest_protocol(item=item, nextitem=None)
        return self.failed, time.monotonic() - begun

    def say(self, **what: Any) -> None:
        print(json.dumps(what), file=self.tell, flush=True)


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(
        Runner(Path(os.environ[waits_switch.FOLDER]), os.fdopen(int(os.environ["TELL"]), "w"))
    )


# ---------------------------------------------------------------------------------- outside of it


class Pytest:
    """Runs the tests on a copy of the source, in a process of its own."""

    def __init__(self, found: list[Site], seeds: int, seconds: float) -> None:
        self.found, self.seeds, self.seconds = found, seeds, seconds
        self.known: dict[str, Any] = {}  # {test: (waits that it comes to, its seconds)}
        self.history: list[Any] = []

    def __call__(self, wanted: list[int]) -> Iterator[dict[str, Any]]:
        """What `Runner` tells. Where a test hangs beyond its limit, the process is killed, the wait
        counts as noticed, and another process goes on.
        """
        left = list(wanted)
        while True:
            hangs = None
            for told in self.process(left):
                if "learned" in told:
                    self.history.append(told["learned"])
                elif "begins" in told:
                    hangs = told
                else:
                    if "site" in told:
                        left.remove(told["site"])
                    hangs = None
                    if "end" in told:
                        return
                    yield told
            assert hangs is not None
            left.remove(hangs["site"])
            self.history.append([hangs["begins"], str(self.found[hangs["site"]].file), True])
            yield {"site": hangs["site"], "by": hangs["begins"] + HANGS, "seconds": hangs["limit"]}

    def process(self, wanted: list[int]) -> Iterator[dict[str, Any]]:
        """What one process tells, until it ends or hangs."""
        with tempfile.TemporaryDirectory(prefix="onefold-waits-") as place:
            folder = Path(place)
            with_switches(self.found, folder)
            asked = {
                "known": self.known,
                "history": self.history,
                "wanted": wanted,
                "within": [str(site.file) for site in self.found],
                "seconds": self.seconds,
            }
            (folder / "asked").write_text(json.dumps(asked))
            reading, writing = os.pipe()
            environment = {
                **os.environ,
                "PYTHONPATH": os.pathsep.join([place, str(ROOT / "tests"), str(ROOT)]),
                "OMP_NUM_THREADS": "1",
                "ONEFOLD_TEST_SEEDS": str(self.seeds),
                waits_switch.FOLDER: place,
                "TELL": str(writing),
            }
            options = ["-q", "-p", "no:cacheprovider", "-p", "waits_taken_out", "--tb=short"]
            with open(folder / "log", "w+") as log:
                heard = os.fdopen(reading)
                process = subprocess.Popen(
                    [sys.executable, "-m", "pytest", *options, *TESTS],
                    cwd=ROOT, env=environment, stdout=log, stderr=log, pass_fds=[writing],
                    start_new_session=True,
                )  # fmt: skip
                os.close(writing)
                try:
                    lines: queue.SimpleQueue[str] = queue.SimpleQueue()
                    threading.Thread(target=_pass_on, args=(heard, lines), daemon=True).start()
                    limit: float | None = None
                    while True:
                        try:
                            line = lines.get(timeout=limit)
                        except queue.Empty:
                            return
                        if not line:
                            log.seek(0)
                            raise RuntimeError(log.read()[-4000:])
                        told = json.loads(line)
                        limit = told["limit"] + GRACE if "limit" in told else None
                        yield told
                        if "end" in told:
                            process.wait(60)
                            return
                finally:
                    with contextlib.suppress(ProcessLookupError):
                        os.killpg(process.pid, signal.SIGKILL)
                    process.wait()


def _pass_on(heard: TextIO, lines: queue.SimpleQueue[str]) -> None:
    """Until the end of `heard`, for which it passes on ""."""
    for line in heard:
        lines.put(line)
    lines.put("")


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", nargs="+", default=[""], help="waits whose name has such a text")
    parser.add_argument("--seeds", type=int, default=6, help="schedules of each test")
    parser.add_argument("--map", type=Path, help="a JSON file for which test comes to which wait")
    parser.add_argument("--seconds", type=float, default=1e9, help="no test is begun after these")
    parser.add_argument("--list", action="store_true", help="print the waits, and run nothing")
    parser.add_argument("--write", type=Path, help="a Markdown file for the table")
    given = parser.parse_args()
    found = sites()
    wanted = [
        number for number, site in enumerate(found) if any(text in site.name for text in given.only)
    ]
    if given.list:
        print("\n".join(found[number].name for number in wanted))
        return 0
    state = "".join(f"{site.name}{site.span}" for site in found)
    digest = hashlib.sha256(state.encode()).hexdigest()
    runs = Pytest(found, given.seeds, given.seconds)
    known = runs.known
    if given.map is not None and given.map.exists():
        kept = json.loads(given.map.read_text())
        known |= kept["tests"] if kept["source"] == digest else {}
    rows = []
    for told in runs(wanted):
        if "test" in told:
            if told["failed"]:
                raise SystemExit(f"{told['test']} fails with every wait in its place")
            known[told["test"]] = [told["reached"], told["seconds"]]
            print(f"{told['seconds']:5.1f} s  {told['test']}", flush=True)
            if given.map is not None:
                given.map.write_text(json.dumps({"source": digest, "tests": known}))
        else:
            name, by = found[told["site"]].name, told["by"].rpartition("::")[2]
            rows.append((name, by or "NONE"))
            print(f"{told['seconds']:5.0f} s  {by or 'NONE NOTICES':90}  {name}", flush=True)
    missed = [name for name, by in rows if by == "NONE"]
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
            "| taken out | a test that fails |",
            "|---|---|",
            *(f"| `{name}` | {by} |" for name, by in rows),
        ]
        given.write.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
