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
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import onefold
from onefold.checkpoint.per_rank import capture, restore
from onefold.data.samples import Batch, eval_batches
from onefold.device import has_streams, memory_figures, reading
from onefold.observe.memory import resident_memory
from onefold.observe.meter import Meter
from onefold.observe.trace import measured, record
from onefold.optim.clip import skips_on_device, step_unless
from onefold.processes.signals import Stop
from onefold.runtime.differentiate import in_autograd, tensors_in
from onefold.runtime.engine import Engine
from onefold.runtime.parameters.parameter import disable_torch_function
from onefold.train.checkpoints import Keeper
from onefold.train.optimizers import peak_lr, rates
from onefold.train.prepare import Run
from onefold.train.report import Row
from onefold.wording import TrainError

#: Overflows in a row that end the run. 40 halvings bring a loss scale of 65536 to almost nothing.
SCALER_LIMIT = 40
#: The step (from 0) of a start that is recorded. Earlier steps build optimizer states and record the
#: order of units.
RECORDED = 3


def train(
    run: Run,
    stop_requested: Callable[[], int],
    report: Callable[[Row], None],
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
        keeper: writes the checkpoints; None writes none.
        alert: tells the user of something that needs attention.

    Raises:
        TrainError: loss or gradients are not finite, and the run must end.
    """
    loop = _Loop(run, stop_requested, report, keeper, alert)
    run.model.train()
    step = run.start
    while step < run.steps and not run.stopped:
        loop.step(step)
        step += 1
    return step


@dataclass
class _Step:
    """A step that the host has launched.

    Attributes:
        generators: the random generators' states before the step. begun: seconds of
            `time.perf_counter`. own: seconds that this rank computed without waiting.
        numbers: returns this rank's part of the loss, the gradient norm and, with a scaler on the
            device, the loss scale after the step. Waits for them, and for nothing launched later.
        tokens: of this rank; of all once the numbers are read. row: the step's figures, as far as they
            are known.
    """

    number: int
    generators: dict[str, Any]
    tokens: int
    begun: float
    own: float
    numbers: Callable[[], list[float]]
    row: Row = field(default_factory=dict)


@dataclass
class _Loop:
    """Runs one step at a time. The fields are the arguments of `train`. All conditions that lead to a
    collective are the same on every rank: `run.stopped` is what the ranks have agreed on.
    """

    run: Run
    stop_requested: Callable[[], int]
    report: Callable[[Row], None]
    keeper: Keeper | None
    alert: Callable[[str], None]

    def __post_init__(self) -> None:
        run = self.run
        self.engine = onefold.engine_of(run.model)
        self.late = skips_on_device(run.optimizer, self.engine)
        flops = run.choice.flops_per_token, run.choice.peak_flops
        self.meter = Meter(run.model, run.optimizer, *flops)
        self.waiting: _Step | None = None  # the step before, if it is not read yet
        self.bad = self.overflows = 0  # in a row
        self.recorded = min(run.start + RECORDED, run.steps - 1)
        self._arrived = 0.0

    def step(self, step: int) -> None:
        """Do step number `step` (from 0)."""
        run, scaler = self.run, self.run.scaler
        for group in run.optimizer.param_groups:
            group["lr"] = peak_lr(run.config, group) * run.factor(step)
        generators = capture()
        self.meter.start()
        with self._recording(step):
            begun, waited = time.perf_counter(), self.engine.traffic.exposed
            loss, tokens = forward_backward(run, step)
            norm = measure_gradients(run)
            own = time.perf_counter() - begun - (self.engine.traffic.exposed - waited)
            seen = _Step(
                step, generators, tokens, begun, max(0.0, own), lambda: [float(loss), float(norm)]
            )
            before, self.waiting = self.waiting, None
            if before is not None:
                self._judge(before)
            elif self.late:
                self._ask()
            if self.late:
                update_unless_bad(run, loss, norm)
            else:
                self._judge(seen)
                apply = "left_out" not in seen.row
                if apply and scaler is not None:
                    scaler.step(run.optimizer)
                elif apply:
                    run.optimizer.step()
            if scaler is not None:
                scaler.update()
            run.optimizer.zero_grad()
            if self.late:
                scale = [scaler._scale] if scaler is not None else []
                seen.numbers = reading(loss, norm, *scale)
            elif scaler is not None:
                seen.row["scale"] = scaler.get_scale()
            seen.row = {**self._figures(step, seen.tokens), **seen.row}
            if before is not None:
                self.report(before.row)
            if self.late and not self._is_needed(step):
                self.waiting = seen
            elif self.late:
                self._judge(seen)
        if self.waiting is None:
            if self._evaluates(step):
                sent = self.engine.traffic.sent().nbytes
                held_out = held_out_loss(run)
                seen.row["eval_loss"] = held_out if math.isfinite(held_out) else None
                seen.row["eval_wire_bytes"] = self.engine.traffic.sent().nbytes - sent
            self.report(seen.row)
        if self.keeper is not None:
            self.keeper.after(step + 1)

    @contextlib.contextmanager
    def _recording(self, step: int) -> Iterator[None]:
        """Record the step inside the block for the report: step number `recorded`, or the first one after
        it in which the optimizer steps.
        """
        run = self.run
        if run.recording is not None or step < self.recorded:
            yield
            return
        with record(run.model, run.optimizer, activations=True) as seen:
            yield
        if seen.steps:
            run.recording, run.measured = seen, measured(run.model, run.optimizer, seen)

    def _ask(self, *values: float) -> list[float]:
        """Agree with the other ranks on a request to stop, and return the greatest of each value.
        Collective.
        """
        asked, *greatest = self.run.ranks.sum(
            float(self.stop_requested()), *values, how=dist.ReduceOp.MAX
        )
        self.run.stopped |= Stop(int(asked))
        return greatest

    def _judge(self, seen: _Step) -> None:
        """Read a step's numbers, exchange them with the other ranks, judge them, and complete the step's
        row. Collective.

        Raises:
            TrainError: the run ends here.
        """
        ranks = self.run.ranks
        loss, norm, *scale = seen.numbers()
        # The greatest and its rank in one number: nothing here grows with the number of ranks
        mine = round(seen.own * 1e6) * ranks.world_size + ranks.rank
        slow, least = self._ask(mine, -seen.own)
        # Ranks that divide layers have the same loss and tokens
        row, sums = seen.row, ranks.sum(loss, seen.tokens)
        loss, tokens = (total / self.run.config.tp for total in sums)
        row["tokens"] = seen.tokens = round(tokens)
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
        if scale:
            row["scale"] = scale[0]

    def _is_fine(self, seen: _Step, loss: float, norm: float) -> bool:
        """Whether a step's update counts. All ranks judge alike, because the numbers are the same.

        Raises:
            TrainError: the run ends here.
        """
        run, config, step = self.run, self.run.config, seen.number
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
            where = (
                "its backward pass has stepped units, so it is not run again to find where: leave out"
                " --step-in-backward for that, and for --clip and --on-nonfinite skip"
            )
            if not run.recipe.step_in_backward:
                where = locate(run, step, seen.generators)
            many = f" That makes {self.bad} such steps in a row (--nonfinite-limit)."
            raise TrainError(
                f"{text}; {where}.{many if config.on_nonfinite == 'skip' else ''} Try a lower --lr, a"
                " longer --warmup, or --clip; --on-nonfinite skip goes on without single steps."
            )
        self.alert(f"{text}. The step is left out.")
        return False

    def _is_needed(self, step: int) -> bool:
        """Whether the step must be read before the next one begins. The same on every rank."""
        run, last = self.run, step + 1 == self.run.steps
        saves = self.keeper is not None and self.keeper.saves(step + 1)
        recorded = run.recording is None and step + 1 >= self.recorded
        return bool(run.stopped) or last or saves or recorded or self._evaluates(step)

    def _evaluates(self, step: int) -> bool:
        every, due = self.run.config.eval_every, step + 1 == self.run.steps
        if not every or self.run.stopped or not self.run.data.size(held_out=True):
            return False
        return due or (step + 1) % every == 0

    def _figures(self, step: int, tokens: int) -> Row:
        """Return a step's figures that need nothing from the device. `held` is the engine's memory,
        `memory` that of the GPU, else of the process.
        """
        figures, seen = self.meter.step(tokens=tokens), memory_figures(self.run.ranks.device)
        now, peak = resident_memory()
        if seen is not None:
            now, peak = seen.allocated, seen.allocated_peak
        row = {
            **figures,
            "step": step + 1,
            "held": figures["memory"],
            "memory": now,
            "memory_peak": peak,
        }
        return row | rates(self.run.optimizer.param_groups)


# -- the parts of a step ---------------------------------------------------------------------------


def forward_backward(run: Run, step: int) -> tuple[torch.Tensor, int]:
    """Compute one step's gradients and leave them in the model.
    Returns (this rank's part of the loss, in fp32 on the device; tokens of this rank).
    """
    samples = run.data.samples
    mine = run.order.micro_batches(step, run.part, run.parts, run.choice.micro_batch)
    counts = [samples.counted(chosen) for chosen in mine]
    counted: float = sum(counts) * run.parts
    if not samples.count_alike:
        counted = run.ranks.sum(sum(counts))[0] / run.config.tp
    tokens = 0
    loss_sum: torch.Tensor | None = None
    for number, (chosen, count) in enumerate(zip(mine, counts, strict=True)):
        last = number + 1 == len(mine)
        batch = samples.batch(chosen)
        tokens += batch["input_ids"].numel()
        with contextlib.nullcontext() if last else onefold.no_sync(run.model):
            loss = loss_of(run.model, batch, run.ranks.device)
            part = loss * (count / counted)
            scaled = part * run.parts
            (scaled if run.scaler is None else run.scaler.scale(scaled)).backward()
        loss_sum = part.detach() if loss_sum is None else loss_sum + part.detach()
    assert loss_sum is not None
    return loss_sum, tokens


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


def update_unless_bad(run: Run, loss: torch.Tensor, norm: torch.Tensor) -> None:
    """Step, unless `loss` or the gradients are not finite on some rank. The device decides, and the
    host does not wait for it. Collective.
    """
    bad = loss.isfinite().logical_not().to(torch.float32)
    onefold.engine_of(run.model).agree_on_overflow(bad)
    if run.scaler is None:
        bad = torch.maximum(bad, norm.isfinite().logical_not().to(torch.float32))
    step_unless(run.optimizer, bad, run.scaler)


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
    cut = run.part, run.parts, run.choice.micro_batch
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
    gathered = ranks.gather((found, _bad_gradients(engine)))
    if places := [place for ours, _ in gathered for place in ours]:
        return f"the first that was not finite: {min(places)[-1]}"
    if bad := {name for _, ours in gathered for name in ours}:
        last = max(bad, key=names.index)
        return f"the first that was not finite: the gradient of a parameter of unit {last!r}"
    return (
        "run once more, the same step was finite everywhere: this computation is not repeatable, or"
        " a device or its memory is faulty"
    )


def _finite(t: torch.Tensor) -> bool:
    return not t.is_floating_point() or bool(torch.isfinite(t.detach()).all())


def _bad_gradients(engine: Engine) -> list[str]:
    """Return the units with a gradient that is not finite on this rank, in forward order."""
    with disable_torch_function():
        return [
            unit.name
            for unit in engine.units
            if not all(_finite(e.param.grad) for e in unit.entries if e.param.grad is not None)
        ]
