"""The training loop. It is PyTorch's own; what stands around it measures and reports.

    for each step
        for each micro-batch                      all but the last under onefold.no_sync
            loss · (its tokens · N / all tokens of the step) ─► backward
        clip ─► optimizer step
        ranks sum their losses, and whether anybody asked to stop

The engine averages gradients over ranks, as DDP does, hence the factor N: what is summed in the end is the gradient of the
mean over every token that counts in the global batch, however it was cut.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

import onefold
from onefold.observe.meter import Meter
from onefold.observe.process import resident_memory
from onefold.train.data import IGNORE, Batch, Samples
from onefold.train.errors import TrainError
from onefold.train.order import eval_batches
from onefold.train.prepare import Run
from onefold.train.window import Window

Row = dict[str, Any]


def train(run: Run, stop_requested: Callable[[], bool], report: Callable[[Row], None], window: Window | None = None) -> int:
    """Run the steps and return how many were done. Collective; all ranks return after the same one.

    Args:
        stop_requested: whether this rank was asked to stop.
        report: gets one row of metrics a step, on every rank.
        window: what records steps; None records the one for the report.

    Raises:
        TrainError: the loss is not finite (fp16 excepted, where the scaler deals with it).
    """
    engine = onefold.engine_of(run.model)
    meter = Meter(run.model, run.optimizer, run.choice.flops_per_token, run.choice.peak_flops)
    window = window or Window(run)
    run.model.train()
    for step in range(run.steps):
        for group in run.optimizer.param_groups:
            group["lr"] = run.config.lr * run.factor(step)
        meter.start()
        window.begin(step)
        loss, tokens = _forward_backward(run, step)
        norm = _update(run)
        total_loss, stopping = run.ranks.sum(loss, float(stop_requested()))
        if not math.isfinite(total_loss) and run.scaler is None:
            raise TrainError(f"the loss at step {step + 1} is {total_loss}: try a lower --lr, a longer --warmup, or --clip.")
        row = _row(run, meter.step(total_loss, tokens, norm, run.scaler), step)
        window.end(step, over=stopping > 0)
        last = stopping > 0 or step + 1 == run.steps
        every = run.config.eval_every
        if every and len(run.data.held_out) and ((step + 1) % every == 0 or last) and not stopping:
            sent = engine.traffic.total()
            row["eval_loss"] = held_out_loss(run)
            row["eval_wire_bytes"] = engine.traffic.total() - sent
        report(row)
        if stopping:
            return step + 1
    return run.steps


def _row(run: Run, figures: Row, step: int) -> Row:
    """The figures of a step as this run keeps them: `memory` of the process, `held` of the engine by category."""
    held = figures.pop("memory")
    row: Row = {**figures, "step": step + 1, **memory(run), "held": held}
    row["wire_bytes_total"] = onefold.engine_of(run.model).traffic.total()
    if run.scaler is None:
        del row["scale"], row["skipped"]
    return row


def _forward_backward(run: Run, step: int) -> tuple[float, int]:
    """(this rank's part of the loss, tokens of the whole global batch) of one step; gradients are left in the model."""
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
    assert loss_sum is not None
    return float(loss_sum), tokens * ranks.world_size


def _update(run: Run) -> float | None:
    """Clip and step; returns the gradient norm before clipping, None where fp16 overflowed."""
    if run.scaler is not None:
        run.scaler.unscale_(run.optimizer)
    norm = float(onefold.clip_grad_norm_(run.model, run.config.clip or math.inf))
    if run.scaler is None:
        run.optimizer.step()
    else:
        run.scaler.step(run.optimizer)
        run.scaler.update()
    run.optimizer.zero_grad()
    return norm if math.isfinite(norm) else None


def loss_of(model: Any, batch: Batch, device: torch.device) -> torch.Tensor:
    """The mean loss over the tokens of `batch` that count, in fp32, a scalar.

    The model may return an object with `.loss`, a dict with "loss", a tuple that begins with it, or the loss.
    """
    moved = {name: tensor.to(device, non_blocking=True) for name, tensor in batch.items()}
    out = model(**moved)
    loss = getattr(out, "loss", None)
    if loss is None:
        loss = out.get("loss") if isinstance(out, dict) else out[0] if isinstance(out, tuple | list) else out
    if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
        raise TrainError(
            f"{type(model).__name__} returned {type(out).__name__} without a scalar loss; called with input_ids and labels, it "
            "must return an object with .loss, a dict with 'loss', a tuple that begins with it, or the loss itself."
        )
    return loss.float().reshape(())


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
    if run.ranks.device.type == "cuda":
        now, peak = torch.cuda.memory_allocated(run.ranks.device), torch.cuda.max_memory_allocated(run.ranks.device)
    else:
        now, peak = resident_memory()
    return {"memory": now, "memory_peak": peak}
