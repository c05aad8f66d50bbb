"""The parts of one step: gradients, their norm, the update; and the loss on held-out samples.

The engine averages gradients over the data-parallel ranks, as DDP does. Each rank therefore
multiplies its loss by their number. The result is the gradient of the mean over all counted tokens of the global
batch, however the batch is cut into micro-batches and ranks.
"""

from __future__ import annotations

import contextlib
import math
from typing import Any

import torch

import onefold
from onefold.data.samples import Batch, eval_batches
from onefold.device import has_streams
from onefold.optim.clip import step_unless
from onefold.train.prepare import Run
from onefold.wording import TrainError


def forward_backward(run: Run, step: int) -> tuple[torch.Tensor, int]:
    """Compute one step's gradients and leave them in the model.
    Returns (this rank's part of the loss, in fp32 on the device; tokens of the whole global batch).
    """
    samples, place = run.data.samples, run.part
    cut = (place.number, place.count, run.choice.micro_batch)
    mine = run.order.micro_batches(step, *cut)
    counts = [samples.counted(chosen) for chosen in mine]
    counted: float = sum(counts) * place.count
    if not samples.count_alike:
        counted = run.ranks.sum(sum(counts))[0] / place.copies
    tokens = 0
    loss_sum: torch.Tensor | None = None
    for number, (chosen, count) in enumerate(zip(mine, counts, strict=True)):
        last = number + 1 == len(mine)
        batch = samples.batch(chosen)
        tokens += batch["input_ids"].numel()
        with contextlib.nullcontext() if last else onefold.no_sync(run.model):
            loss = loss_of(run.model, batch, run.ranks.device)
            part = loss * (count / counted)
            scaled = part * place.count
            (scaled if run.scaler is None else run.scaler.scale(scaled)).backward()
        loss_sum = part.detach() if loss_sum is None else loss_sum + part.detach()
    assert loss_sum is not None
    return loss_sum, tokens * place.count


def measure_gradients(run: Run) -> torch.Tensor:
    """Unscale and clip the gradients; return their norm before clipping, in fp32 on the device.
    The norm is the same on every rank. It is NaN if units were stepped in the backward pass, where
    it is never known. Collective.
    """
    if run.recipe.step_in_backward:
        return torch.tensor(math.nan, device="cpu")
    if run.scaler is not None:
        run.scaler.unscale_(run.optimizer)
    return onefold.clip_grad_norm_(run.model, run.config.clip or math.inf)


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
    ranks, size = run.ranks, run.data.size(held_out=True)
    cut = (run.part.number, run.part.count, run.choice.micro_batch)
    run.model.eval()
    try:
        for positions, real in eval_batches(size, run.config.eval_samples, *cut):
            chosen = run.order.read(positions, held_out=True)
            batch, count = run.data.samples.held_out(chosen, real)
            with torch.no_grad():
                loss = float(loss_of(run.model, batch, ranks.device))
            total += loss * count if count else 0.0
            counted += count
    finally:
        run.model.train()
    total, counted = ranks.sum(total, counted)
    return total / counted
