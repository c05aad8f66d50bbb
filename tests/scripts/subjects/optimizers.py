"""Optimizers of torch and written by hand, two of them, schedules, closures."""

from __future__ import annotations

import contextlib
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


class LARS(torch.optim.Optimizer):
    """A trust ratio by the layer's norm: not element-wise."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.add_(
                        p.grad, alpha=-group["lr"] * float(p.norm() / (p.grad.norm() + 1e-6)) * 0.1
                    )


for _title, _class in {
    "schedule-free SGD": ScheduleFree,
}.items():
    habit(f"a written optimizer: {_title}", "optimizer")(
        lambda s, c=_class: c(s.model.parameters())
    )

habit("a written optimizer: LARS (a norm for each layer)", "optimizer")(
    lambda s: LARS(s.model.parameters())
)


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


@habit("SGD by hand: `p.sub_(lr * p.grad); p.grad = None`", "step")
@torch.no_grad()
def sub_and_none(s: Script) -> None:
    for p in s.model.parameters():
        p.sub_(0.1 * p.grad)
        p.grad = None


@habit("momentum by hand: velocities as `torch.zeros(p.shape)`", sharded=EITHER)
class MomentumByShape:
    def after(self, s: Script) -> None:
        self.velocity = [torch.zeros(p.shape) for p in s.model.parameters()]

    @torch.no_grad()
    def step(self, s: Script) -> None:
        for p, v in zip(s.model.parameters(), self.velocity, strict=True):
            v.mul_(0.9).add_(p.grad)
            p.add_(v, alpha=-0.1)


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


SCHEDULES = {}
for _title, _schedule in SCHEDULES.items():

    @habit(f"a schedule: {_title}, `scheduler.get_last_lr()` logged")
    class Scheduled:
        make = staticmethod(_schedule)

        def optimizer(self, s: Script) -> Any:
            optimizer = torch.optim.AdamW(s.model.parameters(), lr=0.02, eps=1e-4)
            s.scheduler = self.make(optimizer)
            return optimizer

        def weights(self, s: Script) -> None:
            s.scheduler.step()
            s.note("lr", s.scheduler.get_last_lr())


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


@habit(
    "moments counted: `sum(v.numel() for state in optimizer.state.values() ...)`", sharded=EITHER
)
class CountMoments:
    def optimizer(self, s: Script) -> Any:
        return torch.optim.AdamW(s.model.parameters(), lr=0.02, eps=1e-4)

    def end(self, s: Script) -> None:
        s.note(
            "state",
            sum(
                v.numel()
                for state in s.optimizer.state.values()
                for v in state.values()
                if torch.is_tensor(v)
            ),
        )


@habit("`optimizer.zero_grad(set_to_none=False)`", "zero")
def zero_in_place(s: Script) -> None:
    s.optimizer.zero_grad(set_to_none=False)


@habit("a NaN loss skips the step on every rank")
class SkipNaN:
    def step(self, s: Script) -> None:
        if torch.isfinite(s.loss) and s.step != 1:
            _step(s)


class Logging(torch.optim.SGD):
    def step(self, closure: Any = None) -> Any:
        return super().step(closure)


@habit("an optimizer that calls the step of its class, offloaded", options={"offload_optimizer": "cpu"}, expect=ROUNDING)  # fmt: skip
class Offloaded:
    def optimizer(self, s: Script) -> Any:
        # Now torch has its hooks around SGD's own step
        torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
        return Logging(s.model.parameters(), lr=0.1, momentum=0.9)


class AroundTheStep(torch.optim.SGD):
    """Raises where nothing is left to be stepped."""

    def step(self, closure: Any = None) -> Any:
        super().step()
        if all(p.grad is None for p in self.param_groups[0]["params"]):
            raise OverflowError("around the step")


@habit("an offloaded step that raises gives its gradients back at once", options={"offload_optimizer": "cpu"}, expect=ROUNDING)  # fmt: skip
class GivesBack:
    def optimizer(self, s: Script) -> Any:
        return AroundTheStep(s.model.parameters(), lr=0.1)

    def step(self, s: Script) -> None:
        with contextlib.suppress(OverflowError):
            s.optimizer.step()
        s.note("gradients", sum(p.grad is not None for p in s.parameters()))
