"""An exact nn.Embedding's backward reads no parameter, so its unit is not gathered for it. A
subclass may well read its own.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from ranks import run_ranks
from trials import Case, GPTCase, assert_trains_as_ddp, fresh
from zoo import Block, TinyGPT


class Cubed(torch.autograd.Function):
    """Looks rows up and cubes them. Keeps the weight itself on `ctx`, out of sight of every
    saved-tensor hook, and reads it in backward.
    """

    @staticmethod
    def forward(ctx: Any, weight: Tensor, indices: Tensor) -> Tensor:
        ctx.weight, ctx.indices = weight, indices
        return weight[indices] ** 3

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        rows = ctx.weight.detach()[ctx.indices]
        out = torch.zeros_like(ctx.weight)
        out.index_put_((ctx.indices,), 3 * rows**2 * grad, accumulate=True)
        return out, None


class CubedEmbedding(nn.Embedding):
    def forward(self, indices: Tensor) -> Tensor:
        return Cubed.apply(self.weight, indices)


class SquaredEmbedding(nn.Embedding):
    """The same by plain operations: what backward needs is saved by autograd."""

    def forward(self, indices: Tensor) -> Tensor:
        return F.embedding(indices, self.weight * self.weight)


class ReadsItsWeightInBackward(GPTCase):
    """Both embeddings are units of their own."""

    units = (Block, "tokens", "positions")
    kind: type[nn.Embedding] = CubedEmbedding

    class Model(TinyGPT):
        def logits(self, tokens: Tensor) -> Tensor:
            x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1]))
            for block in self.blocks:
                x = block(x)
            return self.head(self.norm(x))

    def build(self) -> nn.Module:
        model = self.Model()
        model.tokens, model.positions = self.kind(61, 20), self.kind(12, 20)
        return model


class SavesItsWeight(ReadsItsWeightInBackward):
    kind = SquaredEmbedding


class FoundByItself(ReadsItsWeightInBackward):
    """Large enough to be made a unit without being named."""

    units = None

    def build(self) -> nn.Module:
        model = self.Model(vocabulary=600)
        model.tokens, model.positions = self.kind(600, 20), self.kind(12, 20)
        return model


@pytest.mark.parametrize(
    "case",
    [ReadsItsWeightInBackward, SavesItsWeight, FoundByItself],
    ids=lambda case: case.__name__,
)
def test_an_embedding_whose_backward_reads_its_weight_trains_as_in_ddp(case: type[Case]) -> None:
    assert_trains_as_ddp(case)


def gathers_a_step(kind: type[nn.Embedding]) -> float:
    """Gathers of the unit "tokens" in a step at stage 3, by the bytes that they send; the step
    before it learns the order.
    """
    import onefold

    case = ReadsItsWeightInBackward()
    case.kind = kind
    model = onefold.shard(fresh(case), onefold.Recipe.zero(3, stall_timeout=10.0), units=case.units)
    engine = onefold.engine_of(model)
    case.loss(model, case.batch(0, 0)).backward()
    engine.traffic.reset()
    case.loss(model, case.batch(0, 1)).backward()
    shard = next(u.numel for u in engine.units if u.name == "tokens") // dist.get_world_size()
    return engine.traffic.by_unit()["tokens"]["all-gather"] / (4 * shard)


@pytest.mark.parametrize(
    ("kind", "gathers"), [(nn.Embedding, 1), (CubedEmbedding, 2)], ids=["exact", "subclass"]
)
def test_only_an_exact_embedding_is_spared_its_second_gather(
    kind: type[nn.Embedding], gathers: int
) -> None:
    assert run_ranks(2, gathers_a_step, kind) == [gathers, gathers]
