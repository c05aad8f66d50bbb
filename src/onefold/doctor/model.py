"""The small model of the checks, and its training.

Its sizes do not divide by the number of ranks. Intervals of ranks therefore cut through parameters,
and every flat buffer has padding.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call
from torch.nn.parallel import DistributedDataParallel

import onefold
from onefold.doctor.checks import Here
from onefold.recipe import COMPUTE_DTYPES, Recipe

VOCABULARY, WIDTH, BLOCKS = 97, 44, 4
#: Steps of a training, micro-batches of a step, and the norm to which gradients are clipped.
STEPS, MICRO_BATCHES, CLIP = 3, 2, 0.5
#: Relative differences that another order of sums may cause: (of losses and norms, of the change in
#: weights).
ROUNDING = {"fp32": (1e-5, 1e-3), "bf16": (1e-2, 0.1)}


class Block(nn.Module):
    """[..., width] → [..., width]: a norm and two layers with a residual connection."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, hidden = nn.LayerNorm(width), 2 * width + 2
        self.up, self.down = nn.Linear(width, hidden), nn.Linear(hidden, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Small(nn.Module):
    """Token ids [batch, tokens] → the mean cross-entropy of predicting each from itself."""

    def __init__(self, width: int, blocks: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(blocks))
        self.head = nn.Linear(width, VOCABULARY, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embedding(ids)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(x).float().flatten(0, 1), ids.flatten())


class Cast(nn.Module):
    """A model with fp32 parameters that computes in `dtype`, as Onefold's masters do."""

    def __init__(self, model: nn.Module, dtype: torch.dtype) -> None:
        super().__init__()
        self.model, self.dtype = model, dtype

    def forward(self, ids: torch.Tensor) -> Any:
        cast = {name: p.to(self.dtype) for name, p in self.model.named_parameters()}
        return functional_call(self.model, cast, (ids,))


def small(here: Here, width: int = WIDTH, blocks: int = BLOCKS) -> Small:
    """Make the model with the same weights on every rank and in every call."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1234)
        return Small(width, blocks).to(here.device)


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    """Make the optimizer of every training here."""
    return torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)


def one_step(
    here: Here,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    step: int,
    micro_batches: int = MICRO_BATCHES,
    no_sync: Callable[[Any], contextlib.AbstractContextManager[object]] = onefold.no_sync,
    clip: Callable[[Any, float], torch.Tensor] = onefold.clip_grad_norm_,
) -> list[torch.Tensor]:
    """Run a step on this rank's own samples. Returns the losses and the gradients' norm."""
    found = []
    for micro in range(micro_batches):
        draw = torch.Generator().manual_seed((step * 10 + micro) * 4099 + here.rank)
        ids = torch.randint(0, VOCABULARY, (2, 16), generator=draw, device="cpu").to(here.device)
        with no_sync(model) if micro + 1 < micro_batches else contextlib.nullcontext():
            loss = model(ids)
            (loss / micro_batches).backward()
        found.append(loss.detach())
    found.append(clip(model, CLIP))
    optimizer.step()
    optimizer.zero_grad()
    return found


@dataclass
class Trained:
    """The losses of this rank's micro-batches and the norms of steps; whole weights on rank 0."""

    numbers: list[float] = field(default_factory=list)
    weights: dict[str, torch.Tensor] = field(default_factory=dict)


def train(
    here: Here, recipe: Recipe, micro_batches: int = MICRO_BATCHES, compiled: bool = False
) -> Trained:
    """Train with Onefold. Collective."""
    plain = small(here)
    for block in plain.blocks if compiled else ():
        block.compile()
    model = onefold.shard(plain, recipe)
    optimizer, found = adamw(model), Trained()
    for step in range(STEPS):
        found.numbers += map(float, one_step(here, model, optimizer, step, micro_batches))
    found.weights = onefold.full_state_dict(model)
    return found


def train_with_ddp(here: Here, precision: str, micro_batches: int = MICRO_BATCHES) -> Trained:
    """Train in the same way with DistributedDataParallel and fp32 states. Collective."""
    model = small(here)
    ddp = DistributedDataParallel(Cast(model, COMPUTE_DTYPES[precision]))
    optimizer, found = adamw(model), Trained()
    for step in range(STEPS):
        found.numbers += map(
            float,
            one_step(
                here, ddp, optimizer, step, micro_batches, DistributedDataParallel.no_sync,
                lambda model, norm: nn.utils.clip_grad_norm_(model.parameters(), norm),
            ),
        )  # fmt: skip
    found.weights = {name: p.detach().cpu().clone() for name, p in model.state_dict().items()}
    return found


def assert_same(what: str, a: Trained, b: Trained) -> None:
    """Raise AssertionError if two trainings differ in any bit."""
    assert_equal(f"{what}: weights", a.weights, b.weights)
    numbers = (torch.tensor(t.numbers, dtype=torch.float64) for t in (a, b))
    assert_equal(f"{what}: losses or norms", *numbers)


def assert_equal(what: str, found: Any, expected: Any) -> None:
    """Raise AssertionError if tensors, or dicts of them, differ in value, shape or dtype."""
    torch.testing.assert_close(
        found, expected, rtol=0, atol=0, equal_nan=True, msg=lambda said: f"{what}: {said}"
    )


def assert_near(here: Here, what: str, a: Trained, b: Trained, precision: str) -> None:
    """Raise AssertionError if two trainings differ by more than the rounding of `precision`."""
    numbers, moved = ROUNDING[precision]
    both = (torch.tensor(t.numbers, dtype=torch.float64) for t in (a, b))
    said = f"{what}: losses or norms: "
    torch.testing.assert_close(*both, rtol=numbers, atol=1e-12, msg=lambda text: said + text)
    begin = small(here).state_dict()

    def length(from_: dict[str, torch.Tensor]) -> float:
        """The norm of how far the weights of `b` are from there."""
        off = [(b.weights[name] - from_[name].cpu()).double().flatten() for name in a.weights]
        return float(torch.cat(off).norm()) if off else 0.0

    off, way = length(a.weights), length(begin)
    assert off <= moved * way, f"{what}: weights differ by {off / way:.1e} of their change"
