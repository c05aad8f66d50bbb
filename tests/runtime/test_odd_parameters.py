"""Parameters of every kind train at every stage as they do in DDP: tied, shared, frozen, borrowed,
tiny, unused.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import states
from onefold.runtime.parameters.interval import local_part
from ranks import run_ranks
from trials import STAGES, Case, Curve, GPTCase, MLPCase, assert_trains_as_ddp, fresh, train_sharded
from zoo import Block, ResidualBlock, TinyGPT, TinyMLP, features_of


class TiedEmbedding(GPTCase):
    def build(self) -> nn.Module:
        return TinyGPT(tied=True)


class NamedUnits(GPTCase):
    units = (Block, "tokens", "head")


class TiedAcrossNamedUnits(TiedEmbedding):
    units = (Block, "tokens", "head")


class SharedModule(MLPCase):
    """One block object at two places of the list, and a second time under another name."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            a, b = ResidualBlock(7), ResidualBlock(7)
            self.blocks = nn.ModuleList([a, b, a])
            self.alias = b

        def forward(self, x: Tensor) -> Tensor:
            for block in self.blocks:
                x = block(x)
            return self.alias(x)

    def build(self) -> nn.Module:
        return self.Model()


class Borrowed(MLPCase):
    """The second block reads the first one's weight, transposed, and owns a bias only; the head
    reads a block's weight.
    """

    units = ("lender", "borrower")

    class Borrower(nn.Module):
        def __init__(self, lender: nn.Linear) -> None:
            super().__init__()
            self.lender = [lender]  # a list hides it from nn.Module: the borrower does not own it
            self.bias = nn.Parameter(torch.zeros(7))

        def forward(self, x: Tensor) -> Tensor:
            return torch.tanh(x) @ self.lender[0].weight + self.bias

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lender = nn.Linear(7, 9)
            self.borrower = Borrowed.Borrower(self.lender)

        def forward(self, x: Tensor) -> Tensor:
            return self.borrower(self.lender(x)) + F.linear(
                x, self.lender.weight.t() @ self.lender.weight
            )

    def build(self) -> nn.Module:
        return self.Model()


class Viewed(MLPCase):
    """Weights used through a transpose, an index, an einsum, a chunk and a view: each may be saved
    for backward as an alias.
    """

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(7, 7) / 3)
            self.table = nn.Parameter(torch.randn(5, 7) / 3)
            self.fused = nn.Parameter(torch.randn(3, 7, 7) / 3)

        def forward(self, x: Tensor) -> Tensor:
            q, k, v = self.fused.chunk(3)
            x = x @ self.weight.t() + self.table[torch.tensor([0, 2, 4, 2])]
            x = torch.einsum("bi,oi->bo", torch.tanh(x), q.squeeze(0)) * (x @ k.view(7, 7))
            return x + F.linear(x, v[0].T.contiguous().T) + self.table[1] * self.weight.diagonal()

    def build(self) -> nn.Module:
        return nn.Sequential(*(self.Layer() for _ in range(3)))


class OddShapes(MLPCase):
    """0-dim, odd, smaller than the world, empty and float64 parameters in one module."""

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.tensor(0.5))
            self.one = nn.Parameter(torch.randn(1))
            self.odd = nn.Parameter(torch.randn(3, 7))
            self.prime = nn.Parameter(torch.randn(7, 1, 1))
            self.empty = nn.Parameter(torch.zeros(0, 7))
            self.wide = nn.Parameter(torch.randn(7, dtype=torch.float64))

        def forward(self, x: Tensor) -> Tensor:
            x = (
                x * self.scale
                + self.one
                + torch.tanh(x @ self.odd.t()) @ self.odd
                + self.prime.flatten()
            )
            return (x.double() * self.wide).float() + self.empty.sum()

    def build(self) -> nn.Module:
        return nn.Sequential(*(self.Layer() for _ in range(2)))

    options = {"cast_inputs": False}


class AllDouble(MLPCase):
    def build(self) -> nn.Module:
        return TinyMLP().double()

    def batch(self, rank: int, step: int) -> Tensor:
        return features_of(10 * step + rank, 4, 7, dtype=torch.float64)

    options = {"cast_inputs": False}


class NeverUsed(MLPCase):
    """A parameter and a whole block that no rank ever uses: without a gradient, momentum and weight
    decay pass them by.
    """

    class Model(TinyMLP):
        def __init__(self) -> None:
            super().__init__()
            self.idle = nn.Parameter(torch.ones(5))
            self.idle_block = ResidualBlock(10)

    def build(self) -> nn.Module:
        return self.Model()

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.5)


class UsedOnOneRank(MLPCase):
    """The branch that a rank takes depends on its data: block 1 on rank 0 in even steps, block 2 on
    rank 1.
    """

    class Model(TinyMLP):
        def forward(self, x: Tensor) -> Tensor:
            rank, step = int(x[0, 0]), int(x[0, 1])
            x = self.blocks[0](torch.tanh(self.enter(x)))
            if rank == 0 and step % 2 == 0:
                x = self.blocks[1](x)
            elif rank > 0:
                x = self.blocks[2](x)
            return self.leave(x)

    def build(self) -> nn.Module:
        return self.Model()

    def batch(self, rank: int, step: int) -> Tensor:
        x = features_of(10 * step + rank, 4, 7)
        x[:, 0], x[:, 1] = rank, step
        return x


class OneWeightUsedOnOneRank(MLPCase):
    """Inside one unit a parameter gets a gradient on rank 1 only, or (the other one) on rank 0
    only.
    """

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.left, self.right = nn.Linear(7, 7), nn.Linear(7, 7)

        def forward(self, x: Tensor) -> Tensor:
            return x + torch.tanh(self.left(x) if x[0, 0] > 0 else self.right(x))

    def build(self) -> nn.Module:
        return nn.Sequential(*(self.Layer() for _ in range(2)))

    def batch(self, rank: int, step: int) -> Tensor:
        x = features_of(10 * step + rank, 4, 7)
        x[:, 0] = 3.0 if rank == 0 else -3.0
        return x


class ChangingGradientSets(MLPCase):
    """A parameter without a gradient for a step keeps its weight, momentum included, and moves
    again afterwards.
    """

    steps = 5

    class Model(TinyMLP):
        def forward(self, x: Tensor) -> Tensor:
            step = int(x[0, 1])
            x = torch.tanh(self.enter(x))
            for index, block in enumerate(self.blocks):
                if index != step % 3:
                    x = block(x)
            return self.leave(x)

    def build(self) -> nn.Module:
        return self.Model()

    def batch(self, rank: int, step: int) -> Tensor:
        x = features_of(10 * step + rank, 4, 7)
        x[:, 1] = step
        return x


class Frozen(GPTCase):
    """The embeddings, one whole block and one bias are frozen."""

    def build(self) -> nn.Module:
        model = TinyGPT()
        for frozen in (model.tokens, model.blocks[1], model.norm):
            frozen.requires_grad_(False)
        model.blocks[2].attention.out.bias.requires_grad_(False)  # type: ignore[union-attr, operator]
        return model

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW(
            (p for p in model.parameters() if p.requires_grad), lr=0.01, weight_decay=0.1
        )


class FrozenThenThawed(GPTCase):
    """Block 0 is frozen after the first step and thawed after the third; block 1 starts frozen and
    is thawed.
    """

    steps = 5

    def build(self) -> nn.Module:
        model = TinyGPT()
        model.blocks[1].requires_grad_(False)
        return model

    reference = "mean"  # DDP fixes at construction which parameters it reduces

    def after_step(self, model: nn.Module, inner: nn.Module, step: int, curve: Curve) -> None:
        if step == 0:
            inner.blocks[0].requires_grad_(False)  # type: ignore[index, union-attr]
            inner.blocks[1].requires_grad_(True)  # type: ignore[index, union-attr]
            for parameter in inner.parameters():
                parameter.grad = None
        if step == 2:
            inner.blocks[0].requires_grad_(True)  # type: ignore[index, union-attr]


CASES_ON_TWO_RANKS = [
    GPTCase, MLPCase, TiedEmbedding, NamedUnits, TiedAcrossNamedUnits, SharedModule, Borrowed, Viewed, OddShapes, AllDouble,
    NeverUsed, UsedOnOneRank, OneWeightUsedOnOneRank, ChangingGradientSets, Frozen, FrozenThenThawed,
]  # fmt: skip


@pytest.mark.parametrize("case", CASES_ON_TWO_RANKS, ids=lambda case: case.__name__)
def test_odd_parameters_train_as_in_ddp(case: type[Case]) -> None:
    assert_trains_as_ddp(case)


@pytest.mark.parametrize(
    "case", [OddShapes, UsedOnOneRank, TiedEmbedding], ids=lambda case: case.__name__
)
def test_odd_parameters_train_as_in_ddp_on_more_ranks_than_elements(case: type[Case]) -> None:
    assert_trains_as_ddp(case, world_size=5)


def frozen_bytes(stage: int) -> list[str]:
    """A frozen model half: no gradient, no optimizer state, no reduction; at stage 3 its shard and
    gathers only.
    """
    import onefold

    problems = []
    case = Frozen()
    inner = fresh(case)
    model = onefold.shard(inner, onefold.Recipe.zero(stage, stall_timeout=10.0))
    optimizer = case.optimizer(model)
    for step in range(2):
        case.step(model, optimizer, torch.distributed.get_rank(), step)
    if any(p.grad is not None for p in model.parameters() if not p.requires_grad):
        problems.append("a frozen parameter has a gradient")
    trainable = sum(local_part(p).numel() for p in model.parameters() if p.requires_grad)
    held = sum(local_part(t).numel() for t in states.held(optimizer) if local_part(t).numel() > 1)
    if abs(held - 2 * trainable) > 0.05 * trainable:
        problems.append(
            f"optimizer states hold {held} elements, expected 2 x {trainable} (local trainable"
            " elements)"
        )
    whole = fresh(case)
    wanted = 4 * sum(p.numel() for p in whole.parameters() if p.requires_grad)
    engine = onefold.engine_of(model)
    engine.traffic.reset()
    case.step(model, optimizer, torch.distributed.get_rank(), 2)
    moves = engine.traffic.by_move()
    reduced = moves.get("reduce-scatter", 0) + moves.get("all-reduce", 0) / 2
    world = torch.distributed.get_world_size()
    if reduced > 1.15 * wanted * (world - 1) / world + 64:
        problems.append(
            f"gradients put {reduced} bytes on the wire, trainable ones are {wanted} bytes: {moves}"
        )
    return problems


@pytest.mark.parametrize("stage", STAGES)
def test_frozen_parameters_cost_no_gradient_no_state_and_no_reduction(stage: int) -> None:
    assert run_ranks(2, frozen_bytes, stage) == [[], []]


def unused_gradients(stage: int) -> list[str]:
    """After backward, who has a gradient: the same parameters as in DDP."""
    import onefold

    case = NeverUsed()
    model = onefold.shard(fresh(case), onefold.Recipe.zero(stage, stall_timeout=10.0))
    case.loss(model, case.batch(torch.distributed.get_rank(), 0)).backward()
    names = [name for name, p in model.named_parameters() if p.grad is None and p.numel() > 0]
    return [name for name in names if "idle" not in name]


@pytest.mark.parametrize("stage", STAGES)
def test_every_used_parameter_has_a_gradient_after_backward(stage: int) -> None:
    assert run_ranks(2, unused_gradients, stage) == [[], []]


def train_once(case_class: type[Case], stage: int) -> list[float]:
    return train_sharded(case_class(), stage).losses


@pytest.mark.parametrize("stage", STAGES)
def test_one_rank_trains_too(stage: int) -> None:
    """World size 1: the same loop, nothing on the wire."""
    assert_trains_as_ddp(GPTCase, world_size=1, stages=(stage,))
