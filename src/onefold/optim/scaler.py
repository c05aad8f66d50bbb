"""Loss scaling for fp16: torch's GradScaler, with overflow found anywhere counted everywhere."""

from __future__ import annotations

from typing import Any

import torch

from onefold.comm import Place
from onefold.runtime.engine import Engine
from onefold.runtime.parameter import whole_sight
from onefold.runtime.registry import engine_of


class GradScaler(torch.amp.GradScaler):
    """Dynamic loss scaling for a sharded model: `scale`, `unscale_`, `step`, `update` as in `torch.amp.GradScaler`.

    Gradients are unscaled on the rank that owns them; if any rank found an infinity or a NaN, every rank skips the step.

    Args:
        module: the model that `onefold.shard` returned.
        options: those of torch.amp.GradScaler (init_scale, growth_factor, backoff_factor, growth_interval, enabled).
    """

    def __init__(self, module: torch.nn.Module, **options: Any) -> None:
        self._engine: Engine = engine_of(module)
        super().__init__(self._engine.device.type, **options)

    def _unscale_grads_(
        self, optimizer: torch.optim.Optimizer, inv_scale: torch.Tensor, found_inf: torch.Tensor, allow_fp16: bool
    ) -> dict[torch.device, torch.Tensor]:
        engine = self._engine
        with whole_sight(), torch.no_grad():
            engine.optimizer_is_stepping()
            grads = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
            found = torch.zeros((), dtype=torch.float32, device=engine.device)
            if grads:
                torch._amp_foreach_non_finite_check_and_unscale_(grads, found, inv_scale.to(engine.device))
            place = Place("control", "(overflow check)", engine.step, "optimizer")
            found.fill_(engine.group.gather_values(found, place).max())
        return {engine.device: found}
