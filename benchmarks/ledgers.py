"""What keeping the ledgers costs:
`python -m benchmarks.ledgers [--models gpt-tiny gpt-110m] [--pairs N] [--name ledgers]`.

Two ranks over gloo train at stage 3. Every second step runs with the ledgers' entries replaced by
functions that do nothing; which of the two comes first turns from pair to pair, so that a drift of
the machine meets both alike. A step takes what its slower rank takes. Beside that stands what one
can say without noise: the entries of a step, and the seconds spent inside them. Writes
benchmarks/results/NAME.json.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from statistics import median, quantiles
from typing import Any

import torch.distributed as dist

from benchmarks import harness, launch, pages
from benchmarks.pages import shown
from benchmarks.peers import adapters, model
from benchmarks.peers.settings import Setting
from onefold.comm.ledger import TrafficEvent, TrafficLedger
from onefold.memory import MemoryLedger
from onefold.observe import Meter
from onefold.runtime.hooks import engine_of

SCHEMA = "onefold-ledgers/1"
#: What is entered: (ledger, its method).
ENTRIES: tuple[tuple[type, str], ...] = (
    (TrafficLedger, "record"),
    (TrafficLedger, "waited"),
    (MemoryLedger, "add"),
    (MemoryLedger, "set"),
    (MemoryLedger, "look"),
)
#: model -> (tokens a rank, pairs of steps): a small model's step is short, so more of them are
#: needed and can be had.
MODELS: Mapping[str, tuple[int, int]] = {"gpt-tiny": (32, 400), "gpt-110m": (256, 30)}
WARMUP, COUNTED, ROWS = 3, 5, 200
#: Share of a step that the ledgers may take.
GOAL = 0.01


# -- one rank --------------------------------------------------------------------------------------


@contextlib.contextmanager
def replaced(make: Callable[[type, str, Any], Any]) -> Iterator[None]:
    """Inside, every method of `ENTRIES` is what `make(ledger, name, method)` says."""
    methods = [(ledger, name, ledger.__dict__[name]) for ledger, name in ENTRIES]
    try:
        for ledger, name, method in methods:
            setattr(ledger, name, make(ledger, name, method))
        yield
    finally:
        for ledger, name, method in methods:
            setattr(ledger, name, method)


def nothing(ledger: type, name: str, method: Any) -> Any:
    """A method that enters nothing; a move still gets its event, the same for all."""
    event = TrafficEvent("", "", 0, 0, "", "", 0, 0.0)
    return lambda *_, **__: event if name == "record" else None


class Counter:
    """Counts entries and the seconds inside them; an entry made by another belongs to it."""

    def __init__(self) -> None:
        self.calls, self.seconds, self.inside = 0, 0.0, False

    def around(self, ledger: type, name: str, method: Any) -> Any:
        def entered(*args: Any, **kwargs: Any) -> Any:
            if self.inside:
                return method(*args, **kwargs)
            self.inside, self.calls = True, self.calls + 1
            start = time.perf_counter()
            try:
                return method(*args, **kwargs)
            finally:
                self.seconds += time.perf_counter() - start
                self.inside = False

        return entered


def measure(job: Mapping[str, Any]) -> dict[str, Any]:
    """Seconds of every step with and without entries, and the entries' own, on one rank."""
    setting, pairs = Setting(**job["setting"]), job["pairs"]
    trainer: Any = adapters.build("onefold-3", setting, model.build(setting.model))
    taken = 0

    def step() -> float:
        nonlocal taken
        batches = model.batches(setting, taken, dist.get_rank())
        taken += 1
        dist.barrier()
        start = time.perf_counter()
        trainer.step(batches)
        return time.perf_counter() - start

    def without() -> float:
        with replaced(nothing):
            return step()

    for _ in range(WARMUP):
        step()
    ledger = engine_of(trainer.model).memory
    before = ledger.now()
    seconds: dict[str, list[float]] = {"with": [], "without": []}
    ways = {"with": step, "without": without}
    for pair in range(pairs):
        for name in sorted(ways, reverse=pair % 2 == 1):
            seconds[name].append(ways[name]())
    counts = []
    for _ in range(COUNTED):
        counter = Counter()
        with replaced(counter.around):
            step()
        counts.append((counter.calls, counter.seconds))
    meter = Meter(trainer.model, trainer.optimizer)
    rows = []
    for _ in range(ROWS):
        start = time.perf_counter()
        meter.step(loss=0.0, tokens=setting.tokens_a_step)
        rows.append(time.perf_counter() - start)
    after = ledger.now()
    if after != before:  # what a step takes it gives back, entered or not
        raise RuntimeError(
            f"the memory ledger says {after} where it said {before}: entries are missing from the"
            " comparison."
        )
    dist.barrier()
    return {
        **seconds,
        "entries": median(n for n, _ in counts),
        "entries_s": median(s for _, s in counts),
        "row_s": median(rows),
    }


# -- all of them -----------------------------------------------------------------------------------


def summarized(setting: Setting, ranks: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """One row: medians of the slower rank, their ratio pair by pair, and the entries' share."""
    slower = {name: harness.slowest(ranks, name) for name in ("with", "without")}
    ratios = [a / b for a, b in zip(slower["with"], slower["without"], strict=True)]
    low, _, high = quantiles(ratios, n=4) if len(ratios) > 1 else (ratios[0],) * 3
    step = median(slower["without"])
    inside, row = (max(r[name] for r in ranks) for name in ("entries_s", "row_s"))
    return {
        "model": setting.model,
        "tokens": setting.tokens,
        "ranks": setting.ranks,
        "pairs": len(ratios),
        "with_s": median(slower["with"]),
        "without_s": step,
        "ratio": median(ratios),
        "ratio_quartiles": [low, high],
        "entries": max(r["entries"] for r in ranks),
        "entries_s": inside,
        "share": inside / step,
        "row_s": row,
        "row_share": row / step,
        "steps_s": slower,
    }


@harness.command(
    "ledgers",
    __doc__,
    models=(list(MODELS), "which GPTs", MODELS),
    pairs=(0, "pairs of steps (0: as many as suit each model)"),
)
def main(options: harness.Options, run: Callable[..., dict[str, Any]] = launch.run_ranks) -> int:
    """0 if every model was measured, else 1. `run` starts the ranks; see `launch.run_ranks`."""
    rows, failed = [], False
    for name in options.models:
        tokens, pairs = MODELS[name]
        setting = Setting(model=name, tokens=tokens, ranks=2)
        job = {"setting": asdict(setting), "pairs": options.pairs or pairs}
        outcome = run(
            "benchmarks.ledgers", job, setting.ranks, threads=setting.threads, timeout=1200.0
        )
        if outcome["status"] != "ok":
            print(f"{name} {outcome['status']}: {outcome['error']}", file=sys.stderr)
            failed = True
            continue
        rows.append(summarized(setting, outcome["ranks"]))
    harness.keep(options, SCHEMA, goal=GOAL, rows=rows)
    pages.show(pages.table(COLUMNS, rows))
    return int(failed)


COLUMNS: dict[str, pages.Cell] = {
    "model": lambda r: f"{r['model']}, {r['tokens']} tokens a rank",
    "step with": shown("with_s", "{:.2f} ms", 1e-3),
    "without": shown("without_s", "{:.2f} ms", 1e-3),
    "ratio (quartiles)": lambda r: "{:.3f} ({:.3f} to {:.3f})".format(
        r["ratio"], *r["ratio_quartiles"]
    ),
    "entries a step": shown("entries", "{:.0f}"),
    "inside them": shown("entries_s", "{:.0f} µs", 1e-6),
    "share of a step": shown("share", "{:.2%}"),
    "a row of metrics": shown("row_s", "{:.0f} µs", 1e-6),
}


if __name__ == "__main__":
    sys.exit(main())
