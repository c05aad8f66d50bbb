"""Slow links between nodes: what each part of hybrid sharding and of ZeRO++ sends over them, and
the loss it ends at.

    torchrun --nproc-per-node 4 examples/slow_links.py              (one machine: two halves of the ranks stand for nodes)
    torchrun --nnodes 2 --nproc-per-node 8 ... examples/slow_links.py

The loop is the same for all of them; the recipe is what differs.
"""

import os

import torch
import torch.distributed as dist
from torch import nn

import onefold

WIDTH, BLOCKS, STEPS = 128, 3, 12


def recipes(group: int) -> dict[str, onefold.Recipe]:
    """The same training over groups of `group` ranks, with one part after the other."""
    codecs = {"gather_codec": "int8", "reduce_codec": "int4"}
    options: dict[str, dict[str, object]] = {
        "stage 3": {"group": group},
        "hybrid sharding": {"shard_group": group},
        "... optimizer over all ranks": {"shard_group": group, "optimizer_over": "all"},
        "second copy in each group": {"group": group, "second_copy": True},
        "parameters sent in 8 bits": {"group": group, "gather_codec": "int8"},
        "gradients sent in 4 bits": {"group": group, "reduce_codec": "int4"},
        "all three (ZeRO++)": {"group": group, "second_copy": True, **codecs},
    }
    return {
        name: onefold.Recipe.zero(3, precision="bf16", **given) for name, given in options.items()
    }


def train(recipe: onefold.Recipe) -> tuple[float, float, int]:
    """(first loss, last loss, payload bytes that this rank sends to other nodes in a step)."""
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(BLOCKS)]
    model = onefold.shard(nn.Sequential(*blocks), recipe)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    traffic = onefold.engine_of(model).traffic
    generator = torch.Generator().manual_seed(dist.get_rank())
    losses = []
    for _ in range(STEPS):
        before = traffic.sent().between
        x = torch.randn(32, WIDTH, generator=generator)
        loss = nn.functional.mse_loss(model(x).float(), torch.tanh(x.roll(1, dims=1)))
        loss.backward()
        onefold.clip_grad_norm_(model, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses[0], losses[-1], traffic.sent().between - before


def main() -> None:
    dist.init_process_group("gloo")
    ranks, here = (
        dist.get_world_size(),
        int(os.environ.get("LOCAL_WORLD_SIZE", dist.get_world_size())),
    )
    group = here if here < ranks else max(1, ranks // 2)
    found = {name: train(recipe) for name, recipe in recipes(group).items()}
    if dist.get_rank() == 0:
        _, _, most = found["stage 3"]
        print(f"{ranks} ranks in groups of {group}")
        for name, (first, last, sent) in found.items():
            print(
                f"{name:30} loss {first:.3f} -> {last:.3f}, {sent / 1024:7.1f} KiB a step between"
                f" groups, {most / max(sent, 1):.2f} x less"
            )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
