"""A GPT cut into stages of a pipeline, trained by torch's schedules, and in one process on the same
batches.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import pipelining
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.checkpoint import checkpoint

from zoo import TinyGPT, tokens_of

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
        sums: the loss of a micro-batch is a sum, not a mean. static: stages are told their shapes.
        compiled: blocks are compiled. max_norm: gradients are clipped by the norm over all stages. scale:
            a GradScaler over all stages begins with it. recipe: options of `Recipe.zero`.
    """

    schedule: str = "ScheduleGPipe"
    pp: int = 2
    dp: int = 2
    tp: int = 1
    stages: int = 2
    v_shaped: bool = False
    depth: int = 4
    micro_batches: int = 4
    steps: int = 3
    calls: int = 1
    under_no_sync: bool = False
    registered: bool = False
    checkpointing: bool = False
    evaluates: bool = False
    sums: bool = False
    static: bool = False
    compiled: bool = False
    max_norm: float | None = None
    scale: float | None = None
    frozen: tuple[str, ...] = ()
    recipe: dict[str, Any] = field(default_factory=dict)


def whole(case: Case) -> TinyGPT:
    torch.manual_seed(0)
    model = TinyGPT(vocabulary=VOCABULARY, width=WIDTH, depth=case.depth, length=LENGTH)
    for name, param in model.named_parameters():
        if case.frozen and name.startswith(case.frozen):
            param.requires_grad_(False)
    return model


class Part(nn.Module):
    """The blocks of one stage, under the names that they have in the whole model."""

    def __init__(
        self, model: TinyGPT, index: int, stages: int, checkpointing: bool = False
    ) -> None:
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
    return tokens_of(
        100 * dp + call, batch=2 * case.micro_batches, length=LENGTH, vocabulary=VOCABULARY
    )


def mesh_of(case: Case) -> DeviceMesh:
    sizes = (case.pp, case.dp, case.tp)
    return init_device_mesh("cpu", sizes, mesh_dim_names=("pp", "dp", "tp"))


def parallelized(part: nn.Module, case: Case, mesh: DeviceMesh) -> nn.Module:
    plan = {
        "tokens": RowwiseParallel(input_layouts=Replicate()),
        "blocks.*.mlp.0": ColwiseParallel(),
        "blocks.*.mlp.2": RowwiseParallel(),
        "head": ColwiseParallel(output_layouts=Replicate()),
    }
    mine = {key: how for key, how in plan.items() if hasattr(part, key.split(".")[0])}
    return parallelize_module(part, mesh["tp"], mine) if case.tp > 1 else part


def stages_of(case: Case, at: int) -> list[int]:
    """The stages of the ranks at place `at` of the pipeline."""
    if case.v_shaped:
        return [at, case.stages - 1 - at]
    return list(range(at, case.stages, case.pp))


def shapes_of(case: Case, index: int) -> tuple[Tensor, Tensor]:
    """What the stage takes and returns for one micro-batch."""
    tokens = torch.zeros(2, LENGTH, dtype=torch.long)
    inner = torch.zeros(2, LENGTH, WIDTH, requires_grad=True)
    scores = torch.zeros(2, LENGTH, VOCABULARY, requires_grad=True)
    return tokens if index == 0 else inner, scores if index == case.stages - 1 else inner


@dataclass
class Pipeline:
    mesh: DeviceMesh
    modules: list[nn.Module]
    stages: list[Any]
    schedule: Any
    scalers: list[Any] = field(default_factory=list)  # none, or one that scales the loss


def built(stage: int, case: Case, mesh: DeviceMesh | None = None) -> Pipeline:
    """This rank's stages, sharded, and their schedule."""
    import onefold
    from onefold.parallel import PipelineStage, register_actions

    mesh = mesh or mesh_of(case)
    model, modules, stages = whole(case), [], []
    for index in stages_of(case, mesh.get_local_rank("pp")):
        part = parallelized(Part(model, index, case.stages, case.checkpointing), case, mesh)
        for block in part.blocks.values() if case.compiled else ():
            block.compile(backend="eager")
        recipe = onefold.Recipe.zero(stage, stall_timeout=30.0, **case.recipe)
        ranks = {"mesh": mesh["dp", "tp"], "data": "dp"} if case.tp > 1 else {"mesh": mesh["dp"]}
        modules.append(onefold.shard(part, recipe, **ranks))
        stages.append(
            PipelineStage(
                modules[-1],
                index,
                case.stages,
                torch.device("cpu"),
                *(shapes_of(case, index) if case.static else ()),
                group=mesh.get_group("pp"),
            )
        )
    scalers: list[Any] = []

    def loss(scores: Tensor, tokens: Tensor) -> Tensor:
        value = (summed_loss_of if case.sums else loss_of)(scores, tokens)
        return scalers[0].scale(value) if scalers else value

    make = getattr(pipelining.schedules, case.schedule)
    single = issubclass(make, pipelining.schedules.PipelineScheduleSingle)
    schedule = make(
        stages[0] if single else stages,
        n_microbatches=case.micro_batches,
        loss_fn=loss,
        scale_grads=not case.sums,
    )
    if make is pipelining.schedules.PipelineScheduleMulti:  # a schedule without such actions
        like = pipelining.ScheduleInterleaved1F1B(stages, case.micro_batches, loss_of)
        schedule.pipeline_order = like.pipeline_order
    if case.registered:
        register_actions(schedule)
    return Pipeline(mesh, modules, stages, schedule, scalers)


def called(pipeline: Pipeline, batch: Tensor) -> list[float]:
    """One `schedule.step`. Returns the losses of the micro-batches, on the ranks of the last stage."""
    losses: list[Tensor] = []
    first = any(stage.is_first for stage in pipeline.stages)
    last = any(stage.is_last for stage in pipeline.stages)
    given = {"target": batch, "losses": losses} if last else {}
    pipeline.schedule.step(*((batch,) if first else ()), **given)
    scale = pipeline.scalers[0].get_scale() if pipeline.scalers else 1.0
    return [loss.item() / scale for loss in losses]


def counting(stages: list[Any], engines: list[Any]) -> list[int]:
    """[how many of this rank's stages are gathered at a time, at most]"""
    most = [0]
    for stage in stages:

        def forward(*args: Any, before: Any = stage.forward_one_chunk, **kwargs: Any) -> Any:
            output = before(*args, **kwargs)
            most[0] = max(most[0], sum(bool(engine.gather.by_storage) for engine in engines))
            return output

        stage.forward_one_chunk = forward
    return most


def evaluated(pipeline: Pipeline, batch: Tensor, params: list[nn.Parameter]) -> None:
    """Evaluate between a backward pass and the step: gradients stay, and nothing stays gathered."""
    import onefold

    grads = [p.grad.clone() for p in params if p.grad is not None]
    first = any(s.is_first for s in pipeline.stages)
    last = any(s.is_last for s in pipeline.stages)
    pipeline.schedule.eval(*((batch,) if first else ()), **({"target": batch} if last else {}))
    assert grads and all(map(torch.equal, grads, (p.grad for p in params if p.grad is not None)))
    assert not any(onefold.engine_of(module).gather.holding for module in pipeline.modules)


def trained(case: Case, *at: int) -> list[dict[str, Any]]:
    """Train at each of these stages of ZeRO."""
    mesh = mesh_of(case)
    return [_trained(stage, case, mesh) for stage in at]


def _trained(stage: int, case: Case, mesh: DeviceMesh) -> dict[str, Any]:
    import onefold

    pipeline = built(stage, case, mesh)
    dp = pipeline.mesh.get_local_rank("dp")
    params = [p for module in pipeline.modules for p in module.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(params, lr=0.01)
    engines = [onefold.engine_of(module) for module in pipeline.modules]
    if case.scale is not None:
        pipeline.scalers.append(onefold.GradScaler(pipeline.modules, init_scale=case.scale))
    at_once = counting(pipeline.stages, engines)
    losses, sent, norms = [], [], []
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
            evaluated(pipeline, batch_of(case, dp, 0), params)
        sent.append([dict(engine.traffic.by_move()) for engine in engines])
        held = [len(engine.gather.by_storage) for engine in engines]
        for scaler in pipeline.scalers:
            scaler.unscale_(optimizer)
        if case.max_norm is not None:
            norms.append(onefold.clip_grad_norm_(pipeline.modules, case.max_norm).item())
        for scaler in pipeline.scalers:
            scaler.step(optimizer)
            scaler.update()
        if not pipeline.scalers:
            optimizer.step()
        optimizer.zero_grad()
    weights = {}
    for module in pipeline.modules:
        weights.update(onefold.full_state_dict(module))
    actions = getattr(pipeline.schedule, "pipeline_order_with_comms", {})
    return {
        "losses": losses,
        "norms": norms,
        "weights": weights,
        "sent": sent,
        "held": held,
        "dp": dp,
        "graphs": [engine.progress.open_graphs for engine in engines],
        "numel": [sum(unit.numel for unit in engine.units) for engine in engines],
        "unshards": [
            sum(
                str(a) == f"{s.stage_index}UNSHARD"
                for a in actions.get(mesh.get_local_rank("pp"), ())
            )
            for s in pipeline.stages
        ],
        "at_once": at_once[0],
    }


def in_one_process(case: Case) -> dict[str, Any]:
    model = whole(case)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01)
    losses: list[list[float]] = [[] for _ in range(case.dp)]
    norms = []
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
        if case.max_norm is not None:
            norms.append(nn.utils.clip_grad_norm_(model.parameters(), case.max_norm).item())
        optimizer.step()
        optimizer.zero_grad()
    return {"losses": losses, "norms": norms, "weights": dict(model.state_dict())}


# -- what goes wrong, and the functions by themselves ----------------------------------------------


def after_a_failure() -> dict[str, Any]:
    """A step that raises in a forward pass of every rank, then one that does not."""
    import onefold

    case = Case("Schedule1F1B", pp=1, stages=1, steps=1)
    pipeline = built(3, case)
    (module,), batch = pipeline.modules, batch_of(case, pipeline.mesh.get_local_rank("dp"), 0)
    engine, calls, block = onefold.engine_of(module), [0], module.blocks["2"]

    def fails(*_: Any) -> None:
        calls[0] += 1
        if calls[0] == 3:
            raise FloatingPointError("for the test")

    handle = block.register_forward_pre_hook(fails)
    said = ""
    try:
        called(pipeline, batch)
    except RuntimeError as error:
        said = repr(error.__cause__)
    handle.remove()
    for param in module.parameters():
        param.grad = None
    left = len(engine.gather.by_storage)
    pipeline.stages[0].clear_runtime_states()  # as every step begins
    released = len(engine.gather.by_storage) == 0
    # torch's schedule keeps the losses of the step that raised: another one for the same stage
    pipeline.schedule = pipelining.Schedule1F1B(pipeline.stages[0], case.micro_batches, loss_of)
    called(pipeline, batch)
    grads = {n: p.grad for n, p in module.named_parameters()}
    got = torch.cat([g.flatten() for g in grads.values() if g is not None])
    fresh = built(3, case, pipeline.mesh)
    called(fresh, batch)
    wanted = torch.cat(
        [p.grad.flatten() for p in fresh.modules[0].parameters() if p.grad is not None]
    )
    return {
        "said": said,
        "equal": torch.equal(got, wanted),
        "gathered": len(engine.gather.by_storage),
        "released": left > 0 and released,
    }


def between_calls() -> list[bool]:
    """On one rank: a step that raises, between two that do not and whose gradients add up."""
    case = Case("Schedule1F1B", pp=1, dp=1, stages=1)
    mesh = mesh_of(case)
    found = []
    for raises in (True, False):
        pipeline = built(3, case, mesh)
        called(pipeline, batch_of(case, 0, 0))
        if raises:
            broken = pipelining.Schedule1F1B(pipeline.stages[0], case.micro_batches, _after(2))
            with contextlib.suppress(FloatingPointError):
                broken.step(batch_of(case, 0, 1), target=batch_of(case, 0, 1))
        called(pipeline, batch_of(case, 0, 2))
        found.append([p.grad.clone() for p in pipeline.modules[0].parameters()])
    return [torch.equal(a, b) for a, b in zip(*found, strict=True)]


def _after(passes: int) -> Any:
    left = [passes + 1]  # and one more, which infers shapes

    def loss(scores: Tensor, tokens: Tensor) -> Tensor:
        left[0] -= 1
        if left[0] < 0:
            raise FloatingPointError("for the test")
        return loss_of(scores, tokens)

    return loss


def by_hand(stage: int) -> dict[str, Any]:
    """unshard, passes whose graphs are open at the same time, a step in between, reshard."""
    import onefold
    from onefold.parallel import accumulating, reduce_grad, reshard, unshard

    case = Case(pp=1, stages=1)
    mesh = mesh_of(case)
    batch, rank = batch_of(case, mesh.get_local_rank("dp"), 0), mesh.get_local_rank("dp")
    model = whole(case)
    module = onefold.shard(model, onefold.Recipe.zero(stage, stall_timeout=30.0), mesh=mesh["dp"])
    engine = onefold.engine_of(module)
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.01)
    found: dict[str, Any] = {"numel": sum(u.numel for u in engine.units)}
    # Two ordinary steps, so that orders are agreed
    for _ in range(2):
        module(batch).backward()
        optimizer.step()
        optimizer.zero_grad()
    engine.traffic.reset()
    unshard(module)
    with accumulating(module):
        losses = [module(part) for part in batch.chunk(4)]
        for loss in (losses[1], losses[0], losses[3], losses[2]):
            loss.backward()
    found["shown"] = engine.progress.pending
    reduce_grad(module, 4)
    found["moves"] = dict(engine.traffic.by_move())
    # The same in passes by themselves
    got = [p.grad.clone() for p in module.parameters()]
    optimizer.zero_grad()
    reshard(module)
    found["held"] = len(engine.gather.by_storage)
    for i, part in enumerate(batch.chunk(4)):
        with contextlib.nullcontext() if i == 3 else onefold.no_sync(module):
            (module(part) / 4).backward()
    found["near"] = all(
        torch.allclose(a, p.grad, rtol=1e-4, atol=1e-6)
        for a, p in zip(got, module.parameters(), strict=True)
    )
    # A step while units are held: the next pass computes with the new values
    unshard(module)
    module(batch)
    optimizer.step()
    optimizer.zero_grad()
    after = module(batch).item()
    found["still"] = engine.gather.holding
    reshard(module)
    found["new values"] = after == module(batch).item()
    found["rank"] = rank
    return found


def refusals() -> dict[str, str]:
    """{what is done: what is said}"""
    import types

    import onefold
    from onefold.parallel import (
        PipelineStage,
        accumulating,
        reduce_grad,
        register_actions,
        reshard,
        unshard,
    )

    case = Case(pp=1, stages=2, dp=2)
    mesh = mesh_of(case)
    said: dict[str, str] = {}

    def refused(name: str, act: Any) -> None:
        try:
            act()
        except (ValueError, RuntimeError) as error:
            said[name] = f"{type(error).__name__}: {error}"

    def part(index: int = 0, **options: Any) -> nn.Module:
        recipe = onefold.Recipe.zero(3, **options)
        return onefold.shard(Part(whole(case), index, 2), recipe, mesh=mesh["dp"])

    def stage(module: nn.Module, index: int = 0, stages: int = 2) -> Any:
        return PipelineStage(module, index, stages, torch.device("cpu"), group=mesh.get_group("pp"))

    module = part()
    refused("not sharded", lambda: stage(Part(whole(case), 0, 2)))
    refused("in backward", lambda: stage(part(offload_optimizer="cpu", step_in_backward=True)))
    module.config = types.SimpleNamespace(tie_word_embeddings=True)
    refused("tied", lambda: stage(module))
    module.config = types.SimpleNamespace(tie_word_embeddings=False)
    schedule = pipelining.ScheduleGPipe(stage(part(), 0, 1), n_microbatches=2, loss_fn=loss_of)
    refused("no actions", lambda: register_actions(schedule))
    for name, act in (("unshard", unshard), ("reshard", reshard), ("reduce_grad", reduce_grad)):
        handle = module.blocks["0"].register_forward_pre_hook(lambda *_, act=act: act(module))
        refused(f"{name} inside", lambda: module(batch_of(case, 0, 0)))
        handle.remove()

    with accumulating(module):
        module(batch_of(case, 0, 0)).sum().backward()
    with onefold.no_sync(module):
        refused("reduce_grad under no_sync", lambda: reduce_grad(module))

    # One parameter in two stages of a rank
    model = whole(case)
    model.head.weight = model.tokens.weight
    first, last = Part(model, 0, 2), Part(model, 1, 2)
    recipe = onefold.Recipe.zero(3)
    onefold.shard(first, recipe, mesh=mesh["dp"])
    refused("one parameter", lambda: onefold.shard(last, recipe, mesh=mesh["dp"]))

    # Different numbers under no_sync
    module = part(0)
    unlike = stage(module, 0, 1)
    with onefold.no_sync(module):
        called(Pipeline(mesh, [module], [unlike], _gpipe(unlike, 2)), batch_of(case, 0, 0))
    refused(
        "other numbers",
        lambda: called(Pipeline(mesh, [module], [unlike], _gpipe(unlike, 4)), batch_of(case, 0, 0)),
    )
    return said


def _gpipe(stage: Any, micro_batches: int) -> Any:
    return pipelining.ScheduleGPipe(
        stage, n_microbatches=micro_batches, loss_fn=lambda output, _: output.square().mean()
    )


# -- checkpoints -----------------------------------------------------------------------------------


def saved(case: Case, folder: str) -> None:
    """Train half of the steps, save each stage, join them."""
    import torch.distributed as dist

    import onefold
    from onefold.checkpoint import join_stages

    pipeline = built(3, case)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.01) for m in pipeline.modules]
    _train(pipeline, case, optimizers, range(case.steps // 2))
    for module, stage, optimizer in zip(pipeline.modules, pipeline.stages, optimizers, strict=True):
        onefold.save(
            f"{folder}/stage-{stage.stage_index}", model=module, optimizer=optimizer, step=7
        )
    dist.barrier()
    if dist.get_rank() == 0:
        join_stages(folder)


def resumed(case: Case, folder: str, strict: bool) -> dict[str, Any]:
    """Load what `saved` has written at another number of stages, and train the other half."""
    import onefold

    pipeline = built(1, case)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.01) for m in pipeline.modules]
    for module, optimizer in zip(pipeline.modules, optimizers, strict=True):
        loaded = onefold.load(folder, model=module, optimizer=optimizer, strict=strict)
        assert (loaded.step, loaded.missing) == (7, ()), loaded
    losses = _train(pipeline, case, optimizers, range(case.steps // 2, case.steps))
    weights: dict[str, Tensor] = {}
    for module in pipeline.modules:
        weights.update(onefold.full_state_dict(module))
    return {"losses": losses, "weights": weights, "dp": pipeline.mesh.get_local_rank("dp")}


def _train(pipeline: Pipeline, case: Case, optimizers: list[Any], steps: range) -> list[float]:
    losses: list[float] = []
    for step in steps:
        losses += called(pipeline, batch_of(case, pipeline.mesh.get_local_rank("dp"), step))
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return losses
