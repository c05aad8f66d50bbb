"""What shard() is told to run over: a process group, a mesh, or nothing; everything else is a
sentence on the rank that gave it.
"""

from __future__ import annotations

import threading
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist

from ranks import run_ranks
from zoo import TinyMLP


def shard_over(group: Any, stage: int = 3) -> None:
    import onefold

    onefold.shard(TinyMLP(), onefold.Recipe.zero(stage, stall_timeout=60.0), group=group)


def refusals() -> dict[str, str]:
    """What is said to each thing that is no group."""
    from torch.distributed.device_mesh import init_device_mesh

    gone = dist.new_group([0, 1])
    dist.destroy_process_group(gone)
    given = {
        "a number": 3,
        "a name": "world",
        "a list": [0, 1],
        "the number of no group": -100,
        "a mesh of two dimensions": init_device_mesh(
            "cpu", (2, 1), mesh_dim_names=("data", "tensor")
        ),
        "a destroyed group": gone,
    }
    said = {}
    for name, group in given.items():
        try:
            shard_over(group)
            said[name] = "nothing"
        except ValueError as error:
            said[name] = str(error)
    shard_over(init_device_mesh("cpu", (2,)))
    shard_over(dist.group.WORLD)
    return said


def test_what_is_no_group_of_ranks_is_refused_in_a_sentence() -> None:
    for rank, said in enumerate(run_ranks(2, refusals)):
        for name, text in (("a number", "3"), ("a name", "'world'"), ("a list", "[0, 1]")):
            assert f"group={text}" in said[name] and "ProcessGroup" in said[name], said
        assert f"rank {rank} is not in the given group" in said["the number of no group"], said
        assert (
            "2 dimensions" in said["a mesh of two dimensions"]
            and "one-dimensional" in said["a mesh of two dimensions"]
        ), said
        assert "destroyed" in said["a destroyed group"], said


def in_groups_of_different_number() -> list[float] | None:
    """Rank 0 of a subset is in one group more than rank 1 is: torch would name a subset's new
    group after a number like that.
    """
    import torch

    import onefold

    lone = dist.new_group([0])
    pair = dist.new_group([0, 1])
    if dist.get_rank() == 2:
        return None
    model = onefold.shard(TinyMLP(), onefold.Recipe.zero(3, stall_timeout=20.0), group=pair)
    assert onefold.engine_of(model).group.communicator() is not None
    out = model(torch.ones(2, 7)).sum()
    del lone
    for _ in range(4):  # each makes its communicators after the last one's have gone
        del model
        model = onefold.shard(TinyMLP(), onefold.Recipe.zero(3, stall_timeout=20.0), group=pair)
        model(torch.ones(2, 7))
    return [float(out), float(len(onefold.engine_of(model).group.ranks))]


def test_ranks_of_a_subset_may_be_in_other_groups_besides() -> None:
    first, second, outside = run_ranks(3, in_groups_of_different_number)
    assert first == second and first[1] == 2
    assert outside is None


def beside_groups_of_the_script() -> list[float]:
    """Ranks 0 and 1 shard over a subset, and make one more group among themselves; then all ranks
    make groups, shard over all, and sum.
    """
    import torch

    import onefold

    recipe = onefold.Recipe.zero(3, stall_timeout=60.0)
    pair, sums = dist.new_group([0, 1]), []
    if dist.get_rank() < 2:
        onefold.shard(TinyMLP(), recipe, group=pair)
        own = dist.new_group([0, 1], use_local_synchronization=True)
        both = torch.ones(())
        dist.all_reduce(both, group=own)
        sums.append(float(both))
    model = onefold.shard(TinyMLP(), recipe)
    model(torch.ones(2, 7)).sum().backward()
    if dist.get_rank() == 2:
        # Some versions of torch count each rank's groups, and need as many on each
        dist.new_group([2], use_local_synchronization=True)
    for members in ([0, 1, 2], [1, 2]):
        group, one = dist.new_group(members), torch.ones(())
        if dist.get_rank() in members:
            dist.all_reduce(one, group=group)
        sums.append(float(one))
    return sums


def test_groups_that_a_script_makes_after_and_before_shard_meet() -> None:
    assert run_ranks(3, beside_groups_of_the_script) == [[2, 3, 1], [2, 3, 2], [3, 2]]


def while_a_thread_makes_a_group() -> float:
    """A thread of rank 0 makes a group while Onefold makes some there; rank 1 makes it later."""
    import torch

    import onefold

    model = onefold.shard(TinyMLP(), onefold.Recipe.zero(3, stall_timeout=60.0))
    communicators, made = onefold.engine_of(model).group.communicators, []

    def make() -> None:
        made.append(dist.new_group([0, 1], timeout=timedelta(seconds=20)))

    if dist.get_rank() == 0:
        with communicators.named():
            thread = threading.Thread(target=make)
            thread.start()
            thread.join()
    else:
        make()
    both = torch.ones(())
    dist.all_reduce(both, group=made[0])
    return float(both)


def test_a_group_that_a_thread_makes_meanwhile_keeps_the_name_that_torch_gives_it() -> None:
    assert run_ranks(2, while_a_thread_makes_a_group) == [2.0, 2.0]


def test_a_group_without_process_groups_is_not_passed_over() -> None:
    assert not dist.is_initialized()
    with pytest.raises(ValueError, match=r"group=\[0, 1\].*init_process_group"):
        shard_over([0, 1])


def names_after() -> bool:
    import torch

    import onefold

    by_torch = dist.distributed_c10d._process_group_name
    model = onefold.shard(torch.nn.Linear(4, 4), onefold.Recipe.zero(3))
    model(torch.ones(1, 4)).sum().backward()
    return dist.distributed_c10d._process_group_name is by_torch


def test_torch_names_groups_itself_once_onefolds_are_made() -> None:
    assert run_ranks(2, names_after) == [True, True]
