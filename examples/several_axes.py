"""ZeRO beside tensor parallelism, with activation checkpointing and compiled blocks.

    torchrun --nproc-per-node 4 examples/several_axes.py               (2 data ranks x 2 of tensor parallelism)
    torchrun --nproc-per-node 8 examples/several_axes.py --tp 4 --stage 3

The order is: tensor parallelism, checkpointing, compile, shard, optimizer.
"""

import argparse

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.checkpoint import checkpoint

import onefold

WIDTH, BLOCKS, STEPS = 64, 4, 20


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return F.mse_loss(self.head(x).squeeze(-1), y)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--tp", type=int, default=2)
    parser.add_argument("--stage", type=int, default=2)
    parser.add_argument("--compile", action="store_true")
    given = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dist.init_process_group("nccl" if device == "cuda" else "gloo")
    mesh = init_device_mesh(
        device, (dist.get_world_size() // given.tp, given.tp), mesh_dim_names=("dp", "tp")
    )

    torch.manual_seed(0)
    model = Model().to(device)
    plan = {"blocks.*.up": ColwiseParallel(), "blocks.*.down": RowwiseParallel()}
    parallelize_module(model, mesh["tp"], plan)
    if given.compile:
        for block in model.blocks:
            block.compile()
    model = onefold.shard(model, onefold.Recipe.zero(given.stage), mesh=mesh, data="dp")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    generator = torch.Generator().manual_seed(
        mesh.get_local_rank("dp")
    )  # data ranks differ, tp ranks do not
    for step in range(STEPS):
        x = torch.randn(16, WIDTH, generator=generator).to(device)
        loss = model(x, x.sum(-1).tanh())
        loss.backward()
        norm = onefold.clip_grad_norm_(model, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if dist.get_rank() == 0 and step % 5 == 4:
            print(f"step {step + 1}: loss {loss.item():.4f}, gradient norm {norm.item():.3f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
