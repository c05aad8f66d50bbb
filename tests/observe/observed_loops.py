"""One step of training, on one rank, with every call that a user's loop makes."""

from __future__ import annotations

import torch
from torch import nn

import onefold
from zoo import TinyGPT, tokens_of


def sharded(
    stage: int = 3, precision: str = "fp32", checkpointing: str = "none"
) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A small GPT of which a lone rank still gathers and casts (bf16), and its optimizer."""
    torch.manual_seed(0)
    model = onefold.shard(
        TinyGPT(checkpointing=checkpointing), onefold.Recipe.zero(stage, precision=precision)
    )  # type: ignore[arg-type]
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)


def one_step(
    model: nn.Module, optimizer: torch.optim.Optimizer, seed: int = 0
) -> tuple[torch.Tensor, torch.Tensor]:
    """(loss, gradient norm) of a whole step."""
    loss = model(tokens_of(seed))
    loss.backward()
    norm = onefold.clip_grad_norm_(model, 1.0)
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach(), norm
