"""The checkpoints of a run: when they are written, which one a start goes on from, and what is taken
from it.

    every --save-every steps, behind the training          ─► OUTPUT/checkpoints/step-00000100, the last --keep of them
    SIGTERM, SIGUSR1, --save-before; Ctrl-C; the last step ─► the same, waited for

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
import time
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import onefold
from onefold.checkpoint.background import Background, running
from onefold.checkpoint.checkpointer import Checkpointer
from onefold.checkpoint.errors import DamagedCheckpoint
from onefold.checkpoint.folder import OF_RUN, newest_first, remove
from onefold.checkpoint.loading import load as load_checkpoint
from onefold.checkpoint.manifest import MANIFEST, FolderSource
from onefold.recipe.options import NODES
from onefold.recipe.options import OPTIONS as RECIPE_OPTIONS
from onefold.train.config import TrainConfig
from onefold.train.errors import TrainError, seconds_of, worded
from onefold.train.folders import weights_digest
from onefold.train.optimizers import KINDS
from onefold.train.process import STARTED, Stop
from onefold.train.report import totals

if TYPE_CHECKING:
    from onefold.train.prepare import Run
    from onefold.train.report import Reporter


CHECKPOINTS = OF_RUN
#: Until a save has been measured: bytes a second that any disk writes.
SLOW_DISK = 100 << 20
#: Seconds from the end of the last save to the end of the process, with some to spare.
LEAVING = 5.0
#: How much longer than any before the next save may take.
SPARE = 1.5
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


class Keeper:
    """The checkpoints of a run that steps.

    Args:
        begun: when the run started, seconds since the epoch; what --save-before counts from.

    Attributes:
        saved: the step of the last checkpoint, None before the first. path: where it lies.
    """

    def __init__(self, run: Run, folder: Path, say: Reporter, begun: float) -> None:
        self.run, self.root, self.say, self.begun = run, folder / CHECKPOINTS, say, begun
        config = run.config
        self.saved: int | None = run.start or None
        self.path: Path | None = None
        self.limit = seconds_of(config.save_before) if config.save_before else None
        self.on = bool(config.save_every) or config.resume != "none" or self.limit is not None
        self._checkpointer: Checkpointer | None = None
        self._saving: Background | None = None
        self._steps: deque[float] = deque(maxlen=50)
        self._last = time.perf_counter()
        self._save_s: float | None = None
        if self.on:
            self._open()

    # -- time --------------------------------------------------------------------------------------

    @property
    def save_seconds(self) -> float:
        """What a save takes at most: as measured, else as its bytes would on a slow disk."""
        if self._save_s is not None:
            return self._save_s
        return (12 * self.run.trained + 4 * self.run.frozen) / SLOW_DISK

    def time_is_up(self) -> bool:
        """Whether another step might leave no time for a checkpoint before --save-before."""
        if self.limit is None:
            return False
        step = max(self._steps, default=0.0)
        needed = 2 * step + SPARE * self.save_seconds + LEAVING
        return time.time() - self.begun + needed > self.limit

    # -- saving ------------------------------------------------------------------------------------

    def after(self, step: int, stopping: Stop, over: bool, skipped: int) -> None:
        """`step` steps are done, `skipped` of them left out: save if it is time to. Collective.
        Raises CheckpointError if this save failed, or one that was under way.
        """
        self.look()
        if self.saves(step, stopping, over):
            self._save(step, skipped)
        if stopping or over:
            self.wait()
        now = time.perf_counter()
        self._steps.append(now - self._last)
        self._last = now

    def saves(self, step: int, stopping: Stop, over: bool) -> bool:
        """Whether `after` saves, if it is given these. The same on every rank."""
        every = self.run.config.save_every
        urgent = bool(stopping & (Stop.PREEMPT | Stop.TIME))
        due = bool(every) and (over or step % (every or 1) == 0)
        return (urgent or due or (self.on and bool(stopping))) and self.saved != step

    def look(self) -> None:
        """Take note of a save that has ended. Raises CheckpointError if it failed."""
        if self._saving is not None and self._saving.done:
            self.wait()

    def wait(self) -> None:
        """Until the last checkpoint is whole. Raises: CheckpointError: it failed."""
        saving, self._saving = self._saving, None
        if self._checkpointer is not None:
            self._checkpointer.wait()
        if saving is not None:
            self._saved(saving.path, saving.seconds or saving.stall_s, saving.stall_s)

    def close(self) -> None:
        """Give the folder back. Collective."""
        if self._checkpointer is not None:
            self._checkpointer.close()
            self._checkpointer = None

    def _open(self) -> Checkpointer:
        if self._checkpointer is None:
            config = self.run.config
            self._checkpointer = Checkpointer(
                self.root, model=self.run.model, keep=config.keep, asynchronous=config.async_save
            )
        return self._checkpointer

    def _save(self, step: int, skipped: int) -> None:
        run, begun = self.run, time.perf_counter()
        path = self._open().save(
            step,
            optimizer=run.optimizer,
            scaler=run.scaler,
            data=run.order,
            extra=kept_beside(run, totals(run), skipped),
            tokenizer=run.loaded.tokenizer,
            frozen=base_of(run) is None,
        )
        assert path is not None  # a save waits for the one before
        self.saved = step
        self._saving = running(onefold.engine_of(run.model))
        if self._saving is None:
            self.wait()  # it is over: raises if it failed
            seconds = time.perf_counter() - begun
            self._saved(path, seconds, seconds)

    def _saved(self, path: Path, seconds: float, stall: float) -> None:
        self.path = path
        self._save_s = max(self._save_s or 0.0, seconds)
        self.say.say("checkpoint", step=self.saved, path=str(path), seconds=seconds, stall_s=stall)

    # -- going back --------------------------------------------------------------------------------

    def roll_back(self, bad_step: int, times: int) -> int:
        """Load a checkpoint, and go on with the samples behind those of `bad_step` (from 0).
        The first time in a row takes the newest, each further one the one before. Collective;
        returns the step to go on with. Raises TrainError if there is no checkpoint yet.
        """
        self.wait()
        run, ranks = self.run, self.run.ranks
        point = ranks.on_first(lambda: self._nth_newest(times))
        if point is None:
            raise TrainError(
                f"step {bad_step + 1} was not finite, and there is no checkpoint to go back to yet:"
                " use a smaller --save-every, or --on-nonfinite skip."
            )
        bad_batch = bad_step + run.order.skipped
        take_over(run, point)
        run.order.skipped = bad_batch + 1 - point.step
        run.optimizer.zero_grad()
        self.saved = point.step
        return point.step

    def _nth_newest(self, times: int) -> Point | None:
        found = newest_first(self.root)
        if not found:
            return None
        nth = min(times, len(found)) - 1
        for path in found[:nth]:
            remove(path)
        return read_point(found[nth])


def check_time(run: Run, keeper: Keeper) -> str | None:
    """A sentence where --save-before or --grace looks too short for what is to be saved."""
    need, config = SPARE * keeper.save_seconds, run.config
    if keeper.limit is not None and need + LEAVING > keeper.limit:
        short = f"--save-before {config.save_before}"
    elif keeper.on and need > seconds_of(config.grace):
        short = f"--grace {config.grace}"
    else:
        return None
    return f"{short} may be too short: a checkpoint is expected to take {worded(need)}"


def started_at() -> float:
    """When the run first started, seconds since the epoch. Restarts change nothing."""
    if STARTED in os.environ:
        return float(os.environ[STARTED])
    of = os.getppid() if "TORCHELASTIC_RUN_ID" in os.environ else os.getpid()
    try:
        with (
            open(f"/proc/{of}/stat", encoding="ascii", errors="replace") as stat,
            open("/proc/uptime", encoding="ascii") as uptime,
        ):
            ticks = int(stat.read().rpartition(")")[2].split()[19])
            return time.time() - float(uptime.read().split()[0]) + ticks / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError):
        return time.time()
