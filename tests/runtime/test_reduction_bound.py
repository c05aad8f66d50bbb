"""Gradients that travel encoded: how far their sums are from the exact ones, on real ranks, against
the bound that is derived for them.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import onefold
from onefold.layout import Topology
from onefold.quant import codec, reduction_bound
from onefold.runtime.parameters.interval import local_part
from ranks import run_ranks

SHAPES = ((37, 11), (300,), (64, 70), (5,), (1, 1000))
RECIPES: dict[str, dict[str, Any]] = {
    "int8": {"reduce_codec": "int8"},
    "int4": {"reduce_codec": "int4"},
    "fp8": {"reduce_codec": "fp8"},
    "int4, stochastic": {"reduce_codec": "int4", "wire_rounding": "stochastic"},
}
#: Ranks, and those of a group: (recipe's options, topology). In pairs a rank has what two have
#: otherwise.
OVER: dict[str, tuple[dict[str, Any], Topology]] = {
    "one node": ({"group": 4}, Topology(4, 4)),
    "two nodes": ({"group": 2}, Topology(4, 2)),
    "HSDP": ({"shard_group": 2}, Topology(4, 2)),
    "two ranks": ({}, Topology(2, 2)),
}
GRADIENTS = ("normal", "a spike", "of any size", "one huge, zeros and subnormals")
#: The last element of a quarter, which is no multiple of int8's block: one counted over the ranks'
#: parts would lie on two.
SPIKE = 1599
Found = dict[tuple[str, str, str], dict[int, Tensor]]
Results = dict[tuple[str, str, str], Tensor]


class Weights(nn.Module):
    """Parameters whose gradients are what the module is called with."""

    def __init__(self) -> None:
        super().__init__()
        self.given = nn.ParameterList(torch.zeros(shape) for shape in SHAPES)

    def forward(self, wanted: list[Tensor]) -> Tensor:
        return torch.stack([(p * w).sum() for p, w in zip(self.given, wanted, strict=True)]).sum()


def gradients(kind: str, rank: int) -> list[Tensor]:
    """What one of four ranks has."""
    generator = torch.Generator().manual_seed(
        17 * rank + (0 if kind == "a spike" else GRADIENTS.index(kind))
    )
    out = [torch.randn(shape, generator=generator) for shape in SHAPES]
    if kind == "a spike" and rank == 1:
        out[2].view(-1)[SPIKE - 768] = 1e6
    if kind == "of any size":
        out = [
            g * torch.exp2(torch.randint(-40, 40, g.shape, generator=generator).float())
            for g in out
        ]
    if kind.startswith("one huge"):
        out = [torch.zeros_like(g) if i % 2 else g * 1e-41 for i, g in enumerate(out)]
        out[2][rank, 7] = 1e37
    return out


def on_ranks(kind: str, ranks: int) -> list[list[Tensor]]:
    """What each of four or of two ranks has."""
    four = [gradients(kind, rank) for rank in range(4)]
    return (
        four
        if ranks == 4
        else [[a + b for a, b in zip(*pair, strict=True)] for pair in (four[:2], four[2:])]
    )


def reduced() -> tuple[Found, list[tuple[int, int]], dict[str, int]]:
    """(by recipe, ranks and kind: what this rank has of the mean by address; the parameters'
    places; the lengths of flat buffers)
    """
    mine = dist.get_rank()
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    found: Found = {}
    lengths: dict[str, int] = {}
    slots: list[tuple[int, int]] = []
    for name, options in RECIPES.items():
        for where, (over, topology) in OVER.items():
            if name in ("fp8", "int4, stochastic") and where not in ("one node", "two nodes"):
                continue
            group = pairs[mine // 2] if topology.size == 2 else None
            model = onefold.shard(
                Weights(),
                onefold.Recipe.zero(3, **options, **over, stall_timeout=20.0),
                units=(),
                group=group,
            )
            (flat,) = (flat for unit in onefold.engine_of(model).units for flat in unit.flats)
            slots, lengths[where] = (
                [(slot.start, slot.end) for slot in flat.layout.slots],
                flat.layout.numel,
            )
            for kind in GRADIENTS:
                model(on_ranks(kind, topology.size)[mine % topology.size]).backward()
                found[name, where, kind] = {}
                for entry in flat.entries:
                    a, b = flat.local(entry)
                    if a < b:
                        found[name, where, kind][a] = local_part(entry.param.grad).clone()
                    entry.param.grad = None
    return found, slots, lengths


def laid_out(parts: list[Tensor], slots: list[tuple[int, int]], numel: int) -> Tensor:
    out = torch.zeros(numel, dtype=torch.float64)
    for part, (a, b) in zip(parts, slots, strict=True):
        out[a:b] = part.double().view(-1)
    return out


def test_reduced_gradients_are_within_the_derived_bound_of_the_exact_sum() -> None:
    said = run_ranks(4, reduced)
    _, slots, lengths = said[0]
    content = torch.cat([torch.arange(a, b) for a, b in slots])
    means, bounds = {}, {}
    for case in said[0][0]:
        name, where, kind = case
        means[case] = together([found[case] for found, *_ in said], lengths[where])[content]
        topology = OVER[where][1]
        by_number = [
            laid_out(parts, slots, lengths[where]) / topology.size
            for parts in on_ranks(kind, topology.size)
        ]
        parts = torch.stack([by_number[i] for i in topology.order])
        bound = reduction_bound(
            codec(RECIPES[name]["reduce_codec"]), parts, topology, stochastic="stochastic" in name
        )
        bounds[case] = bound[content]
        off = (means[case] - parts.sum(0)[content]).abs()
        assert (off <= bounds[case]).all(), (case, (off / bounds[case]).max())
        assert kind != "normal" or (off / bounds[case]).max() > 0.25, (
            f"{case}: the bound is far from anything that happens"
        )
    coarser_codecs_are_told_apart(means, bounds)
    other_ranks_give_the_same_within_what_both_may_be_off(means, bounds)
    a_spike_changes_nothing_of_other_ranks(means, content)


def together(held: list[dict[int, Tensor]], numel: int) -> Tensor:
    """The whole of what ranks have; where two have the same elements they have the same bits."""
    whole = torch.full((numel,), torch.nan, dtype=torch.float64)
    for start, values in (item for one in held for item in one.items()):
        there = whole[start : start + values.numel()]
        assert (there.isnan() | (there == values)).all(), "two ranks hold different sums"
        there.copy_(values)
    return whole


def coarser_codecs_are_told_apart(means: Results, bounds: Results) -> None:
    for where in OVER:
        off = (means["int4", where, "normal"] - means["int8", where, "normal"]).abs()
        assert (off > bounds["int8", where, "normal"] * 2).any(), (
            f"{where}: int4 is within int8's bound"
        )


def other_ranks_give_the_same_within_what_both_may_be_off(means: Results, bounds: Results) -> None:
    for name in RECIPES:
        for kind in GRADIENTS:
            four = torch.stack(
                [torch.cat([g.view(-1) for g in gradients(kind, rank)]) for rank in range(4)]
            ).double()
            pairs = four.abs().sum(0) * 2.0**-24  # what two ranks have was added up in fp32
            for where in OVER:
                if (name, where, kind) not in means:
                    continue
                ranks = OVER[where][1].size  # of sums, which are the same over any
                apart = (means[name, where, kind] * ranks - means[name, "one node", kind] * 4).abs()
                allowed = (
                    bounds[name, where, kind] * ranks + bounds[name, "one node", kind] * 4 + pairs
                )
                assert (apart <= allowed).all(), (name, where, kind)
                assert where == "one node" or kind != "normal" or apart.any(), "the same ranks?"


def a_spike_changes_nothing_of_other_ranks(means: Results, content: Tensor) -> None:
    """Blocks never lie on two ranks: a spike changes what its own block decodes to, which ends
    where the rank's part does.
    """
    for name in RECIPES:
        for where, (_, topology) in OVER.items():
            # Which draws anew each time
            if (name, where, "normal") not in means or "stochastic" in name:
                continue
            other = content[means[name, where, "a spike"] != means[name, where, "normal"]]
            # Of a quarter, or of a half: the first hop's
            end = SPIKE + 1 if topology.inner == 4 else 2 * (SPIKE + 1)
            assert SPIKE in other and other.max() < end, (name, where, other)
            # Of two ranks its own has it, which is not encoded
            assert topology.size == 2 or len(other) > 10, (name, where, other)
