"""The figures of each step as plain numbers, for TensorBoard, W&B, MLflow, a file, or others.

meter = Meter(model, optim, flops_per_token=6 * 7e9, peak_flops=989e12)
for batch in loader:
    ...
    row = meter.step(tokens=batch_tokens)     # a dict; flat(row) has no dicts inside
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from onefold.observe.memory import DEVICE, HOST, NVME, held_by_tier, moments_by_tier, ordered
from onefold.plan.schema import MOMENTS
from onefold.runtime.hooks import engine_of
from onefold.runtime.parameters.parameter import disable_torch_function

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
        ValueError: the model was not sharded.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        flops_per_token: float | None = None,
        peak_flops: float | None = None,
    ) -> None:
        self.engine, self.optimizer = engine_of(model), optimizer
        self.flops_per_token, self.peak_flops = flops_per_token, peak_flops
        self.steps = 0
        self._moments: dict[str, int] = {}
        self._moments_of = -1, -1
        self.start()

    def start(self) -> None:
        """Begin the next step now. Call it after an evaluation or a checkpoint, so that their time
        does not count.
        """
        self._begun, self._before = time.perf_counter(), self._counts()

    def _counts(self) -> dict[str, float]:
        """Return what grows: bytes sent, seconds waited, and bytes moved between tiers."""
        traffic, moved = self.engine.traffic, self.engine.transfers.moved
        sent = traffic.sent()
        return {
            "exposed_ms": 1000 * traffic.exposed,
            "io_ms": 1000 * moved.exposed,
            "wire_bytes": sent.nbytes,
            "wire_bytes_between": sent.between,
            "wire_bytes_plain": sent.plain,
            **moved.by_move(),
        }

    def step(self, tokens: int | None = None) -> Row:
        """Return the figures of a step. Call it after the optimizer has stepped.

        Args:
            tokens: of the step, on all ranks together.

        Returns:
            step, lr, tokens, tokens_per_s, mfu, step_ms, exposed_ms (waiting for other ranks), io_ms (waiting for
            NVMe), wire_bytes, wire_bytes_between (those to other nodes, or groups of the recipe), wire_bytes_plain
            (what they would be without codecs), memory (of the device, {"now", "peak"} by category, bytes), host,
            nvme (bytes held there now), moved_bytes (in the step, by "up", "down", "read", "written"; {} without
            such tiers). A figure that is not known is None.
        """
        now, engine = time.perf_counter(), self.engine
        seconds, before, moments = now - self._begun, self._before, self._moments_now()
        self.steps += 1
        self._begun, self._before = now, self._counts()
        grown = {name: n - before.get(name, 0) for name, n in self._before.items()}
        moved = {name: grown.pop(name) for name in engine.transfers.moved.by_move()}
        held = held_by_tier(engine, moments)
        peak = ordered({**engine.memory.peak(), MOMENTS: moments.get(DEVICE, 0)})
        return {
            "step": self.steps,
            "lr": float(self.optimizer.param_groups[0]["lr"]),
            "tokens": tokens,
            **self.rates(seconds, tokens),
            **grown,
            "memory": {"now": held[DEVICE], "peak": peak},
            **{tier: sum(held[tier].values()) for tier in (HOST, NVME)},
            "moved_bytes": moved,
        }

    def rates(self, seconds: float, tokens: int | None) -> Row:
        """Return tokens_per_s, mfu and step_ms of a step that took `seconds`. For callers that know
        better than `step` when the step ended.
        """
        rate = tokens / seconds if tokens is not None and seconds > 0 else None
        mfu = None
        if rate is not None and self.flops_per_token and self.peak_flops:
            mfu = rate * self.flops_per_token / (self.peak_flops * self.engine.world_size)
        return {"tokens_per_s": rate, "mfu": mfu, "step_ms": 1000 * seconds}

    def _moments_now(self) -> dict[str, int]:
        state = self.optimizer.state
        with disable_torch_function():
            key = (len(state), sum(len(s) for s in state.values()))
        # Walk over all states only if there are new ones
        if key != self._moments_of:
            self._moments, self._moments_of = moments_by_tier(self.optimizer, self.engine), key
        return self._moments


def flat(row: Mapping[str, Any], separator: str = "/") -> dict[str, float | int]:
    """Flatten nested dictionaries into one level ("memory/now/gradients"). Leaves out figures that
    are None.
    """
    out: dict[str, float | int] = {}
    for key, value in row.items():
        if isinstance(value, Mapping):
            inner = flat(value, separator).items()
            out |= {f"{key}{separator}{name}": number for name, number in inner}
        elif isinstance(value, bool | int | float):
            out[key] = value
    return out
