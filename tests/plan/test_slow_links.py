"""Where nodes hang on slow links: what the plan takes, and what it only names. That bytes between nodes
are those planned is asked in tests/promises/test_two_nodes.py.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from onefold.plan.api import planned as plan
from onefold.plan.hardware import machine
from onefold.plan.job import COMMUNICATION, Job
from onefold.recipe import Recipe


@pytest.mark.parametrize(
    ("link", "stages"),
    [pytest.param("25g", (), marks=pytest.mark.slow), ("10g", (2,)), ("1g", (3,))],
)
def test_what_rounds_is_named_and_never_taken(link: str, stages: tuple[int, ...]) -> None:
    found = plan(
        "gpt2-medium", machine(16, 8, "a100-80", link), Job(seq=512), stages=stages, largest=False
    )
    best, ways = found.recommended, found.slow_links
    assert best is not None
    plain = next(c for c in ways if c.scheme == replace(best.scheme, communication=""))
    assert not best.scheme.way.lossy and best.scheme.stage == plain.scheme.stage and best.fits
    flat = next(c for c in ways if c.scheme == replace(best.scheme, communication="flat"))
    assert (
        best.account.seconds["step"] <= plain.account.seconds["step"] < flat.account.seconds["step"]
    )
    assert (
        found.recipe.parameters.codec is found.recipe.gradients.codec is None
        and found.recipe.inner in (None, "node")
    )
    why = next(note for note in found.notes if "yours to ask for: Recipe.zero(" in note)
    assert COMMUNICATION[why.split()[0]].lossy
    said = why.split("Recipe.zero(")[1].split(")")[0]
    asked = eval(f"dict(stage={said})")  # the line is Python
    assert Recipe.zero(**asked).gradients.codec == "int4"
