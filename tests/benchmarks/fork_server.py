"""Ranks of a benchmark that need not import torch again."""

from __future__ import annotations

import importlib
import json
import os
import time
from typing import Any

from ranks import run_ranks


def on_the_fork_server(module: str, job: dict[str, Any], ranks: int, **_: Any) -> dict[str, Any]:
    """In place of `launch.run_ranks`: the same `measure` on the ranks of a test."""
    begun = time.monotonic()
    found = run_ranks(ranks, measured, module, {**job, "ranks": ranks})
    told = json.loads(json.dumps(found))
    return {"status": "ok", "ranks": told, "wall_s": time.monotonic() - begun}


def measured(module: str, job: dict[str, Any]) -> dict[str, Any]:
    """What the module measures on this rank."""
    job = {**job, "rank": int(os.environ["RANK"])}
    found: dict[str, Any] = importlib.import_module(module).measure(job)
    return found
