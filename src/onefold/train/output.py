"""The output folder of a run.

OUTPUT/train.yaml      the resolved configuration; `onefold train --config` reads it again
OUTPUT/metrics.jsonl   one line a step, one with "resumed" where a start went on from a checkpoint, then one with "done"
OUTPUT/checkpoints/    step-00000100 and so on, where the run keeps any
OUTPUT/model/          the model, when the run has ended
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from types import TracebackType
from typing import Any

from onefold.observe.tensorboard import TensorBoard
from onefold.train.claim import name_output
from onefold.train.config import TrainConfig
from onefold.train.early import earlier_run
from onefold.train.errors import TrainError
from onefold.train.resume import CHECKPOINTS, newest_first

METRICS = "metrics.jsonl"


def with_output(config: TrainConfig, restarted: bool = False) -> TrainConfig:
    """`config` with its output folder decided. With --overwrite, checkpoints of the run that is
    replaced are removed.

    Args:
        restarted: this is the same run, started once more.

    Raises:
        TrainError: the folder holds an earlier run, or is none.
    """
    if config.output is None:
        return name_output(config)
    folder = Path(config.output)
    if folder.exists() and not folder.is_dir():
        raise TrainError(f"--output {folder} is a file; name a folder.")
    if restarted:
        return config
    kept = newest_first(folder / CHECKPOINTS)
    if config.overwrite:
        for path in kept:
            shutil.rmtree(path)
        return config
    earlier = [name for name in ("model", METRICS) if (folder / name).exists()] + (
        [CHECKPOINTS] if kept else []
    )
    if config.resume == "auto" and (kept or "model" not in earlier):
        return config  # a run that ended before its first checkpoint begins again
    own = [path.resolve() for path in (folder, folder / CHECKPOINTS, *kept[:1])]
    if config.resume != "none" and kept and Path(config.resume).resolve() in own:
        return config
    if earlier:
        raise TrainError(
            earlier_run(
                folder, earlier, "--resume auto" if kept and config.resume == "none" else ""
            )
        )
    return config


def write_config(config: TrainConfig, folder: Path, chosen: dict[str, Any]) -> None:
    """Save the resolved configuration: what was given, what was chosen in its place, and the
    defaults.

    The length of the run and the global batch are written as numbers, so that the same samples are
    read on any number of ranks. --overwrite and --json were said about this run only and are not
    carried on.

    Args:
        chosen: `stage`, `ranks`, `steps`, `global_batch` as they turned out.
    """
    folder.mkdir(parents=True, exist_ok=True)
    settled = {"steps": chosen["steps"], "epochs": None, "global_batch": chosen["global_batch"]}
    kept = config.model_copy(update={"overwrite": False, "json_lines": False, **settled})
    note = (
        f"# This run chose stage {chosen['stage']} on {chosen['ranks']} ranks. Repeat it: onefold"
        " train --config FILE --output NEW\n"
    )
    (folder / "train.yaml").write_text(note + kept.to_yaml(), encoding="utf-8")


class Metrics:
    """The metrics file: a JSON object a line, flushed at once so that an interrupted run has all
    its lines.

    Args:
        after: go on with what is there, the rows of steps beyond this one cut; None begins anew.

    Attributes:
        first: the row of the first step there is, None before it was written.
    """

    def __init__(self, path: Path, after: int | None = None) -> None:
        self._path = path
        self.first: dict[str, Any] | None = None
        if after is not None and path.is_file():
            self._keep(after)
        self._file = path.open("w" if after is None else "a", encoding="utf-8")

    def write(self, row: dict[str, Any]) -> None:
        if self.first is None and isinstance(row.get("step"), int):
            self.first = row
        self._file.write(json.dumps(row) + "\n")
        self._file.flush()

    def cut(self, after: int) -> None:
        """Forget the rows of steps beyond `after`: the run has gone back to it."""
        if self._path.is_file():
            self._file.close()
            self._keep(after)
            self._file = self._path.open("a", encoding="utf-8")

    def _keep(self, after: int) -> None:
        kept, self.first = [], None
        for line in self._path.read_text(encoding="utf-8", errors="replace").splitlines():
            try:
                row = json.loads(line)
            except json.JSONDecodeError:
                continue  # the run was killed while it wrote
            if row.get("done") or row.get("step", row.get("from_step", 0)) > after:
                continue
            kept.append(line)
            if self.first is None and isinstance(row.get("step"), int):
                self.first = row
        aside = self._path.with_name(self._path.name + ".unfinished")
        aside.write_text("".join(line + "\n" for line in kept), encoding="utf-8")
        aside.replace(self._path)

    def __enter__(self) -> Metrics:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._file.close()


class Board(TensorBoard):
    """TensorBoard's files, in which steps beyond one can be declared void.

    Args:
        after: the step to go on from; None begins anew.
    """

    def __init__(self, folder: Path, after: int | None = None) -> None:
        super().__init__(folder)
        self._folder = folder
        if after is not None:
            self.cut(after)

    def cut(self, after: int) -> None:
        """Void what was written for steps beyond `after`."""
        from torch.utils.tensorboard import SummaryWriter

        self._writer.close()
        self._writer = SummaryWriter(str(self._folder), purge_step=after + 1)
