"""Loss scaling for fp16: torch's GradScaler, with an overflow on one rank seen by all ranks."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch

from onefold.optim.clip import by_device, in_memory
from onefold.runtime.engine import Engine
from onefold.runtime.implementations import supports_scaling
from onefold.runtime.parameters.parameter import disable_torch_function
from onefold.runtime.registry import engine_of


class GradScaler(torch.amp.GradScaler):
    """Dynamic loss scaling for a sharded model: `scale`, `unscale_`, `step`, `update` as in
    `torch.amp.GradScaler`.

    Gradients are unscaled on the rank that owns them; if any rank found an infinity or a NaN, every
    rank skips the step.

    Args:
        module: the model that `onefold.shard` returned.
        options: those of torch.amp.GradScaler (init_scale, growth_factor, backoff_factor,
            growth_interval, enabled).
    """

    def __init__(self, module: torch.nn.Module, **options: Any) -> None:
        self._engine: Engine = engine_of(module)
        super().__init__(self._engine.device.type, **options)

    def step(self, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> float | None:
        """Step as torch's GradScaler does. With a fused optimizer the device skips the step after
        an overflow, without a synchronization.
        """
        engine = self._engine
        known = "_step_supports_amp_scaling" in optimizer.__dict__ or kwargs.get("closure") or args
        with disable_torch_function():
            alone = (
                not engine.offloaded_flats
                and engine.recipe.moments is None
                and not engine.unsharded
            )
            fuses = not known and alone and supports_scaling(optimizer, engine.device)
        if not fuses:
            return super().step(optimizer, *args, **kwargs)
        optimizer._step_supports_amp_scaling = True  # type: ignore[attr-defined]
        try:
            return super().step(optimizer)
        finally:
            del optimizer._step_supports_amp_scaling  # type: ignore[attr-defined]

    def _unscale_grads_(
        self,
        optimizer: torch.optim.Optimizer,
        inv_scale: torch.Tensor,
        found_inf: torch.Tensor,
        allow_fp16: bool,
    ) -> dict[torch.device, torch.Tensor]:
        engine = self._engine
        with disable_torch_function(), torch.no_grad():
            grads, on_disk = in_memory(
                engine, (p for group in optimizer.param_groups for p in group["params"])
            )
            found = torch.zeros((), dtype=torch.float32, device=engine.device)
            for on_one in by_device(grads):
                here = torch.zeros((), dtype=torch.float32, device=on_one[0].device)
                on_host = on_one[0].device.type == "cpu"
                with engine.transfers.host_threads() if on_host else nullcontext():
                    torch._amp_foreach_non_finite_check_and_unscale_(
                        on_one, here, inv_scale.to(here.device)
                    )
                found += here.to(engine.device)
            for storage in on_disk:
                found += not storage.gradients_finite()
                storage.scale_gradients(inv_scale)
            engine.agree_on_overflow(found)
        return {engine.device: found}
