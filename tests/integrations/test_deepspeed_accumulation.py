"""When an engine reduces gradients and steps: the user's boundaries, blocks of one reduction, sums
in place of means.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import onefold
from onefold.integrations.deepspeed.config import read_deepspeed
from onefold.integrations.deepspeed.names import access
from onefold.integrations.deepspeed.names.training import initialize
from ranks import run_ranks

WIDTH, RATE, STAGES = 6, 0.1, (0, 1, 2, 3)
UNMANAGED = {"managed_gradient_accumulation": False}
OFFLOADED = {"offload_optimizer": {"device": "cpu"}}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(3)
        )
        self.head = nn.Linear(WIDTH, 3, bias=False)
        self.unused = nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def batch(index: int) -> Tensor:
    rank = dist.get_rank() if dist.is_initialized() else 0
    return torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(100 * rank + index))


def made(stage: int, accumulation: int = 1, zero: Any = None, **more: Any) -> Any:
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": accumulation,
        "zero_optimization": {"stage": stage, **(zero or {})},
        "optimizer": {"type": "SGD", "params": {"lr": RATE}},
        "gradient_clipping": 0.0,
        **more,
    }
    return initialize(model=Net(), config=config)[0]


def loss_of(engine: Any, index: int, dtype: torch.dtype = torch.float32) -> Tensor:
    loss: Tensor = engine(batch(index).to(dtype)).float().square().mean()
    return loss


def weights(engine: Any) -> list[Tensor]:
    return [access.safe_get_full_fp32_param(p).clone() for p in engine.module.parameters()]


def plain_weights(steps: list[list[int]], factor: float = 1.0) -> list[Tensor]:
    """Weights of a plain model after steps with the mean of these micro-batches, over all ranks."""
    net = Net()
    for micros in steps:
        net.zero_grad()
        for i in micros:
            (net(batch(i)).square().mean() * factor / len(micros)).backward()
        with torch.no_grad():
            for p in net.parameters():
                if p.grad is not None:
                    dist.all_reduce(p.grad)
                    p -= RATE * p.grad / dist.get_world_size()
    return [p.detach() for p in net.parameters()]


def apart(mine: list[Tensor], theirs: list[Tensor]) -> float:
    return max(float((a - b).abs().max()) for a, b in zip(mine, theirs, strict=True))


def sent(engine: Any) -> int:
    """Bytes of reductions that this rank has sent so far."""
    totals: dict[str, int] = onefold.engine_of(engine.module).traffic.by_move()
    return sum(n for move, n in totals.items() if move in ("reduce-scatter", "all-reduce"))


# -- the limit of a file that names none -----------------------------------------------------------


def steps_taken(stage: int) -> list[tuple[float, float, float]]:
    """The limit, the norm of the gradients, and how far an SGD step goes by its rate: without
    `gradient_clipping`, and with 0.
    """
    found = []
    for more in ({}, {"gradient_clipping": 0}):
        config = {
            "train_micro_batch_size_per_gpu": 4,
            "zero_optimization": {"stage": stage},
            "optimizer": {"type": "SGD", "params": {"lr": RATE}},
            **more,
        }
        engine = initialize(model=Net(), config=config)[0]
        before = weights(engine)
        engine.backward(loss_of(engine, 0) * 100)
        engine.step()
        moved = [(a - b).square().sum() for a, b in zip(before, weights(engine), strict=True)]
        length = float(torch.stack(moved).sum().sqrt()) / RATE
        found.append((engine.gradient_clipping(), engine.get_global_grad_norm(), length))
    return found


@pytest.mark.parametrize("stage", STAGES)
def test_a_file_without_gradient_clipping_clips_to_norm_one(stage: int) -> None:
    for (limit, norm, length), (none, _, whole) in run_ranks(2, steps_taken, stage):
        assert limit == 1 and norm > 5 and length == pytest.approx(1, rel=1e-4)
        assert none == 0 and whole == pytest.approx(norm, rel=1e-4)


# -- the user decides when a step applies ----------------------------------------------------------


def unmanaged(stage: int, zero: Any) -> dict[str, Any]:
    """Steps of 3, 1 and 2 micro-batches with a configuration that says 2."""
    engine = made(stage, 2, zero, **UNMANAGED)
    steps, index, counts, boundaries = [], 0, [], []
    for count in (3, 1, 2):
        steps.append(list(range(index, index + count)))
        for i in steps[-1]:
            boundaries.append(engine.is_gradient_accumulation_boundary())
            loss = loss_of(engine, i) / count
            if i % 2:
                engine.backward(loss, scale_wrt_gas=False)
            else:
                (loss * 2).backward()  # divided by the 2 of the configuration
        engine.step()
        assert engine.was_step_applied()
        counts.append((engine.global_steps, engine.micro_steps, engine.global_samples))
        index += count
    return {
        "apart": apart(weights(engine), plain_weights(steps)),
        "counts": counts,
        "boundaries": boundaries,
    }


@pytest.mark.parametrize("zero", [None, OFFLOADED], ids=["device", "offloaded"])
@pytest.mark.parametrize("stage", STAGES)
def test_without_management_every_step_applies_what_has_accumulated(stage: int, zero: Any) -> None:
    if stage == 0 and zero:
        zero = None  # nothing is offloaded at stage 0
    for found in run_ranks(2, unmanaged, stage, zero):
        assert found["apart"] < 1e-6
        assert found["counts"] == [(1, 1, 24), (2, 2, 32), (3, 3, 48)]
        assert found["boundaries"] == [False] * 6


def reductions_without_management(stage: int) -> list[int]:
    engine = made(stage, **UNMANAGED)
    before = sent(engine)
    for i in range(3):
        engine.backward(loss_of(engine, i))
    backward = sent(engine) - before
    engine.step()
    return [backward, sent(engine) - before]


@pytest.mark.parametrize("stage", [0, 1])
def test_without_management_stages_0_and_1_reduce_in_the_step_alone(stage: int) -> None:
    for backward, all_of_it in run_ranks(2, reductions_without_management, stage):
        assert backward == 0 < all_of_it


def refused_without_management() -> list[str]:
    engine = made(1, **UNMANAGED)
    said = []
    for call in (
        lambda: engine.set_gradient_accumulation_boundary(True),
        lambda: engine.coalesce_grad_reduction().__enter__(),
    ):
        with pytest.raises(AssertionError) as caught:
            call()
        said.append(str(caught.value))
    return said


def test_without_management_boundaries_are_not_set_by_other_calls() -> None:
    for said in run_ranks(1, refused_without_management)[0]:
        assert '"managed_gradient_accumulation": false, where each step() is a boundary' in said


# -- one reduction for several backward passes -----------------------------------------------------


def coalesced(stage: int, more: dict[str, Any]) -> tuple[float, int, int]:
    """(difference of the weights, bytes of reductions with and without the block) of two steps."""
    dtype = torch.float16 if "fp16" in more else torch.float32
    runs = []
    for inside in (False, True):
        engine = made(stage, **more)
        before = sent(engine)
        for step in range(2):
            if inside:
                with engine.coalesce_grad_reduction():
                    for i in range(4):
                        engine.backward(loss_of(engine, 4 * step + i, dtype) / 4)
            else:
                for i in range(4):
                    engine.set_gradient_accumulation_boundary(i == 3)
                    engine.backward(loss_of(engine, 4 * step + i, dtype) / 4)
            engine.step()
            assert engine.was_step_applied()
        runs.append((weights(engine), sent(engine) - before))
    (theirs, several), (mine, once) = runs
    return apart(mine, theirs), once, several


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"gradient_clipping": 0.05},
        {"zero": OFFLOADED},
        {"fp16": {"enabled": True, "loss_scale": 8}},
        {"bf16": {"enabled": False}, "data_types": {"grad_accum_dtype": "fp32"}},
    ],
    ids=["plain", "clipped", "offloaded", "fp16", "fp32 sums"],
)
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_block_of_one_reduction_gives_the_weights_of_several(
    stage: int, more: dict[str, Any]
) -> None:
    tolerance = 1e-3 if "fp16" in more else 1e-6
    for difference, once, several in run_ranks(2, coalesced, stage, more):
        assert difference < tolerance
        # Stage 1 reduces at the boundary alone anyway
        assert once * (4 if stage > 1 else 1) == several > 0


def nested_blocks() -> list[str]:
    said = []
    engine = made(1)
    for outer in (engine.no_sync, engine.coalesce_grad_reduction):
        for inner in (engine.no_sync, engine.coalesce_grad_reduction):
            with outer(), pytest.raises(AssertionError, match="no_sync") as caught, inner():
                pass
            said.append(str(caught.value))
        with outer():
            engine.backward(loss_of(engine, 0))
            for error in (AssertionError, RuntimeError):
                with pytest.raises(error, match=r"call Engine\.step\(\) inside no_sync context"):
                    engine.step()
        engine.zero_grad()
    return said


def test_blocks_do_not_nest_and_no_step_runs_inside_them() -> None:
    for said in run_ranks(2, nested_blocks)[0]:
        assert said.startswith("no_sync context manager reentry is unsupported:")
        assert "cannot be nested inside engine.no_sync() or" in said


def left_by_an_error(stage: int) -> tuple[float, bool, bool | None]:
    engine = made(stage)
    engine.set_gradient_accumulation_boundary(False)
    with pytest.raises(KeyError), engine.coalesce_grad_reduction():
        engine.backward(loss_of(engine, 0))
        raise KeyError
    between = engine.is_gradient_accumulation_boundary()
    engine.set_gradient_accumulation_boundary(True)
    engine.backward(loss_of(engine, 1))
    engine.step()
    return apart(weights(engine), plain_weights([[0, 1]], factor=2.0)), between


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_block_that_raised_leaves_its_gradients_to_the_next_reduction(stage: int) -> None:
    for difference, boundary in run_ranks(2, left_by_an_error, stage):
        assert difference < 1e-6 and boundary is False


# -- passes under no_sync --------------------------------------------------------------------------


def step_after_no_sync(stage: int) -> tuple[float, float]:
    """Differences of a step whose passes were all under no_sync, and of one with a last pass
    outside.
    """
    found = []
    for outside in (False, True):
        engine = made(stage)
        if stage > 1:
            with (
                pytest.raises(AssertionError, match="incompatible with ZeRO stage"),
                engine.no_sync(),
            ):
                pass
        with engine.no_sync() if stage < 2 else onefold.no_sync(engine.module):
            for i in range(2):
                (loss_of(engine, i) / (3 if outside else 2)).backward()
        if outside:
            (loss_of(engine, 2) / 3).backward()
        engine.step()
        found.append(apart(weights(engine), plain_weights([[0, 1, 2] if outside else [0, 1]])))
    return found[0], found[1]


@pytest.mark.parametrize("stage", STAGES)
def test_a_step_reduces_what_passes_under_no_sync_have_left(stage: int) -> None:
    for found in run_ranks(2, step_after_no_sync, stage):
        assert max(found) < 1e-6


def gradients_under_no_sync(stage: int) -> float:
    engine, net = made(stage), Net()
    with engine.no_sync():
        for i in range(2):
            engine.backward(loss_of(engine, i))
            net(batch(i)).square().mean().backward()
    mine = [access.safe_get_full_grad(p) for p in engine.module.parameters()]
    theirs = [p.grad for p in net.parameters()]
    assert [g is None for g in mine] == [g is None for g in theirs]
    return apart([g for g in mine if g is not None], [g for g in theirs if g is not None])


@pytest.mark.parametrize("stage", [0, 1])
def test_under_no_sync_a_full_gradient_is_the_ranks_own(stage: int) -> None:
    assert max(run_ranks(2, gradients_under_no_sync, stage)) < 1e-6


# -- sums over the ranks ---------------------------------------------------------------------------


def summed(stage: int, more: dict[str, Any]) -> tuple[float, float]:
    dtype = torch.bfloat16 if "bf16" in more else torch.float32
    norms = []
    for op in ("mean", "sum"):
        engine = made(stage, accumulation=2, gradient_allreduce_op=op, **more)
        assert engine.gradient_average() is (op == "mean")
        for i in range(2):
            loss = loss_of(engine, i, dtype)
            if i:
                engine.backward(loss)
            else:
                loss.backward()
            engine.step()
        norms.append(engine.get_global_grad_norm())
    return norms[0], norms[1]


@pytest.mark.parametrize("more", [{}, {"bf16": {"enabled": True}}], ids=["fp32", "bf16"])
@pytest.mark.parametrize("stage", STAGES)
def test_gradients_may_be_summed_over_the_ranks(stage: int, more: dict[str, Any]) -> None:
    for mean, total in run_ranks(2, summed, stage, more):
        assert total == pytest.approx(2 * mean, rel=1e-6)


# -- parameters that no loss uses ------------------------------------------------------------------


def step_with_an_unused_layer(stage: int, ignored: bool) -> str:
    engine = made(stage, zero={"ignore_unused_parameters": ignored})
    engine.backward(loss_of(engine, 0))
    try:
        engine.step()
    except AssertionError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("stage", [1, 2])
def test_unused_parameters_are_named_if_the_file_does_not_ignore_them(
    stage: int, ranks: int
) -> None:
    for said in run_ranks(ranks, step_with_an_unused_layer, stage, False):
        assert said.startswith("parameters got no gradient since the last step: unused.weight, un")
        assert "set ignore_unused_parameters to true" in said
    assert set(run_ranks(ranks, step_with_an_unused_layer, stage, True)) == {""}


def test_where_unused_parameters_are_not_looked_for_the_key_has_no_effect() -> None:
    zero = {"stage": 3, "ignore_unused_parameters": False}
    read = read_deepspeed({"train_batch_size": 1, "zero_optimization": zero})
    assert [path for path, _ in read.without_effect] == [
        "zero_optimization.ignore_unused_parameters"
    ]
