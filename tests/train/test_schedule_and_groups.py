"""The learning rate over a run, which parameters decay, and which stage is chosen."""

from __future__ import annotations

import itertools
from typing import Any

import choices
import pytest
import torch
from torch import nn

from onefold.plan.api import USABLE
from onefold.train.prepare import (
    choose,
    hidden_matrices,
    lr_factor,
    names_without_decay,
    parameter_groups,
)
from onefold.wording import TrainError

#: Of ranks.SERVERS.
SERVER = "libraries"

GIB = 1 << 30


@pytest.mark.parametrize("kind", ["cosine", "linear", "wsd"])
def test_schedules_rise_to_the_peak_and_fall_to_the_minimum(kind: str) -> None:
    factor = lr_factor(kind, steps=100, warmup=10, minimum=0.1)
    values = [factor(step) for step in range(101)]
    assert 0 < values[0] < values[9] < 1 and values[10] == 1
    assert all(a >= b for a, b in itertools.pairwise(values[10:]))
    assert values[100] == pytest.approx(0.1)
    assert factor(5000) == pytest.approx(0.1)


def test_constant_stays_and_wsd_holds_before_it_falls() -> None:
    assert {lr_factor("constant", 10, 0, 0.1)(step) for step in range(10)} == {1.0}
    assert lr_factor("wsd", 100, 10, 0.0)(79) == 1 > lr_factor("wsd", 100, 10, 0.0)(81)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(10, 4)
        self.layer = nn.Linear(4, 4)
        self.norm = nn.LayerNorm(4)
        self.head = nn.Linear(4, 10, bias=False)
        self.head.weight = self.embed.weight
        self.gain = nn.Parameter(nn.Parameter(self.norm.weight.detach().clone()))


def test_matrices_decay_and_nothing_else_does() -> None:
    model = Model()
    no_decay = names_without_decay(model)
    model.layer.bias.requires_grad_(False)
    decayed, others = parameter_groups(model.named_parameters(), no_decay, 0.1)
    assert [p is model.layer.weight for p in decayed["params"]] == [True]
    assert decayed["weight_decay"] == 0.1 and others["weight_decay"] == 0.0
    assert {id(p) for p in others["params"]} == {
        id(model.embed.weight),
        id(model.norm.weight),
        id(model.norm.bias),
        id(model.gain),
    }


def test_muon_gets_the_matrices_that_are_no_embedding_and_no_head() -> None:
    model = nn.ModuleDict(
        {
            "tokens": nn.Embedding(64, 16),
            "positions": nn.Embedding(80, 16),
            "ups": nn.ModuleList(nn.Linear(16, 80) for _ in range(2)),  # the shape of the positions
            "bag": nn.EmbeddingBag(8, 16),
            "norm": nn.LayerNorm(16),
            "convolution": nn.Conv1d(4, 4, 3),
            "head": nn.Linear(16, 64, bias=False),
        }
    )
    matrices = hidden_matrices(model)
    assert matrices == {"ups.0.weight", "ups.1.weight"}
    groups = parameter_groups(model.named_parameters(), names_without_decay(model), 0.1, matrices)
    assert [(g["use_muon"], g["weight_decay"], len(g["params"])) for g in groups] == [
        (False, 0.1, 2),
        (False, 0.0, 8),
        (True, 0.1, 2),
    ]


def test_the_head_is_told_from_matrices_of_its_shape() -> None:
    """Vocabulary and hidden width are one number; the blocks are units of their own."""
    assert hidden_matrices(Language()) == {
        f"blocks.{i}.{at}.weight" for i in range(6) for at in (0, 2)
    }
    alike = Language(vocabulary=1024)
    assert hidden_matrices(alike) == hidden_matrices(Language())


class Language(nn.Module):
    """input_ids, labels → {"loss"}: wide blocks and short sequences, so that states outweigh
    activations.
    """

    def __init__(self, vocabulary: int = 64) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, 256)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(256, 1024), nn.ReLU(), nn.Linear(1024, 256)) for _ in range(6)
        )
        self.head = nn.Linear(256, vocabulary)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        x = self.embed(input_ids)
        for block in self.blocks:
            x = x + block(x)
        return {"loss": nn.functional.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())}


def asked(**changes: Any) -> choices.Asked:
    return choices.asked(**{"micro_batch": 1, "seq": 8, "free": GIB, **changes})


def test_auto_takes_the_largest_micro_batch_that_divides_and_fits() -> None:
    model = Language()
    roomy = choose(model, *asked(micro_batch="auto", global_batch=48, seq=64))
    assert roomy.micro_batch == 12  # 48 over 4 ranks
    four = choose(model, *asked(micro_batch=4, global_batch=48, seq=64)).needed[1]
    tight = choose(
        model,
        *asked(
            micro_batch="auto", global_batch=48, seq=64, stage="1", free=int(four / USABLE) + 4096
        ),
    )
    assert tight.micro_batch == 4, tight
    with pytest.raises(TrainError, match="does not divide"):
        choose(model, *asked(micro_batch=5, global_batch=48))
