"""`--help` on a narrow terminal: every option can be read, and paragraphs are wrapped once."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from onefold.cli.app import app


def commands(part: Any, *names: str) -> Iterator[list[str]]:
    """The words of each command, groups included."""
    yield list(names)
    for name, inner in getattr(part, "commands", {}).items():
        yield from commands(inner, *names, name)


@pytest.mark.parametrize("width", [80, 120])
def test_help_cuts_nothing_and_breaks_no_paragraph_early(width: int) -> None:
    found = list(commands(typer.main.get_command(app)))
    assert len(found) > 9
    for words in found:
        said = CliRunner().invoke(app, [*words, "--help"], env={"COLUMNS": str(width)})
        assert said.exit_code == 0 and "\u2026" not in said.output, f"{words}\n{said.output}"
        for line, following in pairwise(said.output.splitlines()):
            text, word = line.strip(), following.split()
            if text and word and re.match(r" \w", line) and re.match(r" \w", following):
                # The first word of a line did not fit on the line before
                assert len(line.rstrip()) + 1 + len(word[0]) >= width - 1, f"{words}: {line!r}"
