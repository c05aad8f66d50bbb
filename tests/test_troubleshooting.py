"""docs/troubleshooting.md: each message it quotes is in the source, and each error that the core
raises at a user is on the page.

A quote has `…` where the message has a value. It is found if its fixed parts stand, in order, in one
message of the source.
"""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "onefold"
PAGE = ROOT / "docs" / "troubleshooting.md"
#: Rooms and files whose errors a training script sees.
CORE = (
    "shard.py", "unsharded.py", "ema.py", "recipe", "runtime", "comm", "memory", "device", "optim",
    "offload", "tiling", "quant/moments.py", "quant/moment_packing.py",
)  # fmt: skip
#: Files that check what other files of the house hand them.
INSIDE = (
    "comm/codec.py", "comm/sums.py", "device/pinned.py", "offload/nvme/buffer.py",
    "offload/nvme/files.py", "offload/nvme/region.py", "offload/nvme/store.py",
)  # fmt: skip
KINDS = {
    "ValueError", "RuntimeError", "StallError", "ShardedParameterError", "UnsetError", "TierError",
    "HollowError", "MemoryError",
}  # fmt: skip
GAP = "\0"


def text_of(node: ast.expr) -> str | None:
    """A message as far as the source spells it; `GAP` for what it fills in. None: no text."""
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else None
    if isinstance(node, ast.JoinedStr):
        return "".join(text_of(v) or GAP for v in node.values)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        left, right = text_of(node.left), text_of(node.right)
        return None if left is None and right is None else (left or GAP) + (right or GAP)
    return None


@cache
def sentences() -> tuple[str, ...]:
    """Every text of the source."""
    found = set()
    for path in sorted(SOURCE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.expr) and (text := text_of(node)):
                found.add(text)
    return tuple(found)


def raised() -> dict[str, str]:
    """{file:line: message} of what the core raises, where the source spells it at the raise."""
    found = {}
    for path in sorted(SOURCE.rglob("*.py")):
        name = path.relative_to(SOURCE).as_posix()
        if name in INSIDE or not any(name == c or name.startswith(f"{c}/") for c in CORE):
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if (
                isinstance(node, ast.Call)
                and getattr(node.func, "id", getattr(node.func, "attr", "")) in KINDS
                and node.args
                and (text := text_of(node.args[0]))
                and len(re.sub(r"\W", "", text)) > 10
            ):
                found[f"{name}:{node.lineno}"] = text
    return found


def quotes() -> list[str]:
    """The messages in the first column of the page's tables."""
    rows = re.findall(r"(?m)^\| (`.+?`) \| ", PAGE.read_text(encoding="utf-8"))
    found = [a or b for row in rows for a, b in re.findall(r"`` (.+?) ``|`([^`]+)`", row)]
    return [quote for quote in found if " " in quote or "…" in quote]  # no names of exceptions


def says(message: str, quote: str) -> bool:
    """Whether the quote's fixed parts stand in the message, in order."""
    at = 0
    for part in quote.split("…"):
        at = message.find(part.strip(), at)
        if at < 0:
            return False
        at += len(part.strip())
    return True


@pytest.mark.parametrize("quote", quotes())
def test_a_message_that_is_quoted_is_in_the_source(quote: str) -> None:
    assert any(says(sentence, quote) for sentence in sentences()), (
        f"no message of the source reads {quote!r}: quote it as it is now"
    )


def test_what_the_core_raises_is_on_the_page() -> None:
    told = [quote for quote in quotes() if len(re.sub(r"\W", "", quote)) >= 7]
    missing = {
        where: text.replace(GAP, "…")
        for where, text in raised().items()
        if not any(says(text, quote) for quote in told)
    }
    listed = "\n".join(f"{where}: {text}" for where, text in missing.items())
    assert not missing, f"add to docs/troubleshooting.md, with cause and cure:\n{listed}"


def test_every_row_has_a_cause_and_a_cure() -> None:
    for line in PAGE.read_text(encoding="utf-8").splitlines():
        if line.startswith("| `") and line.count(" | ") >= 2:
            cells = [cell.strip() for cell in line.strip("|").split(" | ")]
            assert len(cells) == 3 and all(cells), line
