"""A GPT cut into stages of a pipeline, trained by torch's schedules, and in one process on the same
batches.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import pipelining
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.checkpoint import checkpoint

import looks
import onefold
from onefold.parallel import PipelineStage, register_actions
from reference import by_rank_0
from zoo import TinyGPT, tokens_of

WIDTH, LENGTH = 16, 12


@dataclass(frozen=True)
class Case:
    """A pipeline and how it is trained.

    Attributes:
        schedule: the name of torch's class.
        places: of stages on each rank along pp. v_shaped: the second half of the stages runs
            backwards over the ranks.
        calls: of `schedule.step` in one optimizer step. under_no_sync: all but the last of them.
        registered: the schedule's actions gather and release.
        sums: the loss of a micro-batch is a sum, not a mean.
        max_norm: gradients are clipped by the norm over all stages. scale: a GradScaler over all
            stages begins with it. options: of `Recipe.zero`.
    """

    schedule: str = "Schedule1F1B"
    pp: int = 2
    dp: int = 2
    tp: int = 1
    places: int = 1
    v_shaped: bool = False
    depth: int = 4
    micro_batches: int = 4
    steps: int = 2
    calls: int = 1
    under_no_sync: bool = False
    registered: bool = False
    checkpointing: bool = False
    evaluates: bool = False
    sums: bool = False
    max_norm: float = 0.5
    scale: float = 0.0
    frozen: tuple[str, ...] = ()
    options: dict[str, Any] = field(default_factory=dict)
    stages: tuple[int, ...] = (0, 1, 2, 3)
    near: float = 2e-5
    ci: bool = False

    @property
    def count(self) -> int:
        return self.pp * self.places


def whole(case: Case) -> TinyGPT:
    torch.manual_seed(0)
    model = TinyGPT(width=WIDTH, depth=case.depth, length=LENGTH)
    for name, param in model.named_parameters():
        if case.frozen and name.startswith(case.frozen):
            param.requires_grad_(False)
    return model


class Part(nn.Module):
    """The blocks of one stage, under the names that they have in the whole model."""

    def __init__(self, model: TinyGPT, index: int, case: Case) -> None:
        super().__init__()
        self.checkpointing = case.checkpointing
        first, last = (len(model.blocks) * i // case.count for i in (index, index + 1))
        if index == 0:
            self.tokens, self.positions = model.tokens, model.positions
        self.blocks = nn.ModuleDict({str(i): model.blocks[i] for i in range(first, last)})
        if index == case.count - 1:
            self.norm, self.head = model.norm, model.head

    def forward(self, x: Tensor) -> Tensor:
        if hasattr(self, "tokens"):
            x = self.tokens(x) + self.positions.weight[: x.shape[1]]
        for block in self.blocks.values():
            x = checkpoint(block, x, use_reentrant=False) if self.checkpointing else block(x)
        return self.head(self.norm(x)) if hasattr(self, "head") else x


def loss_of(scores: Tensor, tokens: Tensor) -> Tensor:
    return F.cross_entropy(scores[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


def batch_of(case: Case, dp: int, call: int) -> Tensor:
    return tokens_of(100 * dp + call, 2 * case.micro_batches, LENGTH)


def mesh_of(case: Case) -> DeviceMesh:
    sizes = (case.pp, case.dp, case.tp)
    return init_device_mesh("cpu", sizes, mesh_dim_names=("pp", "dp", "tp"))


PLAN = {
    "tokens": RowwiseParallel(input_layouts=Replicate()),
    "blocks.*.mlp.0": ColwiseParallel(),
    "blocks.*.mlp.2": RowwiseParallel(),
    "head": ColwiseParallel(output_layouts=Replicate()),
}


@dataclass
class Pipeline:
    case: Case
    mesh: DeviceMesh
    modules: list[nn.Module]
    stages: list[Any]
    schedule: Any = None
    scalers: list[Any] = field(default_factory=list)  # none, or one that scales the loss


def stage_of(
    stage: int, case: Case, mesh: DeviceMesh, index: int, folder: Path | None = None
) -> Any:
    """A stage of the pipeline, sharded at this stage of ZeRO."""
    part: Any = Part(whole(case), index, case)
    ranks: dict[str, Any] = {"mesh": mesh["dp"]}
    if case.tp > 1:
        plan = {key: how for key, how in PLAN.items() if hasattr(part, key.split(".")[0])}
        part = parallelize_module(part, mesh["tp"], plan)
        ranks = {"mesh": mesh["dp", "tp"], "data": "dp"}
    options = {"stall_timeout": 60.0, **case.options}
    if "nvme" in options.values():
        options["nvme"] = str(folder)
    module = onefold.shard(part, onefold.Recipe.zero(stage, **options), **ranks)
    return PipelineStage(module, index, case.count, torch.device("cpu"), group=mesh.get_group("pp"))


def schedule_of(case: Case, stages: list[Any], loss: Any) -> Any:
    made = getattr(pipelining.schedules, case.schedule)
    single = issubclass(made, pipelining.schedules.PipelineScheduleSingle)
    return made(
        stages[0] if single else stages,
        n_microbatches=case.micro_batches,
        loss_fn=loss,
        scale_grads=not case.sums,
    )


def built(stage: int, case: Case, folder: Path | None = None) -> Pipeline:
    """This rank's stages, sharded, and their schedule."""
    mesh = mesh_of(case)
    at = mesh.get_local_rank("pp")
    held = [at, case.count - 1 - at] if case.v_shaped else range(at, case.count, case.pp)
    stages = [stage_of(stage, case, mesh, index, folder) for index in held]
    pipeline = Pipeline(case, mesh, [each.submod for each in stages], stages)

    def loss(scores: Tensor, tokens: Tensor) -> Tensor:
        value = loss_of(scores, tokens) * (len(tokens) if case.sums else 1)
        return pipeline.scalers[0].scale(value) if pipeline.scalers else value

    pipeline.schedule = schedule_of(case, stages, loss)
    if case.registered:
        register_actions(pipeline.schedule)
    if case.scale:
        pipeline.scalers.append(onefold.GradScaler(pipeline.modules, init_scale=case.scale))
    return pipeline


def called(pipeline: Pipeline, batch: Tensor) -> list[float]:
    """One `schedule.step`. Returns the losses of the micro-batches, on the ranks of the last stage."""
    losses: list[Tensor] = []
    first = any(stage.is_first for stage in pipeline.stages)
    last = any(stage.is_last for stage in pipeline.stages)
    given = {"target": batch, "losses": losses} if last else {}
    pipeline.schedule.step(*((batch,) if first else ()), **given)
    scale = pipeline.scalers[0].get_scale() if pipeline.scalers else 1.0
    return [loss.item() / scale for loss in losses]


def evaluated(pipeline: Pipeline) -> None:
    """Evaluate between a backward pass and the step: gradients stay."""
    params = [p for module in pipeline.modules for p in module.parameters()]
    grads = [p.grad.clone() for p in params if p.grad is not None]
    batch = batch_of(pipeline.case, 0, 0)
    first, last = (
        any(getattr(s, which) for s in pipeline.stages) for which in ("is_first", "is_last")
    )
    pipeline.schedule.eval(*((batch,) if first else ()), **({"target": batch} if last else {}))
    assert grads and all(map(torch.equal, grads, (p.grad for p in params if p.grad is not None)))


@dataclass
class Seen:
    """Of one rank. `weights`: whole, of its stages, on the first rank of each. `sent`: bytes of each
    stage in the last step, by move.
    """

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    weights: dict[str, Tensor] = field(default_factory=dict)
    sent: list[dict[str, int]] = field(default_factory=list)


def optimizer_of(modules: Iterable[nn.Module]) -> torch.optim.Optimizer:
    params = [p for module in modules for p in module.parameters() if p.requires_grad]
    return torch.optim.AdamW(params, lr=0.01, eps=1e-4)


def train(
    pipeline: Pipeline, optimizers: list[torch.optim.Optimizer], steps: Iterable[int]
) -> Seen:
    case, dp, seen = pipeline.case, pipeline.mesh.get_local_rank("dp"), Seen()
    for step in steps:
        for module in pipeline.modules:
            looks.watch(module)
        for call in range(case.calls):
            waits = case.under_no_sync and call + 1 < case.calls
            with contextlib.ExitStack() as stack:
                for module in pipeline.modules if waits else ():
                    stack.enter_context(onefold.no_sync(module))
                seen.losses += called(pipeline, batch_of(case, dp, step * case.calls + call))
        seen.sent = [looks.sent(module) for module in pipeline.modules]
        if case.evaluates:
            evaluated(pipeline)
        for scaler in pipeline.scalers:
            for optimizer in optimizers:
                scaler.unscale_(optimizer)
        if case.max_norm:
            seen.norms.append(onefold.clip_grad_norm_(pipeline.modules, case.max_norm).item())
        for optimizer in optimizers:
            pipeline.scalers[0].step(optimizer) if pipeline.scalers else optimizer.step()
            optimizer.zero_grad()
        for scaler in pipeline.scalers:
            scaler.update()
    return seen


@by_rank_0
def in_one_process(case: Case) -> tuple[list[list[float]], Seen]:
    """(losses of each data rank, norms and weights)"""
    model, seen = whole(case), Seen()
    optimizer, losses = optimizer_of([model]), [[] for _ in range(case.dp)]
    for call in range(case.steps * case.calls):
        for dp in range(case.dp):
            for part in batch_of(case, dp, call).chunk(case.micro_batches):
                loss = loss_of(model.logits(part), part) * (len(part) if case.sums else 1)
                losses[dp].append(loss.item())
                (loss / case.dp / (1 if case.sums else case.micro_batches)).backward()
        if (call + 1) % case.calls == 0:
            norm = nn.utils.clip_grad_norm_(model.parameters(), case.max_norm or 1e9).item()
            seen.norms += [norm] if case.max_norm else []
            optimizer.step()
            optimizer.zero_grad()
    seen.weights = dict(model.state_dict())
    return losses, seen
