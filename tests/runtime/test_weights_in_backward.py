"""Code of a backward pass that reads a weight through its module: the backward of a Function, a
module's full backward hook, a tensor's hook. It sees what the forward pass saw.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import onefold
from ranks import run_ranks
from zoo import features_of


class Product(torch.autograd.Function):
    """x @ weight.t(), whose backward reads the weight of the module again."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, module: Own) -> Tensor:
        ctx.module = module
        ctx.save_for_backward(x)
        module.seen.append(weight.dtype)
        return x @ weight.t()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        weight, (x,) = ctx.module.weight, ctx.saved_tensors
        ctx.module.seen.append(weight.dtype)
        return grad.to(weight.dtype) @ weight, grad.t() @ x, None


class Own(nn.Module):
    """A linear layer with a backward of its own."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(outputs, inputs) / inputs**0.5)
        self.seen: list[torch.dtype] = []

    def forward(self, x: Tensor) -> Tensor:
        return Product.apply(x, self.weight, self)  # type: ignore[no-any-return]


def model_of() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(Own(7, 9), nn.Tanh(), nn.Linear(9, 8), nn.Tanh(), Own(8, 3))


def trained(model: nn.Module) -> list[float]:
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.1), []
    for step in range(3):
        loss = model(features_of(step, 4, 7)).float().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def by_stage(precision: str, without: bool) -> list[Any]:
    out: list[Any] = [(trained(model_of()), [])] if without else []
    for stage in (0, 1, 2, 3):
        recipe = onefold.Recipe.zero(stage, precision=precision, stall_timeout=10.0)
        model = onefold.shard(model_of(), recipe, units=(Own,))
        out.append((trained(model), model[0].seen + model[4].seen))  # type: ignore[operator]
    return out


@pytest.mark.parametrize(
    ("precision", "dtype"), [("fp32", torch.float32), ("bf16", torch.bfloat16)]
)
def test_a_functions_backward_reads_the_weight_that_the_forward_pass_read(
    precision: str, dtype: torch.dtype
) -> None:
    for found in run_ranks(2, by_stage, precision, precision == "fp32"):
        losses = [each for each, _ in found]
        assert losses == [losses[0]] * len(losses)
        assert all(seen == [dtype] * 12 for _, seen in found[-4:])


def hooked(stage: int) -> list[Any]:
    """What hooks see of their module's weight, and whether what one writes stays."""
    recipe = onefold.Recipe.zero(stage, precision="bf16", stall_timeout=10.0)
    model = onefold.shard(model_of(), recipe, units=(Own,))
    linear, seen = model[2], []
    assert isinstance(linear, nn.Linear)

    def on_backward(module: Any, _: Any, grads: Any) -> None:
        seen.append((module.weight.dtype, grads[0].dtype, tuple(module.weight.shape)))
        seen.append((grads[0] @ module.weight).dtype)

    linear.register_full_backward_hook(on_backward)
    before = (onefold.full_state_dict(model) or {}).get("2.weight")
    writes = [lambda: linear.weight.data.mul_(0.5), lambda: linear.weight.mul_(0.5)]
    for write in writes:
        handle = linear.bias.register_hook(lambda grad, write=write: (write(), None)[1])
        model(features_of(0, 4, 7)).float().square().mean().backward()
        handle.remove()
    after = (onefold.full_state_dict(model) or {}).get("2.weight")
    seen.append(before is None or after is None or torch.equal(after, before * 0.25))
    return seen


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_a_hook_of_the_backward_pass_sees_the_whole_and_writes_to_what_stays(stage: int) -> None:
    bf16 = torch.bfloat16
    for seen in run_ranks(2, hooked, stage):
        assert seen == [(bf16, bf16, (8, 9)), bf16] * 2 + [True]


def of_another() -> list[torch.dtype]:
    """A hook that reads another model's weight."""
    recipe = onefold.Recipe.zero(3, precision="bf16")
    other, model = (onefold.shard(model_of(), recipe) for _ in range(2))
    seen = []

    def look(*_: Any) -> None:
        seen.append(other[2].weight.dtype)  # type: ignore[union-attr]
        seen.append(other[2].weight.sum().dtype)  # type: ignore[operator, union-attr]

    model[2].register_full_backward_hook(look)
    model(features_of(0, 4, 7)).float().square().mean().backward()
    assert not onefold.engine_of(other).progress.backward_open
    return seen


def test_a_hook_sees_another_model_from_outside() -> None:
    assert run_ranks(2, of_another) == [[torch.float32] * 2] * 2
