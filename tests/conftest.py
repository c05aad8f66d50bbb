"""What every test may use: the folder of helpers on the search path, the source when it is not
installed, the markers.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import zlib
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest

# Until all tests are collected: what their imports make stays
gc.disable()
from hypothesis import HealthCheck, settings

# Speed is judged in benchmarks: a busy machine must not fail a property.
_ANY_SPEED = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])

TESTS = Path(__file__).parent
# For the workers, the ranks and the commands that tests start. Several tests share the cores; a rank
# that is woken by a message then waits for its turn rather than interrupting another one, which may
# hold what a third waits for, spinning (gloo does): a quarter to a third of the time is saved so.
with contextlib.suppress(AttributeError, OSError):  # not Linux
    os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(TESTS))
if importlib.util.find_spec("onefold") is None:
    sys.path.insert(0, str(TESTS.parent / "src"))

import on_ranks
from on_ranks import folder, pytest_pyfunc_call

__all__ = ["folder", "pytest_pyfunc_call"]

import products_by_shape  # `make test-processors` sets what it looks at

products_by_shape.install()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--all", action="store_true", help="what is slow, and every case, too")


def _sample(cases: list[pytest.Function], n: int) -> set[pytest.Function]:
    """One in `n` of the cases of one test, and at least one: the same ones in each run.

    Next comes the case with the most values of parameters that no chosen case has, then the one of
    the lowest hash. So every value of every parameter is met, where `n` leaves enough cases.
    """
    values = {case: set(case.callspec.indices.items()) for case in cases}
    left = sorted(cases, key=lambda case: zlib.crc32(case.name.encode()))
    chosen: set[pytest.Function] = set()
    met: set[tuple[str, int]] = set()
    while len(chosen) < -(-len(cases) // n):
        best = max(left, key=lambda case: len(values[case] - met))
        left.remove(best)
        chosen.add(best)
        met |= values[best]
    return chosen


def _left_out(items: list[pytest.Item]) -> list[pytest.Item]:
    """The items that a run without `--all` leaves out: those that are `slow`, and of a test that is
    marked `one_in(n)` all cases but one in n. What is not parametrized is always run.
    """
    out = [item for item in items if item.get_closest_marker("slow")]
    tests: dict[tuple[str, int], list[pytest.Function]] = {}
    for item in items:
        mark = item.get_closest_marker("one_in")
        if mark and isinstance(item, pytest.Function) and hasattr(item, "callspec"):
            name = item.nodeid.partition("[")[0]
            tests.setdefault((name, mark.args[0]), []).append(item)
    for (_, n), cases in tests.items():
        chosen = _sample(cases, n)
        out += [case for case in cases if case not in chosen]
    return out


def _makes_once(item: pytest.Item) -> bool:
    """Whether the test uses a fixture that its file makes once."""
    known = getattr(item, "_fixtureinfo", None)
    return known is not None and any(
        found[-1].scope == "module" for found in known.name2fixturedefs.values()
    )


def _takes_all(config: pytest.Config) -> bool:
    """Whether every case is run: with `--all`, and where a test was asked for by its name."""
    return config.getoption("--all") or any("::" in argument for argument in config.args)


@pytest.fixture
def sample(request: pytest.FixtureRequest) -> Callable[[Iterable[Any], int], list[Any]]:
    """`sample(cases, n)` is one in n of the cases that a test goes through by itself, in their
    order, and all of them with `--all`. Which ones depends on the name of the test.
    """
    first = zlib.crc32(request.node.name.encode())

    def chosen(cases: Iterable[Any], n: int) -> list[Any]:
        every = list(cases)
        return every if _takes_all(request.config) else every[first % min(n, len(every)) :: n]

    return chosen


@pytest.fixture
def every(request: pytest.FixtureRequest) -> bool:
    """Whether a test goes through all of what it does by itself: with `--all`."""
    return _takes_all(request.config)


@pytest.hookimpl(tryfirst=True)  # pytest-xdist's own reads the groups that are marked here
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not _takes_all(config) and (left_out := _left_out(items)):
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in set(left_out)]
    for item in items:
        if _makes_once(item):  # by one worker
            item.add_marker(pytest.mark.xdist_group(item.nodeid.partition("::")[0]))
    on_ranks.form_groups(items)


def pytest_collection_finish(session: pytest.Session) -> None:
    """What is loaded by now stays: a collection in a test (a simulation ends with one) need not go
    over all of torch, some 0.5 s.
    """
    in_groups = [i for i in session.items if i.get_closest_marker("xdist_group")]
    if getattr(session.config.option, "loadgroup", False) and in_groups:
        # Each worker would otherwise start the ranks of the whole group, for the few tests it has
        assert "@" in in_groups[0].nodeid, "pytest-xdist reads no groups with this pytest"
    gc.collect()
    gc.freeze()
    gc.enable()


def pytest_configure(config: pytest.Config) -> None:
    from examples import ALL, SAMPLE

    count = ALL if _takes_all(config) else SAMPLE
    settings.register_profile("onefold", _ANY_SPEED, max_examples=count)
    settings.load_profile("onefold")


def pytest_unconfigure(config: pytest.Config) -> None:
    if "ranks" in sys.modules:
        sys.modules["ranks"].stop_fork_servers()


@pytest.hookimpl(tryfirst=True)
def pytest_sessionstart(session: pytest.Session) -> None:
    """Where workers run everything, they share the fork servers that this process starts; they take
    as long as the workers' collection. Nor does a worker wait until the virtual device is compiled.
    """
    config = session.config
    everything = list(config.args) == [str(TESTS)] or list(config.args) == config.getini(
        "testpaths"
    )
    if not everything or not getattr(config.option, "numprocesses", None):
        return
    import ranks

    folder = tempfile.mkdtemp(prefix="onefold-tests-")
    config.add_cleanup(functools.partial(shutil.rmtree, folder, ignore_errors=True))
    ranks.start_shared(ranks.SERVERS, folder)
    os.environ[ranks.SHARED] = folder
    compiled = "import virtual; virtual.available() and virtual.build()"
    config.add_cleanup(subprocess.Popen([sys.executable, "-c", compiled], cwd=TESTS).wait)


def pytest_runtest_setup(item: pytest.Item) -> None:
    if "ranks" in sys.modules:
        server = getattr(getattr(item, "module", None), "SERVER", "core")
        sys.modules["ranks"].server_of_test = server
