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


@habit("buffers averaged over ranks by hand: `dist.all_reduce(buffer)`")
class AveragedBuffers(FeaturesHabit):
    part = RunningMean

    def weights(self, s: Script) -> None:
        import torch.distributed as dist

        for b in s.module.buffers():
            if b.is_floating_point():
                dist.all_reduce(b)
                b /= dist.get_world_size()


@habit("a buffer assigned anew: `module.mean = module.mean * 0.9`")
class AssignedBuffer(FeaturesHabit):
    part = RunningMean

    def weights(self, s: Script) -> None:
        s.module.part.mean = s.module.part.mean * 0.9


@habit("a buffer registered after shard() and counted in a hook")
class LateBuffer:
    def after(self, s: Script) -> None:
        s.module.register_buffer("steps", torch.zeros(()), persistent=False)

        def count(m: nn.Module, args: Any, out: Any) -> None:
            m.steps.add_(1)  # type: ignore[operator]

        s.module.register_forward_hook(count)

    def log(self, s: Script) -> None:
        s.note("steps", s.module.steps.item())


class Kinds(nn.Module):
    """Buffers of all kinds, changed by this rank's data: in place, through `.data`, and by putting
    others in their place.
    """

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(9)
        self.register_buffer("average", torch.zeros(9))
        self.register_buffer("codebook", torch.zeros(3, dtype=torch.complex64), persistent=False)
        self.register_buffer("seen", torch.tensor(0))
        self.register_buffer("flag", torch.tensor(False))
        self.register_buffer("empty", torch.empty(0))
        self.register_buffer("none", None)
        self.register_buffer("strided", torch.arange(12.0).view(3, 4).t())
        self.register_buffer("bias", torch.zeros(5, dtype=torch.bfloat16))
        self.register_buffer("table", torch.linspace(1, 2, 9))

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x) * self.table
        with torch.no_grad():
            self.average.data.mul_(0.9).add_(x.mean(0))  # type: ignore[union-attr]
            self.codebook = self.codebook + 1j * x[0, :3]  # type: ignore[operator, has-type]
            self.seen += 1  # type: ignore[operator]
            self.flag.fill_(bool(x[0, 0] > 0))  # type: ignore[operator]
            self.strided.add_(x[0, 0])  # type: ignore[operator]
            self.bias += x[0, 0].bfloat16()  # type: ignore[operator]
        return y * (1 + self.average)


@habit("a buffer: of all kinds, after passes that accumulate, evaluate, raise and are dropped", expect=ROUNDING)  # fmt: skip
class OfAllKinds(FeaturesHabit):
    part = Kinds

    def before(self, s: Script) -> None:
        if s.rank == 1:
            s.module.part.average.fill_(5.0)
        s.module.same = s.module.part  # under two names

    def look(self, s: Script) -> None:
        s.note("buffers", [b.tolist() for b in s.module.buffers()])

    def forward(self, s: Script) -> Any:
        with s.no_sync():
            s.model(s.next_batch(1)).square().mean().backward()
        self.look(s)
        return s.model(s.batch).square().mean()

    def log(self, s: Script) -> None:
        if s.rank == 1:  # by code of a loop: rank 0's are everybody's again before the next pass
            s.module.part.average.data += 1
        s.model.eval()
        with torch.no_grad():
            s.note("evaluated", s.model(s.batch).sum().item())
        self.look(s)
        s.model.train()
        s.model(s.batch)  # a pass whose gradients nobody takes
        try:
            s.model(torch.ones(8, 2))  # raises, on every rank
        except RuntimeError:
            self.look(s)


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
