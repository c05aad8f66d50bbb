"""Evaluation between steps."""

from __future__ import annotations

import torch

from scripts.loop import Script
from scripts.registry import STALLED, habit


@habit("`model.eval()`, `torch.no_grad()`, a loss, `model.train()`", "log")
def evaluate(s: Script) -> None:
    s.model.eval()
    with torch.no_grad():
        s.note("loss", s.cross_entropy(s.next_batch(3)).item())
    s.model.train()


@habit("generate: tokens one by one, `argmax` of the last logits", "end")
def generate(s: Script) -> None:
    tokens = s.batch[:, :2]
    with torch.no_grad():
        for _ in range(4):
            tokens = torch.cat([tokens, s.model(tokens)[:, -1:].argmax(-1)], 1)
    s.note("tokens", tokens.tolist())


@habit("generate on rank 0 only inside `onefold.full_params(model)`", "end")
def rank_0(s: Script) -> None:
    with s.gathered():
        if s.rank == 0:
            with torch.no_grad():
                s.note("mean", s.module(s.batch[:, :-1]).mean().item())


@habit("evaluation on rank 0 only, as DDP's `model.module(x)` allows", "log", sharded=STALLED, composes=False,
       options={"stall_timeout": 1.0})  # fmt: skip
def only_rank_0(s: Script) -> None:
    if s.rank == 0:
        with torch.no_grad():
            s.note("mean", s.module(s.batch[:, :-1]).mean().item())


@habit("evaluation with unequal batches on the ranks", "log")
def unequal(s: Script) -> None:
    with torch.no_grad():
        for i in range(2):
            s.note("loss", s.cross_entropy(s.next_batch(i)[: 1 + s.rank]).item())
