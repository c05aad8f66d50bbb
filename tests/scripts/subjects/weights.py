"""Weights changed under no_grad and through .data: averages, decay, constraints, copies between
models, snapshots.
"""

# ruff: noqa: E501 (a habit of the tables is one line)

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters
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
    "`w.data[torch.tensor(1)] = 0.5` (0-dim)": matrix(lambda p: p.data.__setitem__(torch.tensor(1), 0.5)),
    "`w.data[torch.tensor(2), 1:3].fill_(0.5)` (0-dim)": matrix(lambda p: p.data[torch.tensor(2), 1:3].fill_(0.5)),
    "`w.data[np.int64(4)].zero_()`": matrix(lambda p: p.data[np.int64(4)].zero_()),
    "`w.data[w.data.norm(dim=1).argmax()].mul_(0.5)`": matrix(lambda p: p.data[p.data.norm(dim=1).argmax()].mul_(0.5)),
    "`w.data[2] = torch.ones(1, n)`, a matrix of one row": matrix(lambda p: p.data.__setitem__(2, torch.ones(1, p.shape[1]))),
    "`w.data.to(torch.zeros(3)).mul_(0.5)`": matrix(lambda p: p.data.to(torch.zeros(3)).mul_(0.5)),
    "`w.data.type_as(torch.zeros(2, 9)).mul_(0.5)`": matrix(lambda p: p.data.type_as(torch.zeros(2, 9)).mul_(0.5)),
    "`w.data.expand(-1, -1).mul_(0.5)`": matrix(lambda p: p.data.expand(-1, -1).mul_(0.5)),
    "`torch.broadcast_tensors(w.data, zeros)[0].mul_(0.5)`": matrix(lambda p: torch.broadcast_tensors(p.data, torch.zeros(p.shape))[0].mul_(0.5)),
    "`p.mul_(0.99)`": lambda p: p.mul_(0.99),
    "`p.data.mul_(0.99)`": lambda p: p.data.mul_(0.99),
    "`p.data = p.data * 0.99`": lambda p: assign(p, p.data * 0.99),
    "`p.data = torch.full(p.shape, 0.1)` for vectors": lambda p: assign(p, torch.full(p.shape, 0.1)) if p.ndim == 1 else None,
    "`p.add_(torch.randn_like(p) * 0.01)`": lambda p: p.add_(torch.randn_like(p) * 0.01),
    "`p.add_(torch.randn(p.size()) * 0.01)`": lambda p: p.add_(torch.randn(p.size()) * 0.01),
    "`p.detach().mul_(0.99)`": lambda p: p.detach().mul_(0.99),
    "`w.data[2].zero_()`": matrix(lambda p: p.data[2].zero_()),
    "`w[2].zero_()` under no_grad": matrix(lambda p: p[2].zero_()),
    "`w.detach()[2] = 0`": matrix(lambda p: p.detach().__setitem__(2, 0.0)),
    "`w.data[:, 1] = 0`": matrix(lambda p: p.data.__setitem__((slice(None), 1), 0.0)),
    "`w.data[1, 3] = 0.1`": matrix(lambda p: p.data.__setitem__((1, 3), 0.1)),
    "`w.data[[0, 2]] = 0`": matrix(lambda p: p.data.__setitem__([0, 2], 0.0)),
    "`w.data.view(-1)[5] = 0.1`": matrix(lambda p: p.data.view(-1).__setitem__(5, 0.1)),
    "`w.data.flatten()[5:9].zero_()`": matrix(lambda p: p.data.flatten()[5:9].zero_()),
    "`w.data.t().mul_(0.5)`": matrix(lambda p: p.data.t().mul_(0.5)),
    "`w.data.fill_diagonal_(0)`": matrix(lambda p: p.data.fill_diagonal_(0)),
    "`w.data.tril_()`": matrix(lambda p: p.data.tril_()),
    "`w.data.index_fill_(0, rows, 0)`": matrix(lambda p: p.data.index_fill_(0, torch.tensor([0, 3]), 0.0)),
    "`w.data.copy_(torch.ones(w.shape) * 0.1)`": matrix(lambda p: p.data.copy_(torch.ones(p.shape) * 0.1)),
    "`w.data[w.data.abs() < 0.05] = 0` (pruning)": matrix(lambda p: p.data.__setitem__(p.data.abs() < 0.05, 0.0)),
    "`w.data.mul_(mask)`, a mask of the whole's shape": matrix(lambda p: p.data.mul_((torch.arange(p.numel()).view(p.shape) % 3 > 0).float())),
    "`w.data.div_(w.data.norm(dim=1, keepdim=True))` (unit rows)": matrix(lambda p: p.data.div_(p.data.norm(dim=1, keepdim=True))),
    "`w.data = F.normalize(w.data, dim=-1)` (nGPT)": matrix(lambda p: assign(p, nn.functional.normalize(p.data, dim=-1))),
    "`w.data.renorm_(2, 0, 1.0)` (max-norm rows)": matrix(lambda p: p.data.renorm_(2, 0, 1.0)),
    "spectral norm by hand, `w.data.div_(torch.linalg.matrix_norm(w, 2))`": matrix(lambda p: p.data.div_(torch.linalg.matrix_norm(p.data, 2).clamp(min=1.0))),
    "orthogonalized, `q, _ = torch.linalg.qr(w)`": matrix(lambda p: p.data.copy_(torch.linalg.qr(p.data)[0]) if p.shape[0] >= p.shape[1] else None),
    "`w.data.copy_(w.data.flip(0))`": matrix(lambda p: p.data.copy_(p.data.flip(0))),
    "`w.data.exponential_()`, `w.data.bernoulli_(0.5)` with seeds": matrix(lambda p: (p.data.exponential_(), p.data.bernoulli_(0.5).mul_(0.1))),
}  # fmt: skip
_EITHER = (
    "torch.full(p.shape", "torch.randn(p.size())", ".t()", "diagonal", "tril", "index_fill", "torch.ones(w.shape)", "[:, 1]", "[1, 3]", "[[0, 2]]", "[5]", "[5:9]",
    "pruning", "mask of the whole", "unit rows", "nGPT", "max-norm", "torch.renorm", "spectral", "qr", "sorted", "flip", "w.detach()[2]", "w[2]",
    "clone(), w.data", "[2] = 0.1",
)  # fmt: skip
_ROUNDS = ("mean()", "norm", "qr", "spectral", "nGPT")
for _title, _change in CHANGES.items():
    habit(
        f"all weights: {_title}",
        "weights",
        expect=ROUNDING if any(w in _title for w in _ROUNDS) else BITS,
        sharded=EITHER if any(w in _title for w in _EITHER) else None,
        composes=not any(
            w in _title
            for w in ("sign", "abs()", "round(", "sorted", "bfloat16", "qr", "exponential")
        ),
    )(each(_change))


@habit(
    "a target network: `t.data.lerp_(p.data, 0.1)` from a deepcopy made before shard()",
    sharded=EITHER,
    zero=EITHER,
)
class TargetBefore:
    def before(self, s: Script) -> None:
        self.target = copy.deepcopy(s.module)

    def weights(self, s: Script) -> None:
        for t, p in zip(self.target.parameters(), s.module.parameters(), strict=True):
            t.data.lerp_(p.data, 0.1)

    def end(self, s: Script) -> None:
        s.note("target", [t.detach().tolist() for t in self.target.parameters()])


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


@habit(
    "EMA made before shard() from the whole weights (`shadow[n] = p.data.clone()`)", sharded=EITHER
)
class EmaBefore:
    def before(self, s: Script) -> None:
        self.shadow = {n: p.data.clone() for n, p in s.module.named_parameters()}

    def weights(self, s: Script) -> None:
        for n, p in s.named():
            self.shadow[n] = 0.9 * self.shadow[n] + 0.1 * p.data

    def end(self, s: Script) -> None:
        s.note("ema", {n: v.sum().item() for n, v in self.shadow.items()})


@habit("`AveragedModel(model)` made after shard()", sharded=EITHER, zero=EITHER)
class Averaged:
    def after(self, s: Script) -> None:
        self.average = AveragedModel(s.module, multi_avg_fn=get_ema_multi_avg_fn(0.9))

    def weights(self, s: Script) -> None:
        self.average.update_parameters(s.module)

    def end(self, s: Script) -> None:
        with torch.no_grad():
            s.note("logits", self.average.module(s.batch[:, :-1]).tolist())


@habit("`AveragedModel(model)` made before shard()", sharded=EITHER, zero=EITHER)
class AveragedBefore(Averaged):
    def before(self, s: Script) -> None:
        self.average = AveragedModel(s.module, multi_avg_fn=get_ema_multi_avg_fn(0.9))

    def after(self, s: Script) -> None:
        pass


@habit("a snapshot on the host, `p.data.cpu().clone()`, restored by `p.data = saved`")
class SnapshotData:
    def weights(self, s: Script) -> None:
        if s.step == 0:
            self.saved = [p.data.cpu().clone() for p in s.model.parameters()]
        if s.step == 1:
            for p, v in zip(s.model.parameters(), self.saved, strict=True):
                p.data = v.clone()


@habit("weight decay by hand toward the start (L2-SP): `p.data.add_(start - p.data, alpha=0.1)`")
class Anchor:
    def after(self, s: Script) -> None:
        self.start = {n: p.detach().clone() for n, p in s.named()}

    def log(self, s: Script) -> None:
        for n, p in s.named():
            p.data.add_(self.start[n] - p.data, alpha=0.1)


@habit(
    "a layer copied into another: `a.weight.data.copy_(b.weight.data)`", "weights", sharded=EITHER
)
def copied(s: Script) -> None:
    first, second = s.module.blocks
    second.mlp[0].weight.data.copy_(first.mlp[0].weight.data)
    second.norm_1.weight.data.copy_(first.norm_1.weight.data)


@habit(
    "a layer copied into another of another unit, under no_grad: `a.copy_(b)`",
    "weights",
    sharded=EITHER,
)
@torch.no_grad()
def copied_across(s: Script) -> None:
    s.module.head.weight.copy_(s.module.tokens.weight)


@habit("a layer initialized anew mid-run: `layer.reset_parameters()`", "weights", sharded=EITHER)
def reset(s: Script) -> None:
    if s.step == 1:
        s.module.blocks[0].mlp[0].reset_parameters()
        s.module.head.reset_parameters()


@habit(
    "`parameters_to_vector(model.parameters())`, its norm and length",
    "log",
    expect=ROUNDING,
    sharded=EITHER,
)
def to_vector(s: Script) -> None:
    with torch.no_grad():
        vector = parameters_to_vector(s.model.parameters())
        s.note("vector", [vector.numel(), vector.norm().item()])


@habit("`vector_to_parameters(0.9 * vector, model.parameters())`", "weights", sharded=EITHER)
@torch.no_grad()
def from_vector(s: Script) -> None:
    vector_to_parameters(0.9 * parameters_to_vector(s.model.parameters()), s.model.parameters())


@habit("weights written inside `onefold.full_params(model, write=True)`", "weights")
@torch.no_grad()
def in_full_params(s: Script) -> None:
    with s.gathered(write=True):
        for p in s.module.parameters():
            if p.ndim == 2:
                p[:, 0] = 0.1
                p.div_(p.norm(dim=1, keepdim=True))


@habit(
    "MeZO: `z = torch.normal(mean=0, std=1, size=p.data.size())` by a seed",
    expect=ROUNDING,
    sharded=EITHER,
)
class Mezo:
    def weights(self, s: Script) -> None:
        torch.manual_seed(3)
        for p in s.model.parameters():
            z = torch.normal(mean=0, std=1, size=p.data.size(), dtype=p.data.dtype)
            p.data = p.data + z * 0.01


@habit(
    "magnitude pruning over the whole model: a threshold by `torch.kthvalue` of all weights",
    expect=ROUNDING,
    sharded=EITHER,
    composes=False,
)
class Prune:
    def weights(self, s: Script) -> None:
        if s.step == 1:
            every = torch.cat([p.data.abs().flatten() for p in s.model.parameters() if p.ndim == 2])
            threshold = torch.kthvalue(every, every.numel() // 4).values
            self.masks = {
                n: (p.data.abs() > threshold).float() for n, p in s.named() if p.ndim == 2
            }
        if s.step >= 1:
            for n, p in s.named():
                if n in self.masks:
                    p.data.mul_(self.masks[n])


@habit("averages swapped in and out: `backup = p.data; p.data = shadow; ...; p.data = backup`")
class InAndOut:
    def weights(self, s: Script) -> None:
        backup = {}
        for n, p in s.named():
            shadow = p.data.clone() * 0.5
            backup[n] = p.data
            p.data = shadow
        with torch.no_grad():
            s.note("inside", s.cross_entropy().item())
        for n, p in s.named():
            p.data = backup[n]
        with torch.no_grad():
            s.note("outside", s.cross_entropy().item())


@habit("data of two layers exchanged: `p.data, q.data = q.data, p.data`", "weights")
def exchanged(s: Script) -> None:
    first, second = (block.parameters() for block in s.module.blocks)
    for p, q in zip(first, second, strict=True):
        p.data, q.data = q.data, p.data


@habit("what `.data` gave out keeps its values when other data is assigned", "weights", expect=ROUNDING)  # fmt: skip
def old_stays(s: Script) -> None:
    w = s.module.head.weight
    old, detached = w.data, w.detach()
    w.data = w.data * 2
    old.add_(1.0)
    s.note("norms", [old.norm().item(), detached.norm().item(), w.data.norm().item()])


@habit("`w.data = w.data * 0.5` of a parameter that some ranks have no element of, and `w.data = w.data`", "weights")  # fmt: skip
def halved(s: Script) -> None:
    bias = s.module.norm.bias
    with torch.no_grad():
        s.cross_entropy()  # copies that are kept are fresh again
    bias.data = bias.data * 0.5
    s.note("read", bias.sum().item() - bias.data.sum().item())
    bias.data = bias.data
