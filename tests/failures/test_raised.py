"""A backward pass that raises takes the gradients that were kept under no_sync along, and leaves
nothing else behind. A rank that leaves out a micro-batch brings no gradient for it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import looks
import onefold
import standin
from on_ranks import on_ranks, slow
from reference import built, differences, sgd, weights
from zoo import ResidualBlock, TinyMLP, features_of

#: (stage, options): gradients are kept whole until the boundary at the first four.
AT_BOUNDARY: list[tuple[int, dict[str, Any]]] = [(0, {}), (1, {}), (2, {"reduce_at": "boundary"})]
MODES = [*AT_BOUNDARY, (3, {"reduce_at": "boundary"}), (2, {}), (3, {})]


class Broken(Exception):
    pass


def refuse(_: Tensor) -> None:
    raise Broken("on purpose")


def sharded(stage: int, native: bool = False, **options: Any) -> nn.Module:
    recipe = onefold.Recipe.zero(stage, stall_timeout=20.0, **options)
    group = standin.new_group() if native else None
    return onefold.shard(built(TinyMLP), recipe, units=(ResidualBlock, "leave"), group=group)


def passed(model: nn.Module, number: int) -> Tensor:
    loss = model(features_of(10 * number + dist.get_rank(), 4, 7)).square().mean()
    loss.backward()
    return loss.detach()


def fail(model: Any, under_no_sync: bool) -> None:
    """A kept pass, and one that raises when some units are reduced and some are not."""
    with onefold.no_sync(model):
        passed(model, 50)
    handle = model.blocks[1].up.weight.register_hook(refuse)
    with (
        onefold.no_sync(model) if under_no_sync else contextlib.nullcontext(),
        pytest.raises(Broken),
    ):
        passed(model, 51)
    handle.remove()


def steps(model: nn.Module, optimizer: Any, numbers: range) -> list[float]:
    """Of two micro-batches each."""
    losses = []
    for number in numbers:
        with onefold.no_sync(model):
            losses.append(passed(model, 2 * number).item())
        losses.append(passed(model, 2 * number + 1).item())
        optimizer.step()
        optimizer.zero_grad()
    return losses


@on_ranks(2)
@pytest.mark.parametrize("under_no_sync", [False, True])
@pytest.mark.parametrize(("stage", "options"), MODES)
def test_a_pass_that_raised_leaves_no_trace_in_the_numbers(
    stage: int, options: dict[str, Any], under_no_sync: bool
) -> None:
    found = []
    for fails in (False, True):
        model = sharded(stage, **options)
        optimizer = sgd(model)
        losses = steps(model, optimizer, range(1))
        if fails:
            fail(model, under_no_sync)
            optimizer.zero_grad()  # what was reduced at once is there, as in DDP
        found.append((losses + steps(model, optimizer, range(1, 3)), weights(model)))
    assert found[0][0] == found[1][0]
    assert differences(found[0][1], found[1][1]) == []


WAYS: list[tuple[int, dict[str, Any]]] = [
    *((stage, {"native": native, **options}) for native in (False, True) for stage, options in [
        *MODES, (3, {"group": 2}), (3, {"shard_group": 2}), (2, {"reduce_codec": "int4"}), (2, {"precision": "bf16"}),
    ]),
    (0, {"native": True, "reduce": "native"}), (3, {"native": True, "reduce": "native"}),
    (3, {"native": True, "group": 2, "precision": "bf16", "wire": "fp32"}),
]  # fmt: skip


@on_ranks(4)
@pytest.mark.one_in(2)
@pytest.mark.parametrize(("stage", "options"), WAYS)
def test_passes_that_raised_leave_nothing_held(stage: int, options: dict[str, Any]) -> None:
    model, said = sharded(stage, in_flight=3, **options), []
    for _ in range(3):
        fail(model, False)
        passed(model, 0)
        model.zero_grad()
        said.append(looks.held(model)["device"])
    assert said[0] == said[-1]
    assert not said[-1].keys() & {"gathered", "reduction buffers", "idle buffers"}, said[-1]


# -- a rank that has fewer micro-batches -----------------------------------------------------------


def uneven(
    model: nn.Module, frozen: tuple[tuple[str, ...], ...] = ((), ()), by_hand: bool = False
) -> None:
    """Two steps of two micro-batches, of which rank 1 has the second alone. `frozen`: by
    micro-batch.
    """
    rank, optimizer = dist.get_rank(), torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(2):
        for number, names in enumerate(frozen):
            for name, param in model.named_parameters():
                param.requires_grad_(not (names and name.startswith(names)))
            if number == 0 and rank == 1:
                continue
            keeps = number == 0 and not by_hand
            with onefold.no_sync(model) if keeps else contextlib.nullcontext():
                passed(model, 10 * step + number)
        for param in model.parameters() if by_hand else ():
            grad = param.grad if param.grad is not None else torch.zeros_like(param)
            dist.all_reduce(grad)
            param.grad = grad / dist.get_world_size()
        optimizer.step()
        optimizer.zero_grad()


@on_ranks(2)
@pytest.mark.parametrize(("stage", "options"), AT_BOUNDARY)
def test_a_rank_that_leaves_out_a_micro_batch_brings_nothing_for_it(
    stage: int, options: dict[str, Any]
) -> None:
    uneven(plain := built(TinyMLP), by_hand=True)
    uneven(model := sharded(stage, **options))
    assert differences(weights(plain), weights(model), rtol=1e-5, atol=1e-6) == []


def told(go: Callable[[], Any]) -> None:
    with pytest.raises(onefold.StallError) as caught:
        go()
    for words in (f"rank {dist.get_rank()} gave up waiting in", "(backward, step 0)", "frozen"):
        assert words in str(caught.value)


@on_ranks(2, fresh=True)
@pytest.mark.parametrize(("stage", "options"), AT_BOUNDARY)
def test_ranks_that_saw_different_parameters_frozen_say_where_they_stand(
    stage: int, options: dict[str, Any]
) -> None:
    frozen = ((), ("blocks.0.up", "blocks.1", "leave"))
    recipe = onefold.Recipe.zero(stage, stall_timeout=2.0, **options)
    model = onefold.shard(built(TinyMLP), recipe, units=(ResidualBlock, "leave"))
    told(lambda: uneven(model, frozen))


@on_ranks(2, fresh=True)
@pytest.mark.parametrize("stage", [pytest.param(0, marks=slow), 2, pytest.param(3, marks=slow)])
def test_gradients_of_two_parameters_of_one_size_are_never_added_up(stage: int) -> None:
    pair = nn.ModuleList(nn.Linear(7, 7, bias=False) for _ in range(2))
    model = nn.Sequential(*pair)
    onefold.shard(model, onefold.Recipe.zero(stage, stall_timeout=2.0), units=())
    model[dist.get_rank()].requires_grad_(False)
    told(lambda: passed(model, 0))
