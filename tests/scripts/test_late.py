"""A backward pass whose parameters have been written to since its forward pass is an error, as in
plain PyTorch. Nothing else is.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import onefold
from on_ranks import on_ranks
from reference import built
from zoo import TinyGPT, TinyMLP, features_of, tokens_of

STAGES = (0, 1, 2, 3)
STEPPED, WRITTEN = "ran before optimizer.step()", "another write to the parameters"


def loss_of(model: nn.Module, seed: int) -> Tensor:
    if isinstance(model, TinyGPT):
        return model(tokens_of(seed))
    return model(features_of(seed, 4, 7)).float().square().mean()


def sharded(stage: int, make: Callable[[], nn.Module] = TinyMLP, **options: Any) -> Any:
    return onefold.shard(built(make), onefold.Recipe.zero(stage, stall_timeout=60.0, **options))


def recomputed() -> nn.Module:
    return TinyGPT(checkpointing="non-reentrant")


def step(model: Any) -> None:
    torch.optim.SGD(model.parameters(), lr=1.0).step()
    model.zero_grad()


def step_and_evaluate(model: Any) -> None:
    step(model)
    with torch.no_grad():
        loss_of(model, 2)


def write(model: Any) -> None:
    with onefold.full_params(model, write=True):
        model.enter.weight.mul_(2)


def load(model: Any) -> None:
    onefold.load_full_state_dict(model, TinyMLP().state_dict() if dist.get_rank() == 0 else None)


def read(model: Any) -> None:
    with onefold.full_params(model):
        pass


#: {what is done between forward and backward: (the model, options, what, the stages at which it is
#: refused, words)}. At the other stages the backward pass has the gradients of the usual order.
BETWEEN: dict[str, tuple[Any, dict[str, Any], Any, tuple[int, ...], str]] = {
    "a step": (TinyMLP, {}, step, STAGES, STEPPED),
    "a step, recomputed": (recomputed, {}, step, STAGES, STEPPED),
    "a write": (TinyMLP, {}, write, STAGES, WRITTEN),
    "a load": (TinyMLP, {}, load, STAGES, WRITTEN),
    "a look": (TinyMLP, {}, read, (), ""),
    # Copies in 16 bits serve it until they are refreshed; gathered parameters are gathered anew
    "a step in bf16": (TinyMLP, {"precision": "bf16"}, step, (3,), STEPPED),
    "a step and a pass in bf16": (TinyMLP, {"precision": "bf16"}, step_and_evaluate, STAGES, STEPPED),
}  # fmt: skip


@on_ranks(2)
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("name", list(BETWEEN))
def test_between_forward_and_backward(name: str, stage: int) -> None:
    make, options, between, refused, words = BETWEEN[name]
    model = sharded(stage, make, **options)
    for _ in range(2):  # it is said again
        loss_of(model, 0).backward()
        loss = loss_of(model, 1)
        between(model)
        if stage in refused:
            with pytest.raises(RuntimeError, match=f"(?s){words}"):
                loss.backward()
        else:
            model.zero_grad()
            loss.backward()
        step(model)
    loss_of(model, 2).backward()  # the model trains on
    assert all(p.grad is not None for p in model.parameters())


@on_ranks(2)
@pytest.mark.parametrize("stage", (0, 1, 2))
def test_a_late_pass_over_copies_in_16_bits_has_the_gradients_of_a_timely_one(stage: int) -> None:
    found = []
    for late in (False, True):
        model = sharded(stage, precision="bf16")
        loss_of(model, 0).backward()
        loss = loss_of(model, 1)
        if late:
            step(model)
        else:
            model.zero_grad()
        loss.backward()
        found.append([p.grad.clone() for p in model.parameters()])
    assert all(map(torch.equal, *found))


def test_plain_pytorch_refuses_the_same() -> None:
    model = TinyMLP()
    loss_of(model, 0).backward()
    loss = loss_of(model, 1)
    step(model)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@on_ranks(2)
def test_a_loss_on_a_layer_inside_is_refused_too() -> None:
    model = sharded(3)
    loss_of(model, 0).backward()
    inside: list[Tensor] = []
    model.blocks[1].register_forward_hook(lambda module, args, output: inside.append(output))
    loss_of(model, 1)
    step(model)
    with pytest.raises(RuntimeError, match=r"ran before optimizer.step\(\)"):
        inside[0].square().mean().backward()


# -- what is no error ------------------------------------------------------------------------------


def two_forwards(model: Any) -> None:
    (loss_of(model, 0) + loss_of(model, 1)).backward()


def forwards_then_backwards(model: Any) -> None:
    for loss in [loss_of(model, seed) for seed in (0, 1)]:
        loss.backward()


def accumulation(model: Any) -> None:
    with onefold.no_sync(model):
        loss_of(model, 0).backward()
    with torch.no_grad():
        loss_of(model, 5)
    loss_of(model, 1).backward()


def retained(model: Any) -> None:
    loss = loss_of(model, 0)
    loss.backward(retain_graph=True)
    loss.backward()


def dropped_loss(model: Any) -> None:
    loss_of(model, 0)
    loss_of(model, 1).backward()


@on_ranks(2)
@pytest.mark.parametrize("stage", STAGES)
def test_accumulation_several_forwards_and_recomputation_are_told_nothing(stage: int) -> None:
    loops = (two_forwards, forwards_then_backwards, accumulation, retained, dropped_loss)
    for make in (TinyMLP, recomputed, lambda: TinyGPT(checkpointing="reentrant")):
        model = sharded(stage, make)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        for loop in loops if make is TinyMLP else loops[-1:]:
            for _ in range(2):
                loop(model)
                optimizer.step()
                optimizer.zero_grad()


class TwoNetworks(nn.Module):
    """A generator and a discriminator in one model."""

    def __init__(self) -> None:
        super().__init__()
        self.make, self.judge = TinyMLP(7, 10, 2, 7), TinyMLP(7, 10, 2, 1)

    def forward(self, z: Tensor, real: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        fake = self.make(z)
        return fake, self.judge(real), self.judge(fake.detach())


def train_both(model: Any, by_parts: bool) -> list[float]:
    """An adversarial loop as it is usually written, on the same data everywhere; its losses."""
    make, judge = model.make, model.judge
    of_make, of_judge = (torch.optim.SGD(list(part.parameters()), lr=0.1) for part in (make, judge))
    losses = []
    for number in range(3):
        z, real = features_of(100 + number, 4, 7), features_of(200 + number, 4, 7)
        if by_parts:
            fake = make(z)
            on_real, on_fake = judge(real), judge(fake.detach())
        else:
            fake, on_real, on_fake = model(z, real)
        of_judge.zero_grad()
        loss = (on_real - 1).square().mean() + on_fake.square().mean()
        loss.backward()
        of_judge.step()
        of_make.zero_grad()
        judged = (judge(fake) - 1).square().mean()
        judged.backward()
        of_make.step()
        losses += [loss.item(), judged.item()]
    return losses


@on_ranks(2)
@pytest.mark.parametrize("by_parts", [True, False])
def test_a_second_optimizer_over_other_parameters_may_step_in_between(by_parts: bool) -> None:
    expected = train_both(built(TwoNetworks), by_parts)
    for stage in STAGES:
        assert train_both(sharded(stage, TwoNetworks), by_parts) == pytest.approx(
            expected, rel=1e-5
        )
