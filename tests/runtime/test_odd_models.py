"""Modules of every kind train at every stage as they do in DDP: outputs of any type, recursion,
RNNs, buffers, double backward.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from trials import Case, Curve, GPTCase, MLPCase, assert_trains_as_ddp
from zoo import Block, ResidualBlock, TinyGPT, TinyMLP, features_of


class CalledSeveralTimes(MLPCase):
    """One block applied four times in a row, and the entrance again at the end: one gradient, the
    sum over the calls.
    """

    class Model(TinyMLP):
        def forward(self, x: Tensor) -> Tensor:
            y = torch.tanh(self.enter(x))
            for _ in range(4):
                y = self.blocks[0](y)
            y = self.blocks[2](self.blocks[1](y)) + self.blocks[0](self.enter(-x))
            return self.leave(y)

    def build(self) -> nn.Module:
        return self.Model()


class TwoForwardsOneBackward(MLPCase):
    reference = "mean"  # DDP searches for unused parameters from the last forward only

    def loss(self, model: nn.Module, batch: Tensor) -> Tensor:
        first, second = model(batch), model(batch.flip(0) * 0.5)
        return (first - second).square().mean() + first.square().mean()


class TwoForwardsTwoBackwards(MLPCase):
    """Two forwards, then their backwards in the opposite order: gradients add up before one
    update.
    """

    reference = "mean"

    def step(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, rank: int, step: int
    ) -> float:
        optimizer.zero_grad()
        first = model(self.batch(rank, step)).square().mean()
        second = model(self.batch(rank, step + 50)).square().mean()
        second.backward()
        first.backward()
        self.before_update(model)
        optimizer.step()
        return first.item() + second.item()


class BackwardTwiceThroughOneGraph(MLPCase):
    reference = "mean"

    def step(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, rank: int, step: int
    ) -> float:
        optimizer.zero_grad()
        loss = self.loss(model, self.batch(rank, step))
        loss.backward(retain_graph=True)
        loss.backward()
        self.before_update(model)
        optimizer.step()
        return loss.item()


@dataclass
class Named:
    hidden: Tensor
    note: str = "a string among tensors"
    nothing: None = None


class OddOutputs(MLPCase):
    """Blocks that hand on a tuple, a dict, a dataclass, a nested list, None; the model returns a
    mixture.
    """

    class Tuple(ResidualBlock):
        def forward(self, x: Tensor) -> Any:
            y = super().forward(x)
            return y, (None, 3, [y * 2])

    class Dict(ResidualBlock):
        def forward(self, inputs: Any) -> Any:
            x, (_, three, (double,)) = inputs
            return {"y": super().forward(x) + double / three, "none": None, "flag": True}

    class Data(ResidualBlock):
        def forward(self, inputs: Any) -> Any:  # type: ignore[override]
            return Named(super().forward(inputs["y"]))

    class Silent(ResidualBlock):
        """Returns nothing: it leaves its result in a list that it was given."""

        def forward(self, named: Any, box: list[Tensor] | None = None) -> Any:  # type: ignore[override]
            assert box is not None
            box.append(super().forward(named.hidden))

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(
                [OddOutputs.Tuple(7), OddOutputs.Dict(7), OddOutputs.Data(7), OddOutputs.Silent(7)]
            )

        def forward(self, x: Tensor) -> Any:
            for layer in self.layers[:3]:
                x = layer(x)
            box: list[Tensor] = []
            self.layers[3](x, box=box)
            return {"logits": box[0], "hidden": x, "nothing": None}

    units = ("layers.0", "layers.1", "layers.2", "layers.3")
    reference = "mean"  # DDP finds no tensors inside a dataclass it does not know

    def build(self) -> nn.Module:
        return self.Model()

    def loss(self, model: nn.Module, batch: Tensor) -> Tensor:
        outputs = model(batch)
        return outputs["logits"].square().mean() + outputs["hidden"].hidden.abs().mean()


class OddInputs(MLPCase):
    """Keyword arguments, nested containers, integers, None and no tensor at all."""

    class Maker(nn.Module):
        """A module without a tensor among its inputs."""

        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Parameter(torch.randn(4, 7))

        def forward(self, scale: float, *, rows: int) -> Tensor:
            return torch.tanh(self.table[:rows]) * scale

    class Adder(ResidualBlock):
        def forward(self, pair: Any, mask: Any = None, *, extra: dict[str, Any]) -> Tensor:  # type: ignore[override]
            return super().forward(pair[0] + pair[1] + extra["bias"][0])

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.maker, self.adder = OddInputs.Maker(), OddInputs.Adder(7)

        def forward(self, batch: dict[str, Any]) -> Tensor:
            made = self.maker(0.5, rows=4)
            return self.adder((made, batch["x"]), extra={"bias": [made.mean(0)]})

    units = ("maker", "adder")

    def build(self) -> nn.Module:
        return self.Model()

    def batch(self, rank: int, step: int) -> Any:
        return {"x": features_of(10 * step + rank, 4, 7), "ids": [1, 2], "none": None}


class BatchNorms(MLPCase):
    """Running statistics are buffers: rank 0's are the ones that last, as in DDP."""

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.convolution = nn.Conv2d(3, 3, 3, padding=1)
            self.norm = nn.BatchNorm2d(3)

        def forward(self, x: Tensor) -> Tensor:
            return x + torch.relu(self.norm(self.convolution(x)))

    def build(self) -> nn.Module:
        return nn.Sequential(self.Layer(), self.Layer(), nn.Flatten(), nn.Linear(75, 3))

    def batch(self, rank: int, step: int) -> Tensor:
        return features_of(10 * step + rank, 4, 3, 5, 5) + rank

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)

    def after_step(self, model: nn.Module, inner: nn.Module, step: int, curve: Curve) -> None:
        model.eval()  # running statistics decide this loss
        with torch.no_grad():
            curve.losses.append(self.loss(model, self.batch(7, step)).item())
        model.train()


class Recurrent(MLPCase):
    """LSTM and GRU, whose weights a flat weight list inside the module aliases, over two calls with
    carried state.
    """

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lstm = nn.LSTM(5, 6, num_layers=2, batch_first=True, bidirectional=True)
            self.gru = nn.GRU(12, 4, batch_first=True)
            self.leave = nn.Linear(4, 2)

        def forward(self, x: Tensor) -> Tensor:
            y, state = self.lstm(x[:, :3])
            z, _ = self.lstm(x[:, 3:], state)
            out, _ = self.gru(torch.cat([y, z], 1))
            return self.leave(out)

    units = ("lstm", "gru")

    def build(self) -> nn.Module:
        return self.Model()

    def batch(self, rank: int, step: int) -> Tensor:
        return features_of(10 * step + rank, 3, 6, 5)


class GradientPenalty(MLPCase):
    """autograd.grad with create_graph through the sharded model, then backward through the
    penalty.
    """

    reference = "mean"

    def loss(self, model: nn.Module, batch: Tensor) -> Tensor:
        x = batch.requires_grad_()
        y = model(x).square().sum()
        (slope,) = torch.autograd.grad(y, x, create_graph=True)
        return y / 20 + (slope.norm(dim=1) - 1).square().mean()


class InputGradients(MLPCase):
    """The inputs' own gradients are right too (adversarial training, prompt tuning)."""

    reference = "mean"

    def step(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, rank: int, step: int
    ) -> float:
        optimizer.zero_grad()
        x = self.batch(rank, step).requires_grad_()
        loss = self.loss(model, x)
        loss.backward()
        self.before_update(model)
        optimizer.step()
        assert x.grad is not None
        return loss.item() + x.grad.abs().sum().item()


class CheckpointedReentrant(GPTCase):
    reference = "mean"  # DDP refuses re-entrant checkpoints together with find_unused_parameters

    def build(self) -> nn.Module:
        return TinyGPT(checkpointing="reentrant", dropout=0.2)


class CheckpointedNonReentrant(GPTCase):
    def build(self) -> nn.Module:
        return TinyGPT(checkpointing="non-reentrant", dropout=0.2)


class CheckpointInsideABlock(MLPCase):
    """The checkpoint covers a part of a unit, twice, and one that spans two units."""

    class Layer(ResidualBlock):
        def forward(self, x: Tensor) -> Tensor:
            x = x + checkpoint(lambda t: self.down(torch.tanh(self.up(t))), x, use_reentrant=False)
            return x + checkpoint(
                lambda t: self.down(torch.sin(self.up(t))), x, use_reentrant=False
            )

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(CheckpointInsideABlock.Layer(7) for _ in range(4))

        def forward(self, x: Tensor) -> Tensor:
            for i in (0, 2):
                x = checkpoint(
                    lambda t, i=i: self.layers[i + 1](self.layers[i](t)), x, use_reentrant=False
                )
            return x

    def build(self) -> nn.Module:
        return self.Model()


class Dropout(GPTCase):
    """Random numbers are drawn by the model as if nobody had wrapped it."""

    steps = 4

    def build(self) -> nn.Module:
        return TinyGPT(dropout=0.5)


class NestedUnits(MLPCase):
    """A unit inside a unit, the outer one using its own weights before, between and after."""

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.before, self.inner = nn.Linear(7, 7), ResidualBlock(7)
            self.after = nn.Linear(7, 7)

        def forward(self, x: Tensor) -> Tensor:
            x = self.inner(torch.tanh(self.before(x)))
            return self.inner(self.after(x)) + x @ self.before.weight

    units = (Outer, ResidualBlock)

    def build(self) -> nn.Module:
        return nn.Sequential(self.Outer(), self.Outer())


class MixtureOfExperts(MLPCase):
    """Each token goes to the expert its router likes; an expert may get no token on this rank, or
    on any.
    """

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.router = nn.Linear(7, 5)
            self.experts = nn.ModuleList(ResidualBlock(7) for _ in range(5))

        def forward(self, x: Tensor) -> Tensor:
            weights = F.softmax(self.router(x), -1)
            best = weights.argmax(-1)
            y = torch.zeros_like(x)
            for index in best.unique().tolist():
                chosen = best == index
                y = y.index_put(
                    (chosen,), weights[chosen, index, None] * self.experts[index](x[chosen])
                )
            return x + y

    units = (Layer,)

    def build(self) -> nn.Module:
        return nn.Sequential(self.Layer(), self.Layer())

    def batch(self, rank: int, step: int) -> Tensor:
        return features_of(10 * step + rank, 3, 7)


class ExpertsAsUnits(MixtureOfExperts):
    """Every expert a unit by itself: which ones are gathered differs between the ranks."""

    units = (ResidualBlock,)


class PlainAttributes(MLPCase):
    """Sequential slices, ParameterList, ParameterDict, a lambda and a functional call."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.list = nn.ParameterList([torch.randn(7, 7) / 3, torch.randn(7) / 3])
            self.table = nn.ParameterDict({"a": torch.randn(7, 7) / 3, "b": torch.randn(3) / 3})
            self.body = nn.Sequential(*(ResidualBlock(7) for _ in range(3)))

        def forward(self, x: Tensor) -> Tensor:
            x = F.linear(self.body[:2](x), self.list[0], self.list[1])
            return self.body[2](torch.tanh(x @ self.table["a"])) * self.table["b"].sum()

    def build(self) -> nn.Module:
        return self.Model()


CASES = [
    CalledSeveralTimes, TwoForwardsOneBackward, TwoForwardsTwoBackwards, BackwardTwiceThroughOneGraph, OddOutputs, OddInputs,
    BatchNorms, Recurrent, GradientPenalty, InputGradients, CheckpointedReentrant, CheckpointedNonReentrant,
    CheckpointInsideABlock, Dropout, NestedUnits, MixtureOfExperts, ExpertsAsUnits, PlainAttributes,
]  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_odd_models_train_as_in_ddp(case: type[Case]) -> None:
    assert_trains_as_ddp(case)


class CompiledBlocks(GPTCase):
    """Each block compiled by itself, as torchtitan does."""

    rtol, atol = 1e-4, 1e-5  # the compiler fuses differently from eager

    def build(self) -> nn.Module:
        model = TinyGPT(depth=2)
        for block in model.blocks:
            block.compile()
        return model


class CompiledBlocksReplaced(GPTCase):
    """torch.compile(block) wraps a block in a new module; the names in the state dict follow it."""

    rtol, atol = 1e-4, 1e-5
    units = (Block,)

    def build(self) -> nn.Module:
        model = TinyGPT(depth=2)
        for index, block in enumerate(model.blocks):
            model.blocks[index] = torch.compile(block)  # type: ignore[assignment]
        return model


@pytest.mark.slow
@pytest.mark.parametrize(
    "case", [CompiledBlocks, CompiledBlocksReplaced], ids=lambda case: case.__name__
)
def test_compiled_blocks_train_as_in_ddp(case: type[Case]) -> None:
    assert_trains_as_ddp(case, stages=(0, 2, 3), timeout=300.0)
