"""Parameters in the loss, outside the forward pass."""

# ruff: noqa: E501 (a habit of the tables is one line)

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from scripts.loop import Net, Script
from scripts.registry import ROUNDING, habit

# Stage 0 holds wholes, as DDP does. Under DDP the gradient of a term outside its forward pass comes
# on top of the averaged one, or
# is averaged with it: where all ranks compute the same term both are the same.
TERMS = {
    "L2: `sum(p.pow(2).sum() for p in model.parameters())`": lambda s: 1e-2 * sum(p.pow(2).sum() for p in s.model.parameters()),
    "a tie between two matrices: `F.mse_loss(head.weight, tokens.weight)`": lambda s: F.mse_loss(s.module.head.weight, s.module.tokens.weight),
    "a second use of the head: `F.linear(h, model.head.weight)`": lambda s: F.linear(torch.linspace(-1, 1, 10).view(1, 10), s.module.head.weight).pow(2).mean(),
    "a submodule called in the loss: `model.head(x).pow(2).mean()`": lambda s: s.module.head(torch.linspace(-1, 1, 10).view(1, 10)).pow(2).mean(),
}  # fmt: skip
for _title, _term in TERMS.items():
    habit(f"a term of the loss, {_title}", "loss", expect=ROUNDING, one=ROUNDING)(
        lambda s, loss, f=_term: loss + f(s)
    )


class Contrastive(nn.Module):
    """A CLIP in small: two towers, and a scale that the script uses."""

    def __init__(self) -> None:
        super().__init__()
        self.towers = nn.ModuleList([nn.Linear(6, 5), nn.Linear(7, 5)])
        self.logit_scale = nn.Parameter(torch.tensor(1.0))
        self.center = nn.Parameter(torch.zeros(5))

    def forward(self, a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.towers[0](a), self.towers[1](b)


class ContrastiveHabit:
    def build(self) -> nn.Module:
        return Contrastive()

    def batch(self, seed: int) -> Any:
        g = torch.Generator().manual_seed(seed)
        return torch.randn(4, 6, generator=g), torch.randn(4, 7, generator=g)

    def forward(self, s: Script) -> Any:
        a, b = s.model(*s.batch)
        return F.cross_entropy(
            s.module.logit_scale.exp() * F.normalize(a, dim=1) @ F.normalize(b, dim=1).T,
            torch.arange(4),
        )


# DDP itself does not average the gradient of a parameter that its forward pass does not use, hence
# one batch for all ranks.
habit(
    "`model.logit_scale.exp()` in the contrastive loss outside (CLIP)",
    expect=ROUNDING,
    one=ROUNDING,
    reference="plain",
)(ContrastiveHabit)


@habit(
    "a temperature of its own parameter, outside the model, in the optimizer",
    expect=ROUNDING,
    reference="plain",
)
class Outside:
    def after(self, s: Script) -> None:
        self.temperature = nn.Parameter(torch.tensor(1.0))

    def optimizer(self, s: Script) -> Any:
        return torch.optim.SGD([*s.model.parameters(), self.temperature], lr=0.1)

    def forward(self, s: Script) -> Any:
        logits = s.model(s.batch[:, :-1]) / self.temperature
        return F.cross_entropy(logits.flatten(0, 1), s.batch[:, 1:].flatten())

    def end(self, s: Script) -> None:
        s.note("temperature", self.temperature.item())


class Chunked(Net):
    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.tokens(tokens) + self.positions.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.norm(x)


@habit(
    "the head applied outside in chunks: `F.linear(h[i:j], model.head.weight)` (chunked"
    " cross-entropy)",
    expect=ROUNDING,
    one=ROUNDING,
    reference="plain",
)
class ChunkedLoss:
    def build(self) -> nn.Module:
        return Chunked()

    def forward(self, s: Script) -> Any:
        hidden = s.model(s.batch[:, :-1]).flatten(0, 1)
        targets = s.batch[:, 1:].flatten()
        losses = [
            F.cross_entropy(
                F.linear(hidden[i : i + 4], s.module.head.weight),
                targets[i : i + 4],
                reduction="sum",
            )
            for i in range(0, 12, 4)
        ]
        return torch.stack(losses).sum() / 12
