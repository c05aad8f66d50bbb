"""Ranks of a benchmark that need not import torch again."""

from __future__ import annotations

import importlib
import json
import os
import time
from typing import Any

from benchmarks.peers.settings import Setting

from ranks import run_ranks


def on_the_fork_server(module: str, job: dict[str, Any], ranks: int, **_: Any) -> dict[str, Any]:
    """In place of `launch.run_ranks`: the same worker on the ranks of a test."""
    begun = time.monotonic()
    found = run_ranks(ranks, measured, module, job)
    return {
        "status": "ok",
        "ranks": json.loads(json.dumps(found)),
        "wall_s": time.monotonic() - begun,
    }


def measured(module: str, job: dict[str, Any]) -> dict[str, Any]:
    """What the worker measures. The peers' is told its job in parts."""
    given: tuple[Any, ...] = (job,)
    if module == "benchmarks.peers.worker":
        given = (job["peer"], Setting(**job["setting"]), int(os.environ["RANK"]))
    found: dict[str, Any] = importlib.import_module(module).measure(*given)
    return found
