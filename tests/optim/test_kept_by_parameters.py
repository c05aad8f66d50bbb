"""What a user's optimizer reads from its parameters, or keeps by them, holds wherever they are stepped:
attributes, tables by the parameter or its id, sets, closures.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

import onefold
import onefold.quant.moments as moments
from optim.test_whole_corners import Layers, Pair
from ranks import run_ranks
from whole_optimizers import PerTensor


class Rated(PerTensor):
    """Momentum at rates that are kept in all the ways there are, and counts in two of them."""

    whole = False

    def __init__(self, params: Any, **options: Any) -> None:
        super().__init__(params, **options)
        every = [p for group in self.param_groups for p in group["params"]]
        self.counts: dict[Any, int] = {}
        first = every[0]
        self.halved = lambda p: 0.5 if p is first else 1.0
        self.some = {p for p in every if p.rate > 1}

    def update(self, p: torch.Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        own: Any = p
        rate = own.rate * self.rates[p] * self.of_ids[id(p)] * self.halved(p)  # type: ignore[attr-defined]
        own.seen = getattr(p, "seen", 0) + 1
        self.counts[p] = self.counts.get(p, 0) + 1
        momentum = state.setdefault("momentum", torch.zeros_like(p)).lerp_(p.grad, 0.5)
        step = momentum / (own.seen + self.counts[p] + (p in self.some))
        p.sub_(step / step.norm() if self.whole else step, alpha=group["lr"] * rate)


class RatedWhole(Rated):
    whole = True


def rated(model: nn.Module, kind: type[Rated]) -> Rated:
    params: list[Any] = list(model.parameters())
    for number, p in enumerate(params):
        p.rate = (2.0, 0.0, 1.0)[number % 3]
    optimizer: Any = kind(params)
    optimizer.rates = {p: 1.0 + number for number, p in enumerate(params)}
    optimizer.of_ids = {id(p): 3.0 - number / 2 for number, p in enumerate(params)}
    return optimizer  # type: ignore[no-any-return]


def beside_plain(kind: type[Rated], options: dict[str, Any]) -> list[str]:
    Layers.sizes = (12, 400, 12, 40, 12, 12)
    pair = Pair(lambda model: rated(model, kind), **options)
    onefold.engine_of(pair.model).transfers.chunk = 1024  # elements: several chunks of a matrix
    before = {name: p.clone() for name, p in pair.plain.named_parameters()}
    for _ in range(3):
        pair.step()
    out = pair.differences()
    (_, ours), (_, plain) = pair.both
    for one, other in zip(*(o.param_groups[0]["params"] for o in (ours, plain)), strict=True):
        start, stop = one.onefold.interval
        if kind is Rated and start < stop and one.seen != other.seen:
            out.append(f"{one.onefold.name}: stepped {one.seen} times")
    if set(ours.rates) != set(ours.param_groups[0]["params"]) or len(ours.counts) > len(before):
        out.append("its tables have other parameters")
    stayed = [n for n, p in pair.plain.named_parameters() if torch.equal(p, before[n])]
    return out if stayed == ["layers.1.weight", "layers.4.weight"] else [*out, str(stayed)]


def everywhere(folder: str) -> list[str]:
    host, disk = (
        {"stage": 2, "offload_optimizer": "cpu"},
        {"stage": 3, "offload_optimizer": "nvme", "offload_gradients": "cpu", "nvme": folder},
    )
    return [
        f"{kind.__name__}, {options}: {each}"
        for options in ({"stage": 0}, {"stage": 1}, {"stage": 3}, host, disk)
        for kind in (Rated, RatedWhole)
        if kind is Rated or "nvme" not in options.values()
        for each in beside_plain(kind, options)
    ]


def test_what_code_keeps_by_a_parameter_holds_in_its_step_wherever_that_is_made(
    tmp_path: Path,
) -> None:
    assert run_ranks(2, everywhere, str(tmp_path)) == [[]] * 2


class RatedAdam(torch.optim.AdamW):
    """AdamW, of gradients that count at the parameter's rate."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for p in self.param_groups[0]["params"] if self.param_groups else ():
            own: Any = p
            own.seen = getattr(p, "seen", 0) + 1
            p.grad.mul_(own.rate * self.rates[p] / own.seen)  # type: ignore[attr-defined]
        return super().step(closure)


def moved(options: dict[str, Any], steps: int = 2) -> tuple[list[bool], list[int], dict[str, Any]]:
    """Whether each weight has moved, how often it was seen, and the weights."""
    Layers.sizes, moments.CHUNK["cpu"] = (12, 400, 12, 12), 1024
    model = onefold.shard(Layers(), onefold.Recipe.zero(stage=2, **options))
    onefold.engine_of(model).transfers.chunk = 2048
    params: list[Any] = list(model.parameters())
    optimizer: Any = RatedAdam(params, weight_decay=0.0)
    optimizer.rates = dict.fromkeys(params, 1.0)
    for p, rate in zip(params, (1.0, 0.0, 2.0), strict=True):
        p.rate = rate
    before = onefold.full_state_dict(model)
    for step in range(steps):
        generator = torch.Generator().manual_seed(step)
        model(torch.randn(4, 12, generator=generator)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    after = onefold.full_state_dict(model)
    return [bool((after[n] != before[n]).any()) for n in before], [p.seen for p in params], after


def in_pieces(folder: str) -> list[Any]:
    host = {"offload_optimizer": "cpu"}
    torch.optim.AdamW([nn.Parameter(torch.ones(1))])  # torch hooks its `step` from now on
    disk, early = {"offload_optimizer": "nvme", "nvme": folder}, {"step_in_backward": True}
    out = []
    for moments_in, tiers in (
        ({}, (host, disk, host | early, disk | early)),
        ({"moments": "bf16"}, (host, disk)),
    ):
        right = moved(moments_in)
        assert right[:2] == ([True, False, True], [2, 2, 2]), right[:2]
        for tier in tiers:
            found = moved(moments_in | tier)
            same = all(torch.equal(found[2][n], right[2][n]) for n in right[2])
            out += [] if found[:2] == right[:2] and same else [(tier, found[:2], same)]
    return out


def test_pieces_of_a_parameter_begin_with_the_same_numbers_of_it(tmp_path: Path) -> None:
    assert run_ranks(1, in_pieces, str(tmp_path)) == [[]]
