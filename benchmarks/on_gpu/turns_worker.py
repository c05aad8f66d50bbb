"""One rank of sides that take turns: `python -m benchmarks.on_gpu.turns_worker JOB.json RANK`,
started by `launch.run_ranks`.

One process a rank takes every side of a comparison, builds it, times its steps and lets it go;
rounds go through the sides forwards and backwards, so that what drifts (clocks, temperature) falls
on all alike. What each turn found is a line of a file at once.
"""

from __future__ import annotations

import gc
import json
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import nn

from benchmarks import harness
from benchmarks.offload import sides
from benchmarks.peers import adapters, model, probes, worker
from benchmarks.peers.settings import Setting

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


class Turns:
    """The turns of one rank."""

    def __init__(self, job: dict[str, Any], setting: Setting, path: Path, rank: int) -> None:
        self.job, self.setting, self.rank = job, setting, rank
        self.cuda = setting.device == "cuda"
        self.backend = "gloo"
        if self.cuda:
            gpus = torch.cuda.device_count()
            torch.cuda.set_device(rank % gpus)
            self.backend = "nccl" if setting.ranks <= gpus else "gloo"
        dist.init_process_group(
            self.backend,
            init_method=f"file://{path.with_name('store')}",
            rank=rank,
            world_size=setting.ranks,
        )
        if job.get("deepspeed"):
            sides.prepare("deepspeed", setting.device)

    def all(self) -> int:
        """Every side in every round; how many turns were taken."""
        names, count = list(self.job["sides"]), 0
        self.touch(names[0])
        for number, side in harness.in_turns(names, self.job["rounds"]):
            self.note({"side": side, "round": number, **self.turn(side)})
            count += 1
        return count

    def touch(self, side: str) -> None:
        """One step of a toy: what a device allocates for good at its first product (workspaces) is
        no side's.
        """
        toy = replace(self.setting, model="gpt-tiny", tokens=32, accumulation=1)
        trainer = build(side, toy, model.build(toy.model, device=toy.device))
        trainer.step(
            [
                tuple(
                    part.to(toy.device)
                    for part in model.micro_batch(toy.model, toy.tokens, 0, 0, 0, toy.ranks)
                )
            ]
        )
        del trainer
        self.let_go()

    def turn(self, side: str) -> dict[str, Any]:
        """What one side did; {"status": "failed", ...} where it raised on a rank: all ranks say
        so.
        """
        found: dict[str, Any] = {}
        try:
            found = self.measure(side)
            error = ""
        except Exception as raised:
            error = f"{type(raised).__name__}: {str(raised)[:300]}"
        self.let_go()
        every: list[Any] = [None] * self.setting.ranks
        dist.all_gather_object(every, (error, found))
        errors = [f"rank {r}: {e}" for r, (e, _) in enumerate(every) if e]
        if errors:
            return {"status": "failed", "error": "; ".join(errors)}
        ranks = [f for _, f in every]
        return {
            **ranks[0],
            "status": "ok",
            "step_s": [max(seconds) for seconds in zip(*(f["step_s"] for f in ranks), strict=True)],
            "peak_mib": max(
                (f["peak_mib"] for f in ranks if f["peak_mib"] is not None), default=None
            ),
            "rest_mib": max(
                (f["rest_mib"] for f in ranks if f["rest_mib"] is not None), default=None
            ),
        }

    def measure(self, side: str) -> dict[str, Any]:
        """Build, warm up, time. Memory in MiB beyond what was there before the model: allocated
        (CUDA) or resident.
        """
        setting = self.setting
        before = self.allocated()
        begun = time.perf_counter()
        trainer = build(side, setting, model.build(setting.model, device=setting.device))
        built = time.perf_counter() - begun
        losses = [trainer.step(self.batches(step)) for step in range(setting.warmup)]
        data = [self.batches(setting.warmup + step) for step in range(setting.steps)]
        self.synchronize()
        if self.cuda:
            torch.cuda.reset_peak_memory_stats()
        else:
            probes.reset_peak()
        seconds = [
            self.timed(lambda taken=taken: losses.append(trainer.step(taken))) for taken in data
        ]
        peak = (
            torch.cuda.max_memory_allocated() / 2**20 if self.cuda else probes.peak_resident_mib()
        )
        return {
            "losses": losses,
            "step_s": seconds,
            "built_s": built,
            "backend": self.backend if setting.ranks > 1 else "none",
            "peak_mib": probes.difference(peak, before),
            "rest_mib": probes.difference(self.allocated(), before),
        }

    def timed(self, step: Callable[[], object]) -> float:
        """Seconds of a step: between two events on CUDA, with the device idle before and after."""
        if not self.cuda:
            begun = time.perf_counter()
            step()
            return time.perf_counter() - begun
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        step()
        end.record()
        self.synchronize()
        return start.elapsed_time(end) / 1000

    def batches(self, step: int) -> list[adapters.Batch]:
        """This rank's micro-batches of a step, on the device."""
        s = self.setting
        made = [
            model.micro_batch(s.model, s.tokens, step, m, self.rank, s.ranks)
            for m in range(s.accumulation)
        ]
        return [(ids.to(s.device), labels.to(s.device)) for ids, labels in made]

    def allocated(self) -> float | None:
        """MiB."""
        self.synchronize()
        return torch.cuda.memory_allocated() / 2**20 if self.cuda else probes.resident_mib()

    def synchronize(self) -> None:
        if self.cuda:
            torch.cuda.synchronize()

    def let_go(self) -> None:
        """Of the side before."""
        gc.collect()
        if self.cuda:
            torch.cuda.empty_cache()
        else:
            probes.give_back_free_heap()

    def note(self, row: dict[str, Any]) -> None:
        """A line of the job's file, at once."""
        if self.rank == 0:
            with Path(self.job["lines"]).open("a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")


def read(lines: Path) -> list[dict[str, Any]]:
    """The turns that a file holds by now; a line that is being written is left for the next
    time.
    """
    if not lines.exists():
        return []
    whole, _, _ = lines.read_text(encoding="utf-8").rpartition("\n")
    return [json.loads(line) for line in whole.splitlines()]


def by_side(turns: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Medians of each side's turns: {"step_s", "peak_mib", "rest_mib", "rounds"}, or {"error"}
    where none ended well.
    """
    out: dict[str, dict[str, Any]] = {}
    for side in dict.fromkeys(turn["side"] for turn in turns):
        good = [turn for turn in turns if turn["side"] == side and turn["status"] == "ok"]
        if not good:
            out[side] = {"error": next(turn["error"] for turn in turns if turn["side"] == side)}
            continue
        memory = {
            name: (
                median(values)
                if (values := [turn[name] for turn in good if turn[name] is not None])
                else None
            )
            for name in ("peak_mib", "rest_mib")
        }
        step = median(second for turn in good for second in turn["step_s"])
        out[side] = {
            "step_s": step,
            **memory,
            "rounds": len(good),
            "losses": good[0]["losses"],
            "backend": good[0]["backend"],
        }
    return out


def ratio(turns: list[dict[str, Any]], side: str, to: str) -> float | None:
    """A side's step time as a multiple of another's: the median over rounds of what their turns of
    one round say.
    """
    found = {
        (turn["side"], turn["round"]): median(turn["step_s"])
        for turn in turns
        if turn["status"] == "ok"
    }
    rounds = [number for name, number in found if name == side and (to, number) in found]
    return median(found[side, number] / found[to, number] for number in rounds) if rounds else None


def work() -> NoReturn:
    """One rank."""
    job, path, rank = worker.read_job()
    setting = Setting(**job["setting"])
    worker.leave({"turns": Turns(job, setting, path, rank).all()}, path, rank)


if __name__ == "__main__":
    work()
