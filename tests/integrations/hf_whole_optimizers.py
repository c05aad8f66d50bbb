"""An optimizer of whole matrices as people write it for Trainer, which takes one optimizer."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch.optim import _muon
from torch.optim.optimizer import Optimizer


class MuonBesideAdam(Optimizer):
    """Muon for matrices and Adam for the rest, told apart by `p.ndim`, in one step of its own."""

    def __init__(self, params: Iterable[Any], lr: float = 1e-2, weight_decay: float = 0.0) -> None:
        listed = list(params)
        groups = listed if isinstance(listed[0], dict) else [{"params": listed}]
        by_dims = [
            {**group, "params": [p for p in group["params"] if (p.ndim == 2) == matrices]}
            for group in groups
            for matrices in (True, False)
        ]
        wanted = [group for group in by_dims if group["params"]]
        super().__init__(wanted, {"lr": lr, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if p.ndim == 2:
                    momentum = state.setdefault("momentum", torch.zeros_like(p))
                    momentum.lerp_(p.grad, 0.05)
                    update = _muon._zeropower_via_newtonschulz(
                        p.grad.lerp(momentum, 0.95), (3.4445, -4.7750, 2.0315), 5, 1e-7
                    )
                    p.add_(update.to(p.dtype), alpha=-group["lr"])
                    continue
                state["step"] = state.get("step", 0) + 1
                first = state.setdefault("first", torch.zeros_like(p)).lerp_(p.grad, 0.1)
                second = state.setdefault("second", torch.zeros_like(p))
                second.lerp_(p.grad.square(), 0.01)
                up = 1 - 0.9 ** state["step"]
                root = (second / (1 - 0.99 ** state["step"])).sqrt() + 1e-8
                p.sub_(first / root, alpha=group["lr"] / up)
