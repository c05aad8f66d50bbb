"""The training loop: a plain PyTorch loop, with code around it that measures, reports, and keeps
the run alive.

    for each step
        for each micro-batch                      all but the last under onefold.no_sync
            loss · (its tokens · N / all tokens of the step) ─► backward
        clip
        ranks sum their losses and their requests to stop, and find the slowest among them
        not finite?  stop, or skip the step
        optimizer step ─► held-out loss ─► metrics ─► checkpoint, if one is due

[Note: a step late] On a device with streams the host does not wait for the step that it has just
launched. Loss, norm and loss scale are copied to the host after the step, and the host reads them
during the next step:

    device   forward, backward, clip, update of step s    │ forward, backward of step s + 1      │ clip, update
    host     launches forward and backward of step s + 1  │ reads step s, judges and reports it  │ launches clip and update

A step with a non-finite loss or norm must not change the weights. Two rules ensure that:

- The device itself skips the update if loss or norm are not finite (optim/clip.py).
- The host judges step s before it launches the update of step s + 1. After a bad step s, the
  weights are still those that step s began with. The gradients of step s + 1 are then dropped and
  computed again.

A step is read before the next one begins if the run evaluates, saves, records or ends after it.
Every step is read so on a device without streams, and if the device cannot skip an update
(offloaded shards, packed moments).
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch.distributed as dist

import onefold
from onefold.checkpoint.per_rank import capture, restore
from onefold.device import Reading, memory_figures
from onefold.observe.memory import resident_memory
from onefold.observe.meter import Meter
from onefold.optim.clip import skips_on_device
from onefold.processes.signals import Stop
from onefold.train.faults import NonFinite, locate
from onefold.train.keeper import Keeper
from onefold.train.optimizers import peak_lr, rates
from onefold.train.prepare import Run
from onefold.train.report import Window
from onefold.train.step import (
    forward_backward,
    held_out_loss,
    measure_gradients,
    update,
    update_unless_bad,
)

Row = dict[str, Any]


def train(
    run: Run,
    stop_requested: Callable[[], int],
    report: Callable[[Row], None],
    window: Window | None = None,
    keeper: Keeper | None = None,
    alert: Callable[[str], None] = lambda text: None,
) -> int:
    """Run the steps from `run.start` on and return how many are done.
    Collective; all ranks return after the same step.

    Args:
        stop_requested: returns what this rank was asked, as a `Stop`. Afterwards `run.stopped` says
            why the steps ended.
        report: receives one row of metrics per step, on every rank, in the order of the steps; see
            [Note: a step late] for when.
        window: records steps; None records the one step for the report.
        keeper: writes the checkpoints; None writes none.
        alert: tells the user of something that needs attention.

    Raises:
        TrainError: loss or gradients are not finite, and the run must end (see
            `onefold.train.faults`).
    """
    late = skips_on_device(run.optimizer, onefold.engine_of(run.model))
    loop = (_StepLate if late else _InTime)(
        run, stop_requested, report, window or Window(run), keeper, alert
    )
    run.model.train()
    step = run.start
    while step < run.steps and not run.stopped:
        loop.step(step)
        step += 1
    return step


@dataclass(frozen=True)
class _Told:
    """What the ranks exchanged about a step: the summed loss, requests, the least and the greatest of
    the seconds that a rank computed by itself, and the rank of the greatest.
    """

    loss: float
    stopping: Stop
    own: tuple[float, float]
    slowest: int


@dataclass
class _Loop:
    """Runs one step at a time. The fields are the arguments of `train`."""

    run: Run
    stop_requested: Callable[[], int]
    report: Callable[[Row], None]
    window: Window
    keeper: Keeper | None
    alert: Callable[[str], None]

    def __post_init__(self) -> None:
        run = self.run
        self.engine = onefold.engine_of(run.model)
        flops = run.choice.flops_per_token, run.choice.peak_flops
        self.meter = Meter(run.model, run.optimizer, *flops)
        self.nonfinite = NonFinite(run, self.alert)
        self.skipped_before = int(run.earlier.get("skipped", 0))
        self._scale: float | None = None
        self._overflowed = 0
        self._update_s = 0.0

    @property
    def skipped(self) -> int:
        """Steps whose update was skipped, including those of earlier starts."""
        return self.skipped_before + self._overflowed + self.nonfinite.total

    def step(self, step: int) -> None:
        """Do step number `step` (from 0)."""
        raise NotImplementedError

    def _begin(self, step: int) -> dict[str, Any]:
        """Begin a step. Returns the random generators' states before the step."""
        for group in self.run.optimizer.param_groups:
            group["lr"] = peak_lr(self.run.config, group) * self.run.factor(step)
        generators = capture()
        self.meter.start()
        self.window.begin(step)
        self._begun, self._waited = time.perf_counter(), self.engine.traffic.exposed
        return generators

    def _own_seconds(self) -> float:
        """Seconds that this rank computed without waiting: since the step began, plus the last
        update.
        """
        waited = self.engine.traffic.exposed - self._waited
        return max(0.0, time.perf_counter() - self._begun - waited + self._update_s)

    def _tell(self, loss: float, own: float, asking: bool = True) -> _Told:
        """Exchange loss, requests and own seconds with the other ranks. Collective.
        `asking`: whether ranks may now ask to stop after this step.
        """
        ranks = self.run.ranks
        asked = Stop(int(self.stop_requested())) if asking else Stop.NONE
        kinds = list(Stop)
        total, *said = ranks.sum(loss, *(float(kind in asked) for kind in kinds))
        stopping = sum(kind for kind, count in zip(kinds, said, strict=True) if count)
        # The greatest and its rank in one number: nothing here grows with the number of ranks
        mine = round(own * 1e6) * ranks.world_size + ranks.rank
        slow, least = ranks.sum(mine, -own, how=dist.ReduceOp.MAX)
        microseconds, slowest = divmod(int(slow), ranks.world_size)
        # Ranks that divide the layers have the same loss
        copies = self.run.part.copies
        return _Told(total / copies, Stop(stopping), (-least, microseconds / 1e6), slowest)

    def _where(self, step: int, before: dict[str, Any]) -> str:
        repeat = partial(forward_backward, self.run, step)
        return locate(self.run, repeat, before)

    def _evaluates(self, step: int, stopping: Stop) -> bool:
        every, over = self.run.config.eval_every, step + 1 == self.run.steps
        if not every or stopping or not len(self.run.data.held_out):
            return False
        return over or (step + 1) % every == 0

    def _figures(self, step: int, tokens: int) -> Row:
        """Return a step's figures that need nothing from the device. `memory` is the process's,
        `held` the engine's.
        """
        figures = self.meter.step(tokens=tokens)
        held = figures.pop("memory")
        row: Row = {**figures, "step": step + 1, **memory(self.run), "held": held}
        return row | rates(self.run.optimizer.param_groups)

    def _complete(
        self, row: Row, told: _Told, norm: float, scale: float | None, applied: bool
    ) -> None:
        """Add to `row` what was read from the device and exchanged between the ranks."""
        row["loss"] = told.loss if math.isfinite(told.loss) else None
        row["grad_norm"] = norm if math.isfinite(norm) else None
        if scale is not None:
            row["scale"] = scale
            self._overflowed += self._scale is not None and scale < self._scale
            self._scale = scale
        row["skipped"] = self.skipped
        if not applied:
            row["left_out"] = True
        if self.run.ranks.world_size > 1:
            row["own_ms"] = [1000 * seconds for seconds in told.own]
            row["slowest"] = told.slowest

    def _end(self, step: int, stopping: Stop, row: Row | None) -> None:
        """Evaluate, report and save after a step. `row`: None for a step that is read later."""
        if row is not None:
            if self._evaluates(step, stopping):
                sent = self.engine.traffic.total()
                row["eval_loss"] = held_out_loss(self.run)
                row["eval_wire_bytes"] = self.engine.traffic.total() - sent
            self.report(row)
        if self.keeper is not None:
            self.keeper.after(step + 1, stopping, step + 1 == self.run.steps, self.skipped)
        self.run.stopped = stopping


class _InTime(_Loop):
    """Each step is read and judged before its update."""

    def step(self, step: int) -> None:
        run = self.run
        generators = self._begin(step)
        loss, tokens = forward_backward(run, step)
        read = float(loss)
        norm = float(measure_gradients(run))
        told = self._tell(read, self._own_seconds())
        applied = self.nonfinite.judge(step, told.loss, norm, lambda: self._where(step, generators))
        begun = time.perf_counter()
        update(run, apply=applied)
        self._update_s = time.perf_counter() - begun

        row = self._figures(step, tokens)
        scale = None if run.scaler is None else run.scaler.get_scale()
        self._complete(row, told, norm, scale, applied)
        self.window.end(step, over=bool(told.stopping), whole=applied)
        self._end(step, told.stopping, row)


@dataclass
class _Launched:
    """A step that the host has launched on the device.

    Attributes:
        generators: the random generators' states before the step. begun: seconds of
            `time.perf_counter`. own: seconds that this rank computed without waiting.
        reading: this rank's part of the loss, the gradient norm and, with a scaler, the loss scale
            after the step.
        row: the step's figures, None until they are taken.
    """

    step: int
    generators: dict[str, Any]
    tokens: int
    begun: float
    own: float
    reading: Reading
    row: Row | None = None


class _StepLate(_Loop):
    """Each step is read and judged during the next one. See [Note: a step late]."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._launched: _Launched | None = None  # the previous step, if it is not read yet
        self._arrived = 0.0

    def step(self, step: int) -> None:
        run = self.run
        generators = self._begin(step)
        begun = self._begun
        loss, tokens = forward_backward(run, step)
        before, self._launched = self._launched, None
        read = self._read(before) if before is not None else [0.0]
        own = self._own_seconds()
        told = self._tell(read[0], before.own if before is not None else 0.0)
        if before is not None:
            applied = self._judge(before, told, read)
            assert before.row is not None
            self.report(before.row)
            # `locate` ran the bad step again and dropped this step's gradients: compute them again
            if not applied:
                restore(generators, 0, 1)
                loss, tokens = forward_backward(run, step)
        norm = measure_gradients(run)
        update_began = time.perf_counter()
        update_unless_bad(run, loss, norm)
        self._update_s = time.perf_counter() - update_began
        scale = [run.scaler._scale] if run.scaler is not None else []
        launched = _Launched(step, generators, tokens, begun, own, Reading(loss, norm, *scale))

        if not self._is_needed(step, told.stopping):
            launched.row = self._figures(step, tokens)
            self._launched = launched
            self._end(step, told.stopping, None)
            return
        read = self._read(launched)
        launched.row = self._figures(step, tokens)
        told_now = self._tell(read[0], own, asking=False)
        applied = self._judge(launched, told_now, read)
        self.window.end(step, over=bool(told.stopping), whole=applied)
        self._end(step, told.stopping, launched.row)

    def _is_needed(self, step: int, stopping: Stop) -> bool:
        """Whether the step must be read before the next one begins. The same on every rank."""
        over = bool(stopping) or step + 1 == self.run.steps
        last = step + 1 == self.run.steps
        saves = self.keeper is not None and self.keeper.saves(step + 1, stopping, last)
        return over or saves or self._evaluates(step, stopping) or self.window.is_near(step)

    def _read(self, launched: _Launched) -> list[float]:
        """Wait for that step's numbers, and for nothing launched after them."""
        read = launched.reading.numbers()
        self._seconds = time.perf_counter() - max(launched.begun, self._arrived)
        self._arrived = time.perf_counter()
        return read

    def _judge(self, launched: _Launched, told: _Told, read: list[float]) -> bool:
        """Judge a step that was read, and complete its row. Returns whether it was applied.
        Collective if it was not finite.
        """
        _, norm, *scale = read

        def where() -> str:
            return self._where(launched.step, launched.generators)

        applied = self.nonfinite.judge(launched.step, told.loss, norm, where, self._scale)
        assert launched.row is not None
        launched.row |= self.meter.rates(self._seconds, launched.tokens)
        self._complete(launched.row, told, norm, scale[0] if scale else None, applied)
        return applied


def memory(run: Run) -> Row:
    """Return this rank's memory in bytes, now and at peak: of its GPU, else of the process."""
    figures = memory_figures(run.ranks.device)
    now, peak = resident_memory()
    if figures is not None:
        now, peak = figures.allocated, figures.allocated_peak
    return {"memory": now, "memory_peak": peak}
