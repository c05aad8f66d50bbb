"""Gradient hooks that send gradients to other ranks, beside tensor parallelism: they are right, or
refused in a sentence.
"""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
import torch.distributed as dist
from axes_models import Case, batches_of, mesh_of_case, parallelized
from test_marks import Sequence, batches
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from ranks import run_ranks

pytestmark = pytest.mark.one_in(3)


def hooked(stage: int, micro_batches: int) -> dict[str, Any]:
    """A user's hook adds up the parts of the norm's gradients over tp, in each micro-batch."""
    import onefold

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    recipe = onefold.Recipe.zero(stage, stall_timeout=20.0)
    model = onefold.shard(Sequence(), recipe, mesh=mesh, data="dp")
    group = mesh["tp"].get_group()
    calls = [0]

    def add_up(param: Any) -> None:
        calls[0] += 1
        dist.all_reduce(param.grad, group=group)

    for param in model.norm.parameters():
        param.register_post_accumulate_grad_hook(add_up)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = batches(mesh.get_local_rank("dp"), 2 * micro_batches)
    try:
        for step in range(2):
            for i in range(micro_batches):
                last = i + 1 == micro_batches
                with contextlib.nullcontext() if last else onefold.no_sync(model):
                    model(data[step * micro_batches + i], group).backward()
            optimizer.step()
            optimizer.zero_grad()
    except ValueError as error:
        dist.barrier()  # a rank that ends breaks the passes of others
        return {"said": str(error)}
    return {"weights": onefold.full_state_dict(model), "calls": calls[0]}


def in_one_process(micro_batches: int) -> dict[str, torch.Tensor]:
    model = Sequence()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    every = [batches(dp, 2 * micro_batches) for dp in range(2)]
    for step in range(2):
        for data in every:
            for batch in data[step * micro_batches : (step + 1) * micro_batches]:
                (model(batch) / 2).backward()
        optimizer.step()
        optimizer.zero_grad()
    return dict(model.state_dict())


@pytest.mark.parametrize(("stage", "micro_batches"), [(1, 1), (3, 1), (2, 2)])
def test_a_hook_that_adds_up_parts_once_trains_as_one_process(
    stage: int, micro_batches: int
) -> None:
    expected = in_one_process(micro_batches)
    seen = run_ranks(4, hooked, stage, micro_batches)
    assert [each["calls"] for each in seen] == [4 * micro_batches] * 4, seen
    for name, value in expected.items():
        torch.testing.assert_close(seen[0]["weights"][name], value, rtol=1e-5, atol=1e-6)


def test_a_hook_that_adds_up_what_has_accumulated_is_refused_on_every_rank() -> None:
    for seen in run_ranks(4, hooked, 1, 2):
        said = seen["said"]
        assert "a gradient hook of 'norm." in said and "in several micro-batches" in said, said
        assert "give shard() partial=['norm." in said, said


def hook_of_a_dtensor(sums: bool) -> str:
    import onefold

    case = Case(plan="sequence")
    mesh = mesh_of_case(case)
    recipe = onefold.Recipe.zero(1, stall_timeout=20.0)
    model: Any = onefold.shard(parallelized(case, mesh), recipe, mesh=mesh, data="dp")
    norms: list[float] = []

    def hook(param: nn.Parameter) -> None:
        assert param.grad is not None
        if sums:
            dist.all_reduce(param.grad, group=mesh["tp"].get_group())
        else:  # what it sends is not the gradient
            total = param.grad.norm()
            dist.all_reduce(total)
            norms.append(total.item())

    model.norm.weight.register_post_accumulate_grad_hook(hook)
    try:
        model(batches_of(case, mesh.get_local_rank("dp"))[0]).backward()
    except ValueError as error:
        dist.barrier()
        return str(error)
    return f"{len(norms)} norms"


def test_a_hook_that_sends_the_gradient_of_a_dtensor_is_refused() -> None:
    for said in run_ranks(4, hook_of_a_dtensor, True):
        assert "a gradient hook of 'norm.weight' (R over tp) sends the gradient" in said, said
    assert run_ranks(4, hook_of_a_dtensor, False) == ["1 norms"] * 4
