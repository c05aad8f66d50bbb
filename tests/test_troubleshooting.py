"""docs/troubleshooting.md: each message it quotes is in the source, and each error that the core
raises at a user is on the page.

A quote has `…` where the message has a value. It is found if its fixed parts stand, in order, in one
message of the source.
"""

from __future__ import annotations

import re
import sys
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
sys.path.append(str(ROOT / "docs"))
from messages import expressions, messages, page, text_of

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


@cache
def sentences() -> tuple[str, ...]:
    """Every text of the source."""
    return tuple({text for _, node in expressions() if (text := text_of(node))})


def raised() -> dict[str, str]:
    """{file:line: message} of what the core raises, where the source spells it at the raise. What
    begins with "expected" is the end of `name=value: expected ...`.
    """
    return {
        f"{m.file}:{m.line}": m.text
        for m in messages()
        if m.file not in INSIDE
        and not m.text.startswith("expected ")
        and any(m.file == c or m.file.startswith(f"{c}/") for c in CORE)
    }


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
        where: text
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


def test_every_message_is_on_the_page_of_the_site() -> None:
    made = page()
    missing = [m for m in messages() if " ".join(m.text.split()).replace("|", "\\|") not in made]
    assert not missing, "give the room a part in docs/messages.py: " + missing[0].file
    assert len(messages()) > 500
