"""What checks share: where they run, and the small model that they train.

Its sizes do not divide by the number of ranks. Intervals of ranks therefore cut through parameters,
and every flat buffer has padding.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call
from torch.nn.parallel import DistributedDataParallel

import onefold
from onefold.processes.ranks import Ranks
from onefold.recipe import COMPUTE_DTYPES, Recipe

VOCABULARY, WIDTH, BLOCKS = 97, 44, 4
#: Steps of a training, micro-batches of a step, and the norm to which gradients are clipped.
STEPS, MICRO_BATCHES, CLIP = 3, 2, 0.5
#: Relative differences that another order of sums may cause: (of losses and norms, of the change in
#: weights).
ROUNDING = {"fp32": (1e-5, 1e-3), "bf16": (1e-2, 0.1)}
#: The losses of this rank's micro-batches and the norms of steps; and on rank 0, the whole weights.
Trained = dict[str, torch.Tensor]
NUMBERS = "losses or norms"


class LeftOut(Exception):
    """A check cannot run here; the text says why."""


@dataclass
class Here(Ranks):
    """Where a check runs. `folder`: a temporary folder that all ranks of this node see. Over `control`
    ranks tell each other outcomes; no check uses it.
    """

    folder: str = ""


class Cast(nn.Module):
    """A model with fp32 parameters that computes in `dtype`, as Onefold's masters do."""

    def __init__(self, model: nn.Module, dtype: torch.dtype) -> None:
        super().__init__()
        self.model, self.dtype = model, dtype

    def forward(self, ids: torch.Tensor) -> Any:
        cast = {name: p.to(self.dtype) for name, p in self.model.named_parameters()}
        return functional_call(self.model, cast, (ids,))


def small(here: Here, width: int = WIDTH, blocks: int = BLOCKS) -> nn.Sequential:
    """Make the model, from token ids to logits, with the same weights on every rank and in every call."""
    hidden = 2 * width + 2
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1234)
        each = (
            nn.Sequential(nn.LayerNorm(width), nn.Linear(width, hidden), nn.GELU(), nn.Linear(hidden, width))
            for _ in range(blocks)
        )  # fmt: skip
        head = nn.Linear(width, VOCABULARY, bias=False)
        found = nn.Sequential(nn.Embedding(VOCABULARY, width), nn.Sequential(*each), head)
    return found.to(here.device)


def loss_of(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
    """Return the mean cross-entropy of predicting each token from itself."""
    return F.cross_entropy(model(ids).float().flatten(0, 1), ids.flatten())


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    """Make the optimizer of every training here."""
    return torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)


def one_step(
    here: Here,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    step: int,
    micro_batches: int = MICRO_BATCHES,
) -> list[torch.Tensor]:
    """Run a step on this rank's own samples. Returns the losses and the gradients' norm."""
    found, ddp = [], isinstance(model, DistributedDataParallel)
    for micro in range(micro_batches):
        draw = torch.Generator().manual_seed((step * 10 + micro) * 4099 + here.rank)
        ids = torch.randint(0, VOCABULARY, (2, 16), generator=draw, device="cpu").to(here.device)
        waits: Any = DistributedDataParallel.no_sync if ddp else onefold.no_sync
        with waits(model) if micro + 1 < micro_batches else contextlib.nullcontext():
            loss = loss_of(model, ids)
            (loss / micro_batches).backward()
        found.append(loss.detach())
    if ddp:
        found.append(nn.utils.clip_grad_norm_(model.parameters(), CLIP))
    else:
        found.append(onefold.clip_grad_norm_(model, CLIP))
    optimizer.step()
    optimizer.zero_grad()
    return found


def train(
    here: Here, recipe: Recipe | str, micro_batches: int = MICRO_BATCHES, compiled: bool = False
) -> Trained:
    """Train with Onefold by a recipe; or with DistributedDataParallel and fp32 states, in the precision
    that is named. Collective.
    """
    plain = small(here)
    for block in plain[1].children() if compiled else ():
        block.compile()
    if isinstance(recipe, str):
        model: nn.Module = DistributedDataParallel(Cast(plain, COMPUTE_DTYPES[recipe]))
    else:
        model = onefold.shard(plain, recipe)
    optimizer, numbers = adamw(model), list[float]()
    for step in range(STEPS):
        numbers += map(float, one_step(here, model, optimizer, step, micro_batches))
    weights = plain.state_dict() if isinstance(recipe, str) else onefold.full_state_dict(model)
    found = {name: p.detach().cpu().clone() for name, p in weights.items()}
    return {NUMBERS: torch.tensor(numbers, dtype=torch.float64), **found}


def assert_equal(what: str, found: Any, expected: Any) -> None:
    """Raise AssertionError if tensors, or dicts of them, differ in value, shape or dtype."""
    torch.testing.assert_close(
        found, expected, rtol=0, atol=0, equal_nan=True, msg=lambda said: f"{what}: {said}"
    )


def assert_near(here: Here, what: str, a: Trained, b: Trained, precision: str) -> None:
    """Raise AssertionError if two trainings differ by more than the rounding of `precision`."""
    numbers, moved = ROUNDING[precision]
    said = f"{what}: {NUMBERS}: "
    torch.testing.assert_close(
        a[NUMBERS], b[NUMBERS], rtol=numbers, atol=1e-12, msg=lambda text: said + text
    )
    begin = small(here).state_dict()
    names = sorted(a.keys() & begin.keys())

    def length(from_: Trained) -> float:
        """The norm of how far the weights of `b` are from there."""
        off = [(b[name] - from_[name].cpu()).double().norm() for name in names]
        return float(torch.stack(off).norm()) if off else 0.0

    off, way = length(a), length(begin)
    assert off <= moved * way, f"{what}: weights differ by {off / way:.1e} of their change"
