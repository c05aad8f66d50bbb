"""Norms, clipping and overflows over the stages of a pipeline: each a sharded model of its own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from ranks import run_ranks
from zoo import features_of

pytestmark = pytest.mark.one_in(2)


def stages() -> list[nn.Module]:
    torch.manual_seed(0)
    return [nn.Sequential(nn.Linear(6, 5), nn.GELU(), nn.Linear(5, 6)) for _ in range(4)]


def backward_through(found: list[nn.Module], batch: Tensor) -> None:
    """Each stage gets the same input and a loss of its own: the norm is over all of them."""
    for stage in found:
        stage(batch).pow(2).sum().backward()


#: Stages of ranks 0 and 1, and of ranks 2 and 3. Each pair shares data.
EVEN, UNEVEN = [[0, 1], [2, 3]], [[0, 1, 2], [3]]


def clipped(
    stage: int, norm_type: float, spoil: bool, held: list[list[int]] = EVEN, apart: bool = False
) -> dict[str, Any]:
    """`spoil`: gradients of stage 3 overflow. `apart`: stages have optimizers of their own."""
    import onefold

    rank = dist.get_rank()
    mine = held[rank // 2]
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    recipe = onefold.Recipe.zero(stage, stall_timeout=20.0)
    models = [onefold.shard(stages()[i], recipe, group=pairs[rank // 2]) for i in mine]
    backward_through(models, features_of(rank % 2, 3, 6))
    of = [list(m.parameters()) for m in models]
    optimizers = [
        torch.optim.SGD(p, lr=0.1)
        for p in (of if apart else [[p for params in of for p in params]])
    ]
    # No loss was scaled here, as on the ranks of all stages but the last
    scaler = onefold.GradScaler(models, init_scale=4.0)
    if spoil and rank == 3:
        for param in models[-1].parameters():
            param.grad.mul_(float("inf"))
    for optimizer in optimizers:
        scaler.unscale_(optimizer)
    norm = onefold.clip_grad_norm_(models, 1e-3, norm_type).item()
    for optimizer in optimizers:
        scaler.step(optimizer)
    scaler.update()
    weights = [onefold.full_state_dict(model) for model in models]
    return {
        "norm": norm,
        "weights": dict(zip(mine, weights, strict=True)),
        "scale": scaler.get_scale(),
    }


def in_one_process(norm_type: float) -> tuple[float, list[dict[str, Tensor]]]:
    models = stages()
    for i in range(2):
        backward_through(models, features_of(i, 3, 6))
    params = [p for m in models for p in m.parameters()]
    for p in params:
        p.grad.div_(2 * 4.0)  # the mean over two ranks, unscaled
    norm = nn.utils.clip_grad_norm_(params, 1e-3, norm_type).item()
    torch.optim.SGD(params, lr=0.1).step()
    return norm, [m.state_dict() for m in models]


@pytest.mark.parametrize("norm_type", [2.0, float("inf")])
@pytest.mark.parametrize("held", [EVEN, UNEVEN], ids=["even", "uneven"])
@pytest.mark.parametrize("stage", [1, 3])
def test_a_list_of_stages_is_clipped_by_the_norm_over_all_ranks(
    stage: int, norm_type: float, held: list[list[int]]
) -> None:
    norm, weights = in_one_process(norm_type)
    seen = run_ranks(4, clipped, stage, norm_type, False, held)
    assert len({each["norm"] for each in seen}) == 1, [each["norm"] for each in seen]
    assert seen[0]["norm"] == pytest.approx(norm, rel=1e-6)
    for each in seen:
        for i, found in each["weights"].items():
            for name, value in found.items():
                torch.testing.assert_close(value, weights[i][name], rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize(("held", "apart"), [(EVEN, False), (EVEN, True), (UNEVEN, False)])
def test_an_overflow_in_one_stage_skips_the_step_of_all(held: list[list[int]], apart: bool) -> None:
    before = [m.state_dict() for m in stages()]
    for each in run_ranks(4, clipped, 2, 2.0, True, held, apart):
        assert each["scale"] == 2.0, "the scale is halved on every rank"
        for i, found in each["weights"].items():
            for name, value in found.items():
                assert torch.equal(value, before[i][name]), f"stage {i}, {name} was stepped"
