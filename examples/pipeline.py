"""A pipeline of two stages: each stage is sharded by itself over the ranks that run it, and torch's
1F1B runs the micro-batches. It saves at the end; called again, it goes on from there.

    torchrun --nproc-per-node 2 examples/pipeline.py runs/pipeline --steps 4   # 2 stages on a rank each
    torchrun --nproc-per-node 4 examples/pipeline.py runs/pipeline --steps 8   # goes on with 2 x 2 ranks
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.pipelining import Schedule1F1B

import onefold

STAGES, LAYERS, WORDS, WIDTH, BATCH, TOKENS = 2, 4, 256, 64, 8, 32


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Stage(nn.Module):
    """A part of the model. Its blocks are named as in the whole model, so that checkpoints join."""

    def __init__(self, number: int) -> None:
        super().__init__()
        torch.manual_seed(number)
        each = LAYERS // STAGES
        self.words = nn.Embedding(WORDS, WIDTH) if number == 0 else nn.Identity()
        self.blocks = nn.ModuleDict({str(number * each + at): Block() for at in range(each)})
        last = number == STAGES - 1
        self.head = nn.Linear(WIDTH, WORDS, bias=False) if last else nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.words(x)
        for block in self.blocks.values():
            x = block(x)
        return self.head(x)


def batch(step: int, mesh: DeviceMesh) -> torch.Tensor:
    """This data-parallel rank's samples of a step: each token is one more than that before it."""
    mine = mesh["dp"].get_local_rank(), mesh["dp"].size()
    first = torch.randint(WORDS, (BATCH, 1), generator=torch.Generator().manual_seed(step))
    return ((first + torch.arange(TOKENS + 1)) % WORDS).chunk(mine[1])[mine[0]]


def main() -> None:
    asked = argparse.ArgumentParser()
    asked.add_argument("folder", type=Path)
    asked.add_argument("--steps", type=int, default=4)
    given = asked.parse_args()
    dist.init_process_group("gloo")
    ranks = dist.get_world_size() // STAGES
    mesh = init_device_mesh("cpu", (STAGES, ranks), mesh_dim_names=("pp", "dp"))
    here = mesh["pp"].get_local_rank()

    module = onefold.shard(Stage(here), onefold.Recipe.zero(3), mesh=mesh["dp"])
    optimizer = torch.optim.AdamW(module.parameters(), lr=3e-3)
    stage = onefold.parallel.PipelineStage(
        module, here, STAGES, torch.device("cpu"), group=mesh.get_group("pp")
    )
    schedule = Schedule1F1B(
        stage,
        n_microbatches=2,
        loss_fn=lambda out, ids: F.cross_entropy(out.flatten(0, 1), ids.flatten()),
    )
    done = 0
    if saved := sorted(given.folder.glob("step-*")):
        onefold.load(saved[-1], model=[module], optimizer=optimizer)
        done = int(saved[-1].name.removeprefix("step-"))

    for step in range(done, given.steps):
        ids, losses = batch(step, mesh), list[torch.Tensor]()
        if here == 0:
            schedule.step(ids[:, :-1])
        else:
            schedule.step(target=ids[:, 1:], losses=losses)
        onefold.clip_grad_norm_([module], 1.0)  # the norm of all stages
        optimizer.step()
        optimizer.zero_grad()
        loss = torch.stack(losses).mean() if losses else torch.zeros(())
        dist.all_reduce(loss)  # of the last stage's ranks
        if dist.get_rank() == 0:
            print(f"step {step + 1}: loss {loss / ranks:.6f}")

    path = given.folder / f"step-{given.steps:04d}"
    # One checkpoint of all stages
    onefold.save(path, model=[module], optimizer=optimizer, step=given.steps)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
