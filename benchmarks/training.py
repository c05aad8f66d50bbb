"""Training steps of one side on one rank, timed, and what a table says of them.

Order matters: libraries are imported and exercised on a toy, the memory baseline is taken, and only
then is the model built. What is counted beyond the baseline is the model's, its training state's
and the library's buffers.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from statistics import fmean
from typing import Any

import torch
import torch.distributed as dist

from benchmarks import gpt, harness, probes
from benchmarks.gpt import Setting
from benchmarks.harness import Row, Run, over_rounds, scaled
from benchmarks.pages import Cell, range_of, shown
from benchmarks.trainers import Trainer

LOSSES_COMPARED = 6
"""Steps whose losses are compared: later ones differ by what rounding has grown to, in equal libraries too."""


class Memory:
    """MiB of this rank: allocated on its GPU, or resident where there is none."""

    def __init__(self, device: str) -> None:
        self.cuda = device == "cuda"

    def synchronize(self) -> None:
        if self.cuda:
            torch.cuda.synchronize()

    def settle(self) -> None:
        """Give back what was built before and the C library's free heap. What the GPU's allocator
        caches stays, since a timed step would have to ask for it again.
        """
        gc.collect()
        probes.give_back_free_heap()

    def now(self) -> float | None:
        self.synchronize()
        return torch.cuda.memory_allocated() / 2**20 if self.cuda else probes.resident_mib()

    def reset_peak(self) -> bool:
        """Peaks are those from here on; False where the kernel does not permit it."""
        self.synchronize()
        if self.cuda:
            torch.cuda.reset_peak_memory_stats()
        return probes.reset_peak()

    def peak(self) -> float | None:
        if self.cuda:
            return torch.cuda.max_memory_allocated() / 2**20
        return probes.peak_resident_mib()


class Watch:
    """What a benchmark watches in timed steps beside time and memory; this one watches nothing."""

    def built(self, trainer: Any) -> None:
        """The side is there."""

    def between(self) -> None:
        """Before the first timed step and behind each; may keep the ranks waiting."""

    def begin(self) -> None:
        """The first timed step comes next: count from here."""

    def step(self) -> None:
        """A timed step has ended."""

    def found(self) -> dict[str, Any]:
        """What a rank tells of it, behind the last step."""
        return {}


Build = Callable[[Setting], Trainer]
"""Makes a side from the initial weights of the setting's model."""


def meet() -> None:
    if dist.is_initialized():
        dist.barrier()


def touch(build: Build, setting: Setting, rank: int, batches: Any = gpt.batches) -> None:
    """Let a side train a toy for a step: its code and lazy imports are there afterwards."""
    toy = replace(setting, model=f"{setting.model.partition('-')[0]}-tiny", tokens=32)
    build(toy).step(batches(toy, 0, rank))
    gc.collect()


def measured(
    job: dict[str, Any],
    setting: Setting,
    build: Build,
    batches: Any = gpt.batches,
    watch: Watch | None = None,
) -> dict[str, Any]:
    """Build, warm up, time. Memory in MiB beyond the baseline, seconds as a list of steps, processor
    seconds and bytes of all timed steps together.

    Args:
        batches: micro-batches of (setting, step, rank).
    """
    rank, memory, watch = job["rank"], Memory(setting.device), watch or Watch()
    touch(build, setting, rank, batches)
    meet()
    memory.settle()
    resettable = memory.reset_peak()
    baseline, on_host = memory.now(), probes.resident_mib()

    begun = time.perf_counter()
    trainer = build(setting)
    built = time.perf_counter() - begun
    watch.built(trainer)
    losses = [trainer.step(batches(setting, step, rank)) for step in range(setting.warmup)]
    set_up_peak = probes.difference(memory.peak(), baseline)
    memory.settle()  # what building the model left behind is not part of a step's peak
    steps = range(setting.warmup, setting.warmup + setting.steps)
    data = [batches(setting, step, rank) for step in steps]
    seconds, processor = [], 0.0
    meet()
    watch.between()
    if resettable:
        memory.reset_peak()
    watch.begin()
    sent, ledger = probes.socket_bytes_sent(), trainer.ledger_bytes()
    for taken in data:
        busy, begun = time.process_time(), time.perf_counter()
        losses.append(trainer.step(taken))
        memory.synchronize()
        seconds.append(time.perf_counter() - begun)
        processor += time.process_time() - busy
        watch.step()
        watch.between()
    meet()
    result = {
        "losses": losses,
        "step_s": seconds,
        "cpu_s": processor,
        "build_s": built,
        "baseline_mib": baseline,
        "set_up_peak_mib": set_up_peak,
        "peak_mib": probes.difference(memory.peak(), baseline),
        "peak_is_of_timed_steps": resettable,
        "host_mib": probes.difference(probes.peak_resident_mib(), on_host),
        "sent_bytes": probes.difference(probes.socket_bytes_sent(), sent),
        "ledger_bytes": probes.difference(trainer.ledger_bytes(), ledger),
        **watch.found(),
    }
    memory.settle()
    result["rest_mib"] = probes.difference(memory.now(), baseline)
    meet()  # a rank that returned would free its side, whose sockets another may still be reading
    return result


# -- rows ------------------------------------------------------------------------------------------


def row(setting: Setting, good: list[Run], references: Mapping[int, Run]) -> Row:
    """What most tables say of a side's runs, as `LEGEND` does. None: not measured, or the kernel does
    not say.
    """
    timed = harness.timings(good, references)
    peak, theirs = over_rounds(good, "peak_mib"), over_rounds(references.values(), "peak_mib")
    of_a_step = {
        name: scaled(over_rounds(good, name, fmean), setting.steps)
        for name in ("cpu_s", "sent_bytes", "ledger_bytes")
    }
    return {
        **timed,
        "tokens_a_second": setting.tokens_a_step / timed["step_s"],
        "peak_mib": peak,
        "peak_ratio": peak / theirs if peak and theirs else None,
        "set_up_peak_mib": over_rounds(good, "set_up_peak_mib"),
        "rest_mib": over_rounds(good, "rest_mib"),
        **of_a_step,
        "loss_difference": harness.loss_difference(good, references, LOSSES_COMPARED),
    }


def times(reference: str) -> dict[str, Cell]:
    """The first columns."""
    return {
        "side": shown("side"),
        "step s": shown("step_s", "{:.3f}"),
        f"× {reference}": shown("ratio", "{:.2f}"),
        "range": range_of("ratio_low", "ratio_high"),
        "tokens/s": shown("tokens_a_second", "{:,.0f}"),
        "cpu s": shown("cpu_s", "{:.3f}"),
    }


MEMORY: dict[str, Cell] = {
    "peak MiB": shown("peak_mib", "{:,.0f}"),
    "set-up MiB": shown("set_up_peak_mib", "{:,.0f}"),
    "rest MiB": shown("rest_mib", "{:,.0f}"),
}
WIRE: dict[str, Cell] = {
    "sent MiB": shown("sent_bytes", "{:,.1f}", 2**20),
    "ledger MiB": shown("ledger_bytes", "{:,.1f}", 2**20),
}
LOSS: dict[str, Cell] = {"loss diff": shown("loss_difference", "{:.1e}")}
LEGEND = (
    "step s: median of the timed steps of all rounds, a step lasting until its slowest rank is done. ×"
    " and range: median of the rounds' ratios to the reference, with the least and the greatest. cpu"
    " s: processor time of a rank in a step, all threads. Memory: a rank's resident set beyond what"
    " the imported libraries take (the largest rank, the median round; the C library gives its free"
    " heap back before the first and after the last timed step); peak: in timed steps; set-up: while"
    " building and warming up; rest: between steps. sent: payload a rank gave its sockets in an"
    " optimizer step, as the kernel counts it; ledger: what Onefold says it sent for parameters and"
    " gradients. loss diff: largest relative difference to the reference's losses (means over ranks)"
    f" in the first {LOSSES_COMPARED} steps."
)


class Steps(harness.Study):
    """A study of training steps: `module.measure(job)` answers what `measured` does."""

    legend, read = LEGEND, Setting

    def row(self, comparison: harness.Comparison, side: str, good: list[Run]) -> Row:
        return row(comparison.setting, good, self.references(comparison))

    def columns(self, setting: Setting) -> Mapping[str, Cell]:
        return {**times(self.reference), **MEMORY, **WIRE, **LOSS}

    def document(self) -> dict[str, Any]:
        names = dict.fromkeys(c.setting.model for c in self.comparisons)
        counted = {name: {"parameters": self.count(name)} for name in names}
        return {"models": counted}

    def count(self, name: str) -> int:
        return gpt.count_parameters(name)
