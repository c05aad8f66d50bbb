"""Buffers of all kinds: DDP broadcasts rank 0's before each forward pass."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from scripts.loop import Script
from scripts.registry import BITS, EITHER, ROUNDING, habit


class Features(nn.Module):
    """x (8, 6) -> (8, 4), around one module under test of width 9."""

    def __init__(self, part: nn.Module) -> None:
        super().__init__()
        self.enter, self.part, self.leave = nn.Linear(6, 9), part, nn.Linear(9, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.leave(self.part(torch.tanh(self.enter(x))))


class FeaturesHabit:
    part: Any

    def build(self) -> nn.Module:
        return Features(type(self).part())

    def batch(self, seed: int) -> Any:
        return torch.randn(8, 6, generator=torch.Generator().manual_seed(seed))

    def forward(self, s: Script) -> Any:
        return s.model(s.batch).square().mean()


class RunningMean(nn.Module):
    """A centre kept by an exponential mean of what comes by."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(9))
        self.register_buffer("mean", torch.zeros(9))
        self.register_buffer("seen", torch.zeros((), dtype=torch.long))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            with torch.no_grad():
                self.mean.lerp_(x.mean(0), 0.1)  # type: ignore[operator]
                self.seen += 1
        return (x - self.mean) * self.weight


class Rotary(nn.Module):
    """A buffer that is not saved."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("angles", torch.linspace(0, 1, 9), persistent=False)
        self.weight = nn.Parameter(torch.ones(9))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight * torch.cos(self.angles)  # type: ignore[arg-type]


PARTS: dict[str, Any] = {
    "BatchNorm1d": lambda: nn.BatchNorm1d(9),
    "a running mean by `lerp_` and a counter": RunningMean,
    "spectral_norm's `u` and `v`": lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(9, 9)),
    "the old `nn.utils.spectral_norm`'s `u`": lambda: nn.utils.spectral_norm(nn.Linear(9, 9)),
}
for _title, _part in PARTS.items():
    habit(
        f"a buffer: {_title}",
        expect=ROUNDING if "spectral" in _title else BITS,
        sharded=EITHER if "old" in _title else None,
    )(type("Part", (FeaturesHabit,), {"part": staticmethod(_part), "__module__": __name__}))


@habit("a buffer registered after shard() and counted in a hook")
class LateBuffer:
    def after(self, s: Script) -> None:
        s.module.register_buffer("steps", torch.zeros(()), persistent=False)

        def count(m: nn.Module, args: Any, out: Any) -> None:
            m.steps.add_(1)  # type: ignore[operator]

        s.module.register_forward_hook(count)

    def log(self, s: Script) -> None:
        s.note("steps", s.module.steps.item())


class Expanded(nn.Module):
    """A constant that autograd saves, as contrastive losses and rotary tables have it."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.rand(8, 1).expand(8, 9))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.table


@habit("a buffer: a constant that autograd saved outlives a second pass", reference="plain", expect=ROUNDING)  # fmt: skip
class Outlives(FeaturesHabit):
    part = Expanded

    def forward(self, s: Script) -> Any:
        return (s.model(s.batch) * s.model(s.next_batch(1))).mean()


@habit("a module without parameters put in place of another after shard()", expect=ROUNDING)
class Exchanged(FeaturesHabit):
    part = Rotary

    def build(self) -> nn.Module:
        return nn.Sequential(Features(Rotary()), nn.BatchNorm1d(4, affine=False))

    def weights(self, s: Script) -> None:
        if s.step == 0:
            s.module[1] = nn.BatchNorm1d(4, affine=False)
            s.module[1].running_mean.fill_(float(s.rank))
        s.note("mean", s.module[1].running_mean)
