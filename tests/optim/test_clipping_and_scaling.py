"""Clipping by the global norm, and the gradient scaler of fp16: the same decision on every rank."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from onefold.runtime.parameters.interval import local_part
from ranks import run_ranks
from trials import STAGES, MLPCase, differences, fresh, train_reference, train_sharded
from zoo import TinyMLP, features_of

NORMS = [2.0, 1.0, 3.0, math.inf]


def norms(stage: int | None, norm_type: float, max_norm: float) -> tuple[float, list[float]]:
    """The norm before clipping and the norms of whole gradients after it (by an SGD step of lr 1 on
    zero momentum).
    """
    import onefold

    case = MLPCase()
    inner = fresh(case)
    batch = case.batch(dist.get_rank(), 0) * 5
    if stage is None:
        model: nn.Module = DistributedDataParallel(inner)
    else:
        model = onefold.shard(inner, onefold.Recipe.zero(stage, stall_timeout=10.0))
    case.loss(model, batch).backward()
    if stage is None:
        norm = nn.utils.clip_grad_norm_(model.parameters(), max_norm, norm_type)
    else:
        norm = onefold.clip_grad_norm_(model, max_norm, norm_type)
    torch.optim.SGD(model.parameters(), lr=1.0).step()
    state = inner.state_dict() if stage is None else onefold.full_state_dict(model)
    moved = [state[name].double().sum().item() for name in sorted(state)]
    return norm.item(), moved


def compare_norms(norm_type: float, max_norm: float) -> list[str]:
    expected, weights = norms(None, norm_type, max_norm)
    problems, bits = [], set()
    for stage in STAGES:
        norm, moved = norms(stage, norm_type, max_norm)
        bits.add(norm)
        if not math.isclose(norm, expected, rel_tol=1e-5):
            problems.append(f"stage {stage}, norm {norm_type}: {norm!r}, expected {expected!r}")
        if dist.get_rank() == 0 and any(
            not math.isclose(a, b, rel_tol=1e-4, abs_tol=1e-4)
            for a, b in zip(weights, moved, strict=True)
        ):
            problems.append(
                f"stage {stage}, norm {norm_type}: weights after the step {moved}, expected"
                f" {weights}"
            )
    if len(bits) != 1:
        problems.append(
            f"norm {norm_type}: the stages give {len(bits)} different norms {sorted(bits)}"
        )
    return problems


@pytest.mark.parametrize("max_norm", [0.1, 1e6], ids=["clipping", "not reached"])
@pytest.mark.parametrize("norm_type", NORMS)
def test_clipping_is_torchs_on_whole_gradients(norm_type: float, max_norm: float) -> None:
    found = run_ranks(3, compare_norms, norm_type, max_norm)
    assert found == [[], [], []]


def passes_over_gradients(max_norm: float) -> int:
    """How often clipping multiplies a list of gradients."""
    import onefold

    model = onefold.shard(TinyMLP(), onefold.Recipe.zero(2), device="cpu")
    model(MLPCase().batch(0, 0)).square().mean().backward()
    passes: list[int] = []
    multiply = torch._foreach_mul_

    def counted(tensors: list[torch.Tensor], factor: torch.Tensor) -> None:
        passes.append(len(tensors))
        multiply(tensors, factor)

    torch._foreach_mul_ = counted  # type: ignore[assignment]
    onefold.clip_grad_norm_(model, max_norm)
    torch._foreach_mul_ = multiply
    return len(passes)


def test_clipping_passes_over_gradients_on_the_host_only_to_make_them_smaller() -> None:
    assert (
        run_ranks(1, passes_over_gradients, 1e6)
        == [0]
        == run_ranks(1, passes_over_gradients, math.inf)
    )
    assert run_ranks(1, passes_over_gradients, 1e-6) == [1]


def same_norm_everywhere(stage: int) -> float:
    return norms(stage, 2.0, 0.5)[0]


@pytest.mark.parametrize("stage", STAGES)
def test_every_rank_gets_the_same_norm(stage: int) -> None:
    assert len(set(run_ranks(3, same_norm_everywhere, stage))) == 1


def clip_with_torch(stage: int, norm_type: float) -> list[str]:
    """torch's own clipping at a stage against the same on whole gradients in DDP: where they
    differ.
    """
    import onefold

    case = MLPCase()
    model = onefold.shard(fresh(case), onefold.Recipe.zero(stage, stall_timeout=10.0))
    reference = nn.parallel.DistributedDataParallel(fresh(case))
    found = []
    for m in (reference, model):
        case.loss(m, case.batch(torch.distributed.get_rank(), 0)).backward()
        norm = nn.utils.clip_grad_norm_(m.parameters(), 0.01, norm_type)
        found.append([norm, *(p.grad.norm() for p in m.parameters())])
        nn.utils.clip_grad_value_(m.parameters(), 1e-5)
        found[-1] += [p.grad.abs().max() for p in m.parameters()]
    return [
        f"{a.item()} and {b.item()}"
        for a, b in zip(*found, strict=True)
        if not torch.allclose(a, b, rtol=1e-5)
    ]


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("norm_type", [2.0, 1.0, math.inf])
def test_torchs_own_clipping_is_that_of_whole_gradients(stage: int, norm_type: float) -> None:
    assert run_ranks(3, clip_with_torch, stage, norm_type) == [[], [], []]


class Poisoned(MLPCase):
    """fp16 with a scaler. In step 1 the loss of one rank overflows."""

    steps = 4
    poisoned_rank = 1
    options = {"precision": "fp16"}

    def step(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, rank: int, step: int
    ) -> float:
        import onefold

        if step == 0:
            self.scaler = onefold.GradScaler(model, init_scale=1024.0, growth_interval=100)
            self.scales: list[float] = []
            self.weights: list[Any] = []
        optimizer.zero_grad()
        loss = self.loss(model, self.batch(rank, step)).float()
        if step == 1 and rank == self.poisoned_rank:
            loss = loss * float("inf")
        self.scaler.scale(loss).backward()
        self.scaler.unscale_(optimizer)
        onefold.clip_grad_norm_(model, 10.0)
        self.scaler.step(optimizer)
        self.scaler.update()
        self.scales.append(self.scaler.get_scale())
        self.weights.append([local_part(p).clone() for p in model.parameters()])
        return loss.item()


def overflow(stage: int, rank: int) -> tuple[list[float], list[bool]]:
    """The scale after each step, and whether the weights changed in it."""
    case = Poisoned()
    case.poisoned_rank = rank
    train_sharded(case, stage)
    changed = [
        any(not torch.equal(a, b) for a, b in zip(before, after, strict=True))
        for before, after in zip(case.weights, case.weights[1:], strict=False)
    ]
    return case.scales, changed


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("stage", STAGES)
def test_one_ranks_overflow_skips_the_step_on_all(stage: int, rank: int) -> None:
    for scales, changed in run_ranks(2, overflow, stage, rank):
        assert scales == [
            1024.0,
            512.0,
            512.0,
            512.0,
        ], f"stage {stage}, overflow on rank {rank}: scales {scales}"
        assert changed == [
            False,
            True,
            True,
        ], f"stage {stage}, overflow on rank {rank}: weights changed in steps 1 to 3: {changed}"


class Precise(MLPCase):
    steps = 8

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=0.1)

    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        return (model(batch).float() - 1).square().mean()


def low_precision(precision: str) -> list[str]:
    """16-bit compute follows the fp32 curve, with fp32 masters; the four stages are near one
    another.
    """
    import onefold

    reference = train_reference(Precise())
    problems = []
    for stage in STAGES:
        curve = train_sharded(Precise(), stage, precision=precision)
        tolerance = 3e-2 if precision == "bf16" else 5e-3
        problems += differences(
            f"stage {stage}, {precision}", reference, curve, tolerance, tolerance
        )
        model = onefold.shard(
            fresh(Precise()), onefold.Recipe.zero(stage, precision=precision, stall_timeout=10.0)
        )
        kinds = {p.dtype for p in model.parameters()}
        if kinds != {torch.float32}:
            problems.append(f"stage {stage}, {precision}: masters are {kinds}, expected float32")
    return problems


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_sixteen_bit_training_follows_the_fp32_curve(precision: str) -> None:
    assert run_ranks(2, low_precision, precision) == [[], []]


def small_steps_count(stage: int) -> float:
    """Updates far below a bf16 ulp add up in the masters: 64 steps of 1e-4 on weights near 1."""
    import onefold

    model = nn.Linear(8, 8, bias=False)
    nn.init.ones_(model.weight)
    onefold.shard(model, onefold.Recipe.zero(stage, precision="bf16", stall_timeout=10.0))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    for _ in range(64):
        model(torch.ones(1, 8)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    state = onefold.full_state_dict(model)
    return state["weight"].double().mean().item() if state else 1 - 64e-4


@pytest.mark.parametrize("stage", STAGES)
def test_masters_keep_what_bf16_would_lose(stage: int) -> None:
    for mean in run_ranks(2, small_steps_count, stage):
        assert math.isclose(mean, 1 - 64e-4, abs_tol=1e-5), mean


def accumulated_in_fp32(stage: int, reduce_at: str | None) -> float:
    """44 micro-batches of gradient 1 after one of 256: bf16 accumulation would stay at 256."""
    import onefold

    model = nn.Linear(4, 4, bias=False)
    onefold.shard(
        model, onefold.Recipe.zero(stage, precision="bf16", reduce_at=reduce_at, stall_timeout=10.0)
    )
    for gradient in (256.0, *[1.0] * 43):
        with onefold.no_sync(model):
            model(torch.full((1, 4), gradient)).sum().backward()
    model(torch.ones(1, 4)).sum().backward()
    grads = [p.grad for p in model.parameters() if p.grad is not None and p.grad.numel()]
    return grads[0].float().mean().item() if grads else 300.0


@pytest.mark.parametrize(
    ("stage", "reduce_at"), [(0, None), (1, None), (2, None), (3, None), (3, "boundary")]
)
def test_gradients_accumulate_in_fp32(stage: int, reduce_at: str | None) -> None:
    assert run_ranks(2, accumulated_in_fp32, stage, reduce_at) == [300.0, 300.0]


def autocast_inside(stage: int) -> list[str]:
    class Autocast(MLPCase):
        def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
            with torch.autocast("cpu", torch.bfloat16):
                return model(batch).float().square().mean()

    return differences(
        f"stage {stage}", train_reference(Autocast()), train_sharded(Autocast(), stage), 1e-5, 1e-6
    )


@pytest.mark.parametrize("stage", STAGES)
def test_autocast_inside_works(stage: int) -> None:
    assert run_ranks(2, autocast_inside, stage) == [[], []]


class RecordsInputs(TinyMLP):
    seen: tuple[Any, ...] = ()

    def forward(self, x: torch.Tensor, index: torch.Tensor, nested: Any) -> torch.Tensor:  # type: ignore[override]
        self.seen = (x.dtype, index.dtype, nested["y"][0].dtype, nested["wide"].dtype)
        return super().forward(x)


def input_dtypes(stage: int, cast_inputs: bool) -> tuple[Any, ...]:
    import onefold

    model = RecordsInputs()
    recipe = onefold.Recipe.zero(
        stage, precision="bf16", cast_inputs=cast_inputs, stall_timeout=10.0
    )
    onefold.shard(model, recipe)
    x = features_of(0, 4, 7)
    x = x if cast_inputs else x.bfloat16()
    model(x, torch.arange(3), {"y": [torch.ones(2)], "wide": torch.ones(2, dtype=torch.float64)})
    return model.seen


@pytest.mark.parametrize("stage", STAGES)
def test_inputs_are_cast_to_the_compute_dtype_integers_and_float64_not(stage: int) -> None:
    bf16, f32, f64, i64 = torch.bfloat16, torch.float32, torch.float64, torch.int64
    assert run_ranks(2, input_dtypes, stage, True) == [(bf16, i64, bf16, f64)] * 2
    assert run_ranks(2, input_dtypes, stage, False) == [(bf16, i64, f32, f64)] * 2


def narrow_wire(stage: int) -> list[str]:
    return differences(
        f"stage {stage}",
        train_reference(Precise()),
        train_sharded(Precise(), stage, wire="bf16"),
        1e-2,
        1e-2,
    )


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_gradients_may_travel_in_sixteen_bits(stage: int) -> None:
    assert run_ranks(2, narrow_wire, stage) == [[], []]
