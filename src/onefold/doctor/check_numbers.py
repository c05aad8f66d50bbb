"""Checks of single operations: torch's collectives against sums on the host, and Onefold's sums
against sums in rank order.

Every rank can generate every other rank's numbers, so each computes the expected result on the
host.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import product
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import onefold
from onefold.doctor.checks import Findings, Here, LeftOut
from onefold.recipe import Recipe
from onefold.runtime.hooks import engine_of

#: Numbers that each rank makes on the host, at most: those of all ranks, for every rank.
MADE = 1 << 25
DTYPES = (torch.float32, torch.bfloat16)
#: Elements of the parameters whose gradients are summed. They do not divide by numbers of ranks.
PARAMETERS = (1, 63, 4097, 30011)


def numels(backend: str, ranks: int) -> tuple[int, ...]:
    """Return how many elements of each of `ranks` ranks are moved. The last is large enough for
    NCCL's algorithms for large data.
    """
    large = 1 << 16 if backend == "gloo" else 1 << 22
    return 1, 1000, min(large, MADE // ranks**2)


def values(
    numel: int, rank: int, dtype: torch.dtype = torch.float32, seed: int = 0
) -> torch.Tensor:
    """Return a rank's contribution, [numel]. Its values have many magnitudes, so that sums in
    another order have other bits.
    """
    generator = torch.Generator().manual_seed(1 + 7919 * rank + 104729 * seed)
    found = torch.randn(numel, generator=generator, device="cpu") * torch.exp2(
        torch.randint(-8, 8, (numel,), generator=generator, device="cpu")
    )
    return found.to(dtype)


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether both hold the same bytes, on any device."""
    a, b = a.detach().cpu().contiguous(), b.detach().cpu().contiguous()
    return (
        a.shape == b.shape
        and a.dtype == b.dtype
        and torch.equal(a.view(-1).view(torch.uint8), b.view(-1).view(torch.uint8))
    )


def ordered(parts: list[torch.Tensor], inner: int = 0) -> torch.Tensor:
    """Return the sum in rank order in fp32. With `inner`, add up groups of `inner` ranks first."""
    inner = inner or len(parts)
    groups = [parts[i : i + inner] for i in range(0, len(parts), inner)]
    if len(groups) > 1:
        return ordered([ordered(group) for group in groups])
    total = parts[0].float().clone()
    for part in parts[1:]:
        total += part.float()
    return total


def collectives(here: Here, findings: Findings) -> str:
    """Check each collective that Onefold uses, on gloo and on the device's own backend."""
    where = [("gloo", torch.device("cpu"))]
    if here.device.type != "cpu":
        where.append((here.backend, here.device))
    count, backends = 0, [name for name, _ in where]
    for name, device in where:
        for numel, dtype in product(numels(name, here.world), DTYPES):
            for move, right in _moves(here, name, device, numel, dtype):
                count += 1
                what = f"{move} of {numel:,} {_name(dtype)} on {name}"
                findings.expect(right, f"{what} brings wrong numbers")
    findings.figures |= {"compared": count, "backends": backends}
    return f"{count} results of {' and '.join(backends)} equal what arithmetic says"


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _moves(
    here: Here, backend: str, device: torch.device, numel: int, dtype: torch.dtype
) -> Iterator[tuple[str, bool]]:
    """Run each collective. Yields (its name, whether its result is right)."""
    n, rank = here.world, here.rank
    every = [values(numel * n, r, dtype) for r in range(n)]  # rank r's values, a part per rank
    mine = every[rank].to(device)
    start = slice(numel * rank, numel * (rank + 1))

    whole = torch.empty(n * numel, dtype=dtype, device=device)
    dist.all_gather_single(whole, mine[:numel].contiguous())
    yield "all-gather", same_bits(whole, torch.cat([part[:numel] for part in every]))

    received = torch.empty_like(mine)
    dist.all_to_all_single(received, mine)
    yield "all-to-all", same_bits(received, torch.cat([part[start] for part in every]))

    if device.type == "cpu":  # gloo ends the process that sends from a GPU; the engine does not
        after, before = torch.empty(numel, dtype=dtype, device=device), (rank - 1) % n
        works = [dist.irecv(after, before), dist.isend(mine[:numel].contiguous(), (rank + 1) % n)]
        for work in works:
            if work is not None:
                work.wait()
        yield "send and receive", same_bits(after, every[before][:numel])

    sums = torch.empty(numel, dtype=dtype, device=device)
    dist.reduce_scatter_single(sums, mine.clone())
    yield "reduce-scatter", near(sums, [part[start] for part in every])

    total = mine.clone()
    dist.all_reduce(total)
    yield "all-reduce", near(total, every)

    sent = mine.clone()
    dist.broadcast(sent, 0)
    yield "broadcast", same_bits(sent, every[0])


def near(found: torch.Tensor, parts: list[torch.Tensor], scale: float = 1.0) -> bool:
    """Whether `found` is the sum of `parts` times `scale`, within the rounding of any order."""
    wide = torch.stack([part.double() for part in parts])
    unit = torch.finfo(found.dtype).eps
    room = len(parts) * unit * wide.abs().sum(0) * scale
    return bool(((found.detach().cpu().double() - wide.sum(0) * scale).abs() <= room).all())


class Probe(nn.Module):
    """A model whose loss is Σ wᵢ·cᵢ with the rank's own c. Its gradients are therefore known."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList(Part(numel) for numel in PARAMETERS)

    def forward(self, factors: list[torch.Tensor], expected: list[torch.Tensor]) -> torch.Tensor:
        return torch.stack(
            [part(c, w) for part, c, w in zip(self.parts, factors, expected, strict=True)]
        ).sum()


class Part(nn.Module):
    """One parameter, [numel], which starts as zeros."""

    def __init__(self, numel: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(numel))
        self.right = True

    def forward(self, factor: torch.Tensor, expected: torch.Tensor) -> torch.Tensor:
        self.right = self.right and same_bits(self.weight, expected)
        return (self.weight * factor).sum()


def ordered_sums(here: Here, findings: Findings) -> str:
    """Check reductions at every stage to the bit, and that the next gather has the new weights."""
    for stage in range(4):
        _reduced(here, findings, Recipe.zero(stage, reduce="ordered"), is_ordered_mean)
    findings.figures |= {"stages": 4, "elements": sum(PARAMETERS)}
    return (
        f"stages 0 to 3 add {sum(PARAMETERS):,} gradients up in rank order, to the bit, and gather"
        " what was stepped"
    )


def native_sums(here: Here, findings: Findings) -> str:
    """Check `reduce="native"` within rounding; on gloo, check gloo's own reduce-scatter."""
    if here.backend != "gloo":
        for stage in range(1, 4):
            _reduced(
                here,
                findings,
                Recipe.zero(stage, reduce="native"),
                lambda g, parts, _: near(g, parts, 1 / len(parts)),
            )
        return "reduce='native' at stages 1 to 3 is right within rounding"
    if here.backend == "gloo" and here.device.type != "cpu":
        raise LeftOut(
            "ranks that share a GPU move through gloo: NCCL's own sums need a GPU for each rank"
        )
    compared = 0
    for numel in PARAMETERS:
        every = [values(numel * here.world, r, seed=5) for r in range(here.world)]
        sums = torch.empty(numel, device=here.device)
        dist.reduce_scatter_single(sums, every[here.rank].to(here.device))
        mine = [part[numel * here.rank : numel * (here.rank + 1)] for part in every]
        findings.expect(
            near(sums, mine),
            f"the reduce-scatter of {numel:,} numbers differs from their sum by more than rounding",
        )
        compared += numel
    findings.figures["elements"] = compared
    return (
        f"{here.backend}'s reduce-scatter, called by itself, adds {compared:,} numbers up within"
        " rounding"
    )


def is_ordered_mean(found: torch.Tensor, parts: list[torch.Tensor], inner: int = 0) -> bool:
    """Whether `found` has the bits of a mean in rank order: 1/N times each part, or their sum."""
    factor = 1 / len(parts)
    return same_bits(found, ordered(parts, inner) * factor) or same_bits(
        found, ordered([part * factor for part in parts], inner)
    )


def _reduced(
    here: Here,
    findings: Findings,
    recipe: Recipe,
    right: Callable[[torch.Tensor, list[torch.Tensor], int], bool],
) -> None:
    """Check a step of SGD from zero with learning rate 1: the weights become the negated mean
    gradients. A second pass then checks that it gathers those weights.
    """
    model: Any = onefold.shard(Probe().to(here.device), recipe)
    engine = engine_of(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    every = [
        [values(numel, r, seed=i) for r in range(here.world)] for i, numel in enumerate(PARAMETERS)
    ]
    mine = [parts[here.rank].to(here.device) for parts in every]
    model(mine, [torch.zeros(numel, device="cpu") for numel in PARAMETERS]).backward()
    optimizer.step()
    optimizer.zero_grad()
    with onefold.full_params(model):
        stepped = [part.weight.detach().cpu().clone() for part in model.parts]
    inner = engine.group.topology.inner
    for i, (numel, weight) in enumerate(zip(PARAMETERS, stepped, strict=True)):
        findings.expect(
            right(-weight, every[i], inner),
            f"stage {recipe.stage}: the mean gradient of {numel:,} elements is wrong",
        )
    model(mine, stepped).backward()  # gathers the stepped weights
    optimizer.zero_grad()
    for numel, part in zip(PARAMETERS, model.parts, strict=True):
        findings.expect(
            part.right,
            f"stage {recipe.stage}: the pass computed with other weights than the {numel:,} that"
            " were stepped",
        )
