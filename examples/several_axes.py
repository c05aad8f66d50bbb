"""ZeRO beside tensor and expert parallelism, with activation checkpointing and compiled blocks.

torchrun --nproc-per-node 4 examples/several_axes.py               (2 ranks of tensor x 2 of expert parallelism)
"""

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.checkpoint import checkpoint

import onefold

WIDTH, EXPERTS = 64, 4


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.router = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, EXPERTS, bias=False)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.experts = nn.Parameter(torch.randn(EXPERTS, WIDTH, WIDTH) / 8)

    def compute(self, x):  # (tokens of this rank, width)
        x = x + self.down(nn.functional.gelu(self.up(self.norm(x))))
        weights = self.router(x).softmax(-1)
        weights = weights * (weights == weights.amax(-1, keepdim=True))  # one expert for each token
        # This rank computes its own experts, for the tokens of all ranks along the mesh
        tokens, weights = (
            DTensor.from_local(t, self.mesh, [Shard(0)]).full_tensor(grad_placements=[Partial()])
            for t in (x, weights)
        )
        mine = weights.chunk(self.mesh.size(), 1)[self.mesh.get_local_rank()]
        y = torch.einsum("tw,ewh,te->th", tokens, self.experts.to_local(), mine)
        y = DTensor.from_local(y, self.mesh, [Partial()]).redistribute(placements=[Shard(0)])
        return x + y.to_local()

    def forward(self, x):
        return checkpoint(self.compute, x, use_reentrant=False)


def main() -> None:
    parser = argparse.ArgumentParser()
    for name in ("--tp", "--ep", "--stage"):
        parser.add_argument(name, type=int, default=2)
    given = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dist.init_process_group("nccl" if device == "cuda" else "gloo")
    sizes = (dist.get_world_size() // (given.tp * given.ep), given.ep, given.tp)
    mesh = init_device_mesh(device, sizes, mesh_dim_names=("dp", "ep", "tp"))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Sequential(Block(), Block()), nn.Linear(WIDTH, 1)).to(device)
    plan = {"0.*.up": ColwiseParallel(), "0.*.down": RowwiseParallel()}
    parallelize_module(model, mesh["tp"], plan)
    for block in model[0]:
        block.mesh = mesh["ep"]
        block.experts = nn.Parameter(distribute_tensor(block.experts, mesh["ep"], [Shard(0)]))
        block.compute = torch.compile(block.compute, backend="eager")
    model = onefold.shard(model, onefold.Recipe.zero(given.stage), mesh=mesh, data=("dp", "ep"))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    # Ranks along dp and ep have different samples, those along tp the same
    generator = torch.Generator().manual_seed(dist.get_rank() // given.tp)
    for step in range(20):
        x = torch.randn(64, WIDTH, generator=generator).to(device)
        loss = nn.functional.mse_loss(model(x).squeeze(-1), x.sum(-1).tanh())
        loss.backward()
        norm = onefold.clip_grad_norm_(model, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if dist.get_rank() == 0 and step % 5 == 4:
            print(f"step {step + 1}: loss {loss.item():.4f}, gradient norm {norm.item():.3f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
