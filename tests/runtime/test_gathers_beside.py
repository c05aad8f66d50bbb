"""Gathers begin on the stream of the copies up, whatever they are made of."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest

import onefold
from models import TinyMLP
from ranks import run_ranks


def begun_inside(options: dict[str, Any]) -> list[tuple[str, bool]]:
    """(kind of gather, whether masters were copied inside of the context of that stream)."""
    recipe = onefold.Recipe.zero(3, precision="bf16", **options)
    model = onefold.shard(TinyMLP(), recipe)
    gatherer = onefold.engine_of(model).gather
    inside: list[int] = []
    found = []

    @contextlib.contextmanager
    def beside() -> Iterator[None]:
        inside.append(1)
        yield
        inside.pop()

    put = gatherer.put

    def noted(flat: Any, full: Any) -> None:
        found.append((type(flat.gather).__name__, bool(inside)))
        put(flat, full)

    gatherer.beside, gatherer.put = beside, noted  # type: ignore[method-assign]
    for unit in gatherer.units:
        if not unit.resident:
            gatherer.launch(unit)
            gatherer.release(unit)
    return found


@pytest.mark.parametrize(
    ("ranks", "options", "kind"),
    [
        (1, {}, "LocalGather"),
        (2, {}, "FlatGather"),
        (4, {"group": 2, "second_copy": True}, "SecondaryGather"),
        (2, {"gather_codec": "int8"}, "EncodedGather"),
        (
            4,
            {"group": 2, "second_copy": True, "gather_codec": "int8"},
            "EncodedSecondaryGather",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_masters_are_copied_on_the_stream_of_the_copies_up(
    ranks: int, options: dict[str, Any], kind: str
) -> None:
    for found in run_ranks(ranks, begun_inside, options):
        assert found and set(found) == {(kind, True)}
