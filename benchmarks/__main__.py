"""The runner: `python -m benchmarks NAME [options]`. Without a name it lists the benchmarks, with
`NAME --help` it says what one measures, and how.
"""

from __future__ import annotations

import ast
import importlib
import sys
from pathlib import Path

HERE = Path(__file__).parent
NAMES = (
    "peers", "axes", "offload", "checkpoint", "whole", "trainer", "host_time", "wires", "convergence",
    "plan_matrix", "predicted", "nvme", "codecs", "exports", "gpu", "reach", "validation",
)  # fmt: skip


def about(name: str) -> str:
    """The first line of what a benchmark says of itself; nothing is imported."""
    path = HERE / f"{name}.py"
    path = path if path.exists() else HERE / name / "__init__.py"
    return (ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or "").splitlines()[0]


def main(arguments: list[str]) -> int:
    """What the benchmark answers; 2 for a name that is none."""
    if arguments and arguments[0] in NAMES:
        status: int = importlib.import_module(f"benchmarks.{arguments[0]}").main(arguments[1:])
        return status
    if arguments and not arguments[0].startswith("-"):
        names = ", ".join(NAMES)
        print(
            f"error: there is no benchmark {arguments[0]!r}; choose from {names}", file=sys.stderr
        )
        return 2
    print(__doc__)
    for name in NAMES:
        print(f"{name:12} {about(name)}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
