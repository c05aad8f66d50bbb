"""The parts of one step: gradients, their norm, the update; and the loss on held-out samples.

The engine averages gradients over the data-parallel ranks, as DDP does. Each rank therefore
multiplies its loss by their number. The result is the gradient of the mean over all counted tokens of the global
batch, however the batch is cut into micro-batches and ranks.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

import onefold
from onefold.data.order import Indices
from onefold.data.samples import Batch, Feed, eval_batches, held_out_batch
from onefold.device import has_streams
from onefold.optim.clip import step_unless
from onefold.train.pipeline import Pipeline
from onefold.train.prepare import Run
from onefold.wording import TrainError

#: Held-out batches that go through a pipeline in one call: parameters are gathered once for all.
AT_ONCE = 8


def forward_backward(
    run: Run, feed: Feed, step: int, each: Callable[[], None] | None = None
) -> tuple[torch.Tensor, int]:
    """Compute one step's gradients and leave them in the model.
    Returns (this rank's part of the loss, in fp32 on the device; tokens of the whole global batch).
    `each` is called after every micro-batch. In a pipeline micro-batches then come one by one.
    """
    if run.pipeline is not None:
        return _through_stages(run, run.pipeline, feed, step, each)
    samples, place = run.data.train, run.part
    cut = (place.number, place.count, run.choice.micro_batch)
    mine = run.order.micro_batches(step, *cut)
    counted = samples.counts(run.order.at(step))
    tokens = 0
    loss_sum: torch.Tensor | None = None
    for number, (chosen, batch) in enumerate(_batches(run, feed, step, mine)):
        last = number + 1 == len(mine)
        tokens += batch["input_ids"].numel()
        with contextlib.nullcontext() if last else onefold.no_sync(run.model):
            loss = loss_of(run.model, batch, run.ranks.device)
            part = loss * (samples.counts(chosen) / counted)
            scaled = part * place.count
            (scaled if run.scaler is None else run.scaler.scale(scaled)).backward()
        loss_sum = part.detach() if loss_sum is None else loss_sum + part.detach()
        if each is not None:
            each()
    assert loss_sum is not None
    return loss_sum, tokens * place.count


def _batches(
    run: Run, feed: Feed, step: int, mine: Sequence[Indices]
) -> Iterator[tuple[Indices, Batch]]:
    """Yield the micro-batches of a step, each with its samples. The next one is copied ahead."""
    cut = (run.part.number, run.part.count, run.choice.micro_batch)
    for number, chosen in enumerate(mine):
        batch = feed.take(chosen)
        if number + 1 < len(mine):
            feed.send_ahead(mine[number + 1])
        elif feed.is_ahead and step + 1 < run.steps:
            feed.send_ahead(run.order.micro_batches(step + 1, *cut)[0])
        yield chosen, batch


def _through_stages(
    run: Run, pipeline: Pipeline, feed: Feed, step: int, each: Callable[[], None] | None
) -> tuple[torch.Tensor, int]:
    """Do the same in the stages of a pipeline: the schedule's micro-batches are those of the step."""
    samples, place = run.data.train, run.part
    mine = run.order.micro_batches(step, place.number, place.count, run.choice.micro_batch)
    counted = samples.counts(run.order.at(step))
    batches = [batch for _, batch in _batches(run, feed, step, mine)]
    weights = [place.count * samples.counts(chosen) / counted for chosen in mine]
    scaled = run.scaler.scale if run.scaler is not None else lambda loss: loss
    if each is None:
        total = pipeline.train(batches, weights, scaled)
    else:
        total = torch.zeros((), device=run.ranks.device)
        for number, (batch, weight) in enumerate(zip(batches, weights, strict=True)):
            last = number + 1 == len(mine)
            with contextlib.nullcontext() if last else onefold.no_sync(run.model):
                total += pipeline.train([batch], [weight], scaled)
            each()
    tokens = sum(batch["input_ids"].numel() for batch in batches)
    scale = run.scaler.get_scale() if run.scaler is not None else 1.0
    return total / (place.count * scale), tokens * place.count


def measure_gradients(run: Run) -> torch.Tensor:
    """Unscale and clip the gradients; return their norm before clipping, in fp32 on the device.
    The norm is the same on every rank. It is NaN if units were stepped in the backward pass, where
    it is never known. Collective.
    """
    if run.recipe.step_in_backward:
        return torch.tensor(math.nan, device="cpu")
    if run.scaler is not None:
        run.scaler.unscale_(run.optimizer)
    measured = run.model if run.pipeline is None else [run.model]  # a list: over all stages
    return onefold.clip_grad_norm_(measured, run.config.clip or math.inf)


def update(run: Run, apply: bool) -> None:
    """Step if `apply`, and drop the gradients."""
    if apply and run.scaler is not None:
        run.scaler.step(run.optimizer)
    elif apply:
        run.optimizer.step()
    if run.scaler is not None:
        run.scaler.update()
    run.optimizer.zero_grad()


def update_unless_bad(run: Run, loss: torch.Tensor, norm: torch.Tensor) -> None:
    """Step, unless `loss` or the gradients are not finite on some rank, and drop the gradients.
    The device decides, and the host does not wait for it. Collective.
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
    """Return the mean loss over the counted tokens of `batch`, an fp32 scalar."""
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
    """Start copying `tensor` to `device`. The copy is from pinned memory, so that the host does not
    wait for the device's earlier work.
    """
    if tensor.device.type == device.type:
        return tensor
    # torch's pinned allocator does not reuse this memory before the copy has read it.
    return (tensor.pin_memory() if has_streams(device) else tensor).to(device, non_blocking=True)


def held_out_loss(run: Run) -> float:
    """Return the mean loss over the tokens of the held-out samples.
    Collective; each rank reads its part.
    """
    total = counted = 0.0
    samples, ranks = run.data.held_out, run.ranks
    cut = (run.part.number, run.part.count, run.choice.micro_batch)
    found = eval_batches(len(samples), run.config.eval_samples, *cut)
    at_once = 1 if run.pipeline is None else AT_ONCE
    run.model.eval()
    try:
        for first in range(0, len(found), at_once):
            given = [held_out_batch(samples, *some) for some in found[first : first + at_once]]
            if run.pipeline is not None:
                losses = run.pipeline.evaluate([batch for batch, _ in given])
            else:
                with torch.no_grad():
                    losses = [float(loss_of(run.model, batch, ranks.device)) for batch, _ in given]
            # Only the last stage of a pipeline has losses
            for loss, (_, count) in zip(losses, given, strict=False):
                total += loss * count if count else 0.0
                counted += count
    finally:
        run.model.train()
    total, counted = ranks.sum(total, counted)
    return total / counted
