"""Parameter groups: weight decay and learning rates by shape, name and mark."""

from __future__ import annotations

from typing import Any

import torch

from scripts.loop import Script
from scripts.registry import EITHER, habit

WHEN = {"optimizer_before": "made before shard()", "optimizer": "made after shard()"}


def adamw(groups: list[dict[str, Any]], **options: Any) -> torch.optim.Optimizer:
    # A large decay, so that a group that was formed wrongly shows; a large eps keeps rounding from
    # being blown up.
    return torch.optim.AdamW(groups, **{"lr": 0.02, "eps": 1e-4, **options})


def split(s: Script, decays: Any) -> torch.optim.Optimizer:
    parameters = [(n, p) for n, p in s.named() if p.requires_grad]
    decay = [p for n, p in parameters if decays(n, p)]
    rest = [p for n, p in parameters if not decays(n, p)]
    s.note("groups", [len(decay), len(rest)])
    groups = [{"params": decay, "weight_decay": 2.0}, {"params": rest, "weight_decay": 0.0}]
    return adamw([g for g in groups if g["params"]])


BY = {
    "`p.ndim >= 2`": lambda n, p: p.ndim >= 2,
    "`p.ndim <= 1 or name.endswith('.bias')`": lambda n, p: (
        not (p.ndim <= 1 or n.endswith(".bias"))
    ),
    "names without 'bias' and 'norm'": lambda n, p: not any(word in n for word in ("bias", "norm")),
}
for _by, _decays in BY.items():
    for _place, _when in WHEN.items():
        habit(f"weight decay by {_by}, groups {_when}", _place)(lambda s, d=_decays: split(s, d))


@habit("muP: `p.infshape` marks put on before shard() and read after it")
class MupMarks:
    def before(self, s: Script) -> None:
        for _, p in s.named():
            p.infshape = tuple(p.shape)  # type: ignore[attr-defined]

    def optimizer(self, s: Script) -> Any:
        return adamw([{"params": [p], "lr": 0.1 / max(p.infshape)} for _, p in s.named()])  # type: ignore[attr-defined]


@habit("`p._optim = {...}` put on after shard() (S4), read when groups are made")
class MarkAfter:
    def after(self, s: Script) -> None:
        for n, p in s.named():
            if "positions" in n:
                p._optim = {"lr": 0.005, "weight_decay": 0.0}  # type: ignore[attr-defined]

    def optimizer(self, s: Script) -> Any:
        marked = [p for p in s.model.parameters() if hasattr(p, "_optim")]
        groups: list[dict[str, Any]] = [
            {"params": [p for p in s.model.parameters() if not hasattr(p, "_optim")]}
        ]
        groups += [{"params": [p], **p._optim} for p in marked]
        s.note("marked", len(marked))
        return adamw(groups, weight_decay=1.0)


@habit("tensor-parallel marks (`p.tensor_model_parallel`) survive shard()")
class Megatron:
    def before(self, s: Script) -> None:
        for p in s.module.blocks.parameters():
            p.tensor_model_parallel, p.partition_dim = True, 0

    def log(self, s: Script) -> None:
        s.note(
            "marks",
            [
                (getattr(p, "tensor_model_parallel", False), getattr(p, "partition_dim", -1))
                for p in s.model.parameters()
            ],
        )


@habit("`optimizer.add_param_group` for the head", "optimizer")
def add_group(s: Script) -> Any:
    head = set(map(id, s.module.head.parameters()))
    optimizer = adamw([{"params": [p for p in s.model.parameters() if id(p) not in head]}])
    optimizer.add_param_group({"params": s.module.head.parameters(), "lr": 0.1})
    return optimizer


@habit("parameters told apart by `id(p)` of lists made before shard()")
class ById:
    def before(self, s: Script) -> None:
        self.head = set(map(id, s.module.head.parameters()))

    def optimizer(self, s: Script) -> Any:
        fast = [p for p in s.model.parameters() if id(p) in self.head]
        s.note("fast", len(fast))
        return adamw(
            [
                {"params": fast, "lr": 0.1},
                {"params": [p for p in s.model.parameters() if id(p) not in self.head]},
            ]
        )


@habit("named parameters given to the optimizer (`model.named_parameters()`)", "optimizer")
def named(s: Script) -> Any:
    optimizer = torch.optim.AdamW(s.module.named_parameters(), lr=0.02, eps=1e-4)
    s.note("names", optimizer.param_groups[0]["param_names"])
    return optimizer


@habit("frozen from the start: `requires_grad_(False)` before shard()")
class FrozenBefore:
    def before(self, s: Script) -> None:
        s.module.tokens.requires_grad_(False)
        for p in s.module.blocks[0].parameters():
            p.requires_grad = False

    def optimizer(self, s: Script) -> Any:
        return torch.optim.SGD(
            filter(lambda p: p.requires_grad, s.model.parameters()), lr=0.1, momentum=0.9
        )


@habit(
    "frozen by `p.requires_grad_(False)` after shard(), before the optimizer",
    sharded=EITHER,
    zero=EITHER,
)
class FrozenAfter:
    def after(self, s: Script) -> None:
        s.module.tokens.requires_grad_(False)

    def optimizer(self, s: Script) -> Any:
        return torch.optim.SGD([p for p in s.model.parameters() if p.requires_grad], lr=0.1)


@habit("a block frozen mid-run, with weight decay", sharded=EITHER, zero=EITHER, reference="plain")
class FrozenMidRun:
    def optimizer(self, s: Script) -> Any:
        return torch.optim.SGD(s.model.parameters(), lr=0.1, weight_decay=0.1)

    def weights(self, s: Script) -> None:
        if s.step == 0:
            for p in s.module.blocks[0].parameters():
                p.requires_grad_(False)


@habit(
    "gradual unfreezing (ULMFiT): a block frozen before shard() is unfrozen mid-run",
    sharded=EITHER,
    zero=EITHER,
    reference="plain",
)
class Unfreezing:
    def before(self, s: Script) -> None:
        s.module.blocks[0].requires_grad_(False)

    def weights(self, s: Script) -> None:
        if s.step == 0:
            s.module.blocks[0].requires_grad_(True)
