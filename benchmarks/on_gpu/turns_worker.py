"""One rank of sides that take turns, started by `launch.run_ranks`.

One process a rank takes every side of a comparison, builds it, times its steps and lets it go;
rounds go through the sides forwards and backwards, so that what drifts (clocks, temperature) falls
on all alike. What each turn found is a line of a file at once.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from benchmarks import harness, launch, probes
from benchmarks.harness import of_ranks
from benchmarks.offload import sides
from benchmarks.peers import adapters, model
from benchmarks.peers.settings import Setting
from benchmarks.worker import Memory

NATIVE = "onefold-3-native"
FURTHER: dict[str, tuple[int, dict[str, Any]]] = {
    "onefold-3-activations": (3, {"offload_activations": "cpu"}),
    "onefold-3-tiles": (3, {"tile": "64MB"}),
    "onefold-2-native": (2, {"reduce": "native"}),
    NATIVE: (3, {"reduce": "native"}),
    "onefold-3-codecs": (3, {"gather_codec": "int8", "reduce_codec": "int4"}),
}
"""Sides of Onefold beside its stages and tiers: stage, and further arguments of `Recipe.zero`."""
#: What "tile" is where the model is tiny, so that its embedding is cut.
TINY_TILE = "32KiB"


def known(side: str) -> bool:
    """Whether this Onefold has the options of a side."""
    from onefold.recipe import Recipe

    return not side.endswith("-native") or "reduce" in Recipe.__dataclass_fields__


def build(side: str, setting: Setting, whole: nn.Module) -> Any:
    """The side around `whole`: one of `FURTHER`, or one of `offload.sides`."""
    if side not in FURTHER:
        return sides.build(side, setting, whole)
    stage, options = FURTHER[side]
    if "tile" in options and setting.model == "gpt-tiny":
        options = {"tile": TINY_TILE}
    return adapters.Onefold(setting, whole, stage, **options)


def prepare(job: dict[str, Any]) -> None:
    if job["sides"][0].startswith("deepspeed"):
        adapters.prepare("deepspeed", job["setting"]["device"])


def join(job: dict[str, Any]) -> None:
    launch.join(job, job["setting"]["device"])


def measure(job: dict[str, Any]) -> dict[str, Any]:
    """Every side in every round; how many turns were taken."""
    turns, count = Turns(Setting(**job["setting"]), job["rank"]), 0
    model.touch(lambda toy, whole: build(job["sides"][0], toy, whole), turns.setting)
    turns.memory.let_go()
    for number, side in harness.in_turns(job["sides"], job["rounds"]):
        row = {"side": side, "round": number, **turns.turn(side)}
        count += 1
        if turns.rank == 0:
            with Path(job["lines"]).open("a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")
    return {"turns": count}


class Turns:
    """The turns of one rank."""

    def __init__(self, setting: Setting, rank: int) -> None:
        self.setting, self.rank, self.memory = setting, rank, Memory(setting.device)

    def turn(self, side: str) -> dict[str, Any]:
        """What one side did, or how it failed; all ranks say the same."""
        found: dict[str, Any] = {}
        error = ""
        try:
            found = self.measure(side)
        except Exception as raised:
            error = f"{type(raised).__name__}: {str(raised)[:300]}"
        self.memory.let_go()
        every: list[Any] = [None] * self.setting.ranks
        dist.all_gather_object(every, (error, found))
        errors = [f"rank {r}: {e}" for r, (e, _) in enumerate(every) if e]
        if errors:
            return {"status": "failed", "error": "; ".join(errors)}
        ranks = [f for _, f in every]
        memory = {name: of_ranks(ranks, name) for name in ("peak_mib", "rest_mib")}
        return {**ranks[0], "status": "ok", "step_s": harness.slowest(ranks, "step_s"), **memory}

    def measure(self, side: str) -> dict[str, Any]:
        """Build, warm up, time. Memory in MiB beyond what was there before the model."""
        setting, memory = self.setting, self.memory
        before = memory.now()
        begun = time.perf_counter()
        trainer = build(side, setting, model.build(setting.model, device=setting.device))
        built = time.perf_counter() - begun
        losses = [trainer.step(self.batches(step)) for step in range(setting.warmup)]
        data = [self.batches(setting.warmup + step) for step in range(setting.steps)]
        memory.reset_peak()
        seconds = [
            self.timed(lambda taken=taken: losses.append(trainer.step(taken))) for taken in data
        ]
        peak = memory.peak()
        return {
            "losses": losses,
            "step_s": seconds,
            "built_s": built,
            "backend": dist.get_backend() if setting.ranks > 1 else "none",
            "peak_mib": probes.difference(peak, before),
            "rest_mib": probes.difference(memory.now(), before),
        }

    def batches(self, step: int) -> list[adapters.Batch]:
        """This rank's micro-batches of a step, on the device."""
        return model.batches(self.setting, step, self.rank)

    def timed(self, step: Callable[[], object]) -> float:
        """Seconds of a step: between two events on CUDA, with the device idle before and after."""
        if not self.memory.cuda:
            begun = time.perf_counter()
            step()
            return time.perf_counter() - begun
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        step()
        end.record()
        self.memory.synchronize()
        return start.elapsed_time(end) / 1000


def read(lines: Path) -> list[dict[str, Any]]:
    """The turns that a file holds by now, without a line that is being written."""
    if not lines.exists():
        return []
    whole, _, _ = lines.read_text(encoding="utf-8").rpartition("\n")
    return [json.loads(line) for line in whole.splitlines()]
