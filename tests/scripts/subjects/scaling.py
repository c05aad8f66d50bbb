"""Loss scaling and autocast."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.utils import clip_grad_norm_

from scripts.loop import Script
from scripts.registry import ROUNDING, habit


class Scaled:
    """torch's own scaler on the CPU; fp32 gradients, so that what is scaled by a power of two keeps
    its bits.
    """

    unscale = clip = False

    def after(self, s: Script) -> None:
        self.scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)

    def backward(self, s: Script, loss: Any) -> None:
        self.scaler.scale(loss).backward()
        if self.unscale:
            self.scaler.unscale_(s.optimizer)
        if self.clip:
            clip_grad_norm_(s.model.parameters(), 0.5)

    def step(self, s: Script) -> None:
        self.scaler.step(s.optimizer)
        self.scaler.update()
        s.note("scale", self.scaler.get_scale())


@habit("`torch.amp.GradScaler`, two optimizers")
class Two(Scaled):
    def optimizer(self, s: Script) -> Any:
        return [
            torch.optim.SGD(s.module.blocks.parameters(), lr=0.1),
            torch.optim.SGD(s.module.head.parameters(), lr=0.1),
        ]

    def step(self, s: Script) -> None:
        for optimizer in s.optimizers:
            self.scaler.step(optimizer)
        self.scaler.update()
        s.note("scale", self.scaler.get_scale())


@habit("`torch.amp.GradScaler`, one layer overflows on one rank only")
class OverflowLayerOfRank(Scaled):
    def after(self, s: Script) -> None:
        super().after(s)

        def through(module: Any, args: Any, output: Any) -> None:
            if s.step == 1 and s.rank == 0:
                output.register_hook(lambda g: g * float("inf"))

        s.module.positions.register_forward_hook(through)


@habit("`scaler.state_dict()` saved and loaded on the way")
class ScalerState(Scaled):
    def weights(self, s: Script) -> None:
        state = self.scaler.state_dict()
        self.scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        self.scaler.load_state_dict(state)
        s.note("state", {k: v for k, v in state.items() if not k.startswith("_")})


@habit("a static loss scale by hand: `(loss * 1024).backward(); p.grad.div_(1024)`")
class Static:
    def backward(self, s: Script, loss: Any) -> None:
        (loss * 1024.0).backward()
        for p in s.model.parameters():
            p.grad.div_(1024.0)


@habit(
    "`torch.autocast('cpu', torch.bfloat16)` around the forward pass",
    "forward",
    expect=ROUNDING,
    rtol=1e-2,
    atol=1e-3,
)
def autocast(s: Script) -> Any:
    with torch.autocast("cpu", torch.bfloat16):
        return s.cross_entropy()


@habit(
    "autocast with `torch.amp.GradScaler` and clipping (the whole recipe)",
    expect=ROUNDING,
    rtol=1e-2,
    atol=1e-3,
)
class Whole(Scaled):
    unscale = clip = True

    def forward(self, s: Script) -> Any:
        return autocast(s)
