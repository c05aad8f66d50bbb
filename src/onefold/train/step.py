"""The parts of one step: gradients, their norm, the update; the loss on held-out samples; and where the
numbers of a step first were not finite.

The engine averages gradients over the data-parallel ranks, as DDP does. Each rank therefore
multiplies its loss by their number. The result is the gradient of the mean over all counted tokens of the global
batch, however the batch is cut into micro-batches and ranks.

[Note: the step is done once more] Hooks that watch every step would cost a pass over every output,
and a synchronization with a GPU. So no hooks are set while all is well. When a run must end because
loss or gradients came out non-finite, the weights are still those that the step began with, and the
random generators' states from before it are kept. So `locate` runs the same step again, bit for bit,
with a hook on each unit, and names the culprit:

    forward    the first unit in forward order whose output is bad
    backward   the first output, in backward order, to which a bad gradient comes: the unit that ran behind it made it; failing
               that, the last unit in forward order with a bad gradient of its own parameters

The backward pass must be searched in backward order. Every unit before the culprit has bad
gradients too, so the first unit in forward order would always be the embedding.
"""

from __future__ import annotations

import contextlib
import math
from functools import partial
from typing import Any

import torch
from torch import nn

import onefold
from onefold.checkpoint.per_rank import restore
from onefold.data.samples import Batch, eval_batches
from onefold.device import has_streams
from onefold.optim.clip import step_unless
from onefold.runtime.differentiate import in_autograd, tensors_in
from onefold.runtime.engine import Engine
from onefold.runtime.parameters.parameter import disable_torch_function
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


ROOT = "(root)"


def locate(run: Run, step: int, generators: dict[str, Any]) -> str:
    """Run a step again, and say where its numbers first were not finite. Collective. The run ends
    afterwards: gradients and random generators are left as they come.

    Args:
        generators: the random generators' states at the step's beginning.
    """
    engine, ranks = onefold.engine_of(run.model), run.ranks
    names = [unit.name for unit in engine.units]
    weights = _bad_units(engine, gradients=False)
    ran: list[str] = []  # the units, as their forward passes ended
    found: list[
        tuple[bool, int, int, str]
    ] = []  # (in the backward pass, in which order, rank, where)

    def note(backward: bool, what: str) -> None:
        found.append((backward, len(found), ranks.rank, f"{what}, on rank {ranks.rank}"))

    def came(at: int, gradient: torch.Tensor) -> None:
        if not _finite(gradient):
            behind = ROOT if ran[at] == ROOT else [*ran, ROOT][at + 1]
            note(True, f"a gradient in the backward pass of unit {behind!r}")

    def after(name: str, module: nn.Module, args: Any, output: Any) -> None:
        # The tensors of a recomputation were looked at in the forward pass
        for t in tensors_in(output) if not in_autograd() else ():
            if t.is_floating_point() and t.requires_grad:
                t.register_hook(partial(came, len(ran)))
            if not _finite(t):
                note(False, f"the output of unit {name!r}")
        ran.append(name)

    run.optimizer.zero_grad()
    restore(generators)
    with contextlib.ExitStack() as stack:
        for unit in engine.units:
            if (module := unit.module()) is not None:
                stack.callback(module.register_forward_hook(partial(after, unit.name)).remove)
        forward_backward(run, step)
    gathered = ranks.gather((weights, found, _bad_units(engine, gradients=True)))
    if broken := next((name for ours, _, _ in gathered for name in ours), ""):
        return f"weights of unit {broken!r} are not finite themselves: an earlier update broke them"
    if places := [place for _, ours, _ in gathered for place in ours]:
        return f"the first that was not finite: {min(places)[-1]}"
    if bad := {name for *_, ours in gathered for name in ours}:
        last = max(bad, key=names.index)
        return f"the first that was not finite: the gradient of a parameter of unit {last!r}"
    return (
        "run once more, the same step was finite everywhere: this computation is not repeatable, or"
        " a device or its memory is faulty"
    )


def _finite(t: torch.Tensor) -> bool:
    return not t.is_floating_point() or bool(torch.isfinite(t.detach()).all())


def _bad_units(engine: Engine, gradients: bool) -> list[str]:
    """Return the units with a non-finite weight or gradient on this rank, in forward order."""
    out = []
    with disable_torch_function(), torch.no_grad():
        for unit in engine.units:
            tensors = [e.param.grad if gradients else e.param for e in unit.entries]
            if not all(_finite(t) for t in tensors if t is not None):
                out.append(unit.name)
    return out
