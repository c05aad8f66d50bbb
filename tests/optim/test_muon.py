"""Muon and AdamW as one optimizer: what torch's two do apart."""

from __future__ import annotations

import copy
import io
from typing import Any

import torch
from torch import nn

from onefold.optim.muon import MuonWithAdamW
from reference import built, differences, train
from zoo import TinyGPT, tokens_of


def gpt() -> TinyGPT:
    return built(lambda: TinyGPT(depth=1))  # type: ignore[return-value]


def halves(model: TinyGPT) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """The matrices of blocks, and the rest."""
    body = [p for p in model.blocks.parameters() if p.dim() == 2]
    return body, [p for p in model.parameters() if not any(p is each for each in body)]


def one(model: TinyGPT) -> MuonWithAdamW:
    body, rest = halves(model)
    return MuonWithAdamW(
        [
            {"params": rest, "lr": 1e-2, "betas": (0.8, 0.9)},
            {"params": body, "use_muon": True, "lr": 0.1, "momentum": 0.9},
        ]
    )


class Two:
    """torch's."""

    def __init__(self, model: TinyGPT) -> None:
        body, rest = halves(model)
        self.both: list[Any] = [
            torch.optim.Muon(body, lr=0.1, momentum=0.9, weight_decay=0.1),
            torch.optim.AdamW(rest, lr=1e-2, betas=(0.8, 0.9)),
        ]

    def step(self) -> None:
        for each in self.both:
            each.step()

    def zero_grad(self) -> None:
        for each in self.both:
            each.zero_grad()


def trained(model: nn.Module, optimizer: Any, first: int) -> dict[str, Any]:
    train(model, optimizer, [tokens_of(n) for n in range(first, first + 3)])
    return model.state_dict()


def test_one_optimizer_steps_as_torchs_two_do_and_its_copies_go_on_as_it_does() -> None:
    model, twin = gpt(), gpt()
    optimizer = one(model)
    expected = trained(twin, Two(twin), 0)
    assert differences(expected, trained(model, optimizer, 0)) == []
    assert {tuple(sorted(state)) for state in optimizer.state.values()} == {
        ("momentum_buffer",),
        ("exp_avg", "exp_avg_sq", "step"),
    }
    copied = copy.deepcopy((model, optimizer))
    file = io.BytesIO()
    torch.save((model, optimizer), file)
    pickled = torch.load(io.BytesIO(file.getvalue()), weights_only=False)
    other = gpt()
    other.load_state_dict(model.state_dict())
    loaded = one(other)
    loaded.load_state_dict(copy.deepcopy(optimizer.state_dict()))  # torch shares tensors
    expected = trained(model, optimizer, 3)
    for again in (copied, pickled, (other, loaded)):
        assert differences(expected, trained(*again, 3)) == []
