"""Room `observe`: measurements from the ledgers, in the schema of `plan`; figures of each step,
traces, the report.

| to get                                  | use                                                     |
|-----------------------------------------|---------------------------------------------------------|
| figures of each step                    | `Meter`, `flat`, `TensorBoard`                          |
| the bytes that autograd keeps           | `watch_activations`                                     |
| a trace of some steps                   | `record`, `Recording.write_chrome`                      |
| an account to compare with the plan     | `measured`, `reconciled`                                |
| the files of a run, and the report      | `write_observed`, `read_observed`, `write_report`       |
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
    """Write a run's folder as one HTML page that opens offline; see `onefold.observe.report`."""
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
