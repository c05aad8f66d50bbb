"""The training loop. It is PyTorch's own; what stands around it measures, reports, and keeps the run alive.

    for each step
        for each micro-batch                      all but the last under onefold.no_sync
            loss · (its tokens · N / all tokens of the step) ─► backward
        clip
        ranks sum their losses, what they were asked (to stop, and why), and how long each computed by itself
        not finite?  stop, leave the step out, or go back to a checkpoint
        optimizer step ─► held-out loss ─► metrics ─► checkpoint, if it is time

The engine averages gradients over ranks, as DDP does, hence the factor N: what is summed in the end is the gradient of the
mean over every token that counts in the global batch, however it was cut.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

import onefold
from onefold.device import has_streams, memory_figures
from onefold.observe.meter import Meter
from onefold.observe.process import resident_memory
from onefold.train.data import IGNORE, Batch, Samples
from onefold.train.errors import TrainError
from onefold.train.locate import Generators, locate
from onefold.train.nonfinite import NonFinite, Verdict
from onefold.train.order import eval_batches
from onefold.train.prepare import Run
from onefold.train.slow import Pace
from onefold.train.stop import Stop
from onefold.train.survive import Keeper
from onefold.train.window import Window
from onefold.train.wires import totals

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
    """Run the steps from `run.start` on and return how many are done. Collective; all ranks return after the same one.

    Args:
        stop_requested: what this rank was asked, as a `Stop`; why the steps ended stands in `run.stopped` afterwards.
        report: gets one row of metrics a step, on every rank.
        window: what records steps; None records the one for the report.
        keeper: writes the checkpoints; None writes none.
        alert: tells the user of something that needs an eye.
        forget: the run has gone back to a step; rows beyond it no longer count.

    Raises:
        TrainError: loss or gradients are not finite, and the run is not to go on (see `onefold.train.nonfinite`).
    """
    loop = _Loop(run, stop_requested, report, window or Window(run), keeper, alert, forget)
    run.model.train()
    step = run.start
    while step < run.steps and not run.stopped:
        step = loop.step(step)
    return step


@dataclass(frozen=True)
class _Told:
    """What the ranks told each other after a backward pass: the loss, why to stop, whether this rank was asked, seconds of each rank."""

    loss: float
    stopping: Stop
    own: list[float]


class _Loop:
    """One step at a time."""

    def __init__(
        self,
        run: Run,
        stop_requested: Callable[[], int],
        report: Callable[[Row], None],
        window: Window,
        keeper: Keeper | None,
        alert: Callable[[str], None],
        forget: Callable[[int], None],
    ) -> None:
        self.run, self.stop_requested, self.report, self.window, self.keeper = run, stop_requested, report, window, keeper
        self.alert, self.forget = alert, forget
        self.engine = onefold.engine_of(run.model)
        self.meter = Meter(run.model, run.optimizer, run.choice.flops_per_token, run.choice.peak_flops)
        self.pace = Pace(run.config.slow_factor)
        self.nonfinite = NonFinite(run, alert)
        self.skipped_before = int(run.earlier.get("skipped", 0))
        self._update_s = 0.0

    @property
    def skipped(self) -> int:
        """Steps whose update was left out, earlier starts counted in."""
        return self.skipped_before + self.meter.skipped + self.nonfinite.total

    def step(self, step: int) -> int:
        """Do step number `step` (from 0); returns the number of the next."""
        run = self.run
        for group in run.optimizer.param_groups:
            group["lr"] = run.config.lr * run.factor(step)
        generators = Generators.of(run.ranks.device)
        self.meter.start()
        self.window.begin(step)
        begun, waited = time.perf_counter(), self.engine.traffic.exposed
        loss, tokens = _forward_backward(run, step)
        norm = _measure_gradients(run)
        told = self._tell(loss, time.perf_counter() - begun - (self.engine.traffic.exposed - waited) + self._update_s)

        verdict = self.nonfinite.judge(step, told.loss, norm, lambda: self._where(step, generators))
        if verdict is Verdict.ROLLBACK:
            return self._roll_back(step)
        if verdict is Verdict.SKIP:
            self.engine.reduce.summing.forget()  # finding out where went through the bad step once more
        begun = time.perf_counter()
        _update(run, apply=verdict is Verdict.APPLY)
        self._update_s = time.perf_counter() - begun

        row = self._row(step, told, tokens, norm, applied=verdict is Verdict.APPLY)
        self.window.end(step, over=bool(told.stopping), whole=verdict is Verdict.APPLY)
        over = step + 1 == run.steps
        if self._evaluates(step, told.stopping, over):
            sent = self.engine.traffic.total()
            row["eval_loss"] = held_out_loss(run)
            row["eval_wire_bytes"] = self.engine.traffic.total() - sent
        self.report(row)
        if self.keeper is not None:
            self.keeper.after(step + 1, told.stopping, over, self.skipped)
        run.stopped = told.stopping
        return step + 1

    def _tell(self, loss: float, own: float) -> _Told:
        """Collective."""
        ranks = self.run.ranks
        asked = Stop(int(self.stop_requested()))
        if self.keeper is not None and ranks.is_first and self.keeper.time_is_up():
            asked |= Stop.TIME
        kinds = (Stop.INTERRUPT, Stop.PREEMPT, Stop.TIME)
        seconds = [own if rank == ranks.rank else 0.0 for rank in range(ranks.world_size)]
        total, *said = ranks.sum(loss, *(float(kind in asked) for kind in kinds), *seconds)
        stopping = Stop.NONE
        for kind, count in zip(kinds, said, strict=False):
            if count:
                stopping |= kind
        return _Told(total, stopping, said[len(kinds) :])

    def _where(self, step: int, before: Generators) -> str:
        return locate(self.run, lambda each: _forward_backward(self.run, step, each), before)

    def _roll_back(self, step: int) -> int:
        self.run.optimizer.zero_grad()
        if self.keeper is None:
            raise TrainError("--on-nonfinite rollback: this run keeps no checkpoints to go back to.")
        self.window.end(step, over=False, whole=False)
        target = self.keeper.roll_back(step, self.nonfinite.in_a_row)
        self.forget(target)
        return target

    def _evaluates(self, step: int, stopping: Stop, over: bool) -> bool:
        every = self.run.config.eval_every
        return bool(every and len(self.run.data.held_out) and ((step + 1) % every == 0 or over) and not stopping)

    def _row(self, step: int, told: _Told, tokens: int, norm: float, applied: bool) -> Row:
        """The figures of a step as this run keeps them: `memory` of the process, `held` of the engine by category."""
        run = self.run
        figures = self.meter.step(
            told.loss if math.isfinite(told.loss) else None, tokens, norm if math.isfinite(norm) else None, run.scaler
        )
        held = figures.pop("memory")
        row: Row = {**figures, "step": step + 1, **memory(run), "held": held}
        row |= totals(run)
        row["skipped"] = self.skipped
        if run.scaler is None:
            del row["scale"]
        if not applied:
            row["left_out"] = True
        if run.ranks.world_size > 1:
            row["own_ms"] = [1000 * seconds for seconds in told.own]
            said = self.pace.look(told.own)
            if self.pace.slow is not None:
                row["slow_rank"] = self.pace.slow
            if said is not None:
                self.alert(said)
        return row


def _forward_backward(run: Run, step: int, each: Callable[[], None] = lambda: None) -> tuple[float, int]:
    """(this rank's part of the loss, tokens of the whole global batch) of one step; gradients are left in the model.

    `each` is called after every micro-batch.
    """
    samples, ranks = run.data.train, run.ranks
    mine = run.order.micro_batches(step, ranks.rank, ranks.world_size, run.choice.micro_batch)
    indices = run.order.at(step)
    counted = samples.counts(indices)
    tokens = 0
    loss_sum: torch.Tensor | None = None
    for number, chosen in enumerate(mine):
        last = number + 1 == len(mine)
        batch = samples.batch(chosen)
        tokens += batch["input_ids"].numel()
        with contextlib.nullcontext() if last else onefold.no_sync(run.model):
            loss = loss_of(run.model, batch, ranks.device)
            part = loss * (samples.counts(chosen) / counted)
            scaled = part * ranks.world_size
            (scaled if run.scaler is None else run.scaler.scale(scaled)).backward()
        loss_sum = part.detach() if loss_sum is None else loss_sum + part.detach()
        each()
    assert loss_sum is not None
    return float(loss_sum), tokens * ranks.world_size


def _measure_gradients(run: Run) -> float:
    """Unscale and clip; the gradient norm before clipping, the same on every rank; not finite where fp16 overflowed. Collective.

    NaN where units were stepped behind the backward pass: it is never known.
    """
    if run.recipe.step_in_backward:
        return math.nan
    if run.scaler is not None:
        run.scaler.unscale_(run.optimizer)
    return float(onefold.clip_grad_norm_(run.model, run.config.clip or math.inf))


def _update(run: Run, apply: bool) -> None:
    """Step, unless the step is left out, and drop the gradients."""
    if apply and run.scaler is not None:
        run.scaler.step(run.optimizer)
    elif apply:
        run.optimizer.step()
    if run.scaler is not None:
        run.scaler.update()
    run.optimizer.zero_grad()


def loss_of(model: Any, batch: Batch, device: torch.device) -> torch.Tensor:
    """The mean loss over the tokens of `batch` that count, in fp32, a scalar.

    The model may return an object with `.loss`, a dict with "loss", a tuple that begins with it, or the loss.
    """
    out = model(**{name: _sent(tensor, device) for name, tensor in batch.items()})
    loss = getattr(out, "loss", None)
    if loss is None:
        loss = out.get("loss") if isinstance(out, dict) else out[0] if isinstance(out, tuple | list) else out
    if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
        raise TrainError(
            f"{type(model).__name__} returned {type(out).__name__} without a scalar loss; called with input_ids and labels, it "
            "must return an object with .loss, a dict with 'loss', a tuple that begins with it, or the loss itself."
        )
    return loss.float().reshape(())


def _sent(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """`tensor` on its way to `device`: from pinned memory, so that the host does not wait for what the device has to do first."""
    # torch's own pinned memory: it is not used again before the copy has read it.
    return (tensor.pin_memory() if has_streams(device) else tensor).to(device, non_blocking=True)


def held_out_loss(run: Run) -> float:
    """Mean loss over the tokens of the held-out samples. Collective; each rank reads its part."""
    total = counted = 0.0
    samples, ranks = run.data.held_out, run.ranks
    run.model.eval()
    try:
        with torch.no_grad():
            micro = run.choice.micro_batch
            for indices, real in eval_batches(len(samples), run.config.eval_samples, ranks.rank, ranks.world_size, micro):
                batch, count = held_out_batch(samples, indices, real)
                loss = float(loss_of(run.model, batch, ranks.device))
                total += loss * count if count else 0.0
                counted += count
    finally:
        run.model.train()
    total, counted = ranks.sum(total, counted)
    return total / counted


def held_out_batch(samples: Samples, indices: np.ndarray[Any, np.dtype[np.int64]], real: int) -> tuple[Batch, int]:
    """(the batch with only its first `real` samples counting, tokens that count).

    A batch that does not count at all keeps one label, since a mean over nothing is not a number.
    """
    batch = samples.batch(indices)
    if real < len(indices):
        first = batch["labels"][:1, -1:].clone()
        batch["labels"][real:] = IGNORE
        if not real:
            batch["labels"][:1, -1:] = first.clamp(min=0)
    return batch, samples.counts(indices[:real])


def memory(run: Run) -> Row:
    """Memory of this rank in bytes: of the process, or its GPU, now and at peak."""
    figures = memory_figures(run.ranks.device)
    now, peak = (figures.allocated, figures.allocated_peak) if figures is not None else resident_memory()
    return {"memory": now, "memory_peak": peak}
