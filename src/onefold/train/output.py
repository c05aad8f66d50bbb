"""The output folder of a run. Only one run at a time may use it (processes/claim.py).

    OUTPUT/run.lock        who has claimed the folder; locked (flock) by the command, or under torchrun by the first rank
    OUTPUT/train.yaml      the resolved configuration; `onefold train --config` reads it again
    OUTPUT/metrics.jsonl   one line per step, one with "resumed" for each start from a checkpoint, a last one with "done"
    OUTPUT/checkpoints/    step-00000100 and so on, where the run keeps any
    OUTPUT/model/          the model, when the run has ended

Importing this file needs no torch.
"""

from __future__ import annotations

import itertools
import os
import re
import shutil
import time
from pathlib import Path
from typing import Any

from onefold.processes.claim import cannot_be_written
from onefold.train.config import TrainConfig
from onefold.wording import TrainError

#: The metrics file in an output folder.
METRICS = "metrics.jsonl"


def name_output(config: TrainConfig) -> TrainConfig:
    """Make a new output folder if `config` names none, and return `config` with it.
    Raises TrainError if the folder cannot be made.
    """
    if config.output is not None:
        return config
    name = re.sub(r"[^\w.-]+", "-", Path(config.model).name).strip("-") or "model"
    first = Path("runs") / f"{name}-{time.strftime('%Y%m%d-%H%M%S')}"
    for tries in itertools.count(1):  # two runs that begin in the same second get one each
        folder = first if tries == 1 else first.with_name(f"{first.name}-{tries}")
        try:
            folder.mkdir(parents=True)
        except FileExistsError:
            continue
        except OSError as error:
            raise TrainError(cannot_be_written(folder, error)) from None
        return config.model_copy(update={"output": str(folder)})
    raise AssertionError


def check_output(config: TrainConfig) -> None:
    """Raise TrainError if the folder holds an earlier run that is not gone on with. With --overwrite,
    remove that run's checkpoints and figures. Call it with a claim on the folder, and not after a restart.
    """
    folder = Path(str(config.output))
    # Not `onefold.checkpoint.newest_first`, which needs torch
    kept = [file.parent for file in folder.glob("checkpoints/[!.]*/manifest.json")]
    if config.overwrite:
        for path in kept:
            shutil.rmtree(path)
        shutil.rmtree(folder / "tensorboard", ignore_errors=True)
        for file in folder.glob("observed*.json"):
            file.unlink()
        return
    earlier = [name for name in ("model", METRICS) if os.path.exists(folder / name)]
    # A run that ended before its first checkpoint starts again from step 0
    again = config.resume == "auto" and "model" not in earlier
    if again or (config.resume != "none" and kept):
        return  # which checkpoint may be gone on with is judged by `checkpoints.find`
    earlier += ["checkpoints"] * bool(kept)
    if earlier:
        raise TrainError(
            f"--output {folder} holds an earlier run ({', '.join(earlier)}); name another"
            " folder, go on with it (--resume auto), or add --overwrite."
        )


def write_config(config: TrainConfig, folder: Path, chosen: dict[str, Any]) -> None:
    """Save the resolved configuration, with the values that `describe` returned as `chosen`.
    It states the steps and the global batch as numbers, so any number of ranks reads the same
    samples. It leaves out --overwrite and --json, which were meant for this run only.
    """
    folder.mkdir(parents=True, exist_ok=True)
    settled = {"steps": chosen["steps"], "epochs": None, "global_batch": chosen["global_batch"]}
    kept = config.model_copy(update={"overwrite": False, "json_lines": False, **settled})
    note = (
        f"# This run chose stage {chosen['stage']} on {chosen['ranks']} ranks. Repeat it: onefold"
        " train --config FILE --output NEW\n"
    )
    (folder / "train.yaml").write_text(note + kept.to_yaml(), encoding="utf-8")
