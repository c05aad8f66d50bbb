"""What can be told of a run before torch is imported: within a second or so, where loading a model
takes minutes. Nothing is changed.
"""

from __future__ import annotations

import os
from pathlib import Path

from onefold.train.batch import accumulation_steps
from onefold.train.config import TrainConfig
from onefold.train.documents import check_documents
from onefold.train.errors import TrainError
from onefold.train.model_names import check_model_name
from onefold.train.tiers import refuse_without_folder


def check_early(config: TrainConfig) -> None:
    """See that what the options name is there and can be read.

    Raises:
        TrainError: it is not.
    """
    check_model_name(config.model)
    if config.tokenizer not in ("auto", "bytes", "smollm2") and not os.path.exists(
        config.tokenizer
    ):
        raise TrainError(
            f"--tokenizer {config.tokenizer}: expected auto, bytes, smollm2, or a local folder, and"
            " there is none."
        )
    refuse_without_folder(config)
    if config.resume not in ("none", "auto") and not os.path.exists(config.resume):
        raise TrainError(
            f"--resume {config.resume}: there is no such folder. Expected auto, none, or a folder"
            " such as OUTPUT/checkpoints/step-00000100."
        )
    check_documents(config.data, config.seq)


def check_batch(config: TrainConfig, ranks: int) -> None:
    """See that the global batch can be cut on these ranks.

    A run that goes on takes its global batch from the checkpoint and a micro-batch that divides it,
    so nothing is said of one that may.

    Raises:
        TrainError: it cannot.
    """
    if config.global_batch is not None and config.resume == "none":
        accumulation_steps(
            config.global_batch, 1 if config.micro_batch == "auto" else config.micro_batch, ranks
        )


def refuse_earlier_run(config: TrainConfig) -> None:
    """Say what `output.with_output` would say, where no checkpoint has to be read for it.

    Raises:
        TrainError: the folder holds a run that nobody wants to replace or to go on with.
    """
    if config.output is None or config.overwrite or config.resume != "none":
        return
    folder = Path(config.output)
    earlier = [name for name in ("model", "metrics.jsonl") if os.path.exists(folder / name)]
    if earlier:
        kept = any(folder.glob("checkpoints/*/manifest.json"))
        raise TrainError(
            earlier_run(
                folder,
                [*earlier, *(["checkpoints"] if kept else [])],
                "--resume auto" if kept else "",
            )
        )


def earlier_run(folder: Path, holds: list[str], instead: str) -> str:
    """A sentence. `instead`: how to go on with it, "" if that cannot be."""
    more = f", go on with it ({instead})" if instead else ""
    return (
        f"--output {folder} holds an earlier run ({', '.join(holds)}); name another folder{more},"
        " or add --overwrite."
    )
