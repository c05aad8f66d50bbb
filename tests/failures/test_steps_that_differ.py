"""Ranks whose optimizers or clipping do different things stop with an error on every rank: at the end
of the next backward pass, or in the next save.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import onefold
from on_ranks import on_ranks, slow
from onefold.ema import EMA
from onefold.runtime.agree import UPDATES
from zoo import ResidualBlock, TinyMLP, features_of

STAGES: list[Any] = [
    (0, {}), pytest.param(1, {}, marks=slow), pytest.param(2, {}, marks=slow), (3, {}), (3, {"offload_optimizer": "cpu"}),
    pytest.param(2, {"reduce_at": "boundary"}, marks=slow),
]  # fmt: skip
Train = Callable[[nn.Module, int], Any]


def sharded(stage: int, **options: Any) -> nn.Module:
    torch.manual_seed(0)
    recipe = onefold.Recipe.zero(stage, stall_timeout=10.0, **options)
    return onefold.shard(TinyMLP(), recipe, units=(ResidualBlock,))


def backward(model: nn.Module, step: int) -> torch.Tensor:
    loss = model(features_of(10 * step + dist.get_rank(), 4, 7)).square().mean()
    loss.backward()
    return loss.detach()


def sgd(model: nn.Module, **options: Any) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), **({"lr": 0.1} | options))


def three_steps(
    model: nn.Module, optimizer: Any, before: Callable[[int], Any] = lambda step: None
) -> None:
    for step in range(3):
        backward(model, step)
        before(step)
        optimizer.step()
        optimizer.zero_grad()


# -- what must be an error: {the row: (what one rank does, words of the error)} ---------------------


def other_number_of_passes(model: nn.Module, rank: int) -> None:
    optimizer = sgd(model)
    for step in range(4):
        backward(model, step)
        if rank == 0 or step % 2:
            optimizer.step()
            optimizer.zero_grad()


def left_out(model: nn.Module, rank: int) -> None:
    optimizer = sgd(model)
    for step in range(3):
        backward(model, step)
        if (rank, step) != (1, 1):
            optimizer.step()
        optimizer.zero_grad()


def made_twice(model: nn.Module, rank: int) -> None:
    optimizer = sgd(model)
    three_steps(model, optimizer, lambda step: optimizer.step() if (rank, step) == (1, 1) else None)


def other_limit(model: nn.Module, rank: int) -> None:
    three_steps(model, sgd(model), lambda _: onefold.clip_grad_norm_(model, 1.0 - rank / 2))


def other_norm(model: nn.Module, rank: int) -> None:
    norm_type = (2.0, float("inf"))[rank]
    three_steps(
        model, sgd(model), lambda _: onefold.clip_grad_norm_(model, 1.0, norm_type=norm_type)
    )


def other_rate(model: nn.Module, rank: int) -> None:
    three_steps(model, sgd(model, lr=0.1 / (1 + rank)))


def own_loss(model: nn.Module, rank: int) -> None:
    optimizer = sgd(model)
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0)
    three_steps(model, optimizer, lambda step: scheduler.step(step if rank else -step))


def rate_in_a_tensor(model: nn.Module, rank: int) -> None:
    three_steps(model, torch.optim.Adam(model.parameters(), lr=torch.tensor(0.1 / (1 + rank))))


def other_class(model: nn.Module, rank: int) -> None:
    kind = (torch.optim.Adam, torch.optim.AdamW)[rank]
    three_steps(model, kind(model.parameters(), lr=0.1))


def other_groups(model: nn.Module, rank: int) -> None:
    params = list(model.parameters())
    cut = 3 + rank
    groups = [{"params": params[:cut]}, {"params": params[cut:], "weight_decay": 0.1}]
    three_steps(model, torch.optim.SGD(groups, lr=0.1))


def fewer_parameters(model: nn.Module, rank: int) -> None:
    three_steps(model, torch.optim.SGD(list(model.parameters())[rank:], lr=0.1))


WRONG: dict[Train, tuple[str, ...]] = {
    other_number_of_passes: ("rank 0 called SGD.step()", "rank 1 called nothing more"),
    left_out: ("rank 0 called SGD.step()", "rank 1 called nothing more"),
    made_twice: ("rank 0 called nothing more", "rank 1 called SGD.step()"),
    other_limit: ("with max_norm=1 ", "max_norm=0.5"),
    other_norm: ("with norm_type=2 ", "norm_type=inf"),
    other_rate: ("group 0: lr=0.1", "group 0: lr=0.05"),
    own_loss: ("group 0: lr=0.1", "group 0: lr=0.05"),
    rate_in_a_tensor: ("group 0: lr=0.1", "group 0: lr=0.05"),
    other_class: ("Adam.step()", "AdamW.step()"),
    other_groups: ("3 parameters", "4 parameters", "group 0"),
    fewer_parameters: ("parameters", "group 0"),
}


#: Rows after which a rank gathers the new weights of stages 1 and 2, and another one does not.
STALLS = other_number_of_passes, left_out


def said(train: Callable[[], Any]) -> str:
    try:
        train()
    except (onefold.StallError, onefold.CheckpointError) as error:
        return str(error)
    return ""


@on_ranks(2)
@pytest.mark.parametrize(("stage", "options"), STAGES)
def test_ranks_that_step_differently_stop_on_every_rank(
    stage: int, options: dict[str, Any]
) -> None:
    rank = dist.get_rank()
    for train, words in WRONG.items():
        if stage in (0, 3) or train not in STALLS:
            message = said(partial(train, sharded(stage, **options), rank))
            dist.barrier()
            for word in (*words, f"rank {rank} found at the end of", "step ", "rank 1 called"):
                assert word in message, (train.__name__, word, message)


@on_ranks(2, fresh=True)
def test_where_a_rank_waits_for_one_that_left_out_a_step_the_error_says_who_stepped() -> None:
    message = said(partial(left_out, sharded(1), dist.get_rank()))
    for word in (
        "rank 0: waiting in all-gather of unit '(root)' (forward, step 2, after SGD.step())",
        "(backward, step 2), ",
        "step the same optimizers",
    ):
        assert word in message, (word, message)


@on_ranks(2)
def test_steps_of_many_lines_are_compared_in_all_of_them() -> None:
    torch.manual_seed(0)
    layers = nn.Sequential(*[nn.Linear(1, 1) for _ in range(300)])
    model = onefold.shard(layers, onefold.Recipe.zero(1, stall_timeout=10.0))
    groups = [{"params": [p]} for p in model.parameters()]
    groups[0]["lr"] = 0.1 / (1 + dist.get_rank())  # type: ignore[assignment]
    optimizer = torch.optim.AdamW(groups, lr=0.1)

    def train() -> None:
        for _ in range(2):
            model(torch.ones(1, 1)).sum().backward()
            optimizer.step()
            assert len(onefold.engine_of(model).group.updates) > UPDATES

    assert "group 0: lr=0.1 where rank 1 called AdamW.step() with group 0: lr=0.05" in said(train)


@on_ranks(2)
def test_a_step_that_many_followed_without_a_pass_is_still_compared() -> None:
    model = sharded(1)
    optimizer = sgd(model, lr=0.1 / (1 + dist.get_rank()))
    backward(model, 0)
    optimizer.step()
    optimizer.param_groups[0]["lr"] = 0.1
    for _ in range(1000):
        optimizer.step()
    assert "updates with the checksum" in said(partial(backward, model, 1))


# -- in a save and a load --------------------------------------------------------------------------


@on_ranks(2)
@pytest.mark.parametrize("stage", [0, 1, 3])
def test_saves_and_loads_of_ranks_that_differ_are_refused_on_every_rank(
    stage: int, folder: Path
) -> None:
    rank, model = dist.get_rank(), sharded(stage)
    optimizer = sgd(model, momentum=0.9)
    things = {"optimizer": optimizer, "scheduler": torch.optim.lr_scheduler.LinearLR(optimizer)}
    backward(model, 0)
    optimizer.step()
    path = folder / "saved"
    assert said(partial(onefold.save, path, model=model, **things)) == ""
    for name, what in (("optimizer", "SGD"), ("scheduler", "LinearLR")):
        given = {k: v for k, v in things.items() if k != name or rank == 0}
        messages = [said(partial(onefold.load, path, model=model, **given))]
        if name == "optimizer":
            messages += [said(partial(onefold.save, path, model=model, overwrite=True, **given))]
        for message in messages:
            assert f"was given {name} {what} on rank 0 and None on rank 1" in message, message
    assert said(partial(onefold.load, path, model=model, **things)) == ""
    savers: list[Any] = [onefold.save, onefold.save_async]
    for call in savers:
        if rank == 0:
            optimizer.step()
        last = said(partial(call, path, model=model, overwrite=True))
        assert "rank 0 called SGD.step() where rank 1 called nothing more" in last, last


# -- what may differ -------------------------------------------------------------------------------


def other_micro_batches(model: nn.Module, rank: int) -> None:
    """Rank 1 has one micro-batch of two: see test_raised.py."""
    optimizer = sgd(model)
    for step in range(3):
        if rank == 0:
            with onefold.no_sync(model):
                backward(model, 5 * step)
        backward(model, step)
        optimizer.step()
        optimizer.zero_grad()


def another_model(model: nn.Module, rank: int) -> None:
    """Each rank steps a plain model of its own, also in one optimizer with the sharded one."""
    beside = nn.Linear(2, 2)
    alone = torch.optim.SGD(beside.parameters(), lr=0.1 * (1 + rank))
    groups = [
        {"params": list(model.parameters())},
        {"params": list(nn.Linear(2, 2).parameters()), "lr": 0.1 * (1 + rank)},
    ]

    def before(step: int) -> None:
        for _ in range(1 + rank):
            beside(torch.ones(2)).sum().backward()
            alone.step()

    three_steps(model, torch.optim.SGD(groups, lr=0.1), before)


def two_optimizers(model: nn.Module, rank: int) -> None:
    model.enter.weight.requires_grad_(False)
    params = list(model.parameters())
    first = torch.optim.AdamW(params[:3], lr=0.1)
    optimizer = torch.optim.SGD(params[3:], lr=torch.tensor(0.1), momentum=0.9)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 5)
    average = EMA(model, decay=0.9)

    def before(step: int) -> None:
        onefold.clip_grad_norm_(model, 1.0)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        first.step()
        scheduler.step()
        average.update()

    three_steps(model, optimizer, before)


def scaled(model: nn.Module, rank: int) -> None:
    """One rank alone overflows: every rank leaves out the step."""
    optimizer = sgd(model)
    scaler = onefold.GradScaler(model, init_scale=8.0)
    for step in range(3):
        loss = model(features_of(10 * step + rank, 4, 7)).square().mean()
        scaler.scale(loss * (float("inf") if (rank, step) == (1, 1) else 1.0)).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()


def last_bit(model: nn.Module, rank: int) -> None:
    three_steps(model, sgd(model, lr=0.1 + rank * 1e-17))


def other_orders_and_names(model: nn.Module, rank: int) -> None:
    """What code makes of a set of names is in another order on each rank."""
    params = list(model.parameters())
    turn = slice(None, None, -1 if rank else 1)
    groups = [{"params": params[:3][turn], "name": f"rank {rank}", "seen": float(rank)}]
    first = torch.optim.AdamW(groups, lr=0.1, foreach=bool(rank))
    second = sgd(model, momentum=0.9)
    second.param_groups[0]["params"] = params[3:]
    if rank:  # nothing has a gradient yet
        first.step()
    for step in range(3):
        backward(model, step)
        for optimizer in (first, second)[turn]:
            optimizer.step()
            optimizer.zero_grad()


def steps_without_passes(model: nn.Module, rank: int) -> None:
    optimizer = sgd(model)
    backward(model, 0)
    optimizer.step()
    noted = onefold.engine_of(model).group.updates
    lines = len(noted)
    for _ in range(1000):
        optimizer.step()
    assert len(noted) < UPDATES + lines  # what was noted before a step is then folded into one line
    three_steps(model, optimizer)


def goes_on_after_an_error(model: nn.Module, rank: int) -> None:
    assert said(partial(other_rate, model, rank))
    three_steps(model, sgd(model))


RIGHT: list[Train] = [
    another_model, two_optimizers, scaled, last_bit, other_orders_and_names, steps_without_passes,
    goes_on_after_an_error,
]  # fmt: skip


@on_ranks(2)
@pytest.mark.parametrize(("stage", "options"), STAGES)
def test_what_may_differ_between_ranks_is_no_error(stage: int, options: dict[str, Any]) -> None:
    rows = [*RIGHT, other_micro_batches] if stage < 2 or options.get("reduce_at") else RIGHT
    for train in rows:
        assert said(partial(train, sharded(stage, **options), dist.get_rank())) == "", train
        dist.barrier()
