"""Pieces of scripts that an adversary tried: each on a sharded model and on a plain one, whose
numbers it must leave.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import onefold
from onefold.optim.verdict import refuse_unless_elementwise
from ranks import run_ranks
from zoo import TinyMLP


class Net(nn.Module):
    """Two units: `head` lies on rank 1 alone where there are two."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6)) for _ in range(2)
        )
        self.scale = nn.Parameter(torch.tensor(0.5))
        self.body = nn.Linear(6, 12)
        self.head = nn.Linear(12, 5, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(self.body(x) * self.scale)


X = torch.arange(12.0).view(2, 6) / 12

Piece = Callable[[nn.Module], Any]


def compare(stage: int, pieces: dict[str, Piece], **options: Any) -> None:
    """On one rank: what each piece returns, and the weights behind it."""
    for name, piece in pieces.items():
        plain, model = (
            Net(),
            onefold.shard(Net(), onefold.Recipe.zero(stage, stall_timeout=20.0, **options)),
        )
        expected, found = piece(plain), piece(model)
        torch.testing.assert_close(
            found, expected, msg=lambda m, name=name: f"{name} at stage {stage} returned: {m}"
        )
        state = onefold.full_state_dict(model)
        for key, value in state.items():
            torch.testing.assert_close(
                value,
                plain.state_dict()[key],
                msg=lambda m, name=name, key=key: f"{name}, {key}: {m}",
            )


def train(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    steps: int = 2,
    loss: Callable[[nn.Module], Any] = lambda m: 0.0,
) -> None:
    for _ in range(steps):
        optimizer.zero_grad()
        (model(X).pow(2).mean() + loss(model)).backward()
        optimizer.step()


# -- views and reads -------------------------------------------------------------------------------


def silent(_: Tensor) -> None:
    """What was written shows in the weights."""


VIEWS: dict[str, Piece] = {
    "a 0-dim tensor as an index": lambda m: silent(m.body.weight.data[torch.tensor(2)].zero_()),
    "the index that argmax gives": lambda m: silent(
        m.body.weight.data[m.body.weight.data.norm(dim=1).argmax()].mul_(0.5)
    ),
    "numpy's integer as an index": lambda m: silent(m.body.weight.data[np.int64(10)].zero_()),
    "a 0-dim tensor in a pair": lambda m: silent(
        m.body.weight.data[torch.tensor(2), 1:3].fill_(0.5)
    ),
    "a row set by a 0-dim tensor": lambda m: m.body.weight.data.__setitem__(torch.tensor(11), 0.5),
    "a row set to a matrix of one row": lambda m: m.body.weight.data.__setitem__(
        2, torch.ones(1, 6)
    ),
    "to(another tensor)": lambda m: silent(m.body.weight.data.to(torch.zeros(3)).mul_(0.5)),
    "type_as(a larger tensor)": lambda m: silent(
        m.body.weight.data.type_as(torch.zeros(2, 12, 6)).mul_(0.5)
    ),
    "expand to the same shape": lambda m: silent(m.body.weight.data.expand(-1, -1).mul_(0.5)),
    "expand_as": lambda m: silent(m.body.weight.data.expand_as(torch.zeros(12, 6)).mul_(0.5)),
    "broadcast_tensors": lambda m: silent(
        torch.broadcast_tensors(m.body.weight.data, torch.zeros(12, 6))[0].mul_(0.5)
    ),
    "expand that repeats": lambda m: m.body.weight.data.expand(2, 12, 6).sum().item(),
    "where(condition)": lambda m: [i.tolist() for i in torch.where(m.body.weight.data > 0)],
    "norms of negative orders": lambda m: [
        m.body.weight.data.norm(p).item() for p in (-math.inf, -1.0)
    ],
    "the same where one rank has no element": lambda m: [
        m.head.weight.data.norm(p).item() for p in (-math.inf, -1.0)
    ],
    "the norm in 16 bits": lambda m: m.body.weight.data.bfloat16().norm().float().item(),
    "lists times a parameter that is a number": lambda m: torch._foreach_mul_(
        [m.body.weight.data, m.head.weight.data], m.scale.data
    ),
}


@pytest.mark.parametrize("stage", [1, 3])
def test_views_and_reads_of_a_part_are_those_of_the_whole(stage: int) -> None:
    run_ranks(2, views, stage)


def views(stage: int) -> None:
    compare(stage, VIEWS)


# -- data that was given out -----------------------------------------------------------------------


def averages_in_and_out(model: nn.Module) -> list[float]:
    """The usual class of an exponential moving average:
    `backup = p.data; p.data = shadow; ...; p.data = backup`.
    """
    backup = {}
    for name, p in model.named_parameters():
        shadow = p.data.clone() * 0.5
        backup[name] = p.data
        p.data = shadow
    with torch.no_grad():
        seen = model(X).sum().item()
    for name, p in model.named_parameters():
        p.data = backup[name]
    with torch.no_grad():
        return [seen, model(X).sum().item()]


def swapped(model: nn.Module) -> None:
    for p, q in zip(model.blocks[0].parameters(), model.blocks[1].parameters(), strict=True):
        p.data, q.data = q.data, p.data


def old_stays(model: nn.Module) -> list[Any]:
    w = model.body.weight
    old, detached = w.data, w.detach()
    w.data = w.data * 2
    old.add_(1.0)
    return [old.norm().item(), detached.norm().item(), w.norm().item()]


def old_row_stays(model: nn.Module) -> float:
    row = model.body.weight.data[1]
    model.body.weight.data = model.body.weight.data * 2
    return row.sum().item()


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_what_data_gave_out_keeps_its_values_when_other_data_is_assigned(stage: int) -> None:
    run_ranks(2, old_data, stage)


def old_data(stage: int) -> None:
    pieces: dict[str, Piece] = {
        "averages": averages_in_and_out,
        "swapped": swapped,
        "old": old_stays,
    }
    compare(stage, pieces | ({"row": old_row_stays} if stage else {}))


def halved_between_steps(model: nn.Module) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    train(model, optimizer, 1)
    with torch.no_grad():
        # The copies that stages 1 and 2 keep are fresh again, and nothing else is written until the
        # next pass
        model(X)
    model.head.weight.data = model.head.weight.data * 0.5
    train(model, optimizer, 1)
    model.head.weight.data = model.head.weight.data  # nothing is written, on any rank
    train(model, optimizer, 1)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_ranks_without_an_element_of_what_is_written_through_data_stay_in_step(stage: int) -> None:
    run_ranks(2, written_through_data, stage)


def written_through_data(stage: int) -> None:
    compare(stage, {"halved": halved_between_steps})


def written_inside_full_params(stage: int) -> None:
    model, plain = onefold.shard(Net(), onefold.Recipe.zero(stage)), Net()
    with onefold.full_params(model, write=True):
        model.body.weight.data = model.body.weight.data * 2
        model.head.weight = nn.Parameter(model.head.weight.detach() * 3)
    state = onefold.full_state_dict(model)
    if state:
        assert torch.equal(state["body.weight"], plain.body.weight * 2), "p.data = value"
        assert torch.equal(state["head.weight"], plain.head.weight * 3), (
            "another parameter in its place"
        )
    with (
        pytest.raises(ValueError, match=r"'body.weight'.*unsharded"),
        onefold.full_params(model, write=True),
    ):
        model.body.weight.data = torch.zeros(3)


@pytest.mark.parametrize("stage", [1, 3])
def test_full_params_keep_what_is_assigned_inside(stage: int) -> None:
    run_ranks(2, written_inside_full_params, stage)


# -- gradients -------------------------------------------------------------------------------------


def penalized(model: nn.Module) -> None:
    train(
        model,
        torch.optim.SGD(model.parameters(), lr=0.1),
        3,
        lambda m: 0.1 * sum(p.float().pow(2).sum() for p in m.parameters()),
    )


def checkpointed(model: nn.Module) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.ones(2, 12, requires_grad=True)

    def outside(m: nn.Module) -> Tensor:
        by_weight = checkpoint(
            lambda y, w: F.linear(y, w).relu(), x, m.head.weight, use_reentrant=False
        )
        by_closure = checkpoint(lambda y: F.linear(y, m.head.weight).tanh(), x, use_reentrant=False)
        part = checkpoint(m.head, x, use_reentrant=False)
        whole = checkpoint(m, X, use_reentrant=False)
        return (by_weight * by_closure * part).mean() + whole.pow(2).mean()

    train(model, optimizer, 2, outside)


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_penalties_and_checkpoints_around_anything_train_as_in_plain_pytorch(stage: int) -> None:
    run_ranks(2, differentiated, stage)


def differentiated(stage: int) -> None:
    compare(stage, {"penalized": penalized, "checkpointed": checkpointed})


class Borrower(nn.Module):
    """Uses another model's weight in its forward pass."""

    def __init__(self, other: nn.Module) -> None:
        super().__init__()
        self.net, self.other = Net(), [other]

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x) + self.other[0].head.weight.sum(1).tanh()


def borrowing(stage: int) -> None:
    found = []
    for wrap in (
        lambda m: m,
        lambda m: onefold.shard(m, onefold.Recipe.zero(stage, stall_timeout=20.0)),
    ):
        other = wrap(Net())
        model = wrap(Borrower(other))
        model(X).pow(2).mean().backward()
        found.append(other.head.weight.grad.norm().item())
    assert found[0] > 0 and found[1] == pytest.approx(found[0], rel=1e-5), found


@pytest.mark.parametrize("stage", [1, 3])
def test_a_weight_of_another_model_gets_its_gradient_in_a_forward_pass(stage: int) -> None:
    run_ranks(2, borrowing, stage)


def refusals(stage: int) -> None:
    model = onefold.shard(Net(), onefold.Recipe.zero(stage, stall_timeout=20.0))
    with pytest.raises(onefold.ShardedParameterError, match="requires_grad=True"):
        torch.zeros_like(model.body.weight, requires_grad=True)
    with pytest.raises(
        onefold.ShardedParameterError,
        match=r"`.grad` of parameter 'head.weight' was given shape \(3,\)",
    ):
        model.head.weight.grad = torch.ones(3)  # on the rank that has no element of it, too
    model.head.register_buffer("old", model.head.weight.data.clone())
    with pytest.raises(
        onefold.ShardedParameterError,
        match=r"buffer 'old' was made of parameter 'head.weight'.*gather\(\)",
    ):
        model(X)
    with pytest.raises(onefold.ShardedParameterError, match=r"buffer 'head.old'"):
        onefold.full_state_dict(model)


@pytest.mark.parametrize("stage", [1, 3])
def test_parts_that_would_be_taken_for_wholes_are_refused_on_every_rank(stage: int) -> None:
    run_ranks(2, refusals, stage)


# -- optimizers ------------------------------------------------------------------------------------


class Looks(torch.optim.SGD):
    """SGD that centers gradients of some: by an option of a group, by dimensions, or of large
    matrices.
    """

    def __init__(self, params: Any, lr: float = 0.1, kind: str = "plain") -> None:
        super().__init__(params, lr=lr)
        for group in self.param_groups:
            group.setdefault("kind", kind)
        self.defaults["kind"] = kind

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                wanted = {
                    "plain": False,
                    "all": True,
                    "convolutions": p.ndim > 3,
                    "large": p.ndim == 2 and min(p.shape) >= 128,
                }
                if wanted[group["kind"]]:
                    p.grad = p.grad - p.grad.mean()
        super().step()


def test_an_optimizer_is_tried_with_the_options_of_its_groups_and_on_what_it_steps() -> None:
    matrix, convolution = nn.Parameter(torch.ones(4, 4)), nn.Parameter(torch.ones(2, 2, 3, 3))
    refuse_unless_elementwise(Looks([matrix, convolution]))
    refuse_unless_elementwise(Looks([matrix], kind="convolutions"))
    for groups, kind in (
        ([convolution], "convolutions"),
        ([{"params": [matrix], "kind": "all"}], "plain"),
        ([matrix], "large"),
    ):
        with pytest.raises(ValueError, match="depends on other elements"):
            refuse_unless_elementwise(Looks(groups, kind=kind))


def stepped_before(stage: int) -> None:
    found = []
    for wrap in (
        lambda m: m,
        lambda m: onefold.shard(m, onefold.Recipe.zero(stage, stall_timeout=20.0)),
    ):
        model = Net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        train(model, optimizer, 1)
        model = wrap(model)
        norms = [state["momentum_buffer"].norm().item() for state in optimizer.state.values()]
        saved = copy.deepcopy(optimizer.state_dict())["state"]
        train(model, optimizer, 1)
        # Of the whole's shape
        optimizer.state[model.body.weight]["momentum_buffer"] = torch.ones(12, 6)
        train(model, optimizer, 1)
        found.append(
            (norms, saved, model.state_dict() if not found else onefold.full_state_dict(model))
        )
    (norms, saved, weights), (sharded_norms, sharded_saved, sharded_weights) = found
    torch.testing.assert_close(sharded_norms, norms)
    if sharded_weights:
        torch.testing.assert_close(sharded_saved, saved)
        torch.testing.assert_close(sharded_weights, dict(weights))


@pytest.mark.parametrize("stage", [1, 3])
def test_whole_states_of_an_optimizer_become_parts(stage: int) -> None:
    run_ranks(2, stepped_before, stage)


def counted_steps(stage: int) -> None:
    model = onefold.shard(Net(), onefold.Recipe.zero(stage))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for wanted in (1, 2, 3):
        train(model, optimizer, 1)
        assert [int(optimizer.state[p]["step"]) for p in model.parameters()] == [wanted] * len(
            list(model.parameters())
        )


def test_a_rank_without_an_element_counts_steps_as_the_others() -> None:
    run_ranks(2, counted_steps, 3)


class Logging(torch.optim.SGD):
    def step(self, closure: Any = None) -> Any:
        return super().step(closure)


def logged(model: nn.Module) -> None:
    # Now torch has its hooks around SGD's own step
    torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1)
    train(model, Logging(model.parameters(), lr=0.1, momentum=0.9), 3)


def offloaded() -> None:
    compare(3, {"logged": logged}, offload_optimizer="cpu")


def test_an_offloaded_optimizer_may_call_the_step_of_its_class() -> None:
    run_ranks(2, offloaded)


def saved_data(stage: int) -> list[tuple[str, ...]]:
    """What a tensor that `.data` gave out has on it when it is pickled: nothing, where it is
    whole.
    """
    model = onefold.shard(TinyMLP(), onefold.Recipe.zero(stage, stall_timeout=20.0))
    return [tuple(p.data.__dict__) for p in model.parameters()]


def test_whole_data_is_pickled_as_any_tensor() -> None:
    assert all(not any(found) for found in run_ranks(2, saved_data, 0))
