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


@habit("named parameters given to the optimizer (`model.named_parameters()`)", "optimizer")
def named(s: Script) -> Any:
    optimizer = torch.optim.AdamW(s.module.named_parameters(), lr=0.02, eps=1e-4)
    s.note("names", optimizer.param_groups[0]["param_names"])
    return optimizer


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
