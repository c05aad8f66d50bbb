"""Models that are trained in threads of one process do not notice each other."""

from __future__ import annotations

import sys
import threading
from typing import Any

import pytest
import torch
from torch import nn

from ranks import run_ranks
from zoo import TinyMLP, features_of


class ReadsWeights(TinyMLP):
    """Reads a weight of a block, whose module does not, in its forward pass."""

    def forward(self, x: Any) -> Any:
        first: Any = self.blocks[0]
        return super().forward(x) + first.up.weight.float().mean()


def losses_of(stage: int, seed: int, group: Any) -> list[float]:
    import onefold

    found = []
    for _ in range(2):
        model: nn.Module = ReadsWeights()
        with torch.no_grad():
            for number, p in enumerate(model.parameters()):
                p.copy_(features_of(100 * seed + number, *p.shape) / 4)
        recipe = onefold.Recipe.zero(stage, precision="bf16", stall_timeout=60.0)
        onefold.shard(model, recipe, group=group)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        for step in range(6):
            optimizer.zero_grad()
            loss = model(features_of(seed + step, 4, 7)).float().square().mean()
            loss.backward()
            found.append(model.blocks[1].up.weight.norm().item())  # type: ignore[index,union-attr]
            optimizer.step()
            found.append(loss.item())
    return found


def train_in_threads() -> list[str]:
    import torch.distributed as dist

    stages, threads, found = (3, 2, 3, 0), [], dict[int, Any]()
    # Each model has communicators of its own over the ranks: threads come to theirs in any order
    groups = [dist.new_group() if dist.get_world_size() > 1 else None for _ in stages]
    alone = [losses_of(stage, seed, groups[seed]) for seed, stage in enumerate(stages)]

    def work(seed: int, stage: int) -> None:
        try:
            found[seed] = losses_of(stage, seed, groups[seed])
        except BaseException as error:
            found[seed] = repr(error)

    sys.setswitchinterval(1e-5)
    for seed, stage in enumerate(stages):
        threads.append(threading.Thread(target=work, args=(seed, stage)))
        threads[-1].start()
    for thread in threads:
        thread.join()
    return [
        f"stage {stages[seed]}: {found[seed]} in a thread, {alone[seed]} alone"
        for seed in found
        if found[seed] != alone[seed]
    ]


@pytest.mark.parametrize("ranks", [1, 2])
def test_models_that_threads_train_at_once_train_as_alone(ranks: int) -> None:
    assert run_ranks(ranks, train_in_threads) == [[]] * ranks


def read_beside_a_pass() -> list[str]:
    import onefold
    from onefold.runtime.parameters.parameter import ShardedParameter

    recipe = onefold.Recipe.zero(3, precision="bf16", stall_timeout=30.0)
    inside, done = threading.Event(), threading.Event()

    class Waits(TinyMLP):
        def forward(self, x: Any) -> Any:
            inside.set()
            assert done.wait(60)
            return super().forward(x)

    one, other = onefold.shard(Waits(), recipe), onefold.shard(TinyMLP(), recipe)
    thread = threading.Thread(target=lambda: one(features_of(0, 4, 7)))
    thread.start()
    assert inside.wait(60)
    read = other.blocks[0].up.weight  # type: ignore[union-attr,index]
    gathered = onefold.engine_of(other).gather.gathered
    done.set()
    thread.join()
    return [] if type(read) is ShardedParameter and not gathered else [f"{type(read)}, {gathered}"]


def test_a_weight_that_is_read_beside_another_threads_pass_is_sharded() -> None:
    assert run_ranks(2, read_beside_a_pass) == [[], []]
