"""Optimizers of torch and written by hand, two of them, schedules, closures."""

from __future__ import annotations

from typing import Any

import torch

from scripts.loop import Script, _step
from scripts.registry import EITHER, REFUSED, ROUNDING, habit

OPTIMIZERS = {
    "AdamW, `foreach=True`": lambda ps: torch.optim.AdamW(ps, lr=0.02, eps=1e-4, foreach=True),
    "AdamW, `fused=True`": lambda ps: torch.optim.AdamW(ps, lr=0.02, eps=1e-4, fused=True),
    "AdamW, lr as a tensor": lambda ps: torch.optim.AdamW(ps, lr=torch.tensor(0.02), eps=1e-4),
}
for _title, _make in OPTIMIZERS.items():
    habit(f"torch.optim: {_title}", "optimizer")(lambda s, make=_make: make(s.model.parameters()))


@habit(
    "torch.optim: LBFGS (looks at all parameters)",
    sharded=REFUSED,
    expect=ROUNDING,
    one=ROUNDING,
)
class Together:
    def optimizer(self, s: Script) -> Any:
        return torch.optim.LBFGS(s.model.parameters(), lr=0.1, max_iter=2)

    def step(self, s: Script) -> None:
        s.optimizer.step(lambda: s.loss)


class ScheduleFree(torch.optim.Optimizer):
    """Schedule-free SGD: parameters are y in training and x in evaluation."""

    def __init__(self, params: Any, lr: float = 0.1, beta: float = 0.9) -> None:
        super().__init__(params, {"lr": lr, "beta": beta, "k": 0})

    @torch.no_grad()
    def swap(self, to_x: bool) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if "z" in self.state[p]:
                    p.data.lerp_(
                        end=self.state[p]["z"],
                        weight=1 - 1 / group["beta"] if to_x else 1 - group["beta"],
                    )

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            group["k"] += 1
            ckp1 = 1 / group["k"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                if "z" not in self.state[p]:
                    self.state[p]["z"] = torch.clone(p.data)
                z = self.state[p]["z"]
                p.data.lerp_(end=z, weight=ckp1)
                p.data.add_(p.grad, alpha=group["lr"] * (group["beta"] * (1 - ckp1) - 1))
                z.sub_(p.grad, alpha=group["lr"])


@habit("schedule-free: evaluated at x, back to y")
class ScheduleFreeSwap:
    def optimizer(self, s: Script) -> Any:
        return ScheduleFree(s.model.parameters())

    def log(self, s: Script) -> None:
        s.optimizer.swap(to_x=True)
        with torch.no_grad():
            s.note("loss", s.cross_entropy().item())
        s.optimizer.swap(to_x=False)


@habit("SGD by hand: `for p in model.parameters(): p.data -= lr * p.grad`", "step")
def by_hand(s: Script) -> None:
    for p in s.model.parameters():
        p.data -= 0.1 * p.grad


@habit("two optimizers that step in turn")
class InTurn:
    def optimizer(self, s: Script) -> Any:
        return [
            torch.optim.SGD(s.module.blocks.parameters(), lr=0.1),
            torch.optim.SGD(s.module.head.parameters(), lr=0.1),
        ]

    def step(self, s: Script) -> None:
        s.optimizers[s.step % 2].step()


@habit(
    "an optimizer a parameter, stepped in a post-accumulate hook",
    sharded=EITHER,
    zero=EITHER,
    reference="plain",
)
class InHook:
    def optimizer(self, s: Script) -> Any:
        self.each = {p: torch.optim.SGD([p], lr=0.1) for p in s.model.parameters()}

        def hook(p: Any) -> None:
            self.each[p].step()
            self.each[p].zero_grad()

        for p in s.model.parameters():
            p.register_post_accumulate_grad_hook(hook)
        return []


@habit("`optimizer.step(closure)` that computes the loss")
class Closure:
    def backward(self, s: Script, loss: Any) -> None:
        pass

    def step(self, s: Script) -> None:
        def closure() -> Any:
            s.optimizer.zero_grad()
            loss = s.cross_entropy()
            loss.backward()
            return loss

        s.note("loss", float(s.optimizer.step(closure)))


@habit(
    "SAM: ascend by the gradient's norm, second pass, back, step", expect=ROUNDING, sharded=ROUNDING
)
class SAM:
    def gradients(self, s: Script) -> None:
        with torch.no_grad():
            norm = torch.stack(
                [p.grad.norm() for p in s.model.parameters() if p.grad is not None]
            ).norm()
            self.moved = {}
            for p in s.model.parameters():
                e = p.grad * (0.05 / (norm + 1e-12))
                p.add_(e)
                self.moved[p] = e
        s.optimizer.zero_grad()
        s.cross_entropy().backward()
        with torch.no_grad():
            for p in s.model.parameters():
                p.sub_(self.moved[p])


@habit("`optimizer.zero_grad(set_to_none=False)`", "zero")
def zero_in_place(s: Script) -> None:
    s.optimizer.zero_grad(set_to_none=False)


@habit("a NaN loss skips the step on every rank")
class SkipNaN:
    def step(self, s: Script) -> None:
        if torch.isfinite(s.loss) and s.step != 1:
            _step(s)
