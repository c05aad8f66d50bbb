"""Invariant 1 where the launcher tells of several nodes: moves go over two levels by themselves,
and stages 0 to 3 agree to the bit.
"""

from __future__ import annotations

import logging
import os
from typing import Any

import pytest
import torch

import onefold
from invariants.test_same_numbers import MICRO_BATCHES, Bits, Run, compare
from onefold.comm.communicators import inner_of
from ranks import run_ranks
from trials import STAGES
from zoo import TinyGPT, TinyMLP, features_of

FLAT: Bits = [("stage 3, flat", 3, {"group": "flat"})]


def on_nodes(per_node: str, run: Run, bit_equal: Bits, rounded: Bits) -> list[str]:
    os.environ["LOCAL_WORLD_SIZE"] = per_node
    return compare(run, bit_equal, rounded)


def by_stage(**options: Any) -> Bits:
    return [(f"stage {stage} {options or ''}", stage, options) for stage in STAGES]


@pytest.mark.parametrize("kind", ["sgd", "fused adamw"])
def test_stages_are_bit_equal_on_two_nodes(kind: str) -> None:
    named: Bits = [
        ("stage 0 by name", 0, {"group": "node"}),
        ("HSDP", 3, {"shard_group": "node"}),
        ("in groups of 2", 3, {"group": 2}),
    ]
    same = [*by_stage(), *named]
    for wrong in run_ranks(4, on_nodes, "2", Run(kind=kind, max_norm=0.5, steps=3), same, FLAT):
        assert wrong == [], "\n".join(wrong)


def test_stages_are_bit_equal_on_three_nodes() -> None:
    for wrong in run_ranks(6, on_nodes, "2", Run(kind="fused adamw", steps=2), by_stage(), FLAT):
        assert wrong == [], "\n".join(wrong)


def test_accumulation_on_two_nodes_is_bit_equal_where_it_reduces_at_the_same_time() -> None:
    late = [
        (name, stage, {"reduce_at": "boundary"} if stage >= 2 else {})
        for name, stage, _ in by_stage()
    ]
    for wrong in run_ranks(4, on_nodes, "2", Run(micro_batches=MICRO_BATCHES, steps=2), late, FLAT):
        assert wrong == [], "\n".join(wrong)


@pytest.mark.parametrize(
    "options",
    [{"overlap": False}, {"in_flight": 4, "prefetch": 3}, {"offload_optimizer": "cpu"}],
    ids=str,
)
def test_neither_schedule_nor_tier_changes_a_bit_on_two_nodes(options: dict[str, Any]) -> None:
    first = 1 if "offload_optimizer" in options else 0
    for wrong in run_ranks(
        4,
        on_nodes,
        "2",
        Run(kind="sgd", steps=2),
        [by_stage()[0], *by_stage(**options)[first:]],
        [],
    ):
        assert wrong == [], "\n".join(wrong)


def gradients(stage: int, group: Any) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    model = onefold.shard(
        TinyMLP(8, 24, 2, 6), onefold.Recipe.zero(stage, precision="bf16", group=group)
    )
    model(features_of(torch.distributed.get_rank(), 4, 8)).square().mean().backward()
    with torch.no_grad():
        for p in model.parameters():
            if p.grad is not None:
                p.copy_(p.grad)
    return onefold.full_state_dict(model)


def in_16_bits() -> list[str]:
    """At which stages gradients of 16 bits are others than at stage 0."""
    os.environ["LOCAL_WORLD_SIZE"] = "2"
    first, *others = (gradients(stage, None) for stage in STAGES)
    flat = gradients(0, "flat")
    wrong = [
        f"stage {s}: {name}"
        for s, found in enumerate(others, 1)
        for name in found
        if not torch.equal(first[name], found[name])
    ]
    return wrong + [
        f"flat: {name}"
        for name in flat
        if not torch.allclose(first[name], flat[name], rtol=2e-2, atol=1e-4)
    ]


def test_gradients_of_16_bits_are_the_same_at_every_stage_on_two_nodes() -> None:
    for wrong in run_ranks(4, in_16_bits):
        assert wrong == [], wrong


def levels(
    per_node: str, cases: list[tuple[int, dict[str, Any]]], members: tuple[int, ...] = ()
) -> list[tuple[int, list[str]]]:
    """(groups, what was said of them) of each recipe."""
    os.environ["LOCAL_WORLD_SIZE"] = (
        "1"
        if per_node == "uneven" and torch.distributed.get_rank() == 3
        else per_node.replace("uneven", "3")
    )
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("onefold").addHandler(handler)
    found, group = [], None
    if members:
        group = torch.distributed.new_group(list(members))
        if torch.distributed.get_rank() not in members:
            return []
    for stage, options in cases:
        said.clear()
        model = onefold.shard(TinyGPT(), onefold.Recipe.zero(stage, **options), group=group)
        found.append(
            (
                onefold.engine_of(model).group.topology.outer,
                [s for s in said if "group" in s or "hosts" in s],
            )
        )
        del model
    return found


CASES: list[tuple[int, dict[str, Any]]] = [
    (0, {}),
    (3, {}),
    (3, {"reduce_codec": "int8"}),
    (3, {"group": "flat"}),
    (3, {"group": "node"}),
]


@pytest.mark.parametrize(
    ("per_node", "groups"),
    [("2", [2, 2, 2, 1, 2]), ("4", [1] * 5), ("1", [1, 1, 1, 1, 4]), ("uneven", [1] * 5)],
)
def test_groups_are_the_launchers_nodes_where_these_are_several_and_alike(
    per_node: str, groups: list[int]
) -> None:
    """Where they are not, it is said to those who asked, once."""
    for rank, found in enumerate(run_ranks(4, levels, per_node, CASES)):
        assert [count for count, _ in found] == groups
        *quiet, asked = [said for _, said in found]
        assert quiet == [[]] * 4, quiet
        told = rank == 0 and groups[-1] == 1
        assert len(asked) == told and all(
            "group='node' makes one group of the 4 ranks" in text for text in asked
        ), asked


def initialized() -> tuple[int, list[str]]:
    """(groups, notes) of an engine made from a DeepSpeed file that says nothing of nodes."""
    from onefold.integrations import deepspeed

    os.environ["LOCAL_WORLD_SIZE"] = "2"
    zero = {"stage": 3, "zero_quantized_gradients": True}
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": zero,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
    }
    engine, *_ = deepspeed.initialize(model=TinyMLP(8, 24, 2, 6), config=config)
    found = onefold.engine_of(engine.module)
    return found.group.topology.outer, [note for note in found.recipe.notes if "group" in note]


def test_initialize_takes_nodes_for_groups() -> None:
    assert run_ranks(4, initialized) == [(2, [])] * 4


def test_a_process_group_that_is_spread_unevenly_over_nodes_is_flat() -> None:
    first, *others = run_ranks(4, levels, "2", CASES[:2], (0, 1, 2))
    assert others == [[(1, []), (1, [])]] * 2 + [[]]
    assert [count for count, _ in first] == [1, 1]
    assert all(len(said) == 1 and "2 hosts unevenly (ranks 0-1; 2)" in said[0] for _, said in first)


def test_a_process_group_of_one_rank_of_each_node_is_flat() -> None:
    assert run_ranks(4, levels, "2", CASES[:2], (1, 3)) == [
        [],
        [(1, []), (1, [])],
        [],
        [(1, []), (1, [])],
    ]


def what_another_launcher_said() -> list[Any]:
    """As a program of four ranks finds it that was started by one rank of a launcher's eight, or of
    one.
    """
    found = []
    for world_size, per_node in (("8", "2"), ("1", "1")):
        os.environ |= {"WORLD_SIZE": world_size, "LOCAL_WORLD_SIZE": per_node}
        group = onefold.engine_of(onefold.shard(TinyMLP(), onefold.Recipe.zero(3))).group
        found.append((group.topology.outer, group.borders))
    return found


def test_what_a_launcher_says_of_another_number_of_ranks_is_not_of_this_run() -> None:
    assert run_ranks(4, what_another_launcher_said) == [[(1, ""), (1, "")]] * 4


@pytest.mark.parametrize(
    ("ranks", "per_node", "each"),
    [([0, 1, 4, 5], 2, 2), ([0, 2, 4, 6], 2, 1), ([0, 1, 2, 4], 2, None), ([1, 2, 3, 4], 2, None), ([0, 1, 2, 3, 4, 5, 8, 9], 4, None),
     ([0, 4, 1, 5], 4, None)],
)  # fmt: skip
def test_nodes_are_groups_where_each_has_as_many_neighbouring_ranks(
    ranks: list[int], per_node: int, each: int | None
) -> None:
    if each is None:
        assert inner_of(None, ranks, per_node) == len(ranks)
        with pytest.raises(ValueError, match="unevenly"):
            inner_of("node", ranks, per_node)
    else:
        assert inner_of("node", ranks, per_node) == each
        assert inner_of(None, ranks, per_node) == (len(ranks) if each == 1 else each)
