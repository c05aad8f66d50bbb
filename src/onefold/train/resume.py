"""Where a run goes on: which checkpoint, what must be known of it before the model is built, and
what is taken from it.

    --resume        first start                                   a start after a restart
    none            from the beginning                            newest whole checkpoint of OUTPUT/checkpoints, else from the beginning
    auto            as at right                                   newest whole checkpoint of OUTPUT/checkpoints, else from the beginning
    PATH            that checkpoint, or the newest in that folder newest of OUTPUT/checkpoints, else PATH

The number of ranks, the stage and the micro-batch may all differ from those of the run that saved;
the global batch and the order of the samples stay. On the same ranks with the same micro-batch the
losses are bit-equal to those of a run that was never interrupted.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from onefold.checkpoint.errors import DamagedCheckpoint
from onefold.checkpoint.folder import OF_RUN, checkpoints
from onefold.checkpoint.loading import load as load_checkpoint
from onefold.checkpoint.manifest import MANIFEST, FolderSource
from onefold.train.config import TrainConfig
from onefold.train.errors import TrainError
from onefold.train.wires import OPTIONS

if TYPE_CHECKING:
    from onefold.train.prepare import Run

CHECKPOINTS = OF_RUN
#: Options that may change between two starts of a run and do change its numbers.
FREE = (
    "lr", "schedule", "warmup", "min_lr", "clip", "weight_decay", "beta1", "beta2", "steps", "precision", "micro_batch", *OPTIONS,
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
    """Whether the output folder holds a checkpoint younger than this job (seconds since the epoch):
    then this start is not its first.

    torchrun counts starts after a failure; those because a machine has come it does not.
    """
    if config.output is None:
        return False
    found = newest_first(Path(config.output) / CHECKPOINTS)
    return bool(found) and (found[0] / MANIFEST).stat().st_mtime >= when


def find(config: TrainConfig, restarted: bool) -> Point | None:
    """The checkpoint that the table above names; None starts from the beginning. Reads files only;
    call it on one rank.

    Raises:
        TrainError: --resume names nothing to go on from. CheckpointError: it cannot be read.
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


def newest_first(root: Path) -> list[Path]:
    """The whole checkpoints in `root`."""
    found = sorted(
        ((step, path.name, path) for step, path in checkpoints(root) if step >= 0), reverse=True
    )
    return [path for _, _, path in found]


def next_sound(paths: Sequence[Path]) -> Point | None:
    """The first of `paths` that can be read; those behind it are kept in mind, should its tensors
    turn out damaged.
    """
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
        what = (
            "there is no such folder"
            if not path.exists()
            else "it is no checkpoint and holds no whole one"
        )
        raise TrainError(
            f"--resume {path}: {what}. Expected auto, none, or a folder such as"
            " OUTPUT/checkpoints/step-00000100."
        )
    return found[0]


def read_point(path: Path) -> Point:
    """What the checkpoint at `path` says about itself, without its tensors.

    Raises:
        CheckpointError: it is damaged. TrainError: it was not saved by `onefold train`.
    """
    source = FolderSource(path)
    try:
        data, extra = source.value("data"), source.value("extra")
        manifest = source.manifest
    finally:
        source.close()
    if (
        manifest.step is None
        or not isinstance(data, dict)
        or "all" not in data
        or not isinstance(extra, dict)
    ):
        raise TrainError(
            f"{path} does not say where in its data a run stood: it was not saved by `onefold"
            " train`. Export it and start from the model: --model FOLDER."
        )
    return Point(path, manifest.step, data["all"], extra, dict(manifest.saved_by))


def kept_beside(run: Run, sent: Mapping[str, int], skipped: int) -> dict[str, Any]:
    """What a checkpoint of this run keeps beside its states: totals (`wires.totals`), and the
    options that decide its numbers.
    """
    return {
        **sent,
        "skipped": skipped,
        "steps": run.steps,
        "options": {name: getattr(run.config, name) for name in FREE},
    }


def take_over(run: Run, point: Point) -> list[str]:
    """Put the states of `point` into the run: weights, optimizer, loss scale, random generators,
    place in the data. Collective.

    Returns:
        a sentence for each thing that could not be taken over as it was.

    Raises:
        CheckpointError: it does not fit this model. TrainError: it does not fit this data.
    """
    run.order.load_state_dict(point.order)
    given = [
        {name: group[name] for name in ("betas", "weight_decay")}
        for group in run.optimizer.param_groups
    ]
    loaded = load_checkpoint(
        point.path,
        model=run.model,
        optimizer=run.optimizer,
        scaler=run.scaler,
        data=run.order,
        rng=True,
    )
    for group, options in zip(run.optimizer.param_groups, given, strict=True):
        # What the command line says holds; the learning rate is set at each step anyway
        group.update(options)
    return list(loaded.notes)


def load(run: Run, point: Point) -> list[str]:
    """Have a new start go on from `point`, and say what is not as it was, a sentence each.
    Collective; see `take_over`.

    Where the tensors turn out damaged, the checkpoint before is taken.
    """
    said = []
    while True:
        try:
            said += take_over(run, point)
            break
        except DamagedCheckpoint as error:
            older: Point | None = run.ranks.from_first(
                next_sound(point.before) if run.ranks.is_first else None
            )
            if older is None:
                raise
            said.append(f"{error} Going on from the one before")
            point = older
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
    before = point.extra.get("options", {})
    now = kept_beside(run, {}, 0)["options"]
    # A checkpoint from before these had none of them
    known = [name for name in now if name in before or name in OPTIONS]
    usual = {name: TrainConfig.model_fields[name].default for name in OPTIONS}
    pairs = [(name, shown((usual | before)[name]), shown(now[name])) for name in known]
    changed = [
        f"--{name.replace('_', '-')} {old} -> {new}" for name, old, new in pairs if old != new
    ]
    if changed:
        said.append("options that have changed since: " + ", ".join(changed))
    if point.extra.get("steps", run.steps) != run.steps and run.config.schedule != "constant":
        said.append(
            f"the run was of {point.extra['steps']} steps and is of {run.steps} now: the schedule's"
            " later part moves"
        )
    return said


def shown(value: Any) -> str:
    """An option's value, as on the command line."""
    return "none" if value is None else str(value)
