"""The chapter "groups": groups and codecs on one GPU.

Four ranks over gloo share the GPU and pretend to be two nodes. Asked of each recipe: that it trains
as plain stage 3 does (to the bit where nothing is encoded and the groups are the same), that
streams and prefetching change no bit of it, and that its bytes between nodes are the formula's.
"""

from __future__ import annotations

import argparse
from typing import Any

from benchmarks.harness import Table
from benchmarks.on_gpu.run import mean_losses, relative, run
from benchmarks.peers.settings import Setting
from benchmarks.wires.settings import HOSTS, RANKS_A_HOST, SIDES

REFERENCE = "onefold-3-groups"
RECIPES = (
    REFERENCE,
    "zeropp-hpz",
    "zeropp-qwz",
    "zeropp-qgz",
    "zeropp",
    "hsdp",
    "hybrid-optimizer",
)
TWICE = (REFERENCE, "zeropp", "hsdp")
"""Recipes that run a second time, with `overlap=False`."""
STEPS = 6


def chapter(options: argparse.Namespace) -> tuple[Table, list[dict[str, Any]]]:
    """A row a recipe and precision."""
    columns = (
        "recipe",
        "precision",
        "last loss",
        "to groups of stage 3",
        "overlap off",
        "between, 2Ψ a node",
        "formula",
    )
    table = Table(
        f"Groups and codecs: {HOSTS * RANKS_A_HOST} ranks in {HOSTS} pretended nodes, one GPU",
        columns,
    )
    outcomes = []
    for precision in options.precisions:
        setting = Setting(
            model="gpt-tiny",
            tokens=128,
            precision=precision,
            ranks=HOSTS * RANKS_A_HOST,
            warmup=0,
            steps=STEPS,
            threads=1,
            device=options.device,
        )
        expected: list[float] | None = None
        for name in RECIPES:
            found = run(name, setting, options, ranks_a_node=RANKS_A_HOST)
            outcomes.append(found)
            if found["status"] != "ok":
                table.rows.append([name, precision, found["status"], *["–"] * 4])
                continue
            losses, same = mean_losses(found), "–"
            expected = losses if name == REFERENCE else expected
            if name in TWICE:
                apart = run(
                    name, setting, options, ranks_a_node=RANKS_A_HOST, changes={"overlap": False}
                )
                outcomes.append(apart)
                same = (
                    apart["status"]
                    if apart["status"] != "ok"
                    else "the same bits"
                    if mean_losses(apart) == losses
                    else "DIFFERS"
                )
                if same == "DIFFERS":
                    apart |= {
                        "status": "differs",
                        "error": (
                            f"{precision}: with overlap=False the losses are {mean_losses(apart)}"
                        ),
                    }
            far = f"{relative(losses, expected):.1e}" if expected else "–"
            table.rows.append(
                [name, precision, f"{losses[-1]:.6f}", far, same, *_bytes(name, setting, found)]
            )
    return table, outcomes


def _bytes(name: str, setting: Setting, found: dict[str, Any]) -> tuple[str, str]:
    """What a node's ranks send to the other node in a step, in bytes of 16-bit Ψ, and what the
    formula says of it.
    """
    side = SIDES[name]
    sent = sum(rank["between_bytes"] for rank in found["ranks"][:RANKS_A_HOST]) / STEPS
    of = 2 * found["ranks"][0]["numel"]
    wide = 2 if setting.precision == "fp32" else 1
    said = (
        "–"
        if side.between is None
        else f"{(side.between - side.encoded) * wide + side.encoded:.3f}"
    )
    return f"{sent / of:.3f}", said
