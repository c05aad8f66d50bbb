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
    host     launches forward and backward of step s + 1  │ reads step s, judges and reports it  │ launches the update

A step with a non-finite loss or norm must not change the weights: the device itself skips the update
then (optim/clip.py). A step is read before the next one begins if the run evaluates, saves, records or
ends after it. Every step is read so on a device without streams, and if the device cannot skip an
update (offloaded shards, packed moments).

| --on-nonfinite | what a step that is not finite does                                      | the run ends               |
|----------------|--------------------------------------------------------------------------|----------------------------|
| stop           |                                                                          | at the first bad step      |
| skip           | its samples are skipped, the weights stay                                | at the `limit`-th in a row |

In fp16 the loss scaler handles gradients that overflow: it skips the step and lowers the scale, up
to `SCALER_LIMIT` times in a row. A non-finite loss has nothing to do with the scale.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist

import onefold
from onefold.checkpoint.per_rank import capture
from onefold.device import Reading, memory_figures
from onefold.observe.memory import resident_memory
from onefold.observe.meter import Meter
from onefold.optim.clip import skips_on_device
from onefold.processes.signals import Stop
from onefold.train.faults import locate
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
from onefold.wording import TrainError

Row = dict[str, Any]
#: Overflows in a row that end the run. 40 halvings bring a loss scale of 65536 to almost nothing.
SCALER_LIMIT = 40


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
        TrainError: loss or gradients are not finite, and the run must end.
    """
    loop = _Loop(run, stop_requested, report, window or Window(run), keeper, alert)
    run.model.train()
    step = run.start
    while step < run.steps and not run.stopped:
        loop.step(step)
        step += 1
    return step


@dataclass
class _Launched:
    """A step that the host has launched.

    Attributes:
        generators: the random generators' states before the step. begun: seconds of
            `time.perf_counter`. own: seconds that this rank computed without waiting.
        numbers: returns this rank's part of the loss, the gradient norm and, with a scaler on the
            device, the loss scale after the step. Waits for them, and for nothing launched later.
        row: the step's figures, as far as they are known.
    """

    step: int
    generators: dict[str, Any]
    tokens: int
    begun: float
    own: float
    numbers: Callable[[], list[float]]
    row: Row = field(default_factory=dict)


@dataclass
class _Loop:
    """Runs one step at a time. The fields are the arguments of `train`. All conditions that lead to a
    collective are the same on every rank.
    """

    run: Run
    stop_requested: Callable[[], int]
    report: Callable[[Row], None]
    window: Window
    keeper: Keeper | None
    alert: Callable[[str], None]

    def __post_init__(self) -> None:
        run = self.run
        self.engine = onefold.engine_of(run.model)
        self.late = skips_on_device(run.optimizer, self.engine)
        flops = run.choice.flops_per_token, run.choice.peak_flops
        self.meter = Meter(run.model, run.optimizer, *flops)
        self.waiting: _Launched | None = None  # the step before, if it is not read yet
        self.skipped = int(run.earlier.get("skipped", 0))
        self.bad = self.overflows = 0  # in a row
        self._scale: float | None = None
        self._arrived = 0.0

    def step(self, step: int) -> None:
        """Do step number `step` (from 0)."""
        run = self.run
        for group in run.optimizer.param_groups:
            group["lr"] = peak_lr(run.config, group) * run.factor(step)
        generators = capture()
        self.meter.start()
        self.window.begin(step)
        begun, waited = time.perf_counter(), self.engine.traffic.exposed
        loss, tokens = forward_backward(run, step)
        norm = measure_gradients(run)
        own = time.perf_counter() - begun - (self.engine.traffic.exposed - waited)

        def launched(numbers: Callable[[], list[float]]) -> _Launched:
            return _Launched(step, generators, tokens, begun, max(0.0, own), numbers)

        if self.late:
            before, self.waiting = self.waiting, None
            stopping = self._judge(before)
            update_unless_bad(run, loss, norm)
            scale = [run.scaler._scale] if run.scaler is not None else []
            seen = launched(Reading(loss, norm, *scale).numbers)
            seen.row = self._figures(step, tokens)
            if before is not None:
                self.report(before.row)
            if not self._is_needed(step, stopping):
                self.waiting = seen
                self._end(step, stopping, None)
                return
            self._judge(seen, asking=False)
        else:
            seen = launched(lambda: [float(loss), float(norm)])
            stopping = self._judge(seen)
            update(run, apply="left_out" not in seen.row)
            seen.row |= {**self._figures(step, tokens), **seen.row}
            if run.scaler is not None:
                self._note_scale(seen.row, run.scaler.get_scale())
        whole = "left_out" not in seen.row
        self.window.end(step, over=bool(stopping), whole=whole)
        self._end(step, stopping, seen.row)

    def _judge(self, seen: _Launched | None, asking: bool = True) -> Stop:
        """Read a step's numbers, exchange them with the other ranks, judge them, and complete the
        step's row. Returns what ranks ask for. Collective.

        Args:
            seen: None if there is no step to judge. asking: whether ranks may now ask to stop.

        Raises:
            TrainError: the run ends here.
        """
        ranks, kinds = self.run.ranks, list(Stop)
        loss, norm, *scale = seen.numbers() if seen is not None else [0.0, 0.0]
        asked = Stop(int(self.stop_requested())) if asking else Stop.NONE
        total, *said = ranks.sum(loss, *(float(kind in asked) for kind in kinds))
        stopping = Stop(sum(kind for kind, count in zip(kinds, said, strict=True) if count))
        own = seen.own if seen is not None else 0.0
        # The greatest and its rank in one number: nothing here grows with the number of ranks
        mine = round(own * 1e6) * ranks.world_size + ranks.rank
        slow, least = ranks.sum(mine, -own, how=dist.ReduceOp.MAX)
        if seen is None:
            return stopping
        row, loss = seen.row, total / self.run.part.copies  # ranks that divide layers have the same
        if self.late:
            now = time.perf_counter()
            row |= self.meter.rates(now - max(seen.begun, self._arrived), seen.tokens)
            self._arrived = now
        row["loss"] = loss if math.isfinite(loss) else None
        row["grad_norm"] = norm if math.isfinite(norm) else None
        if ranks.world_size > 1:
            microseconds, row["slowest"] = divmod(int(slow), ranks.world_size)
            row["own_ms"] = [-1000 * least, microseconds / 1000]
        if not self._is_fine(seen, loss, norm):
            row["left_out"] = True
            self.skipped += 1
        row["skipped"] = self.skipped
        if scale:
            self._note_scale(row, scale[0])
        return stopping

    def _note_scale(self, row: Row, scale: float) -> None:
        """Put the loss scale into a row. Where it fell, the scaler has skipped the step."""
        self.skipped += self._scale is not None and scale < self._scale
        self._scale = scale
        row |= {"scale": scale, "skipped": self.skipped}

    def _is_fine(self, seen: _Launched, loss: float, norm: float) -> bool:
        """Whether a step's update counts. All ranks judge alike, because the numbers are the same.

        Raises:
            TrainError: the run ends here.
        """
        run, config, step = self.run, self.run.config, seen.step
        fine = math.isfinite(norm) or run.recipe.step_in_backward
        if math.isfinite(loss) and (fine or run.scaler is not None):
            self.overflows = 0 if fine else self.overflows + 1
            if self.overflows >= SCALER_LIMIT:
                raise TrainError(
                    f"the gradients overflowed in fp16 for {SCALER_LIMIT} steps in a row, up to"
                    f" step {step + 1}. Use --precision bf16 or fp32, or a lower --lr."
                )
            self.bad = 0 if fine else self.bad
            return True
        self.bad += 1
        what, value = ("gradient norm", norm) if math.isfinite(loss) else ("loss", loss)
        text = f"the {what} at step {step + 1} is {value}"
        if config.on_nonfinite == "stop" or self.bad >= config.nonfinite_limit:
            where = locate(run, step, seen.generators)
            many = f" That makes {self.bad} such steps in a row (--nonfinite-limit)."
            raise TrainError(
                f"{text}; {where}.{many if config.on_nonfinite == 'skip' else ''} Try a lower --lr, a"
                " longer --warmup, or --clip; --on-nonfinite skip goes on without single steps."
            )
        self.alert(f"{text}. The step is left out.")
        return False

    def _is_needed(self, step: int, stopping: Stop) -> bool:
        """Whether the step must be read before the next one begins. The same on every rank."""
        last = step + 1 == self.run.steps
        saves = self.keeper is not None and self.keeper.saves(step + 1, stopping, last)
        over = bool(stopping) or last or saves
        return over or self._evaluates(step, stopping) or self.window.is_near(step)

    def _evaluates(self, step: int, stopping: Stop) -> bool:
        every, over = self.run.config.eval_every, step + 1 == self.run.steps
        if not every or stopping or not self.run.data.size(held_out=True):
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

    def _end(self, step: int, stopping: Stop, row: Row | None) -> None:
        """Evaluate, report and save after a step. `row`: None for a step that is read later."""
        if row is not None:
            if self._evaluates(step, stopping):
                sent = self.engine.traffic.sent().nbytes
                row["eval_loss"] = held_out_loss(self.run)
                row["eval_wire_bytes"] = self.engine.traffic.sent().nbytes - sent
            self.report(row)
        if self.keeper is not None:
            self.keeper.after(step + 1, stopping, step + 1 == self.run.steps, self.skipped)
        self.run.stopped = stopping


def memory(run: Run) -> Row:
    """Return this rank's memory in bytes, now and at peak: of its GPU, else of the process."""
    figures = memory_figures(run.ranks.device)
    now, peak = resident_memory()
    if figures is not None:
        now, peak = figures.allocated, figures.allocated_peak
    return {"memory": now, "memory_peak": peak}
