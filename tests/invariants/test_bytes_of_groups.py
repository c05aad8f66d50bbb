"""Invariants 2, 3 and 4 over groups and with codecs: bytes on each link and at rest equal the
formulas to the byte; nothing is left.

Four ranks, two on each of two nodes. Of a flat buffer of n elements of 16 bits, a rank's interval
is e = n/4 and its node's share h = n/2, in bytes E and H; encoded intervals are gathered in whole
16 bytes. A step of m micro-batches, as one rank sends it:

| recipe                | inside: gathers | reductions | between: gathers | reductions | at rest: masters | besides |
|-----------------------|-----------------|------------|------------------|------------|------------------|---------|
| all ranks             | 2mE             | mE         | 4mE              | 2mE        | 2E               |         |
| in groups             | 2mH             | mH         | 2mE              | mE         | 2E               |         |
| HSDP                  | 2mH             | mH         | –                | 2E         | 2H               |         |
| optimizer over all    | 2mH             | mH         | E                | E          | 2E               | H       |
| second copy           | 2mH             | mH         | E                | mE         | 2E               | H       |

Of last units of a pass (the last that the forward pass uses and those around it) a gather is
left out in each micro-batch: the backward pass finds them gathered.
"""

from __future__ import annotations

import gc
import os
from typing import Any

import pytest
import torch

import onefold
from invariants.memory_probe import living_bytes
from invariants.wire import counted_sends, train_steps
from onefold.layout import round_up
from onefold.memory import MASTERS, PARAMETERS
from onefold.quant import codec
from ranks import run_ranks
from zoo import TinyMLP, features_of

PARTS: dict[str, dict[str, Any]] = {
    "all ranks": {"group": "flat"},
    "in groups": {"group": 2},
    "HSDP": {"shard_group": "node"},
    "optimizer over all": {"shard_group": "node", "optimizer_over": "all"},
    "second copy": {"second_copy": True},
}
#: Codecs, and micro-batches.
CODECS: list[tuple[dict[str, str], int]] = [
    ({}, 3), ({"gather_codec": "int8"}, 1), ({"reduce_codec": "int4"}, 3), ({"gather_codec": "fp8", "reduce_codec": "int8"}, 1),
]  # fmt: skip


def formula(
    name: str, codecs: dict[str, str], numel: int, m: int, turns: bool = False
) -> dict[str, int]:
    """By the table of this module, of one flat buffer; `turns`: of a unit at the turn."""
    gathers = m if turns else 2 * m
    gathered, reduced = (
        codec(codecs[k]) if k in codecs else None for k in ("gather_codec", "reduce_codec")
    )
    e, h = numel // 4, numel // 2
    interval = 2 * e if gathered is None else round_up(gathered.encoded_bytes(e), 16)
    sums, share = (
        (2 * e, 2 * h) if reduced is None else (reduced.encoded_bytes(e), reduced.encoded_bytes(h))
    )
    own = 2 * e if name == "HSDP" else 0  # the sums go on to who holds them too, as they are
    once = name in ("HSDP", "optimizer over all")
    out = {
        "inside": gathers * 2 * interval + m * share,
        "between": (
            {"in groups": gathers * interval, "HSDP": 0}.get(name, interval)
            + (1 if once else m) * sums
            + own
        ),
        MASTERS: 4 * (h if name == "HSDP" else e),
        PARAMETERS: 2 * interval if name in ("optimizer over all", "second copy") else 0,
    }
    if name == "all ranks":
        out |= {
            "inside": gathers * interval + m * sums,
            "between": 2 * gathers * interval + 2 * m * sums,
        }
    if gathered is not None and not out[PARAMETERS]:
        out[PARAMETERS] = interval * (2 if name == "HSDP" else 1)
    return out


#: Every part with all codecs, one without divisions with none.
CASES = [
    (name, codecs, m) for codecs, m in CODECS for name in PARTS if name != "all ranks" or not codecs
]


def counted_and_expected(
    cases: list[tuple[str, dict[str, str], int]],
) -> list[tuple[str, dict[str, int], dict[str, int]]]:
    """(recipe, what was counted, what the formula says)"""
    os.environ |= {"LOCAL_WORLD_SIZE": "2", "WORLD_SIZE": "4"}
    found = []
    for name, codecs, m in cases:
        options = PARTS[name]
        more = {"group": 2} if codecs and name in ("all ranks", "in groups") else {}
        torch.manual_seed(0)
        model = onefold.shard(
            TinyMLP(8, 24, 2, 6),
            onefold.Recipe.zero(3, precision="bf16", **{**options, **codecs, **more}),
        )
        optimizer, engine = (
            torch.optim.SGD(model.parameters(), lr=0.1),
            onefold.engine_of(model),
        )
        batches = [features_of(i, 2, 8) for i in range(m)]
        train_steps(model, optimizer, batches, m)
        engine.traffic.reset()
        with counted_sends() as sent:
            train_steps(model, optimizer, batches, m)
        seen = {
            **engine.traffic.by_link(),
            **{k: engine.memory.now().get(k, 0) for k in (MASTERS, PARAMETERS)},
        }
        counted = sent.payload + sent.control - engine.traffic.control_bytes
        seen["beside the ledger"] = counted - seen["inside"] - seen["between"] + len(sent.others)
        expected = {"beside the ledger": 0}
        for unit, flat in ((each, flat) for each in engine.units for flat in each.flats):
            for key, nbytes in formula(
                name, codecs, flat.layout.numel, m, unit.name in ("(root)", "blocks.1")
            ).items():
                expected[key] = expected.get(key, 0) + nbytes
        found.append((f"{name}, {codecs}, {m} micro-batches", seen, expected))
    return found


def test_each_link_and_each_rank_carries_the_bytes_of_the_formula(sample: Any) -> None:
    assert len(CASES) == 1 + 4 * 4
    cases = sample(CASES, 3)
    for rank, found in enumerate(run_ranks(4, counted_and_expected, cases)):
        assert len(found) == len(cases)
        for what, seen, expected in found:
            assert seen == expected, f"rank {rank}, {what}: {seen}, expected {expected}"


def test_all_three_parts_send_three_quarters_of_the_bytes_between_nodes() -> None:
    """In equivalents of Ψ in 16 bits, of which all ranks send 3: half for parameters, a quarter for
    gradients, and scales under 3 %.
    """
    numel = 4 * 256 * 1000
    between = formula("second copy", {"gather_codec": "int8", "reduce_codec": "int4"}, numel, 1)[
        "between"
    ]
    assert (
        between == pytest.approx(0.75 * 1.03 * 2 * numel / 4, rel=0.03)
        and between > 0.75 * 2 * numel / 4
    )
    assert formula("all ranks", {}, numel, 1)["between"] == 3 * 2 * numel / 2  # of what a node has


WITH_EVERYTHING: list[dict[str, Any]] = [
    {
        "second_copy": True,
        "group": 2,
        "gather_codec": "int8",
        "reduce_codec": "int4",
        "error_feedback": True,
    },
    {
        "shard_group": 2,
        "gather_codec": "int8",
        "reduce_codec": "int8",
        "wire_rounding": "stochastic",
    },
]


def left_behind(recipes: list[dict[str, Any]]) -> list[str]:
    """After some steps, and after the model has gone, of a recipe with everything."""
    gc.collect()
    gc.disable()  # nothing may wait for the collector
    found, before = [], living_bytes()
    for options in recipes:
        model = onefold.shard(TinyMLP(8, 24, 2, 6), onefold.Recipe.zero(3, **options))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        batches = [features_of(i, 2, 8) for i in range(4)]
        train_steps(model, optimizer, batches, 2)
        living_bytes()
        objects, living = len(gc.get_objects()), living_bytes()
        for _ in range(7):
            train_steps(model, optimizer, batches, 2)
        grown = len(gc.get_objects()) - objects, living_bytes() - living
        del model, optimizer
        left = living_bytes() - before
        if grown[0] > 100 or grown[1] > 4096 or left > 4096:
            found.append(
                f"{options}: {grown} objects and bytes more after 14 steps, {left} bytes after the"
                " model"
            )
    return found


def test_groups_and_codecs_leave_nothing_behind(sample: Any) -> None:
    assert run_ranks(4, left_behind, sample(WITH_EVERYTHING, 2)) == [[]] * 4
