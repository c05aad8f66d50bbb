"""Rooms import the rooms below them, and nothing imports in a circle: the contracts in pyproject.toml,
and what they leave out. The tables of rooms and files are what is there.
"""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

pytest.importorskip("importlinter")
ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "src" / "onefold"
CONTRACTS = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"][
    "contracts"
]


def contracts(source: Path, folder: Path) -> tuple[int, str]:
    """(exit status, what was said) of the contracts over the packages in `source`."""
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


def copied(folder: Path) -> Path:
    """A copy of the package and of its benchmarks."""
    caches = shutil.ignore_patterns("__pycache__")
    figures = shutil.ignore_patterns("__pycache__", "results", "data")
    shutil.copytree(PACKAGE, folder / "source" / "onefold", ignore=caches)
    shutil.copytree(ROOT / "benchmarks", folder / "source" / "benchmarks", ignore=figures)
    return folder / "source"


def test_rooms_import_the_rooms_below_them_and_nothing_goes_round(tmp_path: Path) -> None:
    status, said = contracts(copied(tmp_path), tmp_path)
    assert status == 0 and f"{len(CONTRACTS)} kept, 0 broken" in said, said


@pytest.mark.parametrize(
    ("file", "line", "broken"),
    [
        (
            "onefold/layout/flat.py",
            "import onefold.comm.group",
            "rooms import the rooms below them",
        ),
        (
            "onefold/runtime/differentiate.py",
            "def late():\n    import onefold.quant",
            "rooms import the rooms below them",
        ),
        ("onefold/quant/scales.py", "import onefold.quant.blockwise", "no circles"),
        ("benchmarks/peers/settings.py", "import benchmarks.offload.sides", "no circles"),
        (
            "benchmarks/wires/sides.py",
            "def late():\n    import benchmarks.wires.worker",
            "no circles",
        ),
        (
            "onefold/doctor/bench.py",
            "import benchmarks",
            "the package does not know its benchmarks",
        ),
    ],
    ids=["upwards", "inside a function", "round", "benchmarks", "a benchmark", "outwards"],
)
def test_an_import_that_goes_up_or_round_is_noticed(
    file: str, line: str, broken: str, tmp_path: Path
) -> None:
    source = copied(tmp_path)
    with (source / file).open("a", encoding="utf-8") as out:
        out.write(f"\n\n{line}\n")
    status, said = contracts(source, tmp_path)
    assert status == 1 and f"{broken} BROKEN" in said, said


@pytest.mark.parametrize(
    "file",
    [
        *(
            "runtime/gather.py",
            "runtime/gather_paths.py",
            "runtime/reduce.py",
            "runtime/reduce_paths.py",
        ),
        *("runtime/reduce_paths.py", "quant/gather_paths.py", "quant/reduce_paths.py"),
    ],
)
def test_what_gathers_and_reduces_knows_no_engine(file: str) -> None:
    """It is given what it works with (runtime/resources.py)."""
    tree = ast.parse((PACKAGE / file).read_text())
    names = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    attributes = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    modules = {node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert not {"engine", "Engine"} & (names | attributes), file
    assert not any("engine" in module for module in modules), file


def test_what_the_engine_is_made_of_does_not_name_it() -> None:
    """Not even for its type: it takes what it works with, and parameters see the engine that they
    belong to as an `OwningEngine` (runtime/parameters/parameter.py).
    """
    import grimp

    graph = grimp.build_graph("onefold", exclude_type_checking_imports=True, cache_dir=None)
    parts = graph.find_upstream_modules("onefold.runtime.engine")
    assert {"onefold.runtime.forward", "onefold.runtime.flat", "onefold.comm.group"} <= parts
    wrong = []
    for module in parts:
        path = ROOT / "src" / Path(*module.split("."))
        file = path.with_suffix(".py")  # a folder of that name may be left from before
        file = file if file.is_file() else path / "__init__.py"
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ImportFrom) and node.module == "onefold.runtime.engine":
                wrong.append(module)
    wrong = [module for module in wrong if module not in ("onefold", "onefold.runtime")]
    assert not wrong, wrong


def rooms() -> set[str]:
    """The rooms of the package: its folders, and its files by name."""
    folders = {p.name for p in PACKAGE.iterdir() if (p / "__init__.py").is_file()}
    return folders | {p.name for p in PACKAGE.glob("*.py") if not p.name.startswith("__")}


def in_order() -> list[str]:
    """The rooms from the top, as the contract of imports in pyproject.toml has them."""
    (layers,) = (c["layers"] for c in CONTRACTS if c["type"] == "layers")
    names = [name.strip() for layer in layers for name in layer.split("|")]
    return [n if (PACKAGE / n).is_dir() else f"{n}.py" for n in names if n != "__main__"]


def rows(page: str) -> list[str]:
    """The rooms that the table of `page` names, in its order."""
    found = []
    for line in (ROOT / page).read_text().partition("| ring |")[2].splitlines()[2:]:
        if not line.startswith("|"):
            break
        found += re.findall(r"`([^`]+)`", line.split("|")[2])
    return found


@pytest.mark.parametrize("page", ["CONTRIBUTING.md", "docs/ARCHITECTURE.md"])
def test_the_table_of_rooms_names_every_room_in_the_order_of_imports(page: str) -> None:
    named = rows(page)
    assert set(named) == rooms(), (
        f"{page} lacks {sorted(rooms() - set(named))}; gone: {sorted(set(named) - rooms())}"
    )
    assert named == in_order()


def test_the_contract_of_imports_names_every_room() -> None:
    assert set(in_order()) == rooms()


def reading_list(room: str) -> tuple[set[str], set[str]]:
    """(every word, the words in backquotes in rows of tables) of the docstring of `room`."""
    tree = ast.parse((PACKAGE / room / "__init__.py").read_text())
    text = ast.get_docstring(tree) or ""
    cells = [line.split("|")[2] for line in text.splitlines() if line.count("|") > 2]
    return set(re.findall(r"\w+", text)), set(re.findall(r"`(\w+)`", " ".join(cells)))


@pytest.mark.parametrize(
    "room",
    [
        *("checkpoint", "comm", "device", "doctor", "machine", "offload", "plan", "runtime"),
        *("tiling", "train"),
    ],
)
def test_a_room_with_a_reading_list_names_every_file(room: str) -> None:
    here = {p.stem for p in (PACKAGE / room).glob("*.py")} - {"__init__"}
    words, listed = reading_list(room)
    assert here <= words, f"not in onefold/{room}/__init__.py: {sorted(here - words)}"
    folders = {p.parent.name for p in (PACKAGE / room).glob("*/__init__.py")}
    gone = listed - here - folders
    assert not gone, f"onefold/{room}/__init__.py names {sorted(gone)}, which are gone"


def circles(imports: dict[str, set[str]]) -> list[set[str]]:
    """The groups of modules that reach each other (Tarjan's strongly connected components)."""
    number: dict[str, int] = {}
    lowest: dict[str, int] = {}
    path: list[str] = []
    found = []

    def visit(module: str) -> None:
        number[module] = lowest[module] = len(number)
        path.append(module)
        for other in imports[module]:
            if other not in number:
                visit(other)
            if other in path:
                lowest[module] = min(lowest[module], lowest[other])
        if lowest[module] == number[module]:
            group = set(path[path.index(module) :])
            del path[path.index(module) :]
            if len(group) > 1:
                found.append(group)

    for module in imports:
        if module not in number:
            visit(module)
    return found


def test_no_module_imports_itself_by_a_detour() -> None:
    """The contract "no circles" looks at siblings; here a package and its own modules count too.
    Imports inside functions are imports.
    """
    import grimp

    graph = grimp.build_graph(
        "onefold", "benchmarks", exclude_type_checking_imports=True, cache_dir=None
    )
    imports = {m: set(graph.find_modules_directly_imported_by(m)) for m in graph.modules}
    assert circles(imports) == []
    assert len(imports) > 400
    assert circles({"a": {"b"}, "b": {"c"}, "c": {"b"}, "d": {"a"}}) == [{"b", "c"}]


def test_below_the_tools_not_even_a_type_comes_from_a_room_above() -> None:
    """The contracts leave imports under TYPE_CHECKING out; those of the core, of the capabilities
    and of what puts them together go down too.
    """
    import grimp

    graph = grimp.build_graph("onefold", cache_dir=None)
    height = {room.removesuffix(".py"): -n for n, room in enumerate(in_order())}
    seen, upwards = 0, []
    for module in graph.modules - {"onefold", "onefold.__main__"}:
        for other in graph.find_modules_directly_imported_by(module) - {"onefold"}:
            if height[module.split(".")[1]] > height["unsharded"]:
                continue
            seen += 1
            if height[module.split(".")[1]] < height[other.split(".")[1]]:
                upwards.append(f"{module} imports {other}")
    assert not upwards and seen > 500


def test_suites_name_files_that_are_there() -> None:
    """pytest runs nothing at all where one of its files is missing: `make test-processors` did."""
    import under_load
    import waits_taken_out

    environment = {k: v for k, v in os.environ.items() if not k.startswith(("MAKE", "MFLAGS"))}
    said = subprocess.run(
        ["make", "-s", "--eval", "named: ; @echo $(BITS)", "named"],
        cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300, check=True,
    )  # fmt: skip
    bits = said.stdout.split()
    assert min(len(bits), len(under_load.FILES), len(waits_taken_out.TESTS)) > 5
    named = {*bits, *under_load.FILES, *waits_taken_out.TESTS}
    named |= {f"src/onefold/{place}" for place in waits_taken_out.OUTSIDE}
    named |= {f"src/onefold/{place}" for place in waits_taken_out.NOT_WAITS}
    assert sorted(name for name in named if not (ROOT / name.partition("::")[0]).exists()) == []
