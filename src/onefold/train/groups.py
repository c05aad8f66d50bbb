"""Which parameters AdamW decays: matrices. Biases, norms, embeddings and everything 1-D are left
alone.

After `onefold.shard` a parameter is a 1-D interval, whatever it was, so the decision is taken on
the names and shapes the model had before, and kept as a set of names.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import nn


def names_without_decay(module: nn.Module) -> frozenset[str]:
    """Names (as `named_parameters` gives them) of the parameters that weight decay skips. Call it
    before sharding.

    A tied weight has one name, its first: an embedding that is the output layer too counts as an
    embedding.
    """
    out: set[str] = set()
    for prefix, owner in module.named_modules():
        skip_all = (
            isinstance(owner, nn.Embedding | nn.EmbeddingBag)
            or "norm" in type(owner).__name__.lower()
        )
        for name, parameter in owner.named_parameters(prefix, recurse=False):
            if skip_all or parameter.ndim < 2 or name.endswith("bias"):
                out.add(name)
    return frozenset(out)


def parameter_groups(
    named_parameters: Iterable[tuple[str, nn.Parameter]],
    no_decay: frozenset[str],
    weight_decay: float,
) -> list[dict[str, Any]]:
    """Two groups for a torch optimizer: decayed and not. Frozen parameters are in neither; an empty
    group is left out.
    """
    decayed: list[nn.Parameter] = []
    others: list[nn.Parameter] = []
    for name, parameter in named_parameters:
        if parameter.requires_grad:
            (others if name in no_decay else decayed).append(parameter)
    groups = [
        {"params": decayed, "weight_decay": weight_decay},
        {"params": others, "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]
