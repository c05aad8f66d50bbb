"""benchmarks/results/matrix.md says what is found; see matrix.py."""

from __future__ import annotations

import importlib.metadata
import sys
from pathlib import Path

import pytest

pytest.importorskip("accelerate")
sys.path.append(str(Path(__file__).parent))
import matrix


def test_the_page_has_every_tool_and_feature_and_the_versions_that_are_here() -> None:
    page = matrix.PAGE.read_text()
    told = matrix.read(page)
    assert {tool.name: list(tool.features) for tool in matrix.TOOLS} == {
        name: list(rows) for name, rows in told.items()
    }
    for rows in told.values():
        for feature, cells in rows.items():
            assert len(cells) == 3 and all(
                cell == "equal" or cell.startswith(("within ", "refused (")) for cell in cells
            ), (feature, cells)
    pinned = (matrix.PAGE.parents[2] / "constraints.txt").read_text().split()
    for name in matrix.PACKAGES:
        version = importlib.metadata.version(name).partition("+")[0]
        if name == "torch" and f"torch=={version}" not in pinned:
            continue  # make test TORCH=...
        assert f"{name} {version}" in page, f"written with another {name}: run matrix.py write"


def test_a_difference_is_told_by_its_size() -> None:
    assert matrix.compared([1.0, 2.0], [1.0, 2.0]) == "equal"
    assert matrix.compared([1.0, 2.0000003], [1.0, 2.0]) == "within 2e-07"
    assert matrix.compared([1.0], [1.0]).startswith("wrong")
    assert matrix.compared([1.0, float("nan")], [1.0, 2.0]).startswith("wrong")
    assert matrix.compared([1.0, 3.0], [1.0, 2.0]).startswith("wrong")


def test_every_cell_is_as_the_page_says() -> None:
    """Equal is equal; what is close stays within ten times what the page says, since processors
    differ.
    """
    told = matrix.read(matrix.PAGE.read_text())
    wrong = []
    for tool, features in matrix.find().items():
        for feature, cells in features.items():
            for said, seen in zip(told[tool][feature], cells.values(), strict=True):
                near = said.startswith("within") and seen.startswith(("within", "equal"))
                if near and seen != "equal":
                    near = float(seen.split()[1]) <= 10 * float(said.split()[1])
                same = said == seen or (said.startswith("refused") and seen.startswith("refused: "))
                if not (near or same):
                    wrong.append(f"{tool}, {feature}: the page says {said!r}, found {seen!r}")
    assert not wrong, "\n".join(wrong)
