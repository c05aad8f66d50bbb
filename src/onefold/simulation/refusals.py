"""Refuse what the simulation does not support, and say why."""

from __future__ import annotations

import torch.distributed as dist

from onefold.plan.degrees import Degrees
from onefold.recipe import Recipe, Tier
from onefold.recipe.optimizers import SIMULATED

#: The most ranks that may be asked for. More would work.
MOST_RANKS = 4096


def check(recipe: Recipe, ranks: int, rank: int, micro_batches: int, optimizer: str) -> None:
    """Raise ValueError or RuntimeError for what the simulation does not support at all."""
    codecs = [
        name
        for name in (recipe.parameters.codec, recipe.gradients.codec, recipe.frozen)
        if name is not None
    ]
    if codecs:
        raise ValueError(
            "a simulation computes nothing, so nothing is encoded in it, and the recipe has"
            f" {', '.join(codecs)}: leave codecs out. The plan itself counts their bytes."
        )
    if recipe.inner == "node":
        raise ValueError(
            "group='node' in a simulation, which knows no nodes: give the number of ranks of one."
        )
    if not 1 <= ranks <= MOST_RANKS:
        raise ValueError(f"a simulation of {ranks} ranks: expected 1 to {MOST_RANKS}.")
    if not 0 <= rank < ranks:
        raise ValueError(f"rank {rank} of {ranks}: expected 0 to {ranks - 1}.")
    if micro_batches < 1:
        raise ValueError(f"{micro_batches} micro-batches: expected at least 1.")
    if optimizer not in SIMULATED:
        raise ValueError(
            f"optimizer {optimizer!r}: a simulation runs torch's own; expected one of"
            f" {', '.join(SIMULATED)}."
        )
    if dist.is_available() and dist.is_initialized():
        raise RuntimeError(
            "a process group is initialized in this process, and a simulation needs the place for"
            " its own: simulate before init_process_group, or in another process (`onefold plan"
            " --simulate`)."
        )


def check_mesh(recipe: Recipe, degrees: Degrees, replicas: int, micro_batches: int) -> None:
    """Raise ValueError for what the simulation of a mesh does not support."""
    if degrees.ranks == 1:
        raise ValueError("a mesh of one rank has no axes: simulate without them.")
    if degrees.chunks > 1:
        raise ValueError(
            f"a simulation of {degrees.chunks} chunks a stage: it runs pipelines of one chunk. The plan"
            " counts the bytes of interleaved stages; leave --chunks out to simulate."
        )
    if degrees.pp > micro_batches and degrees.schedule == "1f1b":
        raise ValueError(
            f"a simulation of {micro_batches} micro-batches in {degrees.pp} stages: torch's 1F1B takes at"
            " least one for each stage. Give more (--global-batch), or --schedule gpipe."
        )
    if has_tiers(recipe) or recipe.step_in_backward:
        raise ValueError(
            "offload or steps in the backward pass in a simulation of a mesh: it runs state on"
            " the device only. Leave them out, or simulate data-parallel ranks alone."
        )
    each = degrees.sizes["dp"]
    if replicas < 1 or each % replicas:
        raise ValueError(
            f"{replicas} replicas of {each} data-parallel ranks: expected a number that divides them."
        )


def has_tiers(recipe: Recipe) -> bool:
    """Return whether the recipe has some of its state, or activations, off the device."""
    tiers = recipe.parameters.tier, recipe.optimizer.tier
    return recipe.offload_activations is not None or any(t is not Tier.DEVICE for t in tiers)
