"""What every test may use: the folder of helpers on the search path, the source when it is not installed, the markers."""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

# Speed is judged in benchmarks: a busy machine must not fail a property.
settings.register_profile("onefold", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("onefold")

TESTS = Path(__file__).parent
os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(TESTS))
if importlib.util.find_spec("onefold") is None:
    sys.path.insert(0, str(TESTS.parent / "src"))


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "slow: takes more than some 10 seconds; `-m 'not slow'` leaves it out")


def pytest_unconfigure(config: pytest.Config) -> None:
    if "ranks" in sys.modules:
        sys.modules["ranks"].stop_fork_server()
