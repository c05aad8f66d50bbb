"""A GPT cut into stages of a pipeline, trained by torch's schedules, and in one process on the same
batches.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import pipelining
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.utils.checkpoint import checkpoint

from models import TinyGPT, tokens_of

VOCABULARY, WIDTH, LENGTH = 61, 16, 12


@dataclass(frozen=True)
class Case:
    """A pipeline and how it is trained.

    Attributes:
        schedule: the name of torch's class.
        stages: of the pipeline, over `pp` ranks.
        v_shaped: the second half of the stages runs backwards over the ranks.
        calls: of `schedule.step` in one optimizer step. under_no_sync: all but the last of them.
        registered: the schedule's actions gather and release.
        recipe: options of `Recipe.zero`.
    """

    schedule: str = "ScheduleGPipe"
    pp: int = 2
    dp: int = 2
    stages: int = 2
    v_shaped: bool = False
    micro_batches: int = 4
    steps: int = 3
    calls: int = 1
    under_no_sync: bool = False
    registered: bool = False
    checkpointing: bool = False
    evaluates: bool = False
    sums: bool = False
    frozen: tuple[str, ...] = ()
    recipe: dict[str, Any] = field(default_factory=dict)


def whole(case: Case) -> TinyGPT:
    torch.manual_seed(0)
    model = TinyGPT(vocabulary=VOCABULARY, width=WIDTH, depth=4, length=LENGTH)
    for name, param in model.named_parameters():
        if case.frozen and name.startswith(case.frozen):
            param.requires_grad_(False)
    return model


class Part(nn.Module):
    """The blocks of one stage, under the names that they have in the whole model."""

    def __init__(self, model: TinyGPT, index: int, stages: int, checkpointing: bool = False) -> None:
        super().__init__()
        depth, self.checkpointing = len(model.blocks), checkpointing
        first, last = depth * index // stages, depth * (index + 1) // stages
        if index == 0:
            self.tokens, self.positions = model.tokens, model.positions
        self.blocks = nn.ModuleDict({str(i): model.blocks[i] for i in range(first, last)})
        if index == stages - 1:
            self.norm, self.head = model.norm, model.head

    def forward(self, x: Tensor) -> Tensor:
        if hasattr(self, "tokens"):
            x = self.tokens(x) + self.positions.weight[: x.shape[1]]
        for block in self.blocks.values():
            x = checkpoint(block, x, use_reentrant=False) if self.checkpointing else block(x)
        return self.head(self.norm(x)) if hasattr(self, "head") else x


def loss_of(scores: Tensor, tokens: Tensor) -> Tensor:
    return F.cross_entropy(scores[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


def summed_loss_of(scores: Tensor, tokens: Tensor) -> Tensor:
    return loss_of(scores, tokens) * tokens.shape[0]


def batch_of(case: Case, dp: int, call: int) -> Tensor:
    return tokens_of(100 * dp + call, batch=2 * case.micro_batches, length=LENGTH, vocabulary=VOCABULARY)


def mesh_of(case: Case) -> DeviceMesh:
    return init_device_mesh("cpu", (case.pp, case.dp), mesh_dim_names=("pp", "dp"))


def stages_of(case: Case, at: int) -> list[int]:
    """The stages of the ranks at place `at` of the pipeline."""
    if case.v_shaped:
        return [at, case.stages - 1 - at]
    return list(range(at, case.stages, case.pp))


@dataclass
class Pipeline:
    mesh: DeviceMesh
    modules: list[nn.Module]
    stages: list[Any]
    schedule: Any


def built(stage: int, case: Case) -> Pipeline:
    """This rank's stages, sharded, and their schedule."""
    import onefold
    from onefold.parallel import PipelineStage, register_actions

    mesh = mesh_of(case)
    model, modules, stages = whole(case), [], []
    for index in stages_of(case, mesh.get_local_rank("pp")):
        part = Part(model, index, case.stages, case.checkpointing)
        recipe = onefold.Recipe.zero(stage, stall_timeout=30.0, **case.recipe)
        modules.append(onefold.shard(part, recipe, mesh=mesh["dp"]))
        stages.append(
            PipelineStage(
                modules[-1], index, case.stages, torch.device("cpu"), group=mesh.get_group("pp")
            )
        )
    make = getattr(pipelining.schedules, case.schedule)
    single = issubclass(make, pipelining.schedules.PipelineScheduleSingle)
    schedule = make(
        stages[0] if single else stages,
        n_microbatches=case.micro_batches,
        loss_fn=summed_loss_of if case.sums else loss_of,
        scale_grads=not case.sums,
    )
    if case.registered:
        register_actions(schedule)
    return Pipeline(mesh, modules, stages, schedule)


def called(pipeline: Pipeline, batch: Tensor) -> list[float]:
    """One `schedule.step`. Returns the losses of the micro-batches, on the ranks of the last stage."""
    losses: list[Tensor] = []
    first = any(stage.is_first for stage in pipeline.stages)
    last = any(stage.is_last for stage in pipeline.stages)
    given = {"target": batch, "losses": losses} if last else {}
    pipeline.schedule.step(*((batch,) if first else ()), **given)
    return [loss.item() for loss in losses]


def trained(stage: int, case: Case) -> dict[str, Any]:
    import contextlib

    import onefold

    pipeline = built(stage, case)
    dp = pipeline.mesh.get_local_rank("dp")
    params = [p for module in pipeline.modules for p in module.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(params, lr=0.01)
    engines = [onefold.engine_of(module) for module in pipeline.modules]
    losses, sent = [], []
    for step in range(case.steps):
        for engine in engines:
            engine.traffic.reset()
        for call in range(case.calls):
            waits = case.under_no_sync and call + 1 < case.calls
            with contextlib.ExitStack() as stack:
                for module in pipeline.modules if waits else ():
                    stack.enter_context(onefold.no_sync(module))
                losses += called(pipeline, batch_of(case, dp, step * case.calls + call))
        if case.evaluates:
            grads = [p.grad.clone() for p in params if p.grad is not None]
            batch = batch_of(case, dp, 0)
            first = any(s.is_first for s in pipeline.stages)
            last = any(s.is_last for s in pipeline.stages)
            pipeline.schedule.eval(*((batch,) if first else ()), **({"target": batch} if last else {}))
            assert all(map(torch.equal, grads, (p.grad for p in params if p.grad is not None)))
        sent.append([dict(engine.traffic.by_move()) for engine in engines])
        held = [len(engine.gather.by_storage) for engine in engines]
        optimizer.step()
        optimizer.zero_grad()
    weights = {}
    for module in pipeline.modules:
        weights.update(onefold.full_state_dict(module))
    return {
        "losses": losses,
        "weights": weights,
        "sent": sent,
        "held": held,
        "graphs": [engine.progress.open_graphs for engine in engines],
        "units": [
            [(u.name, sum(f.layout.numel for f in u.flats)) for u in engine.units]
            for engine in engines
        ],
    }


def in_one_process(case: Case) -> dict[str, Any]:
    model = whole(case)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01)
    losses: list[list[float]] = [[] for _ in range(case.dp)]
    for step in range(case.steps):
        for call in range(case.calls):
            for dp in range(case.dp):
                batch = batch_of(case, dp, step * case.calls + call)
                for part in batch.chunk(case.micro_batches):
                    loss = loss_of(model.logits(part), part)
                    if case.sums:
                        loss = loss * len(part)
                    losses[dp].append(loss.item())
                    scale = 1 if case.sums else case.micro_batches
                    (loss / case.dp / scale).backward()
        optimizer.step()
        optimizer.zero_grad()
    return {"losses": losses, "weights": dict(model.state_dict())}
