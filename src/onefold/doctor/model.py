"""What checks share: where they run, and the small model that they train.

Its sizes do not divide by the number of ranks. Intervals of ranks therefore cut through parameters,
and every flat buffer has padding.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
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
#: Samples of a micro-batch, and their tokens.
SAMPLES = 2, 16
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
    ranks tell each other what they found.
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


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    """Make the optimizer of every training here."""
    return torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)


def one_step(
    here: Here,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    step: int,
    micro_batches: int = MICRO_BATCHES,
    shape: tuple[int, int] = SAMPLES,
) -> list[torch.Tensor]:
    """Run a step on this rank's own samples, which are drawn on its device. Returns the losses and the
    gradients' norm, without waiting for them.
    """
    found, ddp = [], isinstance(model, DistributedDataParallel)
    for micro in range(micro_batches):
        draw = torch.Generator(here.device).manual_seed((step * 10 + micro) * 4099 + here.rank)
        ids = torch.randint(0, VOCABULARY, shape, generator=draw, device=here.device)
        waits: Any = DistributedDataParallel.no_sync if ddp else onefold.no_sync
        with waits(model) if micro + 1 < micro_batches else contextlib.nullcontext():
            loss = F.cross_entropy(model(ids).float().flatten(0, 1), ids.flatten())
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
    here: Here,
    recipe: Recipe | str,
    micro_batches: int = MICRO_BATCHES,
    shape: tuple[int, int] = SAMPLES,
    compiled: bool = False,
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
        numbers += map(float, one_step(here, model, optimizer, step, micro_batches, shape))
    weights = plain.state_dict() if isinstance(recipe, str) else onefold.full_state_dict(model)
    found = {name: p.detach().cpu().clone() for name, p in weights.items()}
    return {NUMBERS: torch.tensor(numbers, dtype=torch.float64), **found}


def assert_nowhere(here: Here, wrong: str) -> None:
    """Raise AssertionError on every rank if some rank says what is wrong. Collective: none goes on while
    another has stopped.
    """
    for rank, said in enumerate(here.gather(wrong)):
        assert not said, f"{said} (on rank {rank})"


def assert_close(here: Here, what: str, found: Any, expected: Any, rtol: float = 0.0) -> None:
    """Raise AssertionError on every rank if tensors, or lists or dicts of them, differ on some rank in
    shape, dtype or value, by more than the relative tolerance. Collective.
    """
    wrong, atol = "", 1e-12 if rtol else 0.0
    try:
        torch.testing.assert_close(found, expected, rtol=rtol, atol=atol, equal_nan=not rtol)
    except AssertionError as error:
        wrong = f"{what}: {error}"
    assert_nowhere(here, wrong)


def same_bits(here: Here, of: str, recipes: Mapping[str, Recipe], **how: Any) -> Trained:
    """Train by each recipe, and return what the first one gave. Raise AssertionError if another gives
    other bits. Collective. `how`: further arguments of `train`.
    """
    (first, recipe), *others = recipes.items()
    expected = train(here, recipe, **how)
    for name, recipe in others:
        assert_close(here, f"{of}: {name} and {first}", train(here, recipe, **how), expected)
    return expected


def assert_near(here: Here, what: str, a: Trained, b: Trained, precision: str) -> None:
    """Raise AssertionError on every rank if two trainings differ by more than the rounding of
    `precision`. Collective.
    """
    numbers, moved = ROUNDING[precision]
    assert_close(here, f"{what}: {NUMBERS}", a[NUMBERS], b[NUMBERS], numbers)

    def length(start: Trained) -> float:
        """The norm of how far the weights of `b` are from there. Only rank 0 has weights."""
        names = sorted(b.keys() & start.keys() - {NUMBERS})
        parts = [(b[name] - start[name].cpu()).double().flatten() for name in names]
        return float(torch.cat([torch.zeros(1, device="cpu"), *parts]).norm())

    off, way = length(a), length(small(here).state_dict())
    said = f"{what}: weights differ by {off:.1e}, and training changed them by {way:.1e}"
    assert_nowhere(here, "" if off <= moved * way else said)
