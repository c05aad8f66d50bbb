"""The checkpoints of a run: which one a start resumes from, what it takes from there, and when the run
writes some (`Keeper`).

    --resume        first start                                    a start after a restart
    none            from the beginning                             newest complete checkpoint of OUTPUT/checkpoints, else the beginning
    auto            same as after a restart                        newest complete checkpoint of OUTPUT/checkpoints, else the beginning
    PATH            that checkpoint, or the newest in that folder  newest of OUTPUT/checkpoints, else PATH

The number of ranks, the stage and the micro-batch may differ from those of the run that saved. The
global batch and the order of the samples stay the same. With the same ranks and micro-batch, the
losses are bit-equal to those of a run that was never interrupted.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from onefold.checkpoint.checkpointer import Checkpointer
from onefold.checkpoint.errors import DamagedCheckpoint
from onefold.checkpoint.folder import OF_RUN, newest_first
from onefold.checkpoint.folder_source import FolderSource
from onefold.checkpoint.loading import load as load_checkpoint
from onefold.checkpoint.manifest import MANIFEST
from onefold.checkpoint.values import fits
from onefold.models.names import weights_digest
from onefold.recipe.optimizers import TRAINED
from onefold.train.config import TrainConfig
from onefold.wording import TrainError

if TYPE_CHECKING:
    from onefold.train.prepare import Run
    from onefold.train.report import Reporter


CHECKPOINTS = OF_RUN
#: Options that a start may change without a word, or that `Point.order` has.
APART = {
    "output", "overwrite", "resume", "json_lines", "nproc", "device", "grace", "max_restarts", "global_batch", "stage", "epochs",
}  # fmt: skip


@dataclass(frozen=True)
class Point:
    """A checkpoint to resume from.

    Attributes:
        step: steps done when it was saved. order: the saved `DataOrder.state_dict()`. extra: the
            saved values of `kept_beside`.
        saved_by: versions, world size, stage of the run that saved. before: older checkpoints of
            the same run, newest first.
    """

    path: Path
    step: int
    order: Mapping[str, Any]
    extra: Mapping[str, Any]
    saved_by: Mapping[str, Any]
    before: tuple[Path, ...] = ()


def restarts() -> int:
    """Return how often torchrun has restarted this run's ranks."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))


def find(config: TrainConfig, restarted: bool) -> Point | None:
    """Return the checkpoint that the table above names, None for the beginning.
    Only one rank calls it.
    Raises TrainError if --resume names no checkpoint, CheckpointError if it cannot be read.
    """
    assert config.output is not None
    if config.resume == "none" and not restarted:
        return None
    own = newest_first(Path(config.output) / CHECKPOINTS)
    if config.resume in ("auto", "none"):
        return next_sound(own)
    going_on = next_sound(own) if restarted else None
    if going_on is not None:
        return going_on
    given = _checkpoint_at(Path(config.resume))
    if own and given.resolve() != own[0].resolve():
        raise TrainError(
            f"--resume {config.resume}: --output {config.output} holds checkpoints of its own, the"
            f" newest {own[0].name}. Name another --output to branch off, use --resume auto to go"
            " on from the newest, or remove those that you do not want any more."
        )
    return read_point(given)


def next_sound(paths: Sequence[Path]) -> Point | None:
    """Return the first of `paths` that can be read, with the later ones in `Point.before`."""
    for number, path in enumerate(paths, 1):
        try:
            return replace(read_point(path), before=tuple(paths[number:]))
        except DamagedCheckpoint as error:
            logging.getLogger("onefold").warning("%s Trying the one before.", error)
    return None


def _checkpoint_at(path: Path) -> Path:
    """Return `path` itself, or the newest checkpoint in it or in its checkpoints folder."""
    if (path / MANIFEST).is_file():
        return path
    found = newest_first(path) or newest_first(path / CHECKPOINTS)
    if not found:
        what = "it is no checkpoint and holds no whole one"
        what = what if path.exists() else "there is no such folder"
        raise TrainError(
            f"--resume {path}: {what}. Expected auto, none, or a folder such as"
            " OUTPUT/checkpoints/step-00000100."
        )
    return found[0]


#: Values of the kinds that a run saves, in the state of its `DataOrder` and in `extra`.
_ORDER = {"samples": 0, "global_batch": 0, "seed": 0, "fingerprint": ""}
_EXTRA = {"optimizer": "", "options": {}}


def read_point(path: Path) -> Point:
    """Read the metadata of the checkpoint at `path`, without its tensors.
    Raises CheckpointError if it is damaged, TrainError if `onefold train` did not save it.
    """
    source = FolderSource(path)
    try:
        data, extra = source.value("data"), source.value("extra")
        manifest = source.manifest
    finally:
        source.close()
    order = data.get("all") if isinstance(data, dict) else None
    whole = isinstance(order, dict) and order.keys() >= _ORDER.keys()
    if manifest.step is None or not (whole and fits(_ORDER, order) and fits(_EXTRA, extra)):
        raise TrainError(
            f"{path} does not say where in its data a run stood: it was not saved by `onefold"
            " train`. Export it and start from the model: --model FOLDER."
        )
    return Point(path, manifest.step, data["all"], extra, dict(manifest.saved_by))


def base_of(run: Run) -> str | None:
    """Return the digest of the frozen base weights, if checkpoints leave them out.
    Checkpoints of a LoRA run leave them out when the model's folder has them. None means that
    checkpoints hold all weights.
    """
    if run.config.lora is None or run.loaded.weights is None:
        return None
    return weights_digest(run.loaded.weights)


def kept_beside(run: Run) -> dict[str, Any]:
    """Return the extra values of a checkpoint: options that decide its numbers."""
    return {
        "base": base_of(run),
        "optimizer": run.config.optimizer,
        "options": run.config.model_dump(mode="json", exclude=APART),
    }


def take_over(run: Run, point: Point) -> None:
    """Load the states of `point` into the run. Collective. Raises CheckpointError or TrainError if
    they do not fit this model or this data.
    """
    run.order.load_state_dict(point.order)
    groups = run.optimizer.param_groups
    names = {"weight_decay", "betas", *TRAINED[run.config.optimizer].options}
    given = [{name: group[name] for name in names & group.keys()} for group in groups]
    states = {"model": run.model, "optimizer": run.optimizer, "scaler": run.scaler}
    base = point.extra.get("base")
    if base is not None and base != run.ranks.on_first(lambda: base_of(run)):
        raise TrainError(
            f"{point.path} holds adapters alone, around other weights than those of --model"
            f" {run.config.model} with --lora. Name the model that the run began with."
        )
    strict: Any = True if base is None else "trained"
    load_checkpoint(point.path, **states, data=run.order, strict=strict, rng=True)
    for group, options in zip(run.optimizer.param_groups, given, strict=True):
        # The command line's values win over the checkpoint's; each step sets the learning rate
        group.update(options)


def load(run: Run, point: Point) -> list[str]:
    """Resume the run from `point`, and return notes on what differs from the run that saved.
    If the tensors turn out to be damaged, take the checkpoint before. Collective.
    """
    try:
        take_over(run, point)
    except DamagedCheckpoint as error:
        older = run.ranks.on_first(lambda: next_sound(point.before))
        if older is None:
            raise
        return [f"{error} Going on from the one before", *load(run, older)]
    run.start = point.step
    return differences(run, point)


def differences(run: Run, point: Point) -> list[str]:
    """Return, for people, how this start differs from the run that saved."""
    said = [f"going on from {point.path}, step {point.step} of {run.steps}"]
    ranks, stage = point.saved_by.get("world_size"), point.saved_by.get("stage")
    if (ranks, stage) != (run.ranks.world_size, run.choice.stage):
        said.append(
            f"it was saved by {ranks} ranks at stage {stage}, and goes on with"
            f" {run.ranks.world_size} at stage {run.choice.stage}"
        )
    before, now = (
        {name: "none" if value is None else value for name, value in options.items()}
        for options in (point.extra.get("options", {}), kept_beside(run)["options"])
    )
    if others := [
        f"--{name.replace('_', '-')} {before[name]} -> {new}"
        for name, new in now.items()
        if before.get(name, new) != new
    ]:
        said.append(f"options that have changed since: {', '.join(others)}")
    return said


class Keeper:
    """Writes the checkpoints of a run.

    Attributes:
        saved: the step of the last checkpoint, None before the first. path: its folder, once it is
            complete.
    """

    def __init__(self, run: Run, folder: Path, say: Reporter) -> None:
        self.run, self.root, self.say = run, folder / CHECKPOINTS, say
        self.saved: int | None = run.start or None
        self.path: str | None = None
        self._under_way: dict[str, Any] | None = None  # what is told of it once it is complete
        if run.config.save_every or run.config.resume != "none":
            _ = self._checkpointer

    def after(self, step: int) -> None:
        """Save if a checkpoint is due after `step` steps. Collective.
        Raises CheckpointError if this save failed, or one that was under way.
        """
        self._look()
        if self.saves(step):
            self._save(step)
        if self.run.stopped or step == self.run.steps:
            self.wait()

    def saves(self, step: int) -> bool:
        """Whether a checkpoint is due after `step` steps. The same on every rank."""
        run, every = self.run, self.run.config.save_every
        due = bool(every) and (step == run.steps or step % (every or 1) == 0)
        return (due or bool(run.stopped)) and self.saved != step

    def wait(self) -> None:
        """Wait until the last checkpoint is complete. Raises CheckpointError if it failed."""
        told, self._under_way = self._under_way, None
        if told is not None:
            self._checkpointer.wait()
            self.path, seconds = told["path"], time.perf_counter() - told.pop("begun")
            self.say.say("checkpoint", **told, seconds=seconds)

    def close(self) -> None:
        """Close the checkpointer, if there is one. Collective."""
        if "_checkpointer" in vars(self):
            self._checkpointer.close()
            del self._checkpointer

    @cached_property
    def _checkpointer(self) -> Checkpointer:
        """Made when it is first asked for: it locks the folder."""
        config = self.run.config
        return Checkpointer(
            self.root, model=self.run.model, keep=config.keep, asynchronous=config.async_save
        )

    def _save(self, step: int) -> None:
        run, begun = self.run, time.perf_counter()
        self.wait()  # as the save would
        path = self._checkpointer.save(
            step,
            optimizer=run.optimizer,
            scaler=run.scaler,
            data=run.order,
            extra=kept_beside(run),
            tokenizer=run.loaded.tokenizer,
            frozen=base_of(run) is None,
        )
        self.saved, stall = step, time.perf_counter() - begun
        self._under_way = {"step": step, "path": str(path), "stall_s": stall, "begun": begun}
        self._look()

    def _look(self) -> None:
        """Tell of a save that has ended. Raises CheckpointError if it failed."""
        if self._under_way is not None and not self._checkpointer.under_way:
            self.wait()
