"""Weights changed under no_grad and through .data: averages, decay, constraints, copies between
models, snapshots.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from scripts.loop import Net, Script
from scripts.registry import BITS, EITHER, ROUNDING, habit


def each(change: Any, no_grad: bool = True) -> Any:
    def hook(s: Script) -> None:
        with torch.set_grad_enabled(not no_grad):
            for p in s.model.parameters():
                change(p)

    return hook


def assign(p: Any, value: Any) -> None:
    p.data = value


def matrix(change: Any) -> Any:
    return lambda p: change(p) if p.ndim == 2 else None


CHANGES = {
    "`w.data[torch.tensor(2)].zero_()` (0-dim)": matrix(lambda p: p.data[torch.tensor(2)].zero_()),
    "`p.data.mul_(0.99)`": lambda p: p.data.mul_(0.99),
    "`p.data = p.data * 0.99`": lambda p: assign(p, p.data * 0.99),
    "`p.add_(torch.randn_like(p) * 0.01)`": lambda p: p.add_(torch.randn_like(p) * 0.01),
    "`p.detach().mul_(0.99)`": lambda p: p.detach().mul_(0.99),
    "`w.data[2].zero_()`": matrix(lambda p: p.data[2].zero_()),
    "`w.data[:, 1] = 0`": matrix(lambda p: p.data.__setitem__((slice(None), 1), 0.0)),
    "`w.data.flatten()[5:9].zero_()`": matrix(lambda p: p.data.flatten()[5:9].zero_()),
    "`w.data.t().mul_(0.5)`": matrix(lambda p: p.data.t().mul_(0.5)),
    "`w.data[w.data.abs() < 0.05] = 0` (pruning)": matrix(lambda p: p.data.__setitem__(p.data.abs() < 0.05, 0.0)),
    "`w.data.div_(w.data.norm(dim=1, keepdim=True))` (unit rows)": matrix(lambda p: p.data.div_(p.data.norm(dim=1, keepdim=True))),
    "`w.data = F.normalize(w.data, dim=-1)` (nGPT)": matrix(lambda p: assign(p, nn.functional.normalize(p.data, dim=-1))),
}  # fmt: skip
_EITHER = (".t()", "[:, 1]", "[5:9]", "pruning", "unit rows", "nGPT")
_ROUNDS = ("norm", "nGPT")
for _title, _change in CHANGES.items():
    habit(
        f"all weights: {_title}",
        "weights",
        expect=ROUNDING if any(w in _title for w in _ROUNDS) else BITS,
        sharded=EITHER if any(w in _title for w in _EITHER) else None,
        composes="abs()" not in _title,
    )(each(_change))


@habit(
    "a target network: two models, both sharded, `t.data.copy_(tau * p.data + (1 - tau) * t.data)`"
)
class TwoModels:
    def after(self, s: Script) -> None:
        state = torch.get_rng_state()
        torch.manual_seed(1)
        self.inner = Net()
        self.target = s.world.wrap(self.inner)
        torch.set_rng_state(state)

    def weights(self, s: Script) -> None:
        for t, p in zip(self.target.parameters(), s.model.parameters(), strict=True):
            t.data.copy_(0.1 * p.data + 0.9 * t.data)

    def end(self, s: Script) -> None:
        with torch.no_grad():
            s.note("logits", self.target(s.batch[:, :-1]).tolist())


@habit("EMA over `p.data` with `lerp_`, swapped in to evaluate and back (`p.data, e = e, p.data`)")
class EmaSwap:
    def after(self, s: Script) -> None:
        self.ema = [p.data.clone() for p in s.model.parameters()]

    def swap(self, s: Script) -> None:
        for i, p in enumerate(s.model.parameters()):
            kept = p.data.clone()
            p.data.copy_(self.ema[i])
            self.ema[i] = kept

    def weights(self, s: Script) -> None:
        for e, p in zip(self.ema, s.model.parameters(), strict=True):
            e.lerp_(p.data, 0.5)
        self.swap(s)
        with torch.no_grad():
            s.note("loss", s.cross_entropy().item())
        self.swap(s)


@habit("`AveragedModel(model)` made after shard()", sharded=EITHER, zero=EITHER)
class Averaged:
    def after(self, s: Script) -> None:
        self.average = AveragedModel(s.module, multi_avg_fn=get_ema_multi_avg_fn(0.9))

    def weights(self, s: Script) -> None:
        self.average.update_parameters(s.module)

    def end(self, s: Script) -> None:
        with torch.no_grad():
            s.note("logits", self.average.module(s.batch[:, :-1]).tolist())


@habit(
    "a layer copied into another: `a.weight.data.copy_(b.weight.data)`", "weights", sharded=EITHER
)
def copied(s: Script) -> None:
    first, second = s.module.blocks
    second.mlp[0].weight.data.copy_(first.mlp[0].weight.data)
    second.norm_1.weight.data.copy_(first.norm_1.weight.data)


@habit("a layer initialized anew mid-run: `layer.reset_parameters()`", "weights", sharded=EITHER)
def reset(s: Script) -> None:
    if s.step == 1:
        s.module.blocks[0].mlp[0].reset_parameters()
        s.module.head.reset_parameters()


@habit("weights written inside `onefold.full_params(model, write=True)`", "weights")
@torch.no_grad()
def in_full_params(s: Script) -> None:
    with s.gathered(write=True):
        for p in s.module.parameters():
            if p.ndim == 2:
                p[:, 0] = 0.1
                p.div_(p.norm(dim=1, keepdim=True))


@habit("`w.data = w.data * 0.5` of a parameter that some ranks have no element of, and `w.data = w.data`", "weights")  # fmt: skip
def halved(s: Script) -> None:
    bias = s.module.norm.bias
    with torch.no_grad():
        s.cross_entropy()  # copies that are kept are fresh again
    bias.data = bias.data * 0.5
    s.note("read", bias.sum().item() - bias.data.sum().item())
    bias.data = bias.data
