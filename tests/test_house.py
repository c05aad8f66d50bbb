"""Rooms import the rooms below them, and nothing imports in a circle: the contracts in pyproject.toml."""

from __future__ import annotations

import ast
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("importlinter")
ROOT = Path(__file__).resolve().parents[1]


def contracts(source: Path, folder: Path) -> tuple[int, str]:
    """(exit status, what was said) of the contracts over the package in `source`."""
    command = [
        sys.executable,
        "-c",
        "import sys; from importlinter.cli import lint_imports; "
        f"sys.exit(lint_imports(config_filename={str(ROOT / 'pyproject.toml')!r}, cache_dir=None))",
    ]
    environment = {**os.environ, "PYTHONPATH": str(source)}
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300
    )
    return done.returncode, done.stdout + done.stderr


def test_rooms_import_the_rooms_below_them_and_nothing_goes_round(tmp_path: Path) -> None:
    status, said = contracts(ROOT / "src", tmp_path)
    assert status == 0 and "2 kept, 0 broken" in said, said


@pytest.mark.parametrize(
    ("file", "line", "broken"),
    [
        ("layout/flat.py", "import onefold.comm.group", "rooms import the rooms below them"),
        (
            "runtime/nested.py",
            "def late():\n    import onefold.quant",
            "rooms import the rooms below them",
        ),
        ("quant/scales.py", "import onefold.quant.blockwise", "no circles"),
    ],
    ids=["upwards", "inside a function", "round"],
)
def test_an_import_that_goes_up_or_round_is_noticed(
    file: str, line: str, broken: str, tmp_path: Path
) -> None:
    source = tmp_path / "source"
    shutil.copytree(
        ROOT / "src" / "onefold",
        source / "onefold",
        ignore=shutil.ignore_patterns("__pycache__"),
    )
    with (source / "onefold" / file).open("a", encoding="utf-8") as out:
        out.write(f"\n\n{line}\n")
    status, said = contracts(source, tmp_path)
    assert status == 1 and f"{broken} BROKEN" in said, said


@pytest.mark.parametrize(
    "file",
    [
        *("runtime/gather.py", "runtime/gathers.py", "runtime/reduce.py", "runtime/reductions.py"),
        *("runtime/native_reductions.py", "quant/gathers.py", "quant/reductions.py"),
    ],
)
def test_what_gathers_and_reduces_knows_no_engine(file: str) -> None:
    """It is given what it works with (runtime/progress.py)."""
    tree = ast.parse((ROOT / "src" / "onefold" / file).read_text())
    names = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    attributes = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    modules = {node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert not {"engine", "Engine"} & (names | attributes), file
    assert not any("engine" in module for module in modules), file
