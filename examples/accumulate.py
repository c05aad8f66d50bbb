"""Gradient accumulation with `onefold.no_sync`, and what it sends at every stage.

    torchrun --nproc-per-node 2 examples/accumulate.py

Four micro-batches a step. Stages 0 and 1 send gradients once a step whatever the number of
micro-batches. Stages 2 and 3 keep only their part of the gradients, so they reduce every
micro-batch, unless the recipe says `reduce_at="boundary"`: then they hold whole gradients until the
boundary and send them once.
"""

import contextlib
import os

import torch
import torch.distributed as dist
from torch import nn

import onefold

MICRO_BATCHES = 4
WIDTH = 256


def bytes_of_a_step(recipe: onefold.Recipe) -> int:
    """Payload bytes this rank sends in one optimizer step of `MICRO_BATCHES` micro-batches."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    torch.manual_seed(0)
    model = onefold.shard(nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(4))), recipe)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    traffic = onefold.engine_of(model).traffic
    generator = torch.Generator().manual_seed(rank)
    before = 0
    for _ in range(2):  # the second step is the typical one
        before = traffic.sent().nbytes
        for number in range(MICRO_BATCHES):
            last = number == MICRO_BATCHES - 1
            with contextlib.nullcontext() if last else onefold.no_sync(model):
                (
                    model(torch.randn(8, WIDTH, generator=generator)).square().mean()
                    / MICRO_BATCHES
                ).backward()
        optimizer.step()
        optimizer.zero_grad()
    return traffic.sent().nbytes - before


def main() -> dict[str, int]:
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    recipes = {f"stage {stage}": onefold.Recipe.zero(stage) for stage in range(4)}
    recipes["stage 2, boundary"] = onefold.Recipe.zero(2, reduce_at="boundary")
    sent = {name: bytes_of_a_step(recipe) for name, recipe in recipes.items()}
    if not dist.is_initialized() or dist.get_rank() == 0:
        parameters = 4 * (WIDTH * WIDTH + WIDTH) * 4
        for name, size in sent.items():
            print(
                f"{name:20} {size:8} bytes a step and rank = {size / parameters:.2f} x the"
                " parameters"
            )
    if dist.is_initialized():
        dist.destroy_process_group()
    return sent


if __name__ == "__main__":
    main()
