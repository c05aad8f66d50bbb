"""The training loop. It is PyTorch's own; what stands around it measures, reports, and keeps the
run alive.

    for each step
        for each micro-batch                      all but the last under onefold.no_sync
            loss · (its tokens · N / all tokens of the step) ─► backward
        clip
        ranks sum their losses, what they were asked (to stop, and why), and how long each computed
        by itself not finite?  stop, leave the step out, or go back to a checkpoint
        optimizer step ─► held-out loss ─► metrics ─► checkpoint, if it is time

The engine averages gradients over ranks, as DDP does, hence the factor N: what is summed in the end
is the gradient of the mean over every token that counts in the global batch, however it was cut.

[Note: a step late] On a device with streams the host does not wait for the step that it has just
launched. Loss, norm and loss scale are copied to the host behind the step, and read in the next
one:

    device   forward, backward, clip, update of step s    │ forward, backward of step s + 1      │ clip, update
    host     launches forward and backward of step s + 1  │ reads step s, judges and reports it  │ launches clip and update

What may follow from step s must not find the weights of step s + 1. So the device itself leaves an
update out where loss or norm are not finite (optim/skip.py), and the host judges step s before it
launches the update of step s + 1: the weights are then those that step s began with. Where the
judgement changed anything, the gradients of step s + 1 are dropped and computed again. A step is
read in itself where somebody needs to know: the run evaluates, saves, records or ends behind it. So
is every step on a device without streams, and where the device cannot leave an update out (shards
off the device, packed moments).
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

import onefold
from onefold.checkpoint.per_rank import capture, restore
from onefold.device import Reading, has_streams, memory_figures
from onefold.observe.memory import resident_memory
from onefold.observe.meter import Meter
from onefold.optim.skip import skips_on_device, step_unless
from onefold.train.checkpoints import Keeper
from onefold.train.data import Batch, Feed, eval_batches, held_out_batch
from onefold.train.errors import TrainError
from onefold.train.faults import NonFinite, Pace, Verdict, locate
from onefold.train.prepare import Run
from onefold.train.process import Stop
from onefold.train.report import Window, totals

Row = dict[str, Any]


def train(
    run: Run,
    stop_requested: Callable[[], int],
    report: Callable[[Row], None],
    window: Window | None = None,
    keeper: Keeper | None = None,
    alert: Callable[[str], None] = lambda text: None,
    forget: Callable[[int], None] = lambda step: None,
) -> int:
    """Run the steps from `run.start` on and return how many are done. Collective; all ranks return
    after the same one.

    Args:
        stop_requested: what this rank was asked, as a `Stop`; why the steps ended stands in
            `run.stopped` afterwards.
        report: gets one row of metrics a step, on every rank, in the order of the steps; see [Note:
            a step late] for when.
        window: what records steps; None records the one for the report.
        keeper: writes the checkpoints; None writes none.
        alert: tells the user of something that needs an eye.
        forget: the run has gone back to a step; rows beyond it no longer count.

    Raises:
        TrainError: loss or gradients are not finite, and the run is not to go on (see
            `onefold.train.faults`).
    """
    late = skips_on_device(run.optimizer, onefold.engine_of(run.model))
    loop = (_StepLate if late else _InTime)(
        run, stop_requested, report, window or Window(run), keeper, alert, forget
    )
    run.model.train()
    step = run.start
    try:
        while step < run.steps and not run.stopped:
            step = loop.step(step)
    finally:
        loop.feed.close()
    return step


@dataclass(frozen=True)
class _Told:
    """What the ranks told each other of a step."""

    loss: float
    stopping: Stop
    own: list[float]


@dataclass
class _Loop:
    """One step at a time. The arguments are those of `train`."""

    run: Run
    stop_requested: Callable[[], int]
    report: Callable[[Row], None]
    window: Window
    keeper: Keeper | None
    alert: Callable[[str], None]
    forget: Callable[[int], None]

    def __post_init__(self) -> None:
        run = self.run
        self.engine = onefold.engine_of(run.model)
        flops = run.choice.flops_per_token, run.choice.peak_flops
        self.meter = Meter(run.model, run.optimizer, *flops)
        self.pace = Pace(run.config.slow_factor)
        self.nonfinite = NonFinite(run, self.alert)
        self.feed = Feed(run.data.train, run.ranks.device)
        self.skipped_before = int(run.earlier.get("skipped", 0))
        self._scale: float | None = None
        self._overflowed = 0
        self._update_s = 0.0

    @property
    def skipped(self) -> int:
        """Steps whose update was left out, earlier starts counted in."""
        return self.skipped_before + self._overflowed + self.nonfinite.total

    def step(self, step: int) -> int:
        """Do step number `step` (from 0); returns the number of the next."""
        raise NotImplementedError

    def _begin(self, step: int) -> dict[str, Any]:
        """Returns the random generators' states before the step."""
        for group in self.run.optimizer.param_groups:
            group["lr"] = self.run.config.lr * self.run.factor(step)
        generators = capture()
        self.meter.start()
        self.window.begin(step)
        self._begun, self._waited = time.perf_counter(), self.engine.traffic.exposed
        return generators

    def _own_seconds(self) -> float:
        """What this rank has computed by itself: since the step began, and in the last update."""
        waited = self.engine.traffic.exposed - self._waited
        return max(0.0, time.perf_counter() - self._begun - waited + self._update_s)

    def _tell(self, loss: float, own: float, asking: bool = True) -> _Told:
        """Collective. `asking`: whether ranks may ask now to stop behind this step."""
        ranks = self.run.ranks
        asked = Stop(int(self.stop_requested())) if asking else Stop.NONE
        if asking and self.keeper is not None and ranks.is_first and self.keeper.time_is_up():
            asked |= Stop.TIME
        kinds = list(Stop)
        seconds = [own if rank == ranks.rank else 0.0 for rank in range(ranks.world_size)]
        total, *said = ranks.sum(loss, *(float(kind in asked) for kind in kinds), *seconds)
        stopping = sum(kind for kind, count in zip(kinds, said, strict=False) if count)
        return _Told(total, Stop(stopping), said[len(kinds) :])

    def _where(self, step: int, before: dict[str, Any]) -> str:
        repeat = partial(_forward_backward, self.run, self.feed, step)
        return locate(self.run, repeat, before)

    def _roll_back(self, step: int) -> int:
        self.run.optimizer.zero_grad()
        if self.keeper is None:
            raise TrainError(
                "--on-nonfinite rollback: this run keeps no checkpoints to go back to."
            )
        self.window.end(step, over=False, whole=False)
        target = self.keeper.roll_back(step, self.nonfinite.in_a_row)
        self.forget(target)
        return target

    def _evaluates(self, step: int, stopping: Stop) -> bool:
        every, over = self.run.config.eval_every, step + 1 == self.run.steps
        if not every or stopping or not len(self.run.data.held_out):
            return False
        return over or (step + 1) % every == 0

    def _figures(self, step: int, tokens: int) -> Row:
        """Figures of a step: `memory` of the process, `held` of the engine. Nothing is read yet."""
        figures = self.meter.step(tokens=tokens)
        held = figures.pop("memory")
        row: Row = {**figures, "step": step + 1, **memory(self.run), "held": held}
        row |= totals(self.run)
        if self.run.scaler is None:
            del row["scale"]
        return row

    def _complete(
        self, row: Row, told: _Told, norm: float, scale: float | None, applied: bool
    ) -> None:
        """Put into `row` what was read from the device and told by the ranks."""
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
            said = self.pace.look(told.own)
            if self.pace.slow is not None:
                row["slow_rank"] = self.pace.slow
            if said is not None:
                self.alert(said)

    def _end(self, step: int, stopping: Stop, row: Row | None) -> int:
        """What follows a step; returns the next one. `row`: None for a step that is read later."""
        if row is not None:
            if self._evaluates(step, stopping):
                sent = self.engine.traffic.total()
                row["eval_loss"] = held_out_loss(self.run)
                row["eval_wire_bytes"] = self.engine.traffic.total() - sent
            self.report(row)
        if self.keeper is not None:
            self.keeper.after(step + 1, stopping, step + 1 == self.run.steps, self.skipped)
        self.run.stopped = stopping
        return step + 1


class _InTime(_Loop):
    """Each step is read and judged before its update."""

    def step(self, step: int) -> int:
        run = self.run
        generators = self._begin(step)
        loss, tokens = _forward_backward(run, self.feed, step)
        read = float(loss)
        norm = float(_measure_gradients(run))
        told = self._tell(read, self._own_seconds())
        verdict = self.nonfinite.judge(step, told.loss, norm, lambda: self._where(step, generators))
        if verdict is Verdict.ROLLBACK:
            return self._roll_back(step)
        applied = verdict is Verdict.APPLY
        if not applied:
            # Finding out where went through the bad step once more
            self.engine.residuals.forget()
        begun = time.perf_counter()
        _update(run, apply=applied)
        self._update_s = time.perf_counter() - begun

        row = self._figures(step, tokens)
        scale = None if run.scaler is None else run.scaler.get_scale()
        self._complete(row, told, norm, scale, applied)
        self.window.end(step, over=bool(told.stopping), whole=applied)
        return self._end(step, told.stopping, row)


@dataclass
class _Launched:
    """A step that the device was given.

    Attributes:
        generators: the states before it. begun: seconds of `time.perf_counter`. own: seconds of
            this rank by itself.
        reading: this rank's part of the loss, the gradient norm and, where there is one, the loss
            scale behind the step.
        row: its figures, once they were taken.
    """

    step: int
    generators: dict[str, Any]
    tokens: int
    begun: float
    own: float
    reading: Reading
    row: Row | None = None


class _StepLate(_Loop):
    """Steps are read and judged in the next one. See [Note: a step late]."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._launched: _Launched | None = None  # the step before, where it was not read yet
        self._arrived = 0.0
        self._draw = 0  # `Residuals.draw` as the step began

    def step(self, step: int) -> int:
        run = self.run
        generators = self._begin(step)
        begun, self._draw = self._begun, self.engine.residuals.draw
        loss, tokens = _forward_backward(run, self.feed, step)
        before, self._launched = self._launched, None
        read = self._read(before) if before is not None else [0.0]
        own = self._own_seconds()
        told = self._tell(read[0], before.own if before is not None else 0.0)
        if before is not None:
            verdict = self._judge(before, told, read, overtaken=True)
            if verdict is Verdict.ROLLBACK:
                return self._roll_back(before.step)
            assert before.row is not None
            self.report(before.row)
            # Its place was looked for, and with it went the gradients of this step
            if verdict is Verdict.SKIP:
                restore(generators, 0, 1)
                loss, tokens = _forward_backward(run, self.feed, step)
        norm = _measure_gradients(run)
        update_began = time.perf_counter()
        _update_unless_bad(run, loss, norm)
        self._update_s = time.perf_counter() - update_began
        scale = [run.scaler._scale] if run.scaler is not None else []
        launched = _Launched(step, generators, tokens, begun, own, Reading(loss, norm, *scale))

        if not self._is_needed(step, told.stopping):
            launched.row = self._figures(step, tokens)
            self._launched = launched
            return self._end(step, told.stopping, None)
        read = self._read(launched)
        launched.row = self._figures(step, tokens)
        told_now = self._tell(read[0], own, asking=False)
        verdict = self._judge(launched, told_now, read, overtaken=False)
        if verdict is Verdict.ROLLBACK:
            return self._roll_back(step)
        self.window.end(step, over=bool(told.stopping), whole=verdict is Verdict.APPLY)
        return self._end(step, told.stopping, launched.row)

    def _is_needed(self, step: int, stopping: Stop) -> bool:
        """Whether the step must be read before the next one begins. The same on every rank."""
        over = bool(stopping) or step + 1 == self.run.steps
        last = step + 1 == self.run.steps
        saves = self.keeper is not None and self.keeper.saves(step + 1, stopping, last)
        return over or saves or self._evaluates(step, stopping) or self.window.is_near(step)

    def _read(self, launched: _Launched) -> list[float]:
        """Wait for that step's numbers, and for nothing behind them."""
        read = launched.reading.numbers()
        self._seconds = time.perf_counter() - max(launched.begun, self._arrived)
        self._arrived = time.perf_counter()
        return read

    def _judge(
        self, launched: _Launched, told: _Told, read: list[float], overtaken: bool
    ) -> Verdict:
        """Judge a step that was read, and complete its row. Collective where it was not finite.
        `overtaken`: forward and backward pass of the next step were launched.
        """
        residuals, (_, norm, *scale) = self.engine.residuals, read

        def where() -> str:
            if overtaken:
                # That pass is made once more, with the random bits that it would have had
                residuals.draw = self._draw
            return self._where(launched.step, launched.generators)

        verdict = self.nonfinite.judge(launched.step, told.loss, norm, where, self._scale)
        if verdict is Verdict.SKIP:
            residuals.forget()
        if verdict is not Verdict.ROLLBACK:
            assert launched.row is not None
            launched.row |= self.meter.rates(self._seconds, launched.tokens)
            behind = scale[0] if scale else None
            self._complete(launched.row, told, norm, behind, verdict is Verdict.APPLY)
        return verdict


def _forward_backward(
    run: Run, feed: Feed, step: int, each: Callable[[], None] = lambda: None
) -> tuple[torch.Tensor, int]:
    """One step's gradients, left in the model. Returns (this rank's part of the loss, in fp32 on
    the device; tokens of the whole global batch). `each` is called after every micro-batch.
    """
    samples, ranks = run.data.train, run.ranks
    cut = (ranks.rank, ranks.world_size, run.choice.micro_batch)
    mine = run.order.micro_batches(step, *cut)
    counted = samples.counts(run.order.at(step))
    tokens = 0
    loss_sum: torch.Tensor | None = None
    for number, chosen in enumerate(mine):
        last = number + 1 == len(mine)
        batch = feed.take(chosen)
        tokens += batch["input_ids"].numel()
        if not last:
            feed.send_ahead(mine[number + 1])
        elif feed.is_ahead and step + 1 < run.steps:
            feed.send_ahead(run.order.micro_batches(step + 1, *cut)[0])
        with contextlib.nullcontext() if last else onefold.no_sync(run.model):
            loss = loss_of(run.model, batch, ranks.device)
            part = loss * (samples.counts(chosen) / counted)
            scaled = part * ranks.world_size
            (scaled if run.scaler is None else run.scaler.scale(scaled)).backward()
        loss_sum = part.detach() if loss_sum is None else loss_sum + part.detach()
        each()
    assert loss_sum is not None
    return loss_sum, tokens * ranks.world_size


def _measure_gradients(run: Run) -> torch.Tensor:
    """Unscale and clip; the norm before clipping, in fp32 on the device, alike on every rank.
    Collective. NaN where units were stepped in the backward pass: it is never known.
    """
    if run.recipe.step_in_backward:
        return torch.tensor(math.nan)
    if run.scaler is not None:
        run.scaler.unscale_(run.optimizer)
    return onefold.clip_grad_norm_(run.model, run.config.clip or math.inf)


def _update(run: Run, apply: bool) -> None:
    """Step, unless the step is left out, and drop the gradients."""
    if apply and run.scaler is not None:
        run.scaler.step(run.optimizer)
    elif apply:
        run.optimizer.step()
    if run.scaler is not None:
        run.scaler.update()
    run.optimizer.zero_grad()


def _update_unless_bad(run: Run, loss: torch.Tensor, norm: torch.Tensor) -> None:
    """Step, unless `loss` or the gradients are not finite on some rank, and drop the gradients.
    The device finds that out; the host does not wait. Collective.
    """
    bad = loss.isfinite().logical_not().to(torch.float32)
    onefold.engine_of(run.model).agree_on_overflow(bad)
    if run.scaler is None:
        bad = torch.maximum(bad, norm.isfinite().logical_not().to(torch.float32))
    step_unless(run.optimizer, bad, run.scaler)
    if run.scaler is not None:
        run.scaler.update()
    run.optimizer.zero_grad()


def loss_of(model: Any, batch: Batch, device: torch.device) -> torch.Tensor:
    """The mean loss over the tokens of `batch` that count, in fp32, a scalar."""
    out = model(**{name: _sent(tensor, device) for name, tensor in batch.items()})
    loss = getattr(out, "loss", None)
    if loss is None and isinstance(out, dict):
        loss = out.get("loss")
    elif loss is None:
        loss = out[0] if isinstance(out, tuple | list) else out
    if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
        raise TrainError(
            f"{type(model).__name__} returned {type(out).__name__} without a scalar loss; called"
            " with input_ids and labels, it must return an object with .loss, a dict with 'loss',"
            " a tuple that begins with it, or the loss itself."
        )
    return loss.float().reshape(())


def _sent(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """`tensor` on its way to `device`: from pinned memory, so that the host does not wait for what
    the device has to do first.
    """
    if tensor.device.type == device.type:
        return tensor
    # torch's own pinned memory: it is not used again before the copy has read it.
    return (tensor.pin_memory() if has_streams(device) else tensor).to(device, non_blocking=True)


def held_out_loss(run: Run) -> float:
    """Mean loss over the tokens of the held-out samples. Collective; each rank reads its part."""
    total = counted = 0.0
    samples, ranks = run.data.held_out, run.ranks
    cut = (ranks.rank, ranks.world_size, run.choice.micro_batch)
    run.model.eval()
    try:
        with torch.no_grad():
            for indices, real in eval_batches(len(samples), run.config.eval_samples, *cut):
                batch, count = held_out_batch(samples, indices, real)
                loss = float(loss_of(run.model, batch, ranks.device))
                total += loss * count if count else 0.0
                counted += count
    finally:
        run.model.train()
    total, counted = ranks.sum(total, counted)
    return total / counted


def memory(run: Run) -> Row:
    """Memory of this rank in bytes: of the process, or its GPU, now and at peak."""
    figures = memory_figures(run.ranks.device)
    now, peak = resident_memory()
    if figures is not None:
        now, peak = figures.allocated, figures.allocated_peak
    return {"memory": now, "memory_peak": peak}
