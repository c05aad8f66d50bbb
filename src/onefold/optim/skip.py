"""Skip a step without telling the host: the device decides.

torch's fused kernels take a number on the device, `found_inf`. If it is 1, the kernel writes
neither weights nor moments, and torch takes back the step counts that bias correction uses. All
state is as if `step()` had not been called.

| the step is made                                        | who decides                                         |
|---------------------------------------------------------|-----------------------------------------------------|
| by a fused kernel, on a device with streams             | the device                                          |
| on the host (offloaded shards)                          | the host, which waits for the gradients anyway      |
| piece by piece (packed moments, stochastic rounding)    | the host: packing them again would change them      |
| by a loop or foreach, or by an unknown optimizer        | the host: these take no `found_inf`                 |
| on a device without streams                             | the host: it never waits for such a device          |
"""

from __future__ import annotations

from typing import Any

import torch

from onefold.device import has_streams
from onefold.runtime.engine import Engine
from onefold.runtime.implementations import is_known


def skips_on_device(optimizer: torch.optim.Optimizer, engine: Engine) -> bool:
    """Return whether `step_unless` can be used: the device decides. See the table above."""
    in_one_piece = (
        not engine.offloaded_flats
        and engine.recipe.moments is None
        and not engine.recipe.stochastic_rounding
    )
    fused = is_known(optimizer) and all(group.get("fused") for group in optimizer.param_groups)
    return has_streams(engine.device) and in_one_piece and fused


def step_unless(
    optimizer: Any, skip: torch.Tensor, scaler: torch.amp.GradScaler | None = None
) -> None:
    """Call `optimizer.step()`, without effect if `skip` is 1. The host never reads `skip`.

    Args:
        optimizer: one for which `skips_on_device` returns True.
        skip: 0 or 1 in fp32, 0-dim, on the device, the same on every rank.
        scaler: the scaler that has unscaled the gradients. The step is also skipped if it found an
            overflow. The caller must call its `update`.
    """
    if scaler is not None:
        for found in scaler._found_inf_per_device(optimizer).values():
            skip = torch.maximum(skip, (found > 0).to(skip))
    optimizer.grad_scale, optimizer.found_inf = None, skip
    try:
        optimizer.step()
    finally:
        del optimizer.grad_scale, optimizer.found_inf
