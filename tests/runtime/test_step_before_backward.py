"""A backward pass whose parameters have been stepped since its forward pass is an error, as in
plain PyTorch; nothing else is.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from onefold.runtime.parameters.interval import local_part
from ranks import run_ranks
from trials import STAGES
from zoo import TinyGPT, TinyMLP, features_of, tokens_of


def sharded(
    stage: int, model: nn.Module | None = None, precision: str = "fp32", **options: Any
) -> Any:
    import onefold

    torch.manual_seed(0)
    recipe = onefold.Recipe.zero(stage, precision=precision, stall_timeout=60.0, **options)
    return onefold.shard(TinyMLP() if model is None else model, recipe)


def loss_of(model: nn.Module, seed: int) -> Tensor:
    return model(features_of(seed, 4, 7)).float().square().mean()


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=1.0)


def said_by(backward: Callable[[], Any]) -> str:
    try:
        backward()
    except RuntimeError as error:
        return str(error)
    return ""


def step_between(model: Any) -> str:
    """What backward() says behind a step that came after its forward pass."""
    optimizer = sgd(model)
    loss_of(model, 0).backward()
    loss = loss_of(model, 1)
    optimizer.step()
    optimizer.zero_grad()
    return said_by(loss.backward)


def step_between_at(stage: int) -> list[str]:
    """The same three times: what is said, that the model trains on afterwards, and that it says it
    again.
    """
    model = sharded(stage)
    said = [step_between(model)]
    optimizer = sgd(model)
    for seed in (2, 3):
        optimizer.zero_grad()
        loss_of(model, seed).backward()
        optimizer.step()
    said.append(str(all(p.grad is not None or not p.numel() for p in model.parameters())))
    return [*said, step_between(model)]


@pytest.mark.parametrize("stage", STAGES)
def test_a_step_between_forward_and_backward_is_an_error_that_names_a_parameter(stage: int) -> None:
    for said in run_ranks(2, step_between_at, stage):
        assert said[1] == "True"
        for text in (said[0], said[2]):
            assert (
                "ran before optimizer.step()" in text
                and "'blocks.0.down.bias' and 15 others" in text
            ), text


def test_plain_pytorch_refuses_the_same() -> None:
    assert "modified by an inplace operation" in step_between(TinyMLP())


def other_writes(stage: int) -> list[str]:
    """Writes that are no optimizer's, between forward and backward."""
    import onefold

    said = []
    model = sharded(stage)
    loss = loss_of(model, 0)
    with onefold.full_params(model, write=True):
        model.enter.weight.mul_(2)
    said.append(said_by(loss.backward))
    model = sharded(stage)
    loss, state = loss_of(model, 0), onefold.full_state_dict(model)
    onefold.load_full_state_dict(model, state or None)
    said.append(said_by(loss.backward))
    model = sharded(stage)
    loss = loss_of(model, 0)
    with onefold.full_params(model):
        pass
    said.append(said_by(loss.backward))
    return said


@pytest.mark.parametrize("stage", STAGES)
def test_writing_or_loading_parameters_in_between_is_an_error_and_reading_is_none(
    stage: int,
) -> None:
    for written, loaded, read in run_ranks(2, other_writes, stage):
        assert (
            "another write to the parameters" in written
            and "another write to the parameters" in loaded
        )
        assert read == ""


def sixteen_bits(stage: int, forward_between: bool) -> tuple[str, list[float]]:
    """bf16 at any stage: what is said, and how far gradients are from those of a backward in the
    usual order.
    """
    grads = []
    said = ""
    for late in (True, False):
        model = sharded(stage, precision="bf16")
        optimizer = sgd(model)
        loss_of(model, 0).backward()
        if not late:
            optimizer.zero_grad()
        loss = loss_of(model, 1)
        if late:
            optimizer.step()
            optimizer.zero_grad()
        if forward_between:
            with torch.no_grad():
                loss_of(model, 2)
        if said := said_by(loss.backward):
            return said, []
        grads.append([local_part(p.grad).clone() for p in model.parameters() if p.grad is not None])
    return said, [(a - b).abs().max().item() for a, b in zip(*grads, strict=True) if a.numel()]


@pytest.mark.parametrize("stage", (0, 1, 2))
@pytest.mark.parametrize("world_size", (1, 2))
def test_copies_in_sixteen_bits_serve_a_late_backward_until_they_are_refreshed(
    world_size: int, stage: int
) -> None:
    for said, distances in run_ranks(world_size, sixteen_bits, stage, False):
        assert said == "" and distances and max(distances) == 0.0
    for said, _ in run_ranks(world_size, sixteen_bits, stage, True):
        assert "ran before optimizer.step()" in said


@pytest.mark.parametrize("world_size", (1, 2))
def test_gathered_parameters_in_sixteen_bits_are_gathered_anew_and_cannot_serve_it(
    world_size: int,
) -> None:
    for said, _ in run_ranks(world_size, sixteen_bits, 3, False):
        assert "ran before optimizer.step()" in said


class TwoNetworks(nn.Module):
    """A generator and a discriminator in one model, their heads too small for units of their
    own.
    """

    def __init__(self) -> None:
        super().__init__()
        self.make, self.judge = TinyMLP(7, 10, 2, 7), TinyMLP(7, 10, 2, 1)

    def forward(self, z: Tensor, real: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        fake = self.make(z)
        return fake, self.judge(real), self.judge(fake.detach())


def train_both(model: nn.Module, by_parts: bool) -> list[float]:
    """A generative adversarial loop as it is usually written; returns its losses."""
    make, judge = model.make, model.judge
    of_make, of_judge = (torch.optim.SGD(list(part.parameters()), lr=0.1) for part in (make, judge))
    rank = torch.distributed.get_rank()
    losses = []
    for step in range(3):
        z, real = (
            features_of(100 + 10 * step + rank, 4, 7),
            features_of(200 + 10 * step + rank, 4, 7),
        )
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


def train_adversaries(stage: int, by_parts: bool) -> list[float]:
    return train_both(sharded(stage, TwoNetworks()), by_parts)


@pytest.mark.parametrize("by_parts", [True, False], ids=["by parts", "in one pass"])
def test_a_second_optimizer_over_other_parameters_may_step_in_between(by_parts: bool) -> None:
    curves = [run_ranks(2, train_adversaries, stage, by_parts) for stage in STAGES]
    assert all(curve == curves[0] for curve in curves[1:])


def ordinary_loops(stage: int) -> list[str]:
    """Loops that step only behind their backward passes; what they were told."""
    import onefold

    told = []
    model = sharded(stage)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)

    def attempt(name: str, loop: Callable[[], Any]) -> None:
        for _ in range(2):
            if said := said_by(loop):
                told.append(f"{name}: {said}")
            optimizer.step()
            optimizer.zero_grad()
            with torch.no_grad():
                loss_of(model, 9)

    def two_forwards() -> None:
        (loss_of(model, 0) + loss_of(model, 1)).backward()

    def forwards_then_backwards() -> None:
        losses = [loss_of(model, seed) for seed in (0, 1)]
        for loss in losses:
            loss.backward()

    def accumulation() -> None:
        with onefold.no_sync(model):
            loss_of(model, 0).backward()
        with torch.no_grad():
            loss_of(model, 5)
        loss_of(model, 1).backward()

    def retained() -> None:
        loss = loss_of(model, 0)
        loss.backward(retain_graph=True)
        loss.backward()

    def dropped_loss() -> None:
        loss_of(model, 0)
        loss_of(model, 1).backward()

    for loop in (two_forwards, forwards_then_backwards, accumulation, retained, dropped_loss):
        attempt(loop.__name__, loop)
    for checkpointing in ("reentrant", "non-reentrant"):
        torch.manual_seed(0)
        gpt = sharded(stage, TinyGPT(checkpointing=checkpointing))  # type: ignore[arg-type]
        optimizer = torch.optim.AdamW(gpt.parameters(), lr=0.01)
        for step in range(3):
            if said := said_by(gpt(tokens_of(step)).backward):
                told.append(f"{checkpointing}: {said}")
            optimizer.step()
            optimizer.zero_grad()
    return told


@pytest.mark.parametrize("world_size", (1, 2))
@pytest.mark.parametrize("stage", STAGES)
def test_accumulation_several_forwards_and_recomputation_are_told_nothing(
    world_size: int, stage: int
) -> None:
    assert run_ranks(world_size, ordinary_loops, stage) == [[]] * world_size


def step_between_with_checkpointing(stage: int) -> str:
    model = sharded(stage, TinyGPT(checkpointing="non-reentrant"))
    optimizer = sgd(model)
    model(tokens_of(0)).backward()
    loss = model(tokens_of(1))
    optimizer.step()
    return said_by(loss.backward)


@pytest.mark.parametrize("stage", STAGES)
def test_a_recomputation_with_stepped_parameters_is_refused_before_it_starts(stage: int) -> None:
    for said in run_ranks(2, step_between_with_checkpointing, stage):
        assert "ran before optimizer.step()" in said


def step_from_a_layer_inside(stage: int) -> str:
    """The loss hangs on an activation inside the model; its output is not used."""
    model = sharded(stage)
    optimizer = sgd(model)
    loss_of(model, 0).backward()
    inside: list[Tensor] = []
    model.blocks[1].register_forward_hook(lambda module, args, output: inside.append(output))
    loss_of(model, 1)
    optimizer.step()
    return said_by(inside[0].square().mean().backward)


def test_a_loss_on_a_gathered_layer_inside_is_refused_too() -> None:
    for said in run_ranks(2, step_from_a_layer_inside, 3):
        assert "ran before optimizer.step()" in said
