"""What the plan says of groups, codecs and frozen weights is what engines do on four ranks of two
nodes: by link, at rest, at peak.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from legs import by_link
from torch import nn

import onefold
from onefold.memory import MOMENTS
from onefold.observe.memory import moments_by_tier
from onefold.offload import preflight
from onefold.plan.modules import model_shape
from onefold.plan.offloaded import offloaded_bytes
from onefold.plan.replay import Replay
from onefold.plan.states import at_rest, bound_of, topology_of, units_of
from onefold.plan.wire import elsewhere, legs_of, wire
from onefold.recipe import Recipe
from ranks import run_ranks
from zoo import TinyGPT, tokens_of

ALL_PARTS = {"second_copy": True, "gather_codec": "int8", "reduce_codec": "int4"}
#: (stage, precision, micro-batches, options of Recipe.zero). Nodes have two ranks; groups of one
#: rank and of all are no groups.
RECIPES: list[tuple[int, str, int, dict[str, Any]]] = [
    (0, "fp32", 2, {}),
    (0, "bf16", 2, {"in_flight": 0}),
    (1, "bf16", 1, {}),
    (3, "bf16", 2, {}),
    (0, "bf16", 1, {"group": "flat"}),
    (3, "fp32", 1, {"group": "flat"}),
    (3, "fp32", 2, {"group": "node"}),
    (2, "bf16", 2, {"group": 2}),
    (1, "fp32", 2, {"group": 2}),
    (3, "bf16", 3, {"shard_group": "node"}),
    (3, "fp32", 1, {"shard_group": 2, "prefetch": 2, "in_flight": 0}),
    (3, "bf16", 2, {"shard_group": 2, "reduce_at": "boundary"}),
    (2, "bf16", 2, {"shard_group": "node"}),
    (3, "bf16", 2, {"shard_group": "node", "optimizer_over": "all"}),
    (3, "bf16", 2, {"second_copy": True}),
    (3, "fp32", 1, {"second_copy": True, "reshard_after_forward": False}),
    (3, "bf16", 2, {"second_copy": True, "group": 1}),
    (3, "bf16", 1, {"gather_codec": "int8"}),
    (3, "fp32", 1, {"gather_codec": "fp8", "shard_group": 2}),
    (3, "bf16", 2, {"gather_codec": "int4", "second_copy": True, "overlap": False}),
    (3, "bf16", 2, {"reduce_codec": "int4", "error_feedback": True}),
    (2, "fp32", 1, {"reduce_codec": "int8", "group": 4}),
    (1, "bf16", 2, {"reduce_codec": "fp8"}),
    (3, "bf16", 3, {"reduce_codec": "int8", "shard_group": "node", "error_feedback": True}),
    (3, "bf16", 2, {**ALL_PARTS, "error_feedback": True, "prefetch": 2, "in_flight": 4}),
    (3, "bf16", 2, {"frozen": "nf4"}),
    (3, "fp32", 1, {"frozen": "int8", "shard_group": 2}),
    (3, "bf16", 1, {"frozen": "int4", **ALL_PARTS}),
    (3, "bf16", 2, {"second_copy": True, "offload_optimizer": "cpu", "offload_param": "cpu"}),
    (3, "bf16", 2, {"shard_group": 2, "offload_optimizer": "cpu"}),
    (3, "bf16", 2, {**ALL_PARTS, "offload_optimizer": 0.6}),
    (
        3,
        "bf16",
        2,
        {"second_copy": True, "offload_optimizer": "nvme", "offload_param": "nvme", "chunk": 65536},
    ),
    (
        3,
        "fp32",
        1,
        {
            "gather_codec": "int8",
            "offload_optimizer": "nvme",
            "offload_param": "nvme",
            "chunk": 65536,
        },
    ),
]


def model() -> nn.Module:
    torch.manual_seed(0)
    made = TinyGPT(width=72, heads=2, depth=2)
    for p in made.blocks[1].parameters():
        p.requires_grad_(p.dim() < 2)
    return made


def observed(recipe: Recipe, micro_batches: int) -> dict[str, Any]:
    """What the ledgers say of a step in the steady state."""
    module = onefold.shard(model(), recipe)
    optimizer = torch.optim.AdamW([p for p in module.parameters() if p.requires_grad], lr=1e-3)
    engine = onefold.engine_of(module)
    for step in range(2):  # the order of units is learned in the first
        if step == 1:
            engine.memory.reset_peak()
            engine.traffic.reset()
            engine.transfers.moved.reset()
        for k in range(micro_batches):
            with contextlib.nullcontext() if k + 1 == micro_batches else onefold.no_sync(module):
                module(tokens_of(10 * step + k)).float().backward()
        optimizer.step()
        optimizer.zero_grad()
    moments = moments_by_tier(optimizer, engine)
    links = engine.traffic.by_link()
    return {
        "at rest": {
            k: v
            for k, v in (engine.memory.now() | {MOMENTS: moments.get("device", 0)}).items()
            if v
        },
        "by move": engine.traffic.by_move(),
        "by link": links,
        "between by move": engine.traffic.between_by_move(),
        "moved": engine.transfers.moved.by_move(),
        "peak": sum(engine.memory.peak().values()),
    }


def planned(
    recipe: Recipe, micro_batches: int, ranks: int, rank: int, per_node: int
) -> dict[str, Any]:
    units = units_of(model_shape(model()), recipe, ranks, rank, per_node)
    legs, topology = legs_of(units, recipe, micro_batches), topology_of(recipe, ranks, per_node)
    moves = {leg.move: [other for other in legs if other.move == leg.move] for leg in legs}
    between = {
        move: by_link(some, topology, per_node, rank)["between"] for move, some in moves.items()
    }
    return {
        "at rest": at_rest(units),
        "by move": wire(units, recipe, micro_batches),
        "by link": by_link(legs, topology, per_node, rank),
        "between by move": {move: nbytes for move, nbytes in between.items() if nbytes},
        "moved": offloaded_bytes(units, recipe, micro_batches).moved,
        "peak": sum(Replay(units, recipe).run(micro_batches).peak.values()),
        "bound": bound_of(units, recipe, micro_batches),
    }


def differing(folder: str, recipes: list[tuple[int, str, int, dict[str, Any]]]) -> list[str]:
    """What a plan says otherwise than an engine."""
    ranks, rank, wrong = dist.get_world_size(), dist.get_rank(), []
    os.environ["LOCAL_WORLD_SIZE"] = "2"
    preflight.measure = lambda *_, **__: []  # the disk's speed is of no interest here
    for stage, precision, micro_batches, options in recipes:
        places = {"nvme": folder} if "nvme" in str(options) else {}
        recipe = Recipe.zero(stage, precision=precision, stall_timeout=30.0, **options, **places)
        told, seen = planned(recipe, micro_batches, ranks, rank, 2), observed(recipe, micro_batches)
        name = f"stage {stage}, {precision}, {micro_batches} micro-batches, {options}"
        wrong += [
            f"{name}: {key} {seen[key]}, planned {told[key]}"
            for key in seen
            if seen[key] != told[key]
        ]
        if seen["peak"] > told["bound"]:
            wrong.append(f"{name}: a peak of {seen['peak']} above its bound of {told['bound']}")
    return wrong


def test_a_plan_of_groups_and_codecs_in_integers_equals_the_ledgers(
    tmp_path: Path, sample: Any
) -> None:
    for wrong in run_ranks(4, differing, str(tmp_path), sample(RECIPES, 3)):
        assert wrong == [], "\n".join(wrong)


@pytest.mark.parametrize(
    ("ranks", "inner", "per_node"),
    [(8, 4, 4), (8, 2, 4), (8, 4, 2), (12, 3, 4), (6, 6, 3), (6, 1, 2)],
)
def test_who_is_on_which_node_is_what_groups_say(ranks: int, inner: int, per_node: int) -> None:
    """Against the lists of the engine's topology, by number."""
    topology = topology_of(Recipe.zero(3, group=inner), ranks)
    for rank in range(ranks):
        at = topology.position_of(rank)
        assert topology.order[at] == rank
        for level, positions in (
            ("intra-group", topology.intra_group(at)),
            ("inter-group", topology.inter_group(at)),
            ("all", list(range(ranks))),
        ):
            numbers = [topology.order[p] for p in positions]
            far = sum(n // per_node != rank // per_node for n in numbers)
            assert elsewhere(topology, per_node, rank, level) == (len(numbers) - 1, far)  # type: ignore[arg-type]
