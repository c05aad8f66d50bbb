"""The figures of each step as plain numbers, for TensorBoard, W&B, MLflow, a file, or others.

    meter = onefold.observe.Meter(model, optim, flops_per_token=6 * 7e9, peak_flops=989e12)
    for batch in loader:
        ...
        row = meter.step(loss=loss, tokens=batch_tokens, grad_norm=norm)     # a dict; flat(row) has no dicts inside

[Note: no synchronization] The meter copies a number on the device asynchronously, after the work
that computes it. The first `step` after the copy has arrived shows the number; that is usually the
next step. On a CPU numbers are shown at once.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import nn

from onefold.device import Reading, has_streams
from onefold.observe.memory import DEVICE, ledgers_of, moments_by_tier
from onefold.plan.schema import MOMENTS
from onefold.runtime.hooks import engine_of
from onefold.runtime.parameters.parameter import disable_torch_function

Number = float | int | torch.Tensor
Row = dict[str, Any]


class Meter:
    """Turns the ledgers' counts since the last step into a row of figures. Local, no
    synchronization, some microseconds per step.

    Args:
        model: what `onefold.shard` returned.
        optimizer: its learning rate and moments are shown.
        flops_per_token: model FLOPs for one token, forward and backward: 6 per parameter, plus
            attention, without recomputation.
        peak_flops: FLOP/s of one rank's hardware in the compute dtype. MFU is None unless both are
            given.

    Raises:
        ValueError: the model was not sharded; `peak_flops` or `flops_per_token` is not above 0.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        flops_per_token: float | None = None,
        peak_flops: float | None = None,
    ) -> None:
        for name, value in (("flops_per_token", flops_per_token), ("peak_flops", peak_flops)):
            if value is not None and not value > 0:
                raise ValueError(
                    f"{name}={value!r}: expected a number above 0, or None if it is not known."
                )
        self.engine = engine_of(model)
        self.optimizer, self.flops_per_token, self.peak_flops = (
            optimizer,
            flops_per_token,
            peak_flops,
        )
        self.steps = self.skipped = 0
        self._late: dict[str, _Late] = {}
        self._scale: float | None = None
        self._moments: dict[str, int] = {}
        self._moments_of = -1, -1
        self.start()

    def start(self) -> None:
        """Begin the next step now. Call it after an evaluation or a checkpoint, so that their time
        does not count.
        """
        self._begun = time.perf_counter()
        self._note()

    def _note(self) -> None:
        traffic, moved = self.engine.traffic, self.engine.transfers.moved
        self._sent, self._exposed, self._moved, self._waited = (
            self._wire(),
            traffic.exposed,
            moved.by_move(),
            moved.exposed,
        )

    def _wire(self) -> dict[str, int]:
        """Return the bytes sent so far: all; those between nodes, if there are several; and without
        codecs, if codecs are used.
        """
        traffic, recipe = self.engine.traffic, self.engine.recipe
        sent = {"wire_bytes": traffic.total()}
        if self.engine.group.borders:
            sent["wire_bytes_between"] = traffic.by_link()["between"]
        if self.engine.world_size > 1 and (
            recipe.parameters.codec or recipe.gradients.codec or recipe.frozen
        ):
            sent["wire_bytes_plain"] = traffic.sent().plain
        return sent

    def step(
        self,
        loss: Number | None = None,
        tokens: int | None = None,
        grad_norm: Number | None = None,
        scaler: Any = None,
    ) -> Row:
        """Return the figures of a step. Call it after the optimizer has stepped.

        Args:
            loss: a number or a one-element tensor. See [Note: no synchronization].
            grad_norm: likewise.
            tokens: of the step, on all ranks together.
            scaler: a GradScaler. A step after which its scale fell counts as skipped.

        Returns:
            step, loss, grad_norm, lr, scale, skipped (so far), tokens, tokens_per_s, mfu, step_ms,
            exposed_ms, wire_bytes, memory (of the device, {"now", "peak"} by category, bytes),
            host, nvme (bytes held there now; every tier besides the device), moved_bytes (in the step, by "up", "down", "read",
            "written"; {} without such tiers), io_ms (waiting for NVMe). A figure that is not known
            is None. With several nodes (or groups of the recipe) also wire_bytes_between, the part
            of wire_bytes that went to others. With codecs also wire_bytes_plain, what wire_bytes
            would be without them.
        """
        now = time.perf_counter()
        seconds = now - self._begun
        traffic, moved = self.engine.traffic, self.engine.transfers.moved
        held = {
            tier: sum(ledger.now().values()) for tier, ledger in ledgers_of(self.engine).items()
        }
        self.steps += 1
        scale = self._scale_of(scaler)
        moments = self._moments_now()
        own = {MOMENTS: moments[DEVICE]} if moments.get(DEVICE) else {}
        row: Row = {
            "step": self.steps,
            "loss": self._number("loss", loss),
            "grad_norm": self._number("grad_norm", grad_norm),
            "lr": float(self.optimizer.param_groups[0]["lr"]),
            "scale": scale,
            "skipped": self.skipped,
            "tokens": tokens,
            **self.rates(seconds, tokens),
            "exposed_ms": 1000 * (traffic.exposed - self._exposed),
            **{name: sent - self._sent[name] for name, sent in self._wire().items()},
            "memory": {
                "now": {**self.engine.memory.now(), **own},
                "peak": {**self.engine.memory.peak(), **own},
            },
            **{tier: nbytes + moments.get(tier, 0) for tier, nbytes in held.items()},
            "moved_bytes": {
                move: nbytes - self._moved.get(move, 0) for move, nbytes in moved.by_move().items()
            },
            "io_ms": 1000 * (moved.exposed - self._waited),
        }
        self._begun = now
        self._note()
        return row

    def rates(self, seconds: float, tokens: int | None) -> Row:
        """Return tokens_per_s, mfu and step_ms of a step that took `seconds`. For callers that know
        better than `step` when the step ended.
        """
        rate = tokens / seconds if tokens is not None and seconds > 0 else None
        return {"tokens_per_s": rate, "mfu": self._mfu(rate), "step_ms": 1000 * seconds}

    def _mfu(self, tokens_per_s: float | None) -> float | None:
        if tokens_per_s is None or self.flops_per_token is None or self.peak_flops is None:
            return None
        return tokens_per_s * self.flops_per_token / (self.peak_flops * self.engine.world_size)

    def _scale_of(self, scaler: Any) -> float | None:
        """Return the loss scale, and count a skipped step if it fell."""
        if scaler is None:
            return None
        tensor = getattr(scaler, "_scale", None)  # get_scale() waits for the device
        scale = self._number(
            "scale", tensor if isinstance(tensor, torch.Tensor) else scaler.get_scale()
        )
        if scale is not None:
            if self._scale is not None and scale < self._scale:
                self.skipped += 1
            self._scale = scale
        return scale

    def _number(self, name: str, value: Number | None) -> float | None:
        if value is None:
            return None
        if not isinstance(value, torch.Tensor):
            return float(value)
        if value.numel() != 1:
            raise ValueError(
                f"{name} has shape {tuple(value.shape)}: expected one number; take its mean() or"
                " sum() first."
            )
        if not has_streams(value.device):
            return float(value.detach())
        return self._late.setdefault(name, _Late()).show(value)

    def _moments_now(self) -> dict[str, int]:
        state = self.optimizer.state
        with disable_torch_function():
            key = (len(state), sum(len(s) for s in state.values()))
        # Walk over all states only if there are new ones
        if key != self._moments_of:
            self._moments, self._moments_of = moments_by_tier(self.optimizer, self.engine), key
        return self._moments


class _Late:
    """A series of device values; `show` returns the latest value that has arrived on the host."""

    def __init__(self) -> None:
        self.waiting: list[Reading] = []
        self.last: float | None = None

    def show(self, value: torch.Tensor) -> float | None:
        self.waiting.append(Reading(value))
        while self.waiting and self.waiting[0].arrived:
            (self.last,) = self.waiting.pop(0).numbers()
        return self.last


def flat(row: Mapping[str, Any], separator: str = "/") -> dict[str, float | int]:
    """Flatten nested dictionaries into one level ("memory/now/gradients"). Leaves out figures that
    are None.
    """
    out: dict[str, float | int] = {}
    for key, value in row.items():
        if isinstance(value, Mapping):
            out.update(
                {f"{key}{separator}{inner}": v for inner, v in flat(value, separator).items()}
            )
        elif isinstance(value, bool | int | float):
            out[key] = value
    return out


class TensorBoard:
    """Writes rows (of `Meter.step`, or any dictionary of numbers) as TensorBoard scalars. A context
    manager.

    Args:
        folder: where the event files go; `tensorboard --logdir FOLDER` shows them.
        after: the step to resume from. Scalars of later steps in the folder are voided. None begins
            anew.

    Raises:
        ModuleNotFoundError: TensorBoard is not installed; the message says how to install it.
    """

    def __init__(self, folder: str | Path, *, after: int | None = None) -> None:
        try:
            module: Any = import_module("torch.utils.tensorboard")
        except ImportError as error:
            raise ModuleNotFoundError(
                "writing for TensorBoard needs the package tensorboard, which is not installed: pip"
                " install tensorboard",
                name="tensorboard",
            ) from error
        void = None if after is None else after + 1
        self._writer: Any = module.SummaryWriter(str(folder), purge_step=void)

    def write(self, row: Mapping[str, Any], step: int | None = None) -> None:
        """Write every number of `row` as a scalar at `step` (None takes row["step"])."""
        at = step if step is not None else row.get("step")
        for name, value in flat(row).items():
            if name != "step":
                self._writer.add_scalar(name.replace(" ", "_"), value, at)

    def close(self) -> None:
        self._writer.close()

    def __enter__(self) -> TensorBoard:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
