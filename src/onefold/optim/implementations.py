"""Which of torch's implementations steps sharded parameters, where the user has named none (`foreach` and `fused` are None).

| parameters are                                     | torch takes by itself | here                                                   |
|----------------------------------------------------|-----------------------|--------------------------------------------------------|
| on an accelerator                                  | foreach               | fused: one pass over masters, gradients and states     |
| on the host, of a model on an accelerator          | a loop in Python      | fused                                                  |
| on the host, of a model on the host: few and small | a loop in Python      | foreach: the same bits, fewer calls                    |
| any other                                          | a loop in Python      | the same: it stays in the cache; DDP's bits            |

On the host foreach has the loop's bits. fused differs from both in the last bit of Adam's and AdamW's, on any device. So a model on the
host keeps the bits that it has under DDP. A model on an accelerator takes what is fastest: its sums are in another order than those of
NCCL's all-reduce anyway. Give the optimizer `foreach=False` for the loop, or `foreach=True` or `fused=True` for one of these.

Only for classes of torch's own whose groups have both options, for the time of a step: torch's `param_groups` look as ever outside of it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch.optim.optimizer import Optimizer

#: Element-wise, with both options, and (SGD, Adam, AdamW on the host) with the loop's bits in foreach.
_KNOWN = (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW)
#: Where torch has fused kernels worth taking.
FUSED_ON = frozenset(("cuda", "xpu"))
#: Bytes of a parameter, and of a group, up to which foreach on the host costs less in calls than it loses in passes over memory.
FEW, SMALL = 32 << 20, 64 << 10


class Chosen:
    """Options of parameter groups that are set until `end`."""

    def __init__(self, optimizer: Optimizer, groups: Sequence[dict[str, Any]], device: torch.device) -> None:
        """`groups`: the optimizer's, or copies of them. `device`: of the model that the parameters are of."""
        self._set: list[tuple[dict[str, Any], str]] = []
        if type(optimizer) not in _KNOWN:
            return
        for group in groups:
            if (name := _best(group, device)) is not None:
                group[name] = True
                self._set.append((group, name))
                if name == "fused":
                    _bring_steps(optimizer, group["params"])

    def end(self) -> None:
        """The groups are as the user made them."""
        options, self._set = self._set, []
        for group, name in options:
            group[name] = None


def is_known(optimizer: Optimizer) -> bool:
    """Whether the optimizer is one of torch's whose implementations are known here; classes derived from them may do anything."""
    return type(optimizer) in _KNOWN


def supports_scaling(optimizer: Optimizer, device: torch.device) -> bool:
    """Whether each group would be stepped by a fused kernel, which takes a loss scale and skips an overflow without asking the host."""
    return type(optimizer) in _KNOWN and all(_best(group, device) == "fused" for group in optimizer.param_groups)


def _best(group: dict[str, Any], device: torch.device) -> str | None:
    """The option to set for a step of `group`; None where torch's own choice stands."""
    if group.get("fused") is not None or group.get("foreach") is not None or group.get("differentiable") or group.get("capturable"):
        return None
    if isinstance(group["lr"], torch.Tensor) or any(isinstance(beta, torch.Tensor) for beta in group.get("betas", ())):
        return None
    params: Iterable[torch.Tensor] = group["params"]
    sizes = [p.numel() * p.element_size() for p in params if p.is_floating_point()]
    if not sizes or len(sizes) < len(group["params"]):
        return None
    places = {p.device.type for p in params}
    if device.type in FUSED_ON and places <= {device.type, "cpu"}:
        return "fused"
    if places == {"cpu"} and device.type == "cpu" and max(sizes) <= SMALL and sum(sizes) <= FEW:
        return "foreach"
    return None


def _bring_steps(optimizer: Optimizer, params: Iterable[torch.Tensor]) -> None:
    """Fused kernels read the count of steps where the parameter is; others, and what was loaded, keep it on the host."""
    for param in params:
        step = optimizer.state[param].get("step") if param in optimizer.state else None
        if isinstance(step, torch.Tensor) and step.device != param.device:
            optimizer.state[param]["step"] = step.to(param.device, torch.float32)
