"""An overflow in one parameter's gradient, of which one rank alone owns elements."""

from __future__ import annotations

import pytest
import torch

import onefold
from on_ranks import on_ranks
from onefold.runtime import stepper
from reference import adamw, built, differences, on_each_rank, weights
from zoo import TinyMLP, features_of


@on_ranks(2)
@pytest.mark.parametrize("name", ["enter.bias", "leave.bias"])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_an_overflow_that_one_rank_has_skips_the_step_on_all(stage: int, name: str) -> None:
    model = onefold.shard(built(TinyMLP), onefold.Recipe.zero(stage))
    optimizer, scaler = adamw(model), onefold.GradScaler(model, init_scale=4.0)
    before = weights(model)
    hook = model.get_parameter(name).register_hook(lambda gradient: gradient * float("inf"))
    for overflows in (True, False):
        scaler.scale(model(features_of(0, 4, 7)).square().mean()).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        hook.remove()
        assert on_each_rank(scaler.get_scale()) == [2.0, 2.0]
        assert (not differences(before, weights(model))) is overflows
    assert all(torch.isfinite(w).all() for w in weights(model).values())


@on_ranks(2)
def test_a_scaler_steps_in_pieces_where_fused_kernels_would_step_all() -> None:
    """Masters that are rounded by chance, on a device with fused kernels."""
    bf16 = {"precision": "bf16", "master_dtype": "bf16", "stochastic_rounding": True}
    model = onefold.shard(built(TinyMLP), onefold.Recipe.zero(1, **bf16))
    optimizer, scaler = adamw(model), onefold.GradScaler(model, init_scale=4.0)
    before = weights(model)
    scaler.scale(model(features_of(0, 4, 7)).float().square().mean()).backward()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stepper, "FUSED_ON", {"cpu"})
        scaler.step(optimizer)
    assert differences(before, weights(model))
