"""Who is on which node: what the launcher says is taken for groups where nodes are several and
alike, and else is said to those who asked. What groups promise are rows of the table.
"""

from __future__ import annotations

import logging
import os
from typing import Any

import pytest
import torch.distributed as dist

import looks
import onefold
import standin
from on_ranks import on_ranks, slow
from zoo import TinyMLP


class Told(logging.Handler):
    """What is said of groups while a model is sharded."""

    def __init__(self) -> None:
        super().__init__()
        self.said: list[str] = []
        logging.getLogger("onefold").addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        text = record.getMessage()
        self.said += [text] if "group" in text or "hosts" in text else []


def groups_of(stage: int, options: Any = None, group: Any = None) -> tuple[int, list[str]]:
    told = Told()
    model = onefold.shard(TinyMLP(), onefold.Recipe.zero(stage, **options or {}), group=group)
    logging.getLogger("onefold").removeHandler(told)
    return looks.groups(model), told.said


#: What the launcher says, and groups: if nothing is asked, with codecs, "flat", and "node".
@on_ranks(4)
@pytest.mark.parametrize(
    ("per_node", "expected"),
    [("2", (2, 2, 1, 2)), ("4", (1, 1, 1, 1)), ("1", (1, 1, 1, 4)), ("uneven", (1, 1, 1, 1))],
)
def test_nodes_are_groups_where_they_are_several_and_alike(
    per_node: str, expected: tuple[int, ...]
) -> None:
    mine = "1" if dist.get_rank() == 3 else "3"
    os.environ["LOCAL_WORLD_SIZE"] = mine if per_node == "uneven" else per_node
    asked: list[dict[str, Any]] = [{}, {"reduce_codec": "int8"}, {"group": "flat"}]
    found = [groups_of(3, options) for options in asked]
    assert found == [(count, []) for count in expected[:3]]
    assert groups_of(0) == (expected[0], [])
    count, said = groups_of(3, {"group": "node"})
    assert count == expected[3]
    told = dist.get_rank() == 0 and count == 1
    assert len(said) == told, said
    assert all("group='node' makes one group of the 4 ranks" in text for text in said)


def of_members(members: list[int]) -> tuple[int, list[str]] | None:
    """On a process group of some of the ranks, which this one may not be of."""
    os.environ["LOCAL_WORLD_SIZE"] = "2"
    group = dist.new_group(members)
    return groups_of(3, group=group) if dist.get_rank() in members else None


@on_ranks(4)
def test_a_process_group_that_is_spread_unevenly_over_nodes_is_flat() -> None:
    found = of_members([0, 1, 2])
    if dist.get_rank() == 0:
        assert found is not None and found[0] == 1 and len(found[1]) == 1
        assert "2 hosts unevenly (ranks 0-1; 2)" in found[1][0]
    else:
        assert found == (None if dist.get_rank() == 3 else (1, []))


@slow
@on_ranks(6)
@pytest.mark.parametrize(
    ("members", "count"), [([0, 1, 4, 5], 2), ([0, 2, 4], 1), ([1, 3], 1), ([1, 2, 3, 4], 1)]
)
def test_nodes_of_a_process_group_are_those_of_its_members(members: list[int], count: int) -> None:
    found = of_members(members)
    assert found is None or found[0] == count


@on_ranks(4)
def test_what_a_launcher_says_of_another_number_of_ranks_is_not_of_this_run() -> None:
    """A program of four ranks that was started by one rank of a launcher's eight, or of one."""
    for world_size, per_node in (("8", "2"), ("1", "1")):
        os.environ |= {"WORLD_SIZE": world_size, "LOCAL_WORLD_SIZE": per_node}
        assert groups_of(3) == (1, [])


@on_ranks(4)
def test_an_engine_of_deepspeeds_configuration_takes_nodes_for_groups() -> None:
    os.environ["LOCAL_WORLD_SIZE"] = "2"
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": 3, "zero_quantized_gradients": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
    }
    engine, *_ = onefold.initialize(model=TinyMLP(8, 24, 2, 6), config=config)
    assert looks.groups(engine.module) == 2


@on_ranks(4)
def test_a_configuration_that_came_to_native_sums_keeps_its_engine_when_it_is_given_again() -> None:
    os.environ["LOCAL_WORLD_SIZE"] = "2"
    config = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 2}}
    model, group, found = TinyMLP(), standin.new_group([0, 1, 2]), list[Any]()
    for _ in range(2 if dist.get_rank() < 3 else 0):
        onefold.initialize(model=model, config=config, group=group)
        found.append(looks.engine(model))
    assert all(one.recipe.reduce == "native" and one is found[0] for one in found)
