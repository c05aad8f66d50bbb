"""The chapters of the first hour. `onefold doctor --check` measures them (src/onefold/doctor/chapters.py);
here they join the report of the others.
"""

from __future__ import annotations

import argparse
import sys
import time
from typing import Any

import torch

from benchmarks.harness import Table
from onefold.doctor.chapter_runs import CHAPTERS, LIMIT, Scope
from onefold.doctor.chapters import CHAPTER

__all__ = ["CHAPTERS", "chapter", "scope_of"]


def scope_of(options: argparse.Namespace, left: float) -> Scope:
    """How the chapters run with these options, within `left` seconds."""
    cuda = options.device == "cuda"
    return Scope(
        device=options.device,
        gpus=torch.cuda.device_count() if cuda else 2,
        gpu=torch.cuda.get_device_name() if cuda else "",
        capacity=torch.cuda.get_device_properties(0).total_memory if cuda else 0,
        tiny=options.tiny,
        steps=max(2, options.steps // 2),
        deadline=time.monotonic() + left,
        limit=min(options.timeout, LIMIT),
        say=lambda text: print(f"# {text}", file=sys.stderr, flush=True),
    )


def chapter(
    name: str, options: argparse.Namespace, left: float
) -> tuple[Table, list[dict[str, Any]]]:
    """Measure one chapter; an outcome for each run of it."""
    found = CHAPTER[name](scope_of(options, left))
    outcomes = [{"peer": run.name, **run.to_json(), "wall_s": run.seconds} for run in found.runs]
    return Table(found.title, found.columns, found.rows), outcomes
