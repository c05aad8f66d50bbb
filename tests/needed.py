"""Tests of what may not be installed, skipped without importing it: each worker collects every
module, and it is the ranks that use the library.
"""

from __future__ import annotations

import importlib.util

import pytest


def skip_without(name: str, reason: str = "") -> None:
    """Skip the module that calls this where the library `name` is not installed."""
    if importlib.util.find_spec(name) is None:
        pytest.skip(reason or f"{name} is not installed", allow_module_level=True)
