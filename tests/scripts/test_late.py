"""Backward passes, steps and reads that come late: what plain PyTorch refuses is refused, all else
is as in plain PyTorch.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import onefold
from on_ranks import on_ranks
from onefold.observe.activations import Activations
from reference import built
from zoo import TinyGPT, TinyMLP, features_of, tokens_of

STAGES = (0, 1, 2, 3)
REFUSED = r"ran before optimizer.step\(\)"
INPLACE = "modified by an inplace operation"


def sharded(stage: int, build: Any = TinyMLP, **options: Any) -> Any:
    return onefold.shard(built(build), onefold.Recipe.zero(stage, stall_timeout=60.0, **options))


def loss_of(model: nn.Module, seed: int) -> Tensor:
    return model(features_of(seed, 4, 7)).float().square().mean()


def late(model: Any, loss: Callable[[int], Tensor]) -> Tensor:
    """A loss whose parameters have been stepped since its forward pass."""
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    loss(0).backward()
    found = loss(1)
    optimizer.step()
    optimizer.zero_grad()
    return found


@on_ranks(2)
@pytest.mark.parametrize("stage", STAGES)
def test_a_step_between_forward_and_backward_is_an_error_that_names_a_parameter(stage: int) -> None:
    model = sharded(stage)
    for _ in range(2):  # and the model trains on between the errors
        with pytest.raises(RuntimeError, match=REFUSED) as error:
            late(model, lambda seed: loss_of(model, seed)).backward()
        assert "'blocks.0.down.bias' and 15 others" in str(error.value)
        model.zero_grad()
        loss_of(model, 2).backward()
        assert all(p.grad is not None for p in model.parameters())
        model.zero_grad()
    gpt = sharded(stage, lambda: TinyGPT(checkpointing="non-reentrant"))
    with pytest.raises(RuntimeError, match=REFUSED):
        late(gpt, lambda seed: gpt(tokens_of(seed))).backward()
    inside: list[Tensor] = []  # the loss hangs on an activation inside; the output is not used
    model = sharded(stage)
    model.blocks[1].register_forward_hook(lambda module, args, out: inside.append(out))
    late(model, lambda seed: loss_of(model, seed))
    if stage == 3:
        with pytest.raises(RuntimeError, match=REFUSED):
            inside[1].square().mean().backward()
    plain = TinyMLP()
    with pytest.raises(RuntimeError, match=INPLACE):
        late(plain, lambda seed: loss_of(plain, seed)).backward()


#: What a module does to `h` after its sine was saved, and whether plain PyTorch refuses it.
WRITES: dict[str, tuple[Callable[[Tensor], object], bool]] = {
    "in place": (lambda h: h.add_(1), True),
    "through a detached tensor": (lambda h: h.detach().mul_(2), True),
    "to a view": (lambda h: h[:1].zero_(), True),
    "to what is a copy": (lambda h: h.clone().add_(1), False),
    "through .data": (lambda h: h.data.add_(1), False),
}


@on_ranks(2)
@pytest.mark.parametrize("stage", STAGES)
def test_a_write_to_a_saved_activation_is_refused_where_plain_pytorch_refuses_it(stage: int) -> None:  # fmt: skip
    def writes(write: Any) -> Any:
        def hook(module: Any, args: Any, h: Tensor) -> Tensor:
            out = h.sin()
            write(h)
            return out

        return hook

    for write, refused in WRITES.values():
        for counted in (False, True):
            plain, model = built(TinyMLP), sharded(stage)
            for each in (plain, model):
                each.blocks[1].register_forward_hook(writes(write))
                with Activations(each) if counted else nullcontext():
                    loss = loss_of(each, 0)
                    with pytest.raises(RuntimeError, match=INPLACE) if refused else nullcontext():
                        loss.backward()
            assert refused or model.enter.bias.grad.norm() == pytest.approx(
                plain.enter.bias.grad.norm()
            )


@on_ranks(2)
@pytest.mark.parametrize("stage", STAGES)
def test_writing_or_loading_parameters_in_between_is_an_error_and_reading_is_none(stage: int) -> None:  # fmt: skip
    def write(model: Any) -> None:
        with onefold.full_params(model, write=True):
            model.enter.weight.mul_(2)

    def load(model: Any) -> None:
        onefold.load_full_state_dict(model, onefold.full_state_dict(model) or None)

    for change in (write, load):
        loss = loss_of(model := sharded(stage), 0)
        change(model)
        with pytest.raises(RuntimeError, match="another write to the parameters"):
            loss.backward()
    loss = loss_of(model := sharded(stage), 0)
    with onefold.full_params(model):
        pass
    loss.backward()


@on_ranks(2)
@pytest.mark.parametrize("stage", STAGES)
def test_a_late_backward_is_refused_also_where_copies_in_sixteen_bits_have_the_old_values(stage: int) -> None:  # fmt: skip
    model = sharded(stage, precision="bf16")
    loss = late(model, lambda seed: loss_of(model, seed))
    with pytest.raises(RuntimeError, match=REFUSED):
        loss.backward()


@on_ranks(2)
@pytest.mark.parametrize("checkpointing", ["reentrant", "non-reentrant"])
def test_two_forward_passes_of_a_recomputed_model_come_before_one_backward_pass(checkpointing: Any) -> None:  # fmt: skip
    def gradients(stage: int) -> Any:
        gpt = sharded(stage, lambda: TinyGPT(checkpointing=checkpointing))
        for _ in range(2):
            gpt.zero_grad()
            (gpt(tokens_of(1)) + gpt(tokens_of(2))).backward()
        return [p.grad.norm().item() for p in gpt.parameters()]

    assert gradients(3) == gradients(2)


@on_ranks(2)
@pytest.mark.parametrize("stage", STAGES)
def test_a_parameter_that_a_forward_pass_unfreezes_trains_from_the_next_pass_on(stage: int) -> None:
    def unfreeze(module: Any, *_: Any) -> None:
        module.weight.requires_grad_(True)

    def gradients(model: Any) -> Any:
        model.enter.register_forward_hook(unfreeze)
        found = []
        for seed in range(2):
            model.zero_grad()
            loss_of(model, seed).backward()
            grad = model.enter.weight.grad
            found.append(None if grad is None else grad.norm().item())
        return found

    plain, model = built(TinyMLP), built(TinyMLP)
    for each in (plain, model):
        each.enter.weight.requires_grad_(False)
    onefold.shard(model, onefold.Recipe.zero(stage, stall_timeout=60.0))
    assert gradients(model) == pytest.approx([None, gradients(plain)[1]])
