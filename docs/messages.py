"""The error messages of Onefold as its source spells them, for the page `messages.html` of the site
(docs/hooks.py) and for the test of docs/troubleshooting.md.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

SOURCE = Path(__file__).parents[1] / "src" / "onefold"
#: What stands for a value that the source fills in.
GAP = "…"
#: Exceptions that are raised at a user, and functions that make them.
KINDS = {
    "CalibrationError", "CheckpointError", "DamagedCheckpoint", "FileNotFoundError", "StoragelessError",
    "MemoryError", "ModuleNotFoundError", "NotImplementedError", "RunFileError", "RuntimeError",
    "ShardedParameterError", "StallError", "TierError", "TrainError", "UninitializedError", "ValueError",
}  # fmt: skip


class Message(NamedTuple):
    """A message, what is raised with it, and where: a file below src/onefold."""

    kind: str
    text: str
    file: str
    line: int


def text_of(node: ast.expr) -> str | None:
    """A text as far as the source spells it; `GAP` for what it fills in. None: it is no text."""
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else None
    if isinstance(node, ast.JoinedStr):
        return "".join(text_of(v) or GAP for v in node.values)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        left, right = text_of(node.left), text_of(node.right)
        return None if left is None and right is None else (left or GAP) + (right or GAP)
    return None


def expressions() -> Iterator[tuple[str, ast.expr]]:
    """(file below src/onefold, expression) of the whole source."""
    for path in sorted(SOURCE.rglob("*.py")):
        file = path.relative_to(SOURCE).as_posix()
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.expr):
                yield file, node


def messages() -> list[Message]:
    """What is raised with a message of its own: more than ten letters that the source spells."""
    found = []
    for file, node in expressions():
        if not (isinstance(node, ast.Call) and node.args):
            continue
        kind = getattr(node.func, "id", getattr(node.func, "attr", ""))
        text = text_of(node.args[0]) if kind in KINDS else None
        if text is not None and sum(map(str.isalnum, text)) > 10:
            found.append(Message(kind, text, file, node.lineno))
    return found


_PARTS = {
    "Recipes, layout": ("recipe", "layout"),
    "Sharding, training": ("sharding.py", "runtime", "comm", "memory.py", "device", "tiling", "parallel", "ema.py"),
    "Optimizers": ("optim", "quant"),
    "Offload": ("offload",),
    "Checkpoints": ("checkpoint", "inspection", "pretrained"),
    "DeepSpeed": ("deepspeed",),
    "Hugging Face": ("hf", "hosts.py"),
    "Lightning": ("lightning",),
    "The plan, the doctor": ("plan", "simulation", "tracing", "doctor", "machine"),
    "Observing, the report": ("observe",),
    "Training from the command line": ("train", "models", "data", "processes", "reading.py", "wording.py", "cli"),
}  # fmt: skip


def page() -> str:
    """Every message in Markdown, grouped by what it is about."""
    lines = [
        "# Every error message",
        "",
        f"As the source spells them; `{GAP}` stands for what differs. Causes and more cures are in",
        "[troubleshooting](troubleshooting.md).",
    ]
    every = messages()
    for heading, parts in _PARTS.items():
        own = [m for m in every if any(m.file == p or m.file.startswith(f"{p}/") for p in parts)]
        lines += ["", f"## {heading}", "", "| kind | message |", "|---|---|"]
        for kind, text in sorted({(m.kind, m.text) for m in own}, key=lambda row: row[::-1]):
            said = " ".join(text.split()).replace("|", "\\|")
            lines.append(f"| {kind} | ```` {said} ```` |")
    return "\n".join(lines) + "\n"
