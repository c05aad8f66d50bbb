"""What is known by now."""

from __future__ import annotations

import argparse
import time
from typing import Any

import torch

from benchmarks import harness
from benchmarks.harness import Table

SCHEMA = "onefold-gpu/1"


class Report:
    """What is known by now: written as gpu.json and gpu.md whenever something is added."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.deadline = time.monotonic() + options.seconds
        self.tables: dict[str, Table] = {}
        self.outcomes: dict[str, list[dict[str, Any]]] = {}
        device = torch.cuda.get_device_name() if options.device == "cuda" else "cpu"
        self.head = harness.about(options, SCHEMA)
        self.head["machine"] |= {"gpu": device, "gpus": torch.cuda.device_count()}

    def left(self) -> float:
        """Seconds before everything should have ended."""
        return self.deadline - time.monotonic()

    def put(self, name: str, table: Table, outcomes: list[dict[str, Any]]) -> None:
        """Another table, or the same with more rows."""
        self.tables[name], self.outcomes[name] = table, outcomes
        self.write()

    def write(self, finished: bool = False) -> None:
        """Both files, whole at any moment."""
        tables = [
            {"title": t.title, "columns": list(t.columns), "rows": t.rows}
            for t in self.tables.values()
        ]
        result = {**self.head, "finished": finished, "tables": tables, "runs": self.outcomes}
        text = [f"# Onefold on {self.head['machine']['gpu']}", "", harness.where(self.head), ""]
        text += [table.markdown() for table in self.tables.values()]
        harness.keep(self.options, result, "\n".join(text))
