"""The output folder of a run.

OUTPUT/train.yaml      the resolved configuration; `onefold train --config` reads it again
OUTPUT/metrics.jsonl   one line a step, then one with "done"
OUTPUT/model/          the model, when the run has ended
"""

from __future__ import annotations

import json
import re
import time
from pathlib import Path
from types import TracebackType
from typing import Any

from onefold.train.config import TrainConfig
from onefold.train.errors import TrainError


def with_output(config: TrainConfig) -> TrainConfig:
    """`config` with its output folder decided.

    Raises:
        TrainError: the folder holds an earlier run, or is none.
    """
    if config.output is None:
        name = re.sub(r"[^\w.-]+", "-", Path(config.model).name).strip("-") or "model"
        folder = first = Path("runs") / f"{name}-{time.strftime('%Y%m%d-%H%M%S')}"
        tries = 1
        while folder.exists():
            tries += 1
            folder = first.with_name(f"{first.name}-{tries}")
        return config.model_copy(update={"output": str(folder)})
    folder = Path(config.output)
    if folder.exists() and not folder.is_dir():
        raise TrainError(f"--output {folder} is a file; name a folder.")
    earlier = [name for name in ("model", "metrics.jsonl") if (folder / name).exists()]
    if earlier and not config.overwrite:
        raise TrainError(f"--output {folder} holds an earlier run ({', '.join(earlier)}); name another folder, or add --overwrite.")
    return config


def write_config(config: TrainConfig, folder: Path, chosen: dict[str, Any]) -> None:
    """Save the resolved configuration: what was given, what was chosen in its place, and the defaults.

    The length of the run and the global batch are written as numbers, so that the same samples are read on any number of
    ranks. --overwrite and --json were said about this run only and are not carried on.

    Args:
        chosen: `stage`, `ranks`, `steps`, `global_batch` as they turned out.
    """
    folder.mkdir(parents=True, exist_ok=True)
    settled = {"steps": chosen["steps"], "epochs": None, "global_batch": chosen["global_batch"]}
    kept = config.model_copy(update={"overwrite": False, "json_lines": False, **settled})
    note = f"# This run chose stage {chosen['stage']} on {chosen['ranks']} ranks. Repeat it: onefold train --config FILE --output NEW\n"
    (folder / "train.yaml").write_text(note + kept.to_yaml(), encoding="utf-8")


class Metrics:
    """The metrics file: a JSON object a line, flushed at once so that an interrupted run has all its lines."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("w", encoding="utf-8")

    def write(self, row: dict[str, Any]) -> None:
        self._file.write(json.dumps(row) + "\n")
        self._file.flush()

    def __enter__(self) -> Metrics:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._file.close()
