"""Checks before anything is laid out: ranks compare what they were given, and refuse modules that
would make their weights diverge.
"""

from __future__ import annotations

import hashlib

import torch
from torch import nn

from onefold.comm import CollectiveContext
from onefold.recipe import Recipe
from onefold.runtime.engine import Engine
from onefold.runtime.state.materialize import has_meta
from onefold.runtime.units import UnitSpec

_START = CollectiveContext("control", "(start)", 0, "state")


def refuse_max_norm(module: nn.Module, alone: bool) -> None:
    """Raise ValueError for embeddings with max_norm: it changes the rows that a rank looks up."""
    for name, inner in module.named_modules() if not alone else ():
        if isinstance(inner, (nn.Embedding, nn.EmbeddingBag)) and inner.max_norm is not None:
            raise ValueError(
                f"{name!r} has max_norm={inner.max_norm}: it renormalizes the rows that a rank"
                " looks up, in its forward pass, so that ranks would come to have different"
                " weights. Leave max_norm out and renormalize after optimizer.step(), under"
                " torch.no_grad(): `w.mul_((max_norm / w.norm(dim=1,"
                " keepdim=True)).clamp(max=1))`."
            )


def compare_ranks(engine: Engine, recipe: Recipe, specs: list[UnitSpec], weights: bool) -> None:
    """Raise on every rank if the ranks were given different recipes or models."""
    found = [
        (f.names, tuple(f.param.shape), f.param.dtype, f.param.requires_grad)
        for s in specs
        for f in s.found
    ]
    parts = {
        "recipes": [
            getattr(recipe, name) for name in Recipe.__dataclass_fields__ if name != "notes"
        ],
        "parameter names": [names for names, *_ in found],
        "parameter shapes": [shape for _, shape, *_ in found],
        "parameter dtypes": [dtype for *_, dtype, _ in found],
        "frozen parameters": [trainable for *_, trainable in found],
        "units": [s.name for s in specs],
        "weights": weights,
    }
    digest = b"".join(hashlib.sha256(repr(part).encode()).digest()[:8] for part in parts.values())
    payload = torch.frombuffer(bytearray(digest), dtype=torch.uint8)
    said = [bytes(p.tolist()) for p in engine.group.exchange_control(payload, _START)]
    for at, name in enumerate(parts):
        cut = slice(8 * at, 8 * at + 8)
        others = [
            engine.group.ranks[r] for r, digests in enumerate(said) if digests[cut] != said[0][cut]
        ]
        if others:
            raise ValueError(
                f"shard() was given different {name} on rank {engine.group.ranks[0]} and on"
                f" {', '.join(f'rank {r}' for r in others)}. Every rank must shard the same model"
                " by the same recipe (weights may differ: rank 0's are taken)."
            )


def rank_0_needs_values(engine: Engine, module: nn.Module) -> bool:
    """Whether rank 0's model is on the meta device, so that its weights must be initialized. Every
    rank gets the same answer. Collective.
    """
    mine = has_meta(module)
    payload = torch.tensor([mine], dtype=torch.uint8)
    return bool(engine.group.exchange_control(payload, _START)[0].item())
