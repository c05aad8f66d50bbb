"""Models of which a step is foretold, by the plan's replay and by a simulation: by name."""

from __future__ import annotations

import torch
from torch import nn

from zoo import Routed, TinyGPT, TinyMLP, features_of, tokens_of


def model_of(kind: str) -> nn.Module:
    torch.manual_seed(0)
    if kind == "mlp":
        return TinyMLP(16, 128, 6, 16)
    if kind == "gpt":
        return TinyGPT(vocabulary=301, width=64, heads=4, depth=4, length=16, tied=True)
    return Routed(256, 5)


def batch_of(kind: str, seed: int) -> torch.Tensor:
    if kind == "gpt":
        return tokens_of(seed, 2, 16, 301)
    return features_of(seed, 4, 16)
