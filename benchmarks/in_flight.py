"""What a bound in bytes, and a stream for sums, change in a step: by the timeline of a simulation.
`python -m benchmarks.in_flight [--models llama-3-8b llama-3-70b] [--gpus 8] [--name in_flight]`.

The real engine launches a step as one rank of several, on simulated streams that take the time of a
GPU (onefold/simulation). It does so four times:

| row     | in flight and ahead             | sums of parts run       |
|---------|---------------------------------|-------------------------|
| counts  | by `in_flight` and `prefetch`   | on the computing stream |
| bytes   | 1 GiB at most, or one           | on the computing stream |
| beside  | by `in_flight` and `prefetch`   | on a stream of their own |
| both    | 1 GiB at most, or one           | on a stream of their own |

Nothing is computed and nothing is sent, so this shows waits and bytes, not what two streams take
from each other's memory bandwidth. Writes benchmarks/results/NAME.json.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import onefold
from benchmarks import harness, pages
from onefold.comm import group
from onefold.device import new_stream
from onefold.memory import GATHERED, REDUCTION
from onefold.plan import hardware, replay
from onefold.runtime import schedule
from onefold.simulation.result import Simulation
from onefold.simulation.simulate import simulate

SCHEMA = "onefold-in-flight/1"
#: name -> (bounded in bytes, sums on a stream of their own)
ROWS = {
    "counts": (False, False),
    "bytes": (True, False),
    "beside": (False, True),
    "both": (True, True),
}
COLUMNS: pages.Columns = {
    "model": pages.shown("model"),
    "tokens": pages.shown("tokens", "{:,}"),
    "row": pages.shown("row"),
    "step ms": pages.shown("step_s", "{:.1f}", 1e-3),
    "waits ms": pages.shown("waits_s", "{:.1f}", 1e-3),
    "own kernels ms": pages.shown("engine_s", "{:.1f}", 1e-3),
    "reductions GB": pages.shown("reduction_bytes", "{:.2f}", 1e9),
    "gathered GB": pages.shown("gathered_bytes", "{:.2f}", 1e9),
    "peak GB": pages.shown("peak_bytes", "{:.2f}", 1e9),
}


@contextmanager
def as_in(bounded: bool, beside: bool) -> Iterator[None]:
    """Let the engine move units, and add up parts, as a row says."""

    def stream(device: Any, name: str = "", urgent: bool = False) -> Any:
        return None if name == "sums" and not beside else new_stream(device, name, urgent)

    with ExitStack() as stack:
        stack.enter_context(patch.object(group, "new_stream", stream))
        for module in (schedule, replay) if not bounded else ():
            stack.enter_context(patch.object(module, "LARGE_TRAFFIC", sys.maxsize))
        yield


def most(found: Simulation, category: str) -> int:
    """The most bytes of a category of memory in the step."""
    now = largest = 0
    for event in found.events:
        if event.what == category:
            now += event.nbytes
            largest = max(largest, now)
    return largest


def row(model: str, tokens: int, gpus: int, name: str) -> dict[str, Any]:
    """One step at stage 3 in bf16, with blocks that are recomputed."""
    machine = hardware.machine(gpus, min(gpus, 8), "h100-80")
    with as_in(*ROWS[name]):
        found = simulate(
            model,
            onefold.Recipe.zero(3, precision="bf16"),
            gpus,
            seq=tokens,
            checkpointing="full",
            machine=machine,
        )
    timeline = found.timeline
    if timeline is None:
        raise SystemExit("a timeline needs the model's code: pip install 'onefold[train]'")
    parts = timeline.parts
    return {
        "model": model,
        "tokens": tokens,
        "row": name,
        "step_s": timeline.step,
        "waits_s": parts.waits,
        "exposed_s": dict(parts.exposed),
        "engine_s": parts.engine,
        "host_s": parts.host,
        "reduction_bytes": most(found, REDUCTION),
        "gathered_bytes": most(found, GATHERED),
        "peak_bytes": sum(found.account.ledger.values()),
    }


@harness.command(
    "in_flight",
    __doc__,
    models=(["llama-3-8b", "llama-3-70b"], "which models"),
    tokens=([2048, 4096], "tokens a sample"),
    gpus=(8, "how many GPUs"),
)
def main(options: harness.Options) -> int:
    rows = [
        row(model, tokens, options.gpus, name)
        for model in options.models
        for tokens in options.tokens
        for name in ROWS
    ]
    pages.show(pages.table(COLUMNS, rows))
    harness.keep(options, SCHEMA, rows=rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
