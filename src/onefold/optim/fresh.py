"""The state that an optimizer gives a parameter at its first step."""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import Optimizer


def fresh_state(optimizer: Optimizer, group: dict[str, Any], param: torch.Tensor) -> dict[str, Any]:
    """Return the state that `optimizer` would give `param`, of its group `group`, at its first
    step. A copy of the optimizer steps a stand-in, so no parameter, hook or step count changes.

    In contrast, torch's `_init_optim_state` steps the real optimizer, with zero gradients and a
    learning rate of zero, and leaves `step` at 1.

    Raises:
        Exception: what the optimizer's step raises, for instance because it needs a closure.
    """
    stand_in = nn.Parameter(torch.zeros_like(param))
    stand_in.grad = torch.zeros_like(stand_in)
    twin = object.__new__(type(optimizer))
    # Schedulers replace `step` in the instance by one that counts
    twin.__dict__.update({k: v for k, v in optimizer.__dict__.items() if k != "step"})
    twin.state = defaultdict(dict)
    twin.param_groups = [{**group, "params": [stand_in]}]
    twin._optimizer_step_pre_hooks, twin._optimizer_step_post_hooks = OrderedDict(), OrderedDict()
    twin.step()
    state = dict(twin.state.get(stand_in, {}))
    step = state.get("step")
    if isinstance(step, torch.Tensor):
        step.zero_()
    elif step is not None:
        state["step"] = 0
    return state
