"""What gradients on their way to the host add to a step: by the timeline of a simulation.
`python -m benchmarks.copies [--cases llama-3-8b:4:1 ...] [--link 50] [--name copies]`.

The real engine launches a step as one rank of several, on simulated streams that take the time of a
GPU (onefold/simulation). Stage 2 in bf16, blocks recomputed, optimizer states on the host. It does
so twice:

| row    | copies larger than the window    | later micro-batches are added |
|--------|----------------------------------|-------------------------------|
| before | are waited for when they begin   | by the host, which waits      |
| now    | run beside the next block        | by the device                 |

Nothing is computed and nothing is copied. Writes benchmarks/results/NAME.json.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import onefold
from benchmarks import harness, pages
from onefold.device import copies
from onefold.offload.storage import OffloadStorage
from onefold.plan import hardware
from onefold.simulation.simulate import simulate
from onefold.simulation.timeline import COPIES

SCHEMA = "onefold-copies/1"
#: model:ranks:micro-batches
CASES = ("llama-3-8b:4:1", "llama-3-8b:1:1", "llama-3-8b:8:4", "llama-3-70b:8:1")
#: Micro-batches that are run; a step of more has others like the middle one.
RUN = 3
COLUMNS: pages.Columns = {
    "case": pages.shown("case"),
    "row": pages.shown("row"),
    "step ms": pages.shown("step_s", "{:,.0f}", 1e-3),
    "passes wait ms": pages.shown("waits_s", "{:,.1f}", 1e-3),
    "host adds ms": pages.shown("adds_s", "{:,.1f}", 1e-3),
    "update ms": pages.shown("update_s", "{:,.0f}", 1e-3),
    "link busy ms": pages.shown("down_s", "{:,.0f}", 1e-3),
}


@contextmanager
def as_before() -> Iterator[None]:
    """Wait for the newest copy too, and let the host add."""
    made = OffloadStorage.__init__

    def make(self: Any, *given: Any) -> None:
        made(self, *given)
        self.adds_on_device = False

    with ExitStack() as stack:
        stack.enter_context(
            patch.object(copies, "within", lambda window, held, sizes: held <= window)
        )
        stack.enter_context(patch.object(OffloadStorage, "__init__", make))
        yield


def row(
    case: str, link: float, tokens: int, before: bool, on_device: float = 0.0
) -> dict[str, Any]:
    """One step.

    Args:
        link: bytes a second between one GPU and the host, in each direction.
        on_device: seconds of the engine's own kernels where the host adds nothing.
    """
    model, *counts = case.split(":")
    gpus, micro_batches = map(int, counts)
    machine = hardware.machine(gpus, gpus, "h100-80")
    machine = replace(
        machine,
        gpu=replace(machine.gpu, host_link=link),
        host=replace(machine.host, link_bandwidth=link * gpus),
    )
    with ExitStack() as stack:
        if before:
            stack.enter_context(as_before())
        found = simulate(
            model,
            onefold.Recipe.zero(2, precision="bf16", offload_optimizer="cpu"),
            gpus,
            seq=tokens,
            micro_batches=min(micro_batches, RUN),
            checkpointing="full",
            machine=machine,
        )
    timeline = found.timeline
    if timeline is None:
        raise SystemExit("a timeline needs the model's code: pip install 'onefold[train]'")
    parts = timeline.of(micro_batches)
    return {
        "case": case,
        "row": "before" if before else "now",
        "model": model,
        "ranks": gpus,
        "micro_batches": micro_batches,
        "tokens": tokens,
        "step_s": parts.step,
        "waits_s": parts.exposed.get(COPIES["down"], 0.0),
        "adds_s": parts.engine - on_device if before else 0.0,
        "engine_s": parts.engine,
        "exposed_s": dict(parts.exposed),
        "update_s": parts.optimizer,
        "down_s": timeline.busy["host link down"] * micro_batches / timeline.micro_batches,
    }


@harness.command(
    "copies",
    __doc__,
    cases=(list(CASES), "MODEL:RANKS:MICRO-BATCHES"),
    tokens=(8192, "tokens a sample"),
    link=(50.0, "GB/s in each direction"),
)
def main(options: harness.Options) -> int:
    rows = []
    for case in options.cases:
        now = row(case, options.link * 1e9, options.tokens, False)
        then = row(case, options.link * 1e9, options.tokens, True, now["engine_s"])
        rows += [then, now]
        pages.show(pages.table(COLUMNS, rows[-2:]))
    pages.show(pages.table(COLUMNS, rows))
    harness.keep(options, SCHEMA, rows=rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
