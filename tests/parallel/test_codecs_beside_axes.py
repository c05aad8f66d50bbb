"""Codecs on meshes are off by their own step and no more: gradients of boxes, of what ranks along tp hold
too, and of experts; gathered parts of weights.

A step of stochastic rounding is the largest magnitude of a block divided by the codec's largest number.
Each holder's part is encoded once at most, so the mean over data ranks is off by the mean of their steps.
A wrong factor (an axis counted twice, or left out) is off by half of a gradient or more.
"""

from __future__ import annotations

from typing import Any

import axes_models
import mixture_models
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from ranks import run_ranks

pytestmark = pytest.mark.one_in(2)

#: The largest number that a codec can store.
TOP = {"int8": 127, "int4": 7}
LLAMA = axes_models.Case(steps=1)
SLACK = 1 + 2.0**-6  # magnitudes are kept in bf16


def of_llama(stage: int, codec: str) -> dict[str, Any]:
    import onefold

    mesh = axes_models.mesh_of_case(LLAMA)
    recipe = onefold.Recipe.zero(stage, stall_timeout=30.0, reduce_codec=codec)
    model = axes_models.parallelized(LLAMA, mesh)
    model = onefold.shard(model, recipe, mesh=mesh, data="dp")
    return stepped(model, axes_models.batches_of(LLAMA, mesh.get_local_rank("dp"))[0])


def of_experts(stage: int, codec: str) -> dict[str, Any]:
    import onefold

    mesh = init_device_mesh("cpu", (2, 2, 1), mesh_dim_names=("dp", "ep", "tp"))
    model = mixture_models.Mixture(learned=False)
    for block in model.blocks:
        block.experts.divide(mesh["ep", "tp"])
    recipe = onefold.Recipe.zero(stage, stall_timeout=30.0, reduce_codec=codec)
    model = onefold.shard(model, recipe, mesh=mesh, data=("dp", "ep"))
    return stepped(model, mixture_models.batch_of(dist.get_rank(), 0))


def stepped(model: nn.Module, batch: Tensor) -> dict[str, Any]:
    """The norm of the gradients, and on rank 0 what a step of their length has left of the weights."""
    import onefold

    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    model(batch).backward()
    norm = onefold.clip_grad_norm_(model, float("inf")).item()
    optimizer.step()
    return {"norm": norm, "weights": onefold.full_state_dict(model)}


#: (on ranks, in one process, the batch of a data rank, data ranks)
MODELS = {
    "tensor parallel": (
        of_llama,
        lambda: axes_models.built(LLAMA),
        lambda i: axes_models.batches_of(LLAMA, i)[0],
        2,
    ),
    "experts": (
        of_experts,
        lambda: mixture_models.Mixture(learned=False),
        lambda i: mixture_models.batch_of(i, 0),
        4,
    ),
}


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("codec", TOP)
def test_encoded_gradients_are_off_by_a_step_at_most(name: str, codec: str) -> None:
    function, make, batch_of, data = MODELS[name]
    model = make()
    start = {key: value.clone() for key, value in model.state_dict().items()}
    each = []
    for data_rank in range(data):
        model.zero_grad()
        model(batch_of(data_rank)).backward()
        each.append({key: p.grad.clone() for key, p in model.named_parameters()})
    off = 0.0
    for stage in (1, 2, 3):
        ranks = run_ranks(4, function, stage, codec)
        squares = room = 0.0
        for key in each[0]:
            exact = torch.stack([g[key] for g in each]).mean(0)
            allowed = (
                sum(g[key].abs().max().item() for g in each) / data / TOP[codec] * SLACK + 1e-6
            )
            got = start[key] - ranks[0]["weights"][key]
            apart = (got - exact).abs().max().item()
            assert apart <= allowed, (
                f"{name}, stage {stage}: {key} is off by {apart}, not {allowed}"
            )
            off, squares = max(off, apart / allowed), squares + exact.square().sum().item()
            room += allowed**2 * exact.numel()
        for rank, seen in enumerate(ranks):
            assert abs(seen["norm"] - squares**0.5) <= room**0.5, (stage, rank, seen["norm"])
            assert seen["norm"] == ranks[0]["norm"]
    assert off > 0.1, "nothing was encoded"


def gathered(codec: str) -> dict[str, float]:
    """{name: how far the DTensor in a pass is from the weight, in steps of the codec}"""
    import onefold

    mesh = axes_models.mesh_of_case(LLAMA)
    model: Any = axes_models.parallelized(LLAMA, mesh)
    recipe = onefold.Recipe.zero(3, stall_timeout=30.0, gather_codec=codec)
    model = onefold.shard(model, recipe, mesh=mesh, data="dp")
    plain, out = axes_models.built(LLAMA), {}
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear):
            weight = plain.get_submodule(name).weight.detach()

            def look(module: Any, _: Any, name: str = name, weight: Tensor = weight) -> None:
                found = module.weight.full_tensor().detach()
                step = weight.abs().max() / TOP[codec] * SLACK
                out[name] = ((found - weight).abs().max() / step).item()

            module.register_forward_pre_hook(look)
    with torch.no_grad():
        model(axes_models.batches_of(LLAMA, mesh.get_local_rank("dp"))[0])
    return out


@pytest.mark.parametrize("codec", TOP)
def test_encoded_parts_of_weights_are_off_by_a_step_at_most(codec: str) -> None:
    for seen in run_ranks(4, gathered, codec):
        assert len(seen) == 15 and all(0 < steps <= 1 for steps in seen.values()), seen
