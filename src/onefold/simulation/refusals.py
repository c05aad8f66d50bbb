"""Refuse what the simulation does not support, and say why."""

from __future__ import annotations

import torch.distributed as dist

from onefold.plan.degrees import Degrees
from onefold.recipe import Recipe, Tier
from onefold.recipe.optimizers import SIMULATED


def check(recipe: Recipe, ranks: int, rank: int, micro_batches: int, optimizer: str) -> None:
    """Raise ValueError or RuntimeError for what the simulation does not support at all."""
    codecs = recipe.parameters.codec, recipe.gradients.codec, recipe.frozen
    if any(codecs):
        raise ValueError(
            "a simulation computes nothing, so nothing is encoded in it, and the recipe has"
            f" {', '.join(filter(None, codecs))}: leave codecs out. The plan itself counts their"
            " bytes."
        )
    if recipe.inner == "node":
        raise ValueError(
            "group='node' in a simulation, which knows no nodes: give the number of ranks of one."
        )
    if ranks < 1 or not 0 <= rank < ranks:
        raise ValueError(f"rank {rank} of {ranks}: expected a rank below their number.")
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
    tiers = {recipe.parameters.tier, recipe.optimizer.tier} - {Tier.DEVICE}
    if tiers or recipe.offload_activations is not None or recipe.step_in_backward:
        raise ValueError(
            "offload or steps in the backward pass in a simulation of a mesh: it runs state on"
            " the device only. Leave them out, or simulate data-parallel ranks alone."
        )
    each = degrees.sizes["dp"]
    if replicas < 1 or each % replicas:
        raise ValueError(
            f"{replicas} replicas of {each} data-parallel ranks: expected a number that divides them."
        )
