"""Clipping by the global norm, the gradient scaler of fp16, and 16-bit compute: the same decision on
every rank.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import onefold
from on_ranks import on_ranks
from reference import built, ddp, differences, on_each_rank, train, weights
from zoo import TinyMLP, features_of

STAGES = (0, 1, 2, 3)


def sharded(stage: int, build: Any = TinyMLP, **options: Any) -> Any:
    return onefold.shard(built(build), onefold.Recipe.zero(stage, stall_timeout=10.0, **options))


@on_ranks(3)
@pytest.mark.parametrize("max_norm", [0.1, 1e6])
@pytest.mark.parametrize("norm_type", [2.0, 1.0, 3.0, math.inf])
def test_clipping_is_torchs_on_whole_gradients(norm_type: float, max_norm: float) -> None:
    batch = features_of(dist.get_rank(), 4, 7) * 5
    reference = ddp(built(TinyMLP))
    reference(batch).square().mean().backward()
    expected = nn.utils.clip_grad_norm_(reference.parameters(), max_norm, norm_type)
    torch.optim.SGD(reference.parameters(), lr=1.0).step()
    norms = set()
    for stage in STAGES:
        model = sharded(stage)
        model(batch).square().mean().backward()
        norm = onefold.clip_grad_norm_(model, max_norm, norm_type)
        torch.testing.assert_close(norm, expected, rtol=1e-5, atol=0)
        torch.optim.SGD(model.parameters(), lr=1.0).step()
        assert not differences(weights(reference), weights(model), 1e-4, 1e-5)
        norms |= {*on_each_rank(norm.item())}
    assert len(norms) == 1, "the same bits on every rank and at every stage"


@on_ranks(2)
@pytest.mark.parametrize("poisoned", [0, 1])
@pytest.mark.parametrize("stage", STAGES)
def test_one_ranks_overflow_skips_the_step_on_all(stage: int, poisoned: int) -> None:
    model = sharded(stage, precision="fp16")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scaler = onefold.GradScaler(model, init_scale=1024.0, growth_interval=100)
    seen = []
    for step in range(4):
        before = weights(model)
        loss = model(features_of(10 * step + dist.get_rank(), 4, 7)).float().square().mean()
        factor = float("inf") if step == 1 and dist.get_rank() == poisoned else 1.0
        scaler.scale(loss * factor).backward()
        scaler.unscale_(optimizer)
        onefold.clip_grad_norm_(model, 10.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        seen.append((scaler.get_scale(), bool(differences(before, weights(model)))))
    assert seen == [(1024.0, True), (512.0, False), (512.0, True), (512.0, True)]


@on_ranks(2)
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_sixteen_bit_training_follows_the_fp32_curve(precision: str) -> None:
    def loss(model: nn.Module, batch: Tensor) -> Tensor:
        return (model(batch).float() - 1).square().mean()

    batches = [features_of(10 * step + dist.get_rank(), 4, 7) for step in range(8)]
    reference = ddp(built(TinyMLP))
    expected = train(reference, torch.optim.SGD(reference.parameters(), lr=0.1), batches, loss)
    near = 3e-2 if precision == "bf16" else 5e-3
    for stage in STAGES:
        model = sharded(stage, precision=precision)
        found = train(model, torch.optim.SGD(model.parameters(), lr=0.1), batches, loss)
        assert found == pytest.approx(expected, rel=near, abs=near)
        assert {p.dtype for p in model.parameters()} == {torch.float32}, "masters"


def ones(stage: int, width: int, **options: Any) -> Any:
    model = nn.Linear(width, width, bias=False)
    nn.init.ones_(model.weight)
    recipe = onefold.Recipe.zero(stage, precision="bf16", stall_timeout=10.0, **options)
    return onefold.shard(model, recipe)


@on_ranks(2)
@pytest.mark.parametrize("stage", STAGES)
def test_masters_keep_what_bf16_would_lose(stage: int) -> None:
    """64 steps of 1e-4 on weights near 1 are far below a bf16 ulp."""
    model = ones(stage, 8)
    train(model, torch.optim.SGD(model.parameters(), lr=1e-4), [torch.ones(1, 8)] * 64, lambda m, x: m(x).sum())  # fmt: skip
    assert math.isclose(weights(model)["weight"].double().mean().item(), 1 - 64e-4, abs_tol=1e-5)


@on_ranks(2)
@pytest.mark.parametrize(("stage", "reduce_at"), [(0, None), (1, None), (2, None), (3, None), (3, "boundary")])  # fmt: skip
def test_gradients_accumulate_in_fp32(stage: int, reduce_at: str | None) -> None:
    """44 micro-batches of gradient 1 after one of 256: bf16 would stay at 256."""
    model = ones(stage, 4, reduce_at=reduce_at)
    for gradient in (256.0, *[1.0] * 43):
        with onefold.no_sync(model):
            model(torch.full((1, 4), gradient)).sum().backward()
    model(torch.ones(1, 4)).sum().backward()
    assert model.weight.grad.mean().item() == 300.0


@on_ranks(2)
@pytest.mark.parametrize("stage", STAGES)
def test_inputs_are_cast_to_the_compute_dtype_integers_and_float64_not(stage: int) -> None:
    class Records(TinyMLP):
        seen: tuple[Any, ...] = ()

        def forward(self, x: Tensor, index: Tensor, nested: Any) -> Tensor:  # type: ignore[override]
            self.seen = (x.dtype, index.dtype, nested["y"][0].dtype, nested["wide"].dtype)
            return super().forward(x)

    bf16, f32, f64, i64 = torch.bfloat16, torch.float32, torch.float64, torch.int64
    nested = {"y": [torch.ones(2)], "wide": torch.ones(2, dtype=torch.float64)}
    for cast, x, y in ((True, f32, bf16), (False, bf16, f32)):
        model = sharded(stage, Records, precision="bf16", cast_inputs=cast)
        model(features_of(0, 4, 7).to(x), torch.arange(3), nested)
        assert model.seen == (bf16, i64, y, f64)
