"""Training on a mesh of several axes by a loop of one's own, beside DDP on the same ranks: each rank of
DDP has the whole model, and the batch of its data coordinate.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor.parallel import parallelize_module

sys.path.append(str(Path(__file__).resolve().parent.parent / "parallel"))

import axes_models
import pipeline_models
import test_experts as experts

RANKS, STEPS, MICRO_BATCHES = 8, 4, 4
LLAMA = axes_models.Case(steps=STEPS)
PIPELINE = pipeline_models.Case("Schedule1F1B", pp=2, dp=4, micro_batches=MICRO_BATCHES)

Passes = Callable[[Any, Tensor], Tensor]  # (model, batch) -> the loss, after the backward passes


class Gathered(torch.autograd.Function):
    """Every rank's part of samples, one behind the other; the parts' gradients are added up."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, mesh: DeviceMesh) -> Tensor:  # type: ignore[override]
        ctx.mesh = mesh
        parts = [torch.empty_like(part) for _ in range(mesh.size())]
        dist.all_gather(parts, part.contiguous(), group=mesh.get_group())
        return torch.cat(parts, 1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        whole = grad.contiguous()
        dist.all_reduce(whole, group=ctx.mesh.get_group())
        return whole.chunk(ctx.mesh.size(), 1)[ctx.mesh.get_local_rank()], None


class Whole(axes_models.LlamaAttention):
    """Attention of a rank that has a part of each sample: its inputs are gathered, and the rank keeps
    the outputs of its tokens.
    """

    mesh: DeviceMesh | None = None

    def forward(self, x: Tensor) -> Tensor:
        assert self.mesh is not None
        whole: Tensor = super().forward(Gathered.apply(x, self.mesh))
        return whole.chunk(self.mesh.size(), 1)[self.mesh.get_local_rank()]


def llama(context: DeviceMesh | None = None) -> axes_models.TinyLlama:
    model: Any = axes_models.built(LLAMA)
    for layer in model.layers if context is not None else ():
        layer.attention.__class__ = Whole
        layer.attention.mesh = context
    return model


def part_of_samples(model: Any, tokens: Tensor, context: DeviceMesh) -> Tensor:
    """The mean loss of this rank's tokens of each sample, of which there are as many on each rank."""
    here, parts = context.get_local_rank(), context.size()
    inputs, targets = (t.chunk(parts, 1)[here] for t in (tokens[:, :-1], tokens[:, 1:]))
    loss: Tensor = model(inputs, targets)
    return loss


class OfParts(nn.Module):
    """A Llama that takes its inputs and targets apart: (batch, length) each."""

    def __init__(self, model: axes_models.TinyLlama) -> None:
        super().__init__()
        self.model = model

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        inner, x = self.model, self.model.tok_embeddings(inputs)
        for layer in inner.layers:
            x = layer(x)
        return F.cross_entropy(inner.output(inner.norm(x)).flatten(0, 1), targets.flatten())


def _simple(model: Any, batch: Tensor) -> Tensor:
    loss: Tensor = model(batch)
    loss.backward()
    return loss


def trained(model: nn.Module, batches: list[Tensor], passes: Passes) -> list[float]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    losses = []
    for batch in batches:
        losses.append(passes(model, batch).item())
        optimizer.step()
        optimizer.zero_grad()
    return losses


def ddp(model: nn.Module, batches: list[Tensor], passes: Passes = _simple) -> list[float]:
    return trained(nn.parallel.DistributedDataParallel(model), batches, passes)


def _recipe(stage: int) -> Any:
    import onefold

    return onefold.Recipe.zero(stage, stall_timeout=60.0)


def tensor_parallel(stage: int | None, plan: str, replicas: int) -> list[float]:
    import onefold

    names = ("dp_replicate", "dp_shard", "tp")
    mesh = init_device_mesh("cpu", (replicas, 4 // replicas, 2), mesh_dim_names=names)
    at = mesh.get_local_rank("dp_replicate") * (4 // replicas) + mesh.get_local_rank("dp_shard")
    model, batches = llama(), axes_models.batches_of(LLAMA, at)
    if stage is None:
        return ddp(model, batches)
    case = axes_models.Case(plan=plan)
    parallelize_module(model, mesh["tp"], axes_models.plan_of(case))
    return trained(
        onefold.shard(model, _recipe(stage), mesh=mesh, data=names[:2]), batches, _simple
    )


def expert_parallel(stage: int | None) -> list[float]:
    import onefold

    mesh = init_device_mesh("cpu", (4, 2), mesh_dim_names=("dp", "ep"))
    batches = experts.batches(experts.Case(micro_batches=2), dist.get_rank())[:STEPS]
    if stage is None:
        return ddp(experts.Net(), batches)
    model = experts.divided(experts.Net(), mesh["ep"])
    model = onefold.shard(model, _recipe(stage), mesh=mesh, data=("dp", "ep"))
    return trained(model, batches, _simple)


def context_parallel(stage: int | None) -> list[float]:
    import onefold

    mesh = init_device_mesh("cpu", (4, 2), mesh_dim_names=("dp", "cp"))
    batches = axes_models.batches_of(LLAMA, mesh.get_local_rank("dp"))
    if stage is None:
        return ddp(llama(), batches)
    model = onefold.shard(OfParts(llama(mesh["cp"])), _recipe(stage), mesh=mesh, data=("dp", "cp"))

    def passes(model: Any, batch: Tensor) -> Tensor:
        loss = part_of_samples(model, batch, mesh["cp"])
        loss.backward()
        told = loss.detach().clone()
        dist.all_reduce(told, group=mesh.get_group("cp"))
        return told / mesh["cp"].size()

    return trained(model, batches, passes)


def pipeline_parallel(stage: int | None) -> list[float]:
    if stage is None:
        mesh = pipeline_models.mesh_of(PIPELINE)
        batches = [
            pipeline_models.batch_of(PIPELINE, mesh.get_local_rank("dp"), i) for i in range(STEPS)
        ]

        def passes(model: Any, batch: Tensor) -> Tensor:
            losses = [pipeline_models.loss_of(model(p), p) for p in batch.chunk(MICRO_BATCHES)]
            loss = torch.stack(losses).mean()
            loss.backward()
            return loss

        whole = pipeline_models.whole(PIPELINE)
        whole.forward = whole.logits  # type: ignore[method-assign]
        return ddp(whole, batches, passes)
    pipeline = pipeline_models.built(stage, PIPELINE)
    (module,) = pipeline.modules
    batches = [
        pipeline_models.batch_of(PIPELINE, pipeline.mesh.get_local_rank("dp"), i)
        for i in range(STEPS)
    ]

    def scheduled(_: Any, batch: Tensor) -> Tensor:
        losses = pipeline_models.called(pipeline, batch)
        # The last stage has them; the page asks rank 0, of the first
        mine = torch.tensor(losses).mean() if losses else torch.zeros(())
        dist.all_reduce(mine, group=pipeline.mesh.get_group("pp"))
        return mine

    return trained(module, batches, scheduled)


def run(case: dict[str, Any], stage: int | None) -> list[float]:
    """Train by the axis of `case`, or with DDP if `stage` is None. Returns losses of the batches of
    data coordinate 0.
    """
    torch.manual_seed(0)
    axis, plan = case["axis"], case.get("plan", "plain")
    if axis == "tp":
        return tensor_parallel(stage, plan, case.get("replicas", 1))
    return {"ep": expert_parallel, "cp": context_parallel, "pp": pipeline_parallel}[axis](stage)
