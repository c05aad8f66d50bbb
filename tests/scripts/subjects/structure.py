"""Changes of the model's structure after shard()."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from scripts.loop import Script
from scripts.registry import EITHER, ROUNDING, habit

LATE = {"sharded": EITHER, "zero": EITHER, "reference": "plain"}


@habit(
    "weights tied after shard(): `model.head.weight = model.tokens.weight`",
    "after",
    expect=ROUNDING,
    composes=False,
    **LATE,
)
def tied(s: Script) -> None:
    s.module.head.weight = s.module.tokens.weight


@habit(
    "`resize_token_embeddings` by hand: a larger embedding with the old rows",
    "after",
    composes=False,
    **LATE,
)
def resized(s: Script) -> None:
    torch.manual_seed(2)
    old, new = s.module.tokens, nn.Embedding(20, 10)
    new.weight.data[:17] = old.weight.data
    s.module.tokens = new


@habit(
    "`onefold.unshard(model)`, a new head, `shard()` again",
    "after",
    reference="plain",
    composes=False,
)
def unsharded_head(s: Script) -> None:
    torch.manual_seed(2)
    with s.unsharded():
        s.module.head = nn.Linear(10, 17, bias=False)


@habit("LoRA put in by hand before shard(): frozen base, trained adapters")
class Lora:
    def before(self, s: Script) -> None:
        s.module.requires_grad_(False)
        for block in s.module.blocks:
            block.mlp[0] = Adapted(block.mlp[0])

    def optimizer(self, s: Script) -> Any:
        s.note("trained", sum(p.numel() for p in s.model.parameters() if p.requires_grad))
        return torch.optim.AdamW(
            [p for p in s.model.parameters() if p.requires_grad], lr=0.02, eps=1e-4
        )


class Adapted(nn.Module):
    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base
        self.a = nn.Parameter(torch.full((2, base.in_features), 0.1))
        self.b = nn.Parameter(torch.zeros(base.out_features, 2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + x @ self.a.T @ self.b.T


@habit("LoRA merged inside `onefold.full_params(model, write=True)`", expect=ROUNDING)
class MergedWhole(Lora):
    def end(self, s: Script) -> None:
        with s.gathered(write=True), torch.no_grad():
            for block in s.module.blocks:
                block.mlp[0].base.weight += block.mlp[0].b @ block.mlp[0].a


@habit("`torch.utils.checkpoint` put around blocks after shard() (a patched forward)", "after")
def checkpointed(s: Script) -> None:
    for block in s.module.blocks:
        forward = block.forward
        block.forward = lambda x, forward=forward: checkpoint(forward, x, use_reentrant=False)
