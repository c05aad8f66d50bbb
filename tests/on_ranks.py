"""Tests whose body runs on ranks, many of them in one start.

    @on_ranks(2)
    @pytest.mark.parametrize("stage", [0, 1, 2, 3])
    def test_a_step_frees_its_gradients(stage: int, folder: Path) -> None:
        ...                                   # on each of two ranks of gloo; asserts here

A test says what must hold on a rank, where it can be seen. Its arguments are the values of
`pytest.mark.parametrize`, which the rank takes from the module that it imports (they may be lambdas);
`folder`, one for all ranks of the test; and `every`, whether it runs with `--all`.

Neighbours of a module with the same number of ranks share a start, `TOGETHER` at most, and are one
piece of work for pytest-xdist. Each has its own result. A start ends early where ranks did not agree
on how a test ended: one raised and another did not, a rank stalled, died, or took too long. What
stands behind it is run in a new start. `fresh=True` gives a test a start of its own: it kills, hangs,
patches, or looks at its process.
"""

from __future__ import annotations

import faulthandler
import gc
import importlib
import json
import os
import random
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

import pytest

import ranks

#: Tests of a start at most.
TOGETHER = 16
#: Seconds that one test may take, which bound a hang only.
TIME = 180.0
#: Seconds that a rank which failed waits for the others to end the test by themselves.
GRACE = 10.0

Test = TypeVar("Test", bound=Callable[..., None])
slow = pytest.mark.slow
_told: dict[str, list[Said]] = {}


@dataclass
class Said:
    """How a test ended on a rank: `error` is the class of what it raised, "" if nothing."""

    error: str = ""
    message: str = ""
    trace: str = ""
    seconds: float = 0.0


def on_ranks(
    count: int,
    fresh: bool = False,
    server: str = "",
    seconds: float = TIME,
) -> Callable[[Test], Test]:
    """The body of the test runs on each of `count` ranks.

    Args:
        fresh: in a start of its own.
        server: what the ranks have imported, one of `ranks.SERVERS`; the module's `SERVER` or
            "core" if not given.
        seconds: that the test may take, which bound a hang only.
    """
    return pytest.mark.on_ranks(count, fresh=fresh, server=server, seconds=seconds)


class Uneven(BaseException):
    """Ranks did not agree on how a test ended, so that the start must end."""


# -- on a rank -------------------------------------------------------------------------------------


def serve(tests: list[tuple[str, str, list[int], bool]], folder: str, seconds: float) -> None:
    """Run tests one after the other: (module, name, positions of its parameters, every)."""
    import torch.distributed as dist

    rank, world = dist.get_rank(), dist.get_world_size()  # a test may end the group
    for at, test in enumerate(tests):
        faulthandler.dump_traceback_later(seconds, exit=True)
        said = _run(*test, folder=Path(folder, f"of-{at}"))
        told = Path(folder, f"{at}-{rank}")
        told.with_suffix(".part").write_text(json.dumps(asdict(said)))
        told.with_suffix(".part").rename(told)
        _agree(folder, at, world, said, seconds)
    faulthandler.cancel_dump_traceback_later()


def _run(module: str, name: str, positions: list[int], every: bool, folder: Path) -> Said:
    import torch

    environment, here, began = dict(os.environ), os.getcwd(), time.monotonic()
    threads = set(threading.enumerate())
    torch.manual_seed(0)
    random.seed(0)
    said = Said()
    try:
        function = getattr(importlib.import_module(module), name)
        folder.mkdir(exist_ok=True)
        function(**_arguments(function, positions, folder, every))
        assert torch.get_default_dtype() == torch.float32, "the test left another default dtype"
    except BaseException as raised:
        said = Said(type(raised).__name__, str(raised), _shown(raised))
        traceback.clear_frames(raised.__traceback__)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(here)
    torch.set_default_dtype(torch.float32)
    gc.collect()
    begun = [t for t in set(threading.enumerate()) - threads if not t.daemon]
    for thread in begun:  # those of a pool that was collected now end by themselves
        thread.join(1.0)
    left = [t.name for t in begun if t.is_alive()]
    if left and not said.error:
        said = Said("ThreadsLeft", f"threads outlive the test: {', '.join(left)}")
    said.seconds = time.monotonic() - began
    return said


def _parametrized(function: Any) -> list[list[dict[str, Any]]]:
    """For each `parametrize` of a test, its rows: {name: value}."""
    found = []
    for mark in getattr(function, "pytestmark", []):
        if mark.name == "parametrize":
            named, values = mark.args[:2]
            names = [n.strip() for n in named.split(",")] if isinstance(named, str) else list(named)
            rows = [v.values if isinstance(v, type(pytest.param())) else v for v in values]
            rows = [
                row if len(names) > 1 or isinstance(value, type(pytest.param())) else (row,)
                for row, value in zip(rows, values, strict=True)
            ]
            found.append([dict(zip(names, row, strict=True)) for row in rows])
    return found


def _positions(item: Any) -> list[int]:
    """Which row of each `parametrize` the test has."""
    given = item.callspec.params if hasattr(item, "callspec") else {}
    return [
        next(i for i, row in enumerate(rows) if all(given[k] is v for k, v in row.items()))
        for rows in _parametrized(item.function)
    ]


def _arguments(function: Any, positions: list[int], folder: Path, every: bool) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for rows, position in zip(_parametrized(function), positions, strict=True):
        found |= rows[position]
    taken = function.__code__.co_varnames[: function.__code__.co_argcount]
    given = {"folder": folder, "every": every}
    return found | {name: value for name, value in given.items() if name in taken}


def _shown(raised: BaseException) -> str:
    """The traceback without torch's frames, with what names stood for in the tests' own."""
    tests = os.path.dirname(__file__)
    told = traceback.TracebackException.from_exception(raised, capture_locals=True)
    cause: Any = told
    while cause is not None:
        for frame in cause.stack:
            inside = frame.filename.startswith(tests) and frame.filename != __file__
            values = (frame.locals or {}) if inside else {}
            frame.locals = {name: text[:200] for name, text in values.items()} or None
        cause = cause.__cause__ or cause.__context__
    return "".join(told.format())


def _agree(folder: str, at: int, world: int, said: Said, seconds: float) -> None:
    """Wait for the other ranks to end this test. There is no collective in it: who failed may stand
    at another one than the rest.
    """
    others = [Path(folder, f"{at}-{rank}") for rank in range(world)]
    until = time.monotonic() + (GRACE if said.error else seconds)
    while not all(other.exists() for other in others):
        if time.monotonic() > until:
            raise Uneven(f"this rank {said.error or 'was through'}, others did not end")
        time.sleep(0.001)
    errors = {json.loads(other.read_text())["error"] for other in others}
    if len(errors) > 1 or errors & {"StallError", "ThreadsLeft"}:
        raise Uneven(f"the ranks ended with {sorted(errors)}")


# -- in pytest -------------------------------------------------------------------------------------


def _asked(item: pytest.Item) -> tuple[int, bool, str, float] | None:
    """(ranks, fresh, server, seconds), None of a test that runs here."""
    mark = item.get_closest_marker("on_ranks")
    return mark and (mark.args[0], *mark.kwargs.values())


def _group(item: pytest.Item) -> str:
    mark = item.get_closest_marker("xdist_group")
    return mark.args[0] if mark else ""


def form_groups(items: list[pytest.Item]) -> None:
    """Mark which tests share a start, before pytest-xdist hands them out."""
    open_: dict[Any, list[int]] = {}
    for item in items:
        asked = _asked(item)
        if asked is None or asked[1]:
            continue
        name = item.nodeid.partition("::")[0]
        number, count = open_.get((name, asked), [0, 0])
        if count == TOGETHER:
            number, count = number + 1, 0
        open_[name, asked] = [number, count + 1]
        item.add_marker(pytest.mark.xdist_group(f"{name}-{asked[0]}-{asked[2]}-{number}"))


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    asked = _asked(pyfuncitem)
    if asked is None:
        return None
    name = pyfuncitem.nodeid
    if name not in _told:
        group = _group(pyfuncitem)
        same = [i for i in pyfuncitem.session.items if group and _group(i) == group]
        waiting = [i for i in same if i.nodeid not in _told and i is not pyfuncitem]
        _start(asked, [pyfuncitem, *waiting])
    said = _told[name]
    pyfuncitem.user_properties.append(("seconds", max(s.seconds for s in said)))
    if all(s.error == "Skipped" for s in said):
        pytest.skip(said[0].message)
    wrong = [f"rank {r}: {s.error}: {s.message}\n{s.trace}" for r, s in enumerate(said) if s.error]
    if wrong:
        pytest.fail("\n".join(wrong), pytrace=False)
    return True


def _start(asked: tuple[int, bool, str, float], items: list[Any]) -> None:
    """One start for these tests; afterwards `_told` has the first of them, and as many more as it
    came to.
    """
    count, _, server, seconds = asked
    told = [
        (
            item.module.__name__,
            item.function.__name__,
            _positions(item),
            item.config.getoption("--all") or any("::" in a for a in item.config.args),
        )
        for item in items
    ]
    with tempfile.TemporaryDirectory(prefix="onefold-tests-") as folder:
        outcomes = ranks.outcomes_of(
            count, serve, told, folder, seconds,
            timeout=60 + seconds * len(items), grace=5.0, server=server,
        )  # fmt: skip
        for at, item in enumerate(items):
            files = [Path(folder, f"{at}-{rank}") for rank in range(count)]
            if at and not any(file.exists() for file in files):
                return  # it was not begun, or is found again as the first of the next start
            _told[item.nodeid] = [
                Said(**json.loads(file.read_text()))
                if file.exists()
                else Said(o.error or "no result", o.message, o.trace)
                for file, o in zip(files, outcomes, strict=True)
            ]


@pytest.fixture
def folder() -> None:
    """One for all ranks of the test; made there."""
