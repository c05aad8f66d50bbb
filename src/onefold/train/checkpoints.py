"""The checkpoints of a run: which one a start goes on from, and what is taken from it. When they are
written is a matter of keeper.py.

    --resume        first start                                    a start after a restart
    none            from the beginning                             newest whole checkpoint of OUTPUT/checkpoints, else from the beginning
    auto            as at right                                    newest whole checkpoint of OUTPUT/checkpoints, else from the beginning
    PATH            that checkpoint, or the newest in that folder  newest of OUTPUT/checkpoints, else PATH

The number of ranks, the stage and the micro-batch may all differ from those of the run that saved;
the global batch and the order of the samples stay. On the same ranks with the same micro-batch the
losses are bit-equal to those of a run that was never interrupted.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from onefold.checkpoint.errors import DamagedCheckpoint
from onefold.checkpoint.folder import OF_RUN, newest_first
from onefold.checkpoint.folder_source import FolderSource
from onefold.checkpoint.loading import load as load_checkpoint
from onefold.checkpoint.manifest import MANIFEST
from onefold.models.names import weights_digest
from onefold.recipe.options import NODES
from onefold.recipe.options import OPTIONS as RECIPE_OPTIONS
from onefold.train.config import TrainConfig
from onefold.train.optimizers import KINDS
from onefold.wording import TrainError

if TYPE_CHECKING:
    from onefold.train.prepare import Run


CHECKPOINTS = OF_RUN
#: The options of groups and codecs.
OPTIONS = tuple(name for name, option in RECIPE_OPTIONS.items() if option.panel == NODES)
#: Options that may change between two starts of a run and do change its numbers.
FREE = (
    "lr", "schedule", "warmup", "min_lr", "clip", "weight_decay", "beta1", "beta2", "optimizer_options", "steps", "precision",
    "micro_batch", *OPTIONS,
)  # fmt: skip


@dataclass(frozen=True)
class Point:
    """A checkpoint to go on from.

    Attributes:
        step: steps that were done. order: what `DataOrder.state_dict` gave. extra: what
            `kept_beside` gave.
        saved_by: versions, world size, stage of the run that saved. before: older checkpoints of
            the same run, newest first.
    """

    path: Path
    step: int
    order: Mapping[str, Any] = field(default_factory=dict)
    extra: Mapping[str, Any] = field(default_factory=dict)
    saved_by: Mapping[str, Any] = field(default_factory=dict)
    before: tuple[Path, ...] = ()

    @property
    def global_batch(self) -> int | None:
        """Sequences an optimizer step sees."""
        return self.order.get("global_batch")


def restarts() -> int:
    """How often torchrun has started this run's ranks again."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))


def made_since(config: TrainConfig, when: float) -> bool:
    """Whether the output folder has a checkpoint made after `when` (seconds since the epoch).
    torchrun does not count the starts because a machine has come, so this start is no first one.
    """
    if config.output is None:
        return False
    found = newest_first(Path(config.output) / CHECKPOINTS)
    return bool(found) and (found[0] / MANIFEST).stat().st_mtime >= when


def find(config: TrainConfig, restarted: bool) -> Point | None:
    """The checkpoint that the table above names; None is the beginning. For one rank to call.
    Raises TrainError if --resume names none, CheckpointError if it cannot be read.
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
    """The first of `paths` that can be read; it remembers those behind it."""
    for number, path in enumerate(paths, 1):
        try:
            return replace(read_point(path), before=tuple(paths[number:]))
        except DamagedCheckpoint as error:
            logging.getLogger("onefold").warning("%s Trying the one before.", error)
    return None


def _checkpoint_at(path: Path) -> Path:
    """`path` itself, or the newest checkpoint in it or in its folder of checkpoints."""
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


def read_point(path: Path) -> Point:
    """What the checkpoint at `path` says about itself. Reads no tensor.
    Raises CheckpointError if it is damaged, TrainError if `onefold train` did not save it.
    """
    source = FolderSource(path)
    try:
        data, extra = source.value("data"), source.value("extra")
        manifest = source.manifest
    finally:
        source.close()
    dicts = isinstance(data, dict) and isinstance(extra, dict)
    if manifest.step is None or not dicts or "all" not in data:
        raise TrainError(
            f"{path} does not say where in its data a run stood: it was not saved by `onefold"
            " train`. Export it and start from the model: --model FOLDER."
        )
    return Point(path, manifest.step, data["all"], extra, dict(manifest.saved_by))


def base_of(run: Run) -> str | None:
    """Where a frozen model stays out of checkpoints, since its folder has it: which weights those
    are. None where checkpoints hold it too.
    """
    if run.config.lora is None or run.loaded.weights is None:
        return None
    return weights_digest(run.loaded.weights)


def kept_beside(run: Run, sent: Mapping[str, int], skipped: int) -> dict[str, Any]:
    """What a checkpoint keeps beside its states: totals, and options that decide its numbers."""
    return {
        **sent,
        "skipped": skipped,
        "steps": run.steps,
        "base": base_of(run),
        "optimizer": run.config.optimizer,
        "options": {name: getattr(run.config, name) for name in FREE},
    }


def take_over(run: Run, point: Point) -> list[str]:
    """Put the states of `point` into the run, and say what could not be taken over. Collective.
    Raises CheckpointError or TrainError where it does not fit this model or this data.
    """
    run.order.load_state_dict(point.order)
    groups = run.optimizer.param_groups
    names = {"weight_decay", *KINDS[run.config.optimizer].options}
    given = [{name: group[name] for name in names & group.keys()} for group in groups]
    states = {"model": run.model, "optimizer": run.optimizer, "scaler": run.scaler}
    base = point.extra.get("base")
    if base is not None and base != run.ranks.on_first(lambda: base_of(run)):
        raise TrainError(
            f"{point.path} holds adapters alone, around other weights than those of --model"
            f" {run.config.model} with --lora. Name the model that the run began with."
        )
    # What is trained must be there all the same: the optimizer's groups name it
    loaded = load_checkpoint(point.path, **states, data=run.order, strict=base is None, rng=True)
    for group, options in zip(run.optimizer.param_groups, given, strict=True):
        # What the command line says holds; the learning rate is set at each step anyway
        group.update(options)
    return list(loaded.notes)


def load(run: Run, point: Point) -> list[str]:
    """Have a new start go on from `point`, and say what is not as it was. Collective.
    Where its tensors turn out damaged, the checkpoint before is taken.
    """
    try:
        said = take_over(run, point)
    except DamagedCheckpoint as error:
        older = run.ranks.on_first(lambda: next_sound(point.before))
        if older is None:
            raise
        return [f"{error} Going on from the one before", *load(run, older)]
    run.start = point.step
    run.earlier = dict(point.extra)
    return said + differences(run, point)


def differences(run: Run, point: Point) -> list[str]:
    """What this start does otherwise than the run that saved, for people."""
    said = [f"going on from {point.path}, step {point.step} of {run.steps}"]
    ranks, stage = point.saved_by.get("world_size"), point.saved_by.get("stage")
    if (ranks, stage) != (run.ranks.world_size, run.choice.stage):
        said.append(
            f"it was saved by {ranks} ranks at stage {stage}, and goes on with"
            f" {run.ranks.world_size} at stage {run.choice.stage}"
        )
    # A checkpoint from before OPTIONS were saved had none of them
    before = {name: TrainConfig.model_fields[name].default for name in OPTIONS}
    before |= point.extra.get("options", {})
    now = kept_beside(run, {}, 0)["options"]
    others = changed((name, before[name], now[name]) for name in now if name in before)
    if others:
        said.append(f"options that have changed since: {others}")
    if point.extra.get("steps", run.steps) != run.steps and run.config.schedule != "constant":
        said.append(
            f"the run was of {point.extra['steps']} steps and is of {run.steps} now: the schedule's"
            " later part moves"
        )
    return said


def changed(options: Iterable[tuple[str, Any, Any]]) -> str:
    """Of (name, old value, new value) those that differ, as on a command line, for people."""

    def shown(value: Any) -> str:
        return "none" if value is None else str(value)

    return ", ".join(
        f"--{name.replace('_', '-')} {shown(old)} -> {shown(new)}"
        for name, old, new in options
        if shown(old) != shown(new)
    )
