"""Weights drawn or set after shard(): every function of nn.init, model.apply, seeds."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn

from scripts.loop import Script
from scripts.registry import EITHER, habit

INITS = {
    "`nn.init.normal_(w, std=0.1)`": lambda w: nn.init.normal_(w, std=0.1),
    "`nn.init.kaiming_uniform_(w, a=math.sqrt(5))`": lambda w: nn.init.kaiming_uniform_(w, a=math.sqrt(5)),
    "`nn.init.orthogonal_(w)`": nn.init.orthogonal_,
    "`w.data.normal_(mean=0.0, std=0.02)` (HF `_init_weights`)": lambda w: w.data.normal_(mean=0.0, std=0.02),
    "`w.copy_(torch.randn(w.shape) * 0.1)`": torch.no_grad()(lambda w: w.copy_(torch.randn(w.shape) * 0.1)),
    "`w.normal_(generator=g)` with a generator": torch.no_grad()(lambda w: w.normal_(0.0, 0.1, generator=torch.Generator().manual_seed(3))),
}  # fmt: skip
_EITHER = ("orthogonal", "torch.randn(w.shape)")
for _title, _init in INITS.items():

    def _after(s: Script, f: Any = _init) -> None:
        torch.manual_seed(11)
        for p in s.module.parameters():
            if p.ndim == 2:
                f(p)
        s.note("next random number", torch.rand(()).item())

    habit(
        f"all matrices: {_title}",
        "after",
        sharded=EITHER if any(w in _title for w in _EITHER) else None,
    )(_after)


def init_weights(m: nn.Module) -> None:
    if isinstance(m, nn.Linear):
        nn.init.normal_(m.weight, mean=0.0, std=0.1)
        if m.bias is not None:
            nn.init.zeros_(m.bias)
    elif isinstance(m, nn.Embedding):
        torch.nn.init.normal_(m.weight, mean=0.0, std=0.1)
    elif isinstance(m, nn.LayerNorm):
        m.bias.data.zero_()
        m.weight.data.fill_(1.0)


@habit(
    "`model.apply(init_weights)` before shard(), seeds different on the ranks: rank 0's hold",
    "before",
)
def apply_before(s: Script) -> None:
    torch.manual_seed(50 + s.rank)
    s.module.apply(init_weights)


@habit("`module.reset_parameters()` for all modules that have it", "after", sharded=EITHER)
def reset_all(s: Script) -> None:
    torch.manual_seed(5)
    for m in s.module.modules():
        if hasattr(m, "reset_parameters"):
            m.reset_parameters()
