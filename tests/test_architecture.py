"""The links of docs/ARCHITECTURE.md lead to what they name.

python tests/test_architecture.py --write      # moves the links to the lines where things are now
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

PAGE = Path(__file__).resolve().parents[1] / "docs" / "ARCHITECTURE.md"
LINK = re.compile(r"\[(?P<text>[^\]]+)\]\((?P<path>\.\./[^)#]+)(?:#L(?P<line>\d+))?\)")


def definitions(tree: ast.Module) -> dict[str, int]:
    """The line of each function, class and method, by its qualified name."""
    found = {}

    def visit(body: list[ast.stmt], prefix: str) -> None:
        for node in body:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                found[prefix + node.name] = node.lineno
                if isinstance(node, ast.ClassDef):
                    visit(node.body, f"{prefix}{node.name}.")

    visit(tree.body, "")
    return found


def line_of(text: str, path: Path) -> int | None:
    """The line that a link with this text leads to; None if there is no such thing in `path`."""
    source = path.read_text()
    if text.startswith("Note: "):
        # The first mention is where the note stands: others cite it further down, or elsewhere
        words = text.split()
        pattern = re.compile(
            r"^[ \t]*\[" + r"\s+".join(map(re.escape, words)) + r"\]", re.MULTILINE
        )
        hit = pattern.search(source)
        return source[: hit.start()].count("\n") + 1 if hit else None
    return definitions(ast.parse(source)).get(text.strip("`"))


def links() -> Iterator[tuple[str, Path, int | None]]:
    for hit in LINK.finditer(PAGE.read_text()):
        line = hit["line"]
        yield hit["text"], (PAGE.parent / hit["path"]).resolve(), int(line) if line else None


def test_every_link_leads_to_the_line_that_it_names() -> None:
    wrong, seen = [], 0
    for text, path, line in links():
        seen += 1
        if not path.is_file():
            wrong.append(f"{text}: there is no {path.name}")
        elif line is not None and line_of(text, path) != line:
            wrong.append(f"{text}: {path.name} has it in line {line_of(text, path)}, not {line}")
    assert not wrong, "\n".join(["python tests/test_architecture.py --write moves links:", *wrong])
    assert seen > 50


def write() -> None:
    """Move the links of the page."""

    def moved(hit: re.Match[str]) -> str:
        path = (PAGE.parent / hit["path"]).resolve()
        line = line_of(hit["text"], path) if path.is_file() and hit["line"] else None
        return f"[{hit['text']}]({hit['path']}#L{line})" if line is not None else hit.group()

    PAGE.write_text(LINK.sub(moved, PAGE.read_text()))


if __name__ == "__main__" and "--write" in sys.argv:
    write()
