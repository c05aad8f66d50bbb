"""Room `observe`: what the ledgers saw, in the same schema as `plan`; figures of each step, traces,
the report.

| wanted                                  | here                                                    |
|-----------------------------------------|---------------------------------------------------------|
| figures of each step                    | `Meter`, `flat`, `TensorBoard`                          |
| what autograd keeps                     | `watch_activations`                                     |
| a window of steps, as a trace           | `record`, `Recording.write_chrome`                      |
| an account to hold against the plan     | `measured`, `reconciled`                                |
| what a run leaves behind, and the page  | `write_observed`, `read_observed`, `write_report`       |
"""

from pathlib import Path

from onefold.observe.activations import Activations, watch_activations
from onefold.observe.measure import measured, reconciled
from onefold.observe.memory import Reconciliation, resident_memory
from onefold.observe.meter import Meter, TensorBoard, flat
from onefold.observe.runfile import (
    Observed,
    RunFileError,
    gather_ranks,
    read_observed,
    write_observed,
)
from onefold.observe.trace import Move, Recording, Work, record


def write_report(run: str | Path, out: str | Path | None = None) -> Path:
    """The run in a folder as one HTML page that opens offline; see `onefold.observe.report`."""
    from onefold.observe.report import write_report as write

    return write(run, out)


__all__ = [
    "Activations",
    "Meter",
    "Move",
    "Observed",
    "Reconciliation",
    "Recording",
    "RunFileError",
    "TensorBoard",
    "Work",
    "flat",
    "gather_ranks",
    "measured",
    "read_observed",
    "reconciled",
    "record",
    "resident_memory",
    "watch_activations",
    "write_observed",
    "write_report",
]
