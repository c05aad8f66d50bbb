"""ZeRO under torch's pipelines: each stage's module is sharded by itself, gathered once and reduced
once a step, and trains as the whole model does in one process.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from pipeline_models import (
    Case,
    Part,
    Pipeline,
    Seen,
    batch_of,
    built,
    called,
    in_one_process,
    loss_of,
    mesh_of,
    optimizer_of,
    schedule_of,
    stage_of,
    train,
    whole,
)  # fmt: skip
from torch import nn

import looks
import onefold
from on_ranks import on_ranks, slow
from onefold.parallel import register_actions, unshard
from promises.jobs import differing
from reference import differences

ABOVE = (1, 2, 3)
LOOPED: dict[str, Any] = {"places": 2}
V: dict[str, Any] = {"places": 2, "v_shaped": True}
ROWS: dict[str, Case] = {
    "1F1B": Case(ci=True),
    "interleaved 1F1B": Case("ScheduleInterleaved1F1B", **LOOPED),
    "looped BFS, registered": Case("ScheduleLoopedBFS", registered=True, ci=True, **LOOPED),
    "zero bubble": Case("ScheduleInterleavedZeroBubble", registered=True, **LOOPED),
    "ZBV": Case("ScheduleZBVZeroBubble", registered=True, **V),
    "DualPipeV": Case("ScheduleDualPipeV", **V),
    "four stages on a rank": Case("ScheduleLoopedBFS", registered=True, places=4, depth=8),
    "one data rank": Case("ScheduleZBVZeroBubble", dp=1, **V),
    "two calls, one data rank": Case("ScheduleGPipe", calls=2, dp=1, micro_batches=3, ci=True),
    "two calls, the first under no_sync": Case(calls=2, under_no_sync=True, ci=True),
    "losses added up": Case("ScheduleZBVZeroBubble", sums=True, **V),
    "evaluation before the step": Case("ScheduleLoopedBFS", evaluates=True, registered=True, **LOOPED),
    "checkpointing": Case("ScheduleInterleavedZeroBubble", checkpointing=True, **LOOPED),
    "frozen": Case("ScheduleInterleavedZeroBubble", frozen=("blocks.1.mlp", "blocks.3.mlp"), **LOOPED),
    "states on the host": Case(options={"offload_optimizer": "cpu"}, stages=ABOVE, ci=True),
    "bf16": Case(options={"precision": "bf16"}, near=0.03),
    "all on the host": Case(options={"offload_optimizer": "cpu", "offload_param": "cpu"}, stages=(3,)),
    "all on NVMe": Case(options={"offload_optimizer": "nvme", "offload_param": "nvme"}, stages=(3,)),
    "activations on the host": Case(options={"offload_activations": "1GB"}),
    "kept for backward": Case("ScheduleGPipe", options={"reshard_after_forward": False}),
    "at the boundary": Case("ScheduleGPipe", options={"reduce_at": "boundary"}),
    "tensor parallel": Case("ScheduleZBVZeroBubble", dp=1, tp=2, **V),
    "loss scaling, unequal stages": Case(scale=2.0**12, depth=5, ci=True),
    "everything": Case(
        "ScheduleInterleaved1F1B", dp=1, tp=2, depth=6, calls=2, registered=True, checkpointing=True,
        max_norm=0.05, scale=2.0**10, frozen=("tokens", "blocks.1", "blocks.3.mlp"), stages=ABOVE,
        options={"offload_optimizer": "cpu"}, **LOOPED,
    ),
    "three axes": Case(tp=2),
}  # fmt: skip


def rows_on(ranks: int) -> Any:
    rows = [(name, c) for name, c in ROWS.items() if c.pp * c.dp * c.tp == ranks]
    found = [pytest.param(c, id=name, marks=() if c.ci else slow) for name, c in rows]
    return pytest.mark.parametrize("case", found)


def keep(case: Case, folder: Path, every: bool) -> None:
    losses, one = in_one_process(case)
    first: Seen | None = None
    for stage in case.stages if every else sorted({case.stages[0], case.stages[-1]}):
        pipeline = built(stage, case, folder)
        seen = train(pipeline, [optimizer_of(pipeline.modules)], range(case.steps))
        for module in pipeline.modules:
            seen.weights |= onefold.full_state_dict(module)
            assert not looks.gathered(module), f"stage {stage}: units stay gathered"
        wanted = losses[pipeline.mesh.get_local_rank("dp")]
        assert not seen.losses or seen.losses == pytest.approx(wanted, case.near), f"stage {stage}"
        assert seen.norms == pytest.approx(one.norms, case.near), f"stage {stage}: norms"
        mine = {name: one.weights[name] for name in seen.weights}
        wrong = differences(mine, seen.weights, 5 * case.near, case.near)
        first = first or seen
        wrong += differing("other bits", first.weights, seen.weights)
        assert not wrong, f"stage {stage}: {wrong}"
        assert (seen.losses, seen.norms) == (first.losses, first.norms), (
            f"stage {stage}: other bits"
        )
        if (
            not case.options
            and not case.frozen
            and case.tp == case.calls == 1
            and not case.evaluates
        ):
            assert seen.sent == [sent(stage, pipeline, at) for at in pipeline.stages], (
                f"stage {stage}"
            )


def sent(stage: int, pipeline: Pipeline, at: Any) -> dict[str, int]:
    """One gather for each UNSHARD, or each step, and one reduction a step."""
    case = pipeline.case
    once = 4 * sum(n for _, n in looks.units(at.submod)) * (case.dp - 1) // case.dp
    if not once:
        return {}
    if stage == 0:
        return {"all-reduce": 2 * once}
    actions = getattr(pipeline.schedule, "pipeline_order_with_comms", {})
    mine = [str(a) for a in actions.get(pipeline.mesh.get_local_rank("pp"), ())]
    gathers = mine.count(f"{at.stage_index}UNSHARD") if case.registered and stage == 3 else 1
    return {"all-gather": gathers * once, "reduce-scatter": once}


@on_ranks(2)
@rows_on(2)
def test_two_ranks_train_as_one_process(case: Case, folder: Path, every: bool) -> None:
    keep(case, folder, every)


@on_ranks(4)
@rows_on(4)
def test_four_ranks_train_as_one_process(case: Case, folder: Path, every: bool) -> None:
    keep(case, folder, every)


@on_ranks(8)
@rows_on(8)
def test_eight_ranks_train_as_one_process(case: Case, folder: Path, every: bool) -> None:
    keep(case, folder, every)


@on_ranks(4)
def test_an_overflow_in_one_stage_skips_the_step_of_all() -> None:
    """With one optimizer: others beside it are refused."""
    case = Case(depth=5, places=2, schedule="ScheduleInterleaved1F1B", scale=4.0)
    pipeline = built(2, case)
    optimizers = [optimizer_of(pipeline.modules)]
    if dist.get_rank() == 3:  # one data rank of the last stage
        pipeline.modules[-1].head.weight.register_hook(lambda grad: grad * float("inf"))
    train(pipeline, optimizers, range(1))
    assert pipeline.scalers[0].get_scale() == 2.0, "the scale is halved on every rank"
    before = whole(case).state_dict()
    for module in pipeline.modules:
        found_now = onefold.full_state_dict(module)
        assert not differences({name: before[name] for name in found_now}, found_now)
    others = [optimizer_of(pipeline.modules[:1]) for _ in range(2)]  # torch tells them by their id
    for wrong, other in enumerate(others):
        with pytest.raises(ValueError, match="scales one optimizer") if wrong else nullcontext():
            pipeline.scalers[0].unscale_(other)


@on_ranks(2)
def test_a_step_that_raised_leaves_nothing_behind() -> None:
    case = Case(pp=1)
    pipeline = built(3, case)
    (module,), batch = pipeline.modules, batch_of(case, dist.get_rank(), 0)
    calls = [0]

    def fails(*_: Any) -> None:
        calls[0] += 1
        if calls[0] == 3:
            raise FloatingPointError("for the test")

    handle = module.blocks["2"].register_forward_pre_hook(fails)
    with pytest.raises(RuntimeError) as raised:
        called(pipeline, batch)
    assert "FloatingPointError" in repr(raised.value.__cause__)
    handle.remove()
    module.zero_grad()
    pipeline.stages[0].clear_runtime_states()  # as every step begins
    assert not looks.gathered(module)
    # torch's schedule keeps the losses of the step that raised: another one for the same stage
    pipeline.schedule = schedule_of(case, pipeline.stages, loss_of)
    called(pipeline, batch)
    fresh = built(3, case)
    called(fresh, batch)
    for p, q in zip(module.parameters(), fresh.modules[0].parameters(), strict=True):
        assert (p.grad is None and q.grad is None) or torch.equal(p.grad, q.grad)


@on_ranks(2)
@pytest.mark.parametrize("where", ["the module", "the loss"])
def test_gradients_of_a_stage_on_one_rank_stay_where_a_later_step_raises(where: str) -> None:
    case, recipe = Case(pp=1), onefold.Recipe.zero(3)
    module: Any = onefold.shard(Part(whole(case), 0, case), recipe, mesh=mesh_of(case)["pp"])
    stages, batch = [a_stage_of(module, 1)], batch_of(case, 0, 0)
    raises, calls = [False], [0]

    def fails(*_: Any) -> None:
        calls[0] += 1
        if raises[0] and calls[0] % 4 == 3:
            raise FloatingPointError("for the test")

    def loss(scores: Any, tokens: Any) -> Any:
        if where == "the loss":
            fails()
        return loss_of(scores, tokens)

    if where == "the module":
        module.blocks["0"].register_forward_pre_hook(fails)

    def grads() -> list[torch.Tensor]:
        return [p.grad.clone() for p in module.parameters()]

    def step(fail: bool) -> None:
        calls[0], raises[0] = 0, fail
        schedule = schedule_of(case, stages, loss)
        with pytest.raises((RuntimeError, FloatingPointError)) if fail else nullcontext():
            called(Pipeline(case, mesh_of(case), [module], stages, schedule), batch)

    step(fail=False)
    first = grads()
    step(fail=True)
    if where == "the module":
        assert all(map(torch.equal, grads(), first))
    step(fail=False)
    assert all(torch.allclose(g, 2 * f) for g, f in zip(grads(), first, strict=True))
    step(fail=True)
    module.zero_grad()
    step(fail=False)
    assert all(map(torch.equal, grads(), first))


@on_ranks(2)
def test_dropped_gradients_leave_no_number_of_micro_batches_behind() -> None:
    module = part()
    stage = a_stage_of(module, 1)
    for count, waits in ((2, onefold.no_sync(module)), (4, contextlib.nullcontext())):
        module.zero_grad()
        case = replace(TWO, schedule="ScheduleGPipe", micro_batches=count)
        schedule = schedule_of(case, [stage], lambda output, _: output.square().mean())
        with waits:
            called(Pipeline(case, mesh_of(TWO), [module], [stage], schedule), batch_of(case, 0, 0))


# -- checkpoints -----------------------------------------------------------------------------------


def made(stage: int, case: Case) -> tuple[Pipeline, list[torch.optim.Optimizer]]:
    pipeline = built(stage, case)
    return pipeline, [optimizer_of([module]) for module in pipeline.modules]


@on_ranks(4)
def test_stages_saved_together_load_at_other_numbers_of_stages_and_beside_other_axes(
    folder: Path, every: bool
) -> None:
    """And go on as one process that was never interrupted."""
    pipeline, optimizers = made(3, Case())
    train(pipeline, optimizers, range(2))
    onefold.save(folder / "saved", model=pipeline.modules, optimizer=optimizers, step=2)
    losses, one = in_one_process(Case(steps=4))
    others = (Case(pp=1, tp=2), Case("ScheduleInterleaved1F1B", **LOOPED), Case())
    for case in others if every else others[:1]:
        pipeline, optimizers = made(1, case)
        with torch.no_grad():
            for module in pipeline.modules:
                for p in module.parameters():
                    p.mul_(0.5)
        found = onefold.load(folder / "saved", model=pipeline.modules, optimizer=optimizers)
        assert (found.step, found.missing, found.unexpected) == (2, (), ()), found
        seen = train(pipeline, optimizers, range(2, 4))
        wanted = losses[pipeline.mesh.get_local_rank("dp")][2 * case.micro_batches :]
        assert not seen.losses or seen.losses == pytest.approx(wanted, rel=2e-5)
        for module in pipeline.modules:
            weights = onefold.full_state_dict(module)
            assert not differences({n: one.weights[n] for n in weights}, weights, 1e-4, 2e-5)


# -- what is refused -------------------------------------------------------------------------------

TWO = Case(dp=2, pp=1, places=2)


def part(**options: Any) -> Any:
    return stage_of(3, replace(TWO, options=options), mesh_of(TWO), 0).submod


def a_stage_of(module: nn.Module, stages: int = 2) -> Any:
    group = mesh_of(TWO).get_group("pp")
    return onefold.parallel.PipelineStage(module, 0, stages, torch.device("cpu"), group=group)


def tied() -> None:
    module = part()
    module.config = SimpleNamespace(tie_word_embeddings=True)
    a_stage_of(module)


def inside_a_pass() -> None:
    module = part()
    module.blocks["0"].register_forward_pre_hook(lambda *_: unshard(module))
    module(batch_of(TWO, 0, 0))


def one_parameter_in_two_stages() -> None:
    model, mesh = whole(TWO), mesh_of(TWO)
    model.head.weight = model.tokens.weight
    for index in (0, 1):
        onefold.shard(Part(model, index, TWO), onefold.Recipe.zero(3), mesh=mesh["dp"])


def other_numbers_of_micro_batches() -> None:
    module = part()
    stage = a_stage_of(module, 1)
    for count, waits in ((2, onefold.no_sync(module)), (4, contextlib.nullcontext())):
        case = replace(TWO, schedule="ScheduleGPipe", micro_batches=count)
        schedule = schedule_of(case, [stage], lambda output, _: output.square().mean())
        with waits:
            called(Pipeline(case, mesh_of(TWO), [module], [stage], schedule), batch_of(case, 0, 0))


REFUSED: list[tuple[Callable[[], Any], str]] = [
    (lambda: a_stage_of(Part(whole(TWO), 0, TWO)), "call onefold.shard"),
    (lambda: a_stage_of(part(offload_optimizer="cpu", step_in_backward=True)), "steps a unit as soon as"),
    (tied, "cannot be shared between the 2 stages"),
    (lambda: register_actions(schedule_of(Case("ScheduleGPipe"), [a_stage_of(part(), 1)], loss_of)), "leave register_actions out"),
    (inside_a_pass, "unshard was called inside a pass"),
    (one_parameter_in_two_stages, "belongs to another sharded model"),
    (other_numbers_of_micro_batches, "divided by 2 micro-batches, and those of this step by 4"),
]  # fmt: skip


@on_ranks(2)
def test_what_a_stage_cannot_do_is_refused_in_a_sentence() -> None:
    for call, words in REFUSED:
        with pytest.raises((ValueError, RuntimeError), match=words):
            call()
