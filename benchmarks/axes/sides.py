"""How each side is built: the model is cut over an axis by torch, then sharded over the data axes."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import pipelining
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from benchmarks.axes import model
from benchmarks.axes.settings import Setting
from benchmarks.peers import adapters
from benchmarks.peers.model import Batch

NAMES = {"tp": ("dp", "tp"), "ep": ("efsdp", "ep"), "pp": ("pp", "dp")}
"""Dimensions of the mesh of each composition."""


def mesh_of(setting: Setting) -> DeviceMesh:
    first = 2 if setting.axes == "pp" else setting.ranks // 2
    sizes = (first, setting.ranks // first)
    return init_device_mesh(setting.device, sizes, mesh_dim_names=NAMES[setting.axes])


def cut(setting: Setting, mesh: DeviceMesh) -> model.Stage:
    """What a rank runs, before it is sharded; the same for all sides."""
    if setting.axes == "pp":
        layers = range(model.SHAPES[setting.model].layers)
        half = len(layers) // 2
        blocks = layers[half:] if mesh.get_local_rank("pp") else layers[:half]
        return model.build(setting.model, blocks, setting.device)
    whole = model.build(setting.model, device=setting.device)
    if setting.axes == "tp":
        attention, mlp = "blocks.*.attention", "blocks.*.mlp"
        plan: dict[str, Any] = {
            "tokens": RowwiseParallel(input_layouts=Replicate()),
            **{f"{attention}.{name}": ColwiseParallel() for name in "qkv"},
            f"{attention}.out": RowwiseParallel(),
            f"{mlp}.up": ColwiseParallel(),
            f"{mlp}.down": RowwiseParallel(),
            "head": ColwiseParallel(output_layouts=Replicate()),
        }
        parallelize_module(whole, mesh["tp"], plan)
    else:
        for experts in experts_of(whole):
            experts.group = mesh.get_group("ep")
            for name in ("up", "down"):
                weight = distribute_tensor(getattr(experts, name).data, mesh["ep"], [Shard(0)])
                setattr(experts, name, nn.Parameter(weight))
    return whole


def experts_of(module: nn.Module) -> list[model.Experts]:
    return [one for one in module.modules() if isinstance(one, model.Experts)]


class _Pipelined:
    """A step by torch's 1F1B schedule."""

    setting: Setting
    optimizer: torch.optim.Optimizer

    def schedule_over(self, stage: Any, mesh: DeviceMesh) -> None:
        self.stage, self.group = stage, mesh.get_group("pp")
        self.schedule = pipelining.Schedule1F1B(
            stage, n_microbatches=self.setting.accumulation, loss_fn=model.loss_of
        )

    def step(self, batches: Sequence[Batch]) -> float:
        ids, labels = (torch.cat(parts) for parts in zip(*batches, strict=True))
        losses: list[Tensor] = []
        if self.stage.is_last:
            self.schedule.step(target=labels, losses=losses)
        else:
            self.schedule.step(ids)
        self.optimizer.step()
        self.optimizer.zero_grad()
        # The rank of the first stage is told what the last one has found
        mean = torch.stack(losses).detach().mean() if losses else torch.zeros((), device=ids.device)
        dist.broadcast(mean, group=self.group, group_src=1)
        return float(mean)


class FSDP2(adapters.TorchPeer):
    """`fully_shard` of each block, then of the root.

    Args:
        kept: whole parameters live from the forward to the backward pass.
    """

    def __init__(self, setting: Setting, *, kept: bool = False) -> None:
        super().__init__(setting)
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

        self.autocast = False
        dtype = torch.bfloat16 if setting.precision == "bf16" else None
        policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=dtype and torch.float32)
        mesh = mesh_of(setting)
        self.model = part = cut(setting, mesh)
        data = mesh._flatten("dp") if setting.axes == "ep" else mesh["dp"]
        how: dict[str, Any] = {"mesh": data, "mp_policy": policy}
        for block in part.blocks.values():
            for experts in experts_of(block):
                own = {**how, "mesh": mesh["efsdp"], "reshard_after_forward": not kept}
                sharded = fully_shard(experts, **own)
                # As torchtitan: they have gradients of all data ranks' tokens. By a division of its
                # own, since gloo has none
                sharded.set_gradient_divide_factor(setting.data_ranks)
                sharded.set_force_sum_reduction_for_comms(True)
            fully_shard(block, reshard_after_forward=not kept, **how)
        fully_shard(part, **how)
        self.optimizer = adapters.adamw(part.parameters())
        self.mesh = mesh


class FSDP2Pipelined(_Pipelined, FSDP2):
    def __init__(self, setting: Setting, **how: Any) -> None:
        super().__init__(setting, **how)
        at, device = self.mesh.get_local_rank("pp"), torch.device(setting.device)
        group = self.mesh.get_group("pp")
        self.schedule_over(
            pipelining.PipelineStage(self.model, at, 2, device, group=group), self.mesh
        )


class Onefold(adapters.Onefold):
    """`onefold.shard` of what a rank runs."""

    def __init__(self, setting: Setting, stage: int) -> None:
        self.mesh = mesh = mesh_of(setting)
        ranks: dict[str, Any] = {"mesh": mesh, "data": NAMES["ep"]}
        if setting.axes != "ep":
            ranks = {"mesh": mesh["dp"] if setting.axes == "pp" else mesh, "data": "dp"}
        super().__init__(setting, cut(setting, mesh), stage, ranks)


class OnefoldPipelined(_Pipelined, Onefold):
    def __init__(self, setting: Setting, stage: int) -> None:
        super().__init__(setting, stage)
        parallel = importlib.import_module("onefold.parallel")
        at, device = self.mesh.get_local_rank("pp"), torch.device(setting.device)
        group = self.mesh.get_group("pp")
        self.schedule_over(
            parallel.PipelineStage(self.model, at, 2, device, group=group), self.mesh
        )


def build(side: str, setting: Setting) -> Any:
    """The side on this rank, from the same fp32 weights as every other.

    Raises:
        ValueError: there is no such side.
    """
    family, _, how = side.partition("-")
    pipelined = setting.axes == "pp"
    if family == "fsdp2" and how in ("", "kept"):
        return (FSDP2Pipelined if pipelined else FSDP2)(setting, kept=how == "kept")
    if family == "onefold" and how in ("0", "1", "2", "3"):
        return (OnefoldPipelined if pipelined else Onefold)(setting, int(how))
    raise ValueError(f"There is no side {side!r}.")
