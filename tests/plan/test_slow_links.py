"""Where nodes hang on slow links: what the plan takes, what it only names, and that both are what
the formulas say.
"""

from __future__ import annotations

from typing import Any

import pytest
from benchmarks.validation.formulas import traffic
from legs import by_link

import onefold
from onefold.plan.hardware import machine
from onefold.plan.job import COMMUNICATION, Job
from onefold.plan.planner import Plan, plan
from onefold.plan.shapes import architecture
from onefold.plan.states import topology_of, units_of
from onefold.plan.wire import legs_of
from onefold.quant import codec
from onefold.recipe import Recipe


def of(link: str, ranks: int = 16, name: str = "gpt2-medium", **job: Any) -> Plan:
    return plan(name, machine(ranks, 8, "a100-80", link), Job(seq=512, **job), largest=False)


@pytest.mark.parametrize(("link", "stages"), [("100g", ()), ("10g", (2,)), ("1g", (3,))])
def test_what_rounds_is_named_and_never_taken(link: str, stages: tuple[int, ...]) -> None:
    found = plan(
        "gpt2-medium", machine(16, 8, "a100-80", link), Job(seq=512), stages=stages, largest=False
    )
    assert found.slow_links is not None and found.recommended is not None
    slow, best = found.slow_links, found.recommended
    plain = next(c for c in slow.rows if c.scheme == best.scheme.with_(communication=""))
    assert not best.scheme.way.lossy and best.scheme.stage == plain.scheme.stage and best.fits
    flat = next(c for c in slow.rows if c.scheme == best.scheme.with_(communication="flat"))
    assert (
        best.account.seconds["step"] <= plain.account.seconds["step"] < flat.account.seconds["step"]
    )
    assert (
        found.recipe.parameters.codec is found.recipe.gradients.codec is None
        and found.recipe.group in (None, "node")
    )
    assert slow.named is not None and COMMUNICATION[slow.named.scheme.communication].lossy
    assert (
        "yours to ask for: Recipe.zero(" in slow.why[-1] and "--reduce-codec int4" in slow.why[-1]
    )
    said = slow.why[-1].split("Recipe.zero(")[1].split(")")[0]
    asked = eval(f"dict(stage={said})")  # the line is Python
    assert Recipe.zero(**asked).gradients.codec == "int4"


@pytest.mark.parametrize("link", ["100g", "1g"])
def test_every_part_sends_less_between_nodes_than_none_of_it_and_all_of_them_least(
    link: str,
) -> None:
    slow = of(link).slow_links
    assert slow is not None
    at_3 = {c.scheme.communication: c.account for c in slow.rows if c.scheme.stage == 3}
    assert set(at_3) == set(COMMUNICATION)
    between = {name: account.node_links["between"] for name, account in at_3.items()}
    for part in ("qwZ", "hpZ", "qgZ", "HSDP", "hybrid"):
        assert between["ZeRO++"] < between[part] < between[""] < between["flat"], between
    assert at_3["ZeRO++"].seconds["step"] == min(a.seconds["step"] for a in at_3.values())
    assert at_3["hpZ"].rest_bytes > at_3["flat"].rest_bytes == at_3[""].rest_bytes


WAYS: dict[str, dict[str, Any]] = {
    "pairwise": {"group": "flat"},
    "groups": {},
    "second copy": {"second_copy": True},
    "shard group": {"shard_group": "node"},
    "optimizer over all": {"shard_group": "node", "optimizer_over": "all"},
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("gathered", [None, "int8"])
@pytest.mark.parametrize("reduced", [None, "int4"])
def test_what_crosses_a_nodes_border_is_the_formula(
    way: str, gathered: str | None, reduced: str | None
) -> None:
    """All ranks of a node of eight together, three nodes, three micro-batches; every unit of a GPT
    that is gathered in both passes, less a gather of those at the turn, which the backward pass
    finds gathered.
    """
    shape, per_node, nodes, micro = architecture("gpt2"), 8, 3, 3
    recipe = Recipe.zero(
        3, precision="bf16", gather_codec=gathered, reduce_codec=reduced, **WAYS[way]
    )
    topology = topology_of(recipe, per_node * nodes, per_node)
    units = [
        u
        for u in units_of(shape, recipe, per_node * nodes, per_node=per_node)
        if not u.looks_up_only
    ]
    legs = legs_of(units, recipe, micro)
    sent = sum(by_link(legs, topology, per_node, rank)["between"] for rank in range(per_node))
    e, r = (
        codec(name).encoded_bytes(1 << 16) / (2 << 16) if name else 1.0
        for name in (gathered, reduced)
    )
    numel = sum(f.numel for u in units for f in u.flats)
    told = traffic.border_bytes(numel, way, per_node, nodes, 2, micro, gathered=e, reduced=r)
    turn = sum(f.numel for u in units if u.name in ("(root)", "transformer.h.11") for f in u.flats)
    told -= (
        micro * {"pairwise": per_node, "groups": 1}.get(way, 0) * e * turn * 2 * (nodes - 1) / nodes
    )
    assert sent == pytest.approx(told, rel=2e-3 if gathered or reduced else 1e-9)


def test_zeropp_sends_three_quarters_of_a_pass_between_nodes_and_few_scales() -> None:
    whole = traffic.border_bytes(1e9, "second copy", 8, 2, gathered=0.5, reduced=0.25)
    assert whole == pytest.approx(0.75 * 2e9 / 2)
    found = onefold.plan(
        "llama-3-8b",
        gpus=16,
        link="10g",
        stage=3,
        seq=512,
        largest=False,
        second_copy=True,
        gather_codec="int8",
        reduce_codec="int4",
    )
    between = found.stages[0].account.node_links["between"]
    assert 1 < between / (0.75 * 2 * found.model.numel / 2) < 1.03
    assert found.recipe.parameters.codec == "int8" and found.recipe.gradients.codec == "int4"
