"""Sides that take turns in one process a rank, for the chapters of benchmarks/gpu.py: what starts the
ranks, and a rank.

One process a rank takes every side of a comparison, builds it, times its steps and lets it go;
rounds go through the sides forwards and backwards, so that what drifts (clocks, temperature) falls
on all alike. What each turn found is a line of a file at once: a run that is cut off keeps its turns,
and a side that breaks its process loses its own only.
"""

from __future__ import annotations

import contextlib
import json
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from benchmarks import gpt, harness, launch, offload, probes, trainers
from benchmarks.gpt import Batch, Setting
from benchmarks.harness import of_ranks
from benchmarks.training import Memory, touch

FURTHER: dict[str, tuple[int, dict[str, Any]]] = {
    "onefold-3-activations": (3, {"offload_activations": "cpu"}),
    "onefold-2-native": (2, {"reduce": "native"}),
    "onefold-3-native": (3, {"reduce": "native"}),
    "onefold-3-codecs": (3, {"gather_codec": "int8", "reduce_codec": "int4"}),
}
"""Sides of Onefold beside its stages and tiers: stage, and further arguments of `Recipe.zero`."""
Turn = dict[str, Any]


# -- those who start ranks -------------------------------------------------------------------------


def take_turns(
    setting: Setting,
    sides: Sequence[str],
    options: harness.Options,
    left: Callable[[], float],
    show: Callable[[list[Turn]], None],
    **job: Any,
) -> list[Turn]:
    """The turns of all sides, as far as they come in the seconds that are `left`; `show` follows
    them. DeepSpeed patches what it finds of torch, and may have another interpreter: its sides have
    processes of their own.
    """
    turns: list[Turn] = []
    for theirs in (False, True):
        waiting = [side for side in sides if launch.on_deepspeed(side) == theirs]
        while waiting and left() > 0:
            outcome = _run(
                setting, waiting, options, min(options.timeout, left()), turns, show, job
            )
            if outcome["status"] == "ok":
                break
            done = {turn["side"] for turn in turns}
            lost = next((side for side in waiting if side not in done), waiting[-1])
            turns.append(
                {"side": lost, "round": 0, "status": "failed", "error": outcome["error"][-600:]}
            )
            waiting = waiting[waiting.index(lost) + 1 :]
            show(turns)
    return turns


def _run(
    setting: Setting,
    waiting: list[str],
    options: harness.Options,
    limit: float,
    turns: list[Turn],
    show: Callable[[list[Turn]], None],
    job: dict[str, Any],
) -> dict[str, Any]:
    """Run `waiting` sides for at most `limit` seconds; `turns` and `show` follow them."""
    before = list(turns)
    with (
        tempfile.TemporaryDirectory(prefix="gpu-") as folder,
        tempfile.TemporaryDirectory(prefix="offload-", dir=options.disk) as disk,
        ThreadPoolExecutor(1) as pool,
    ):
        lines = Path(folder, "turns.jsonl")
        job = {
            "rounds": 1,
            **job,
            "setting": asdict(setting),
            "sides": waiting,
            "lines": str(lines),
        }
        job |= {"disk": str(Path(disk).resolve()), "own_adam": options.deepspeed_adam}
        running = pool.submit(
            launch.run_ranks,
            "benchmarks.gpu_turns",
            job,
            setting.ranks,
            threads=setting.threads,
            python=launch.python_of(waiting[0], options),
            timeout=limit,
        )
        while True:
            ended = running.done()  # asked before the file is read, so that the last lines are
            text = lines.read_text(encoding="utf-8") if lines.exists() else ""
            whole, _, _ = text.rpartition("\n")
            turns[:] = before + [json.loads(line) for line in whole.splitlines()]
            show(turns)
            if ended:
                return running.result()
            time.sleep(0.5)


# -- a rank ----------------------------------------------------------------------------------------


def build(side: str, setting: Setting, whole: nn.Module, job: dict[str, Any]) -> Any:
    """The side around `whole`: one of `FURTHER`, or a side of `offload`."""
    if side in FURTHER:
        stage, options = FURTHER[side]
        return trainers.Onefold(setting, whole, stage, **options)
    disk = Path(job["disk"], side)
    disk.mkdir(exist_ok=True)
    return offload.build(side, setting, whole, str(disk), job["own_adam"])


def prepare(job: dict[str, Any]) -> None:
    if launch.on_deepspeed(job["sides"][0]):
        trainers.prepare("deepspeed", job["setting"]["device"])


def join(job: dict[str, Any]) -> None:
    launch.join(job, job["setting"]["device"])


def measure(job: dict[str, Any]) -> dict[str, Any]:
    """Every side in every round; how many turns were taken."""
    rank = Rank(job)
    for number, side in harness.in_turns(job["sides"], job["rounds"]):
        turn = {"side": side, "round": number, "error": "", **rank.turn(side, number)}
        if rank.number == 0:
            with Path(job["lines"]).open("a", encoding="utf-8") as file:
                file.write(json.dumps(turn) + "\n")
    return {"turns": len(job["sides"]) * job["rounds"]}


class Rank:
    """The turns of one rank."""

    def __init__(self, job: dict[str, Any]) -> None:
        self.job, self.number = job, job["rank"]
        self.setting, self.memory = Setting(**job["setting"]), Memory(job["setting"]["device"])
        with contextlib.suppress(Exception):  # a side that fails says so in its turn
            touch(lambda toy: self.build(job["sides"][0], toy), self.setting, self.number)
        self.let_go()

    def build(self, side: str, setting: Setting) -> Any:
        return build(side, setting, gpt.build(setting.model, device=setting.device), self.job)

    def let_go(self) -> None:
        """Give back everything, after the last step of a side."""
        self.memory.settle()
        if self.memory.cuda:
            torch.cuda.empty_cache()

    def turn(self, side: str, number: int) -> Turn:
        """What one side did, or how it failed; all ranks say the same."""
        found: dict[str, Any] = {}
        error = ""
        try:
            found = self.measure(side, number)
        except Exception as raised:
            error = f"{type(raised).__name__}: {str(raised)[:300]}"
        self.let_go()
        every: list[Any] = [None] * self.setting.ranks
        dist.all_gather_object(every, (error, found))
        errors = [f"rank {r}: {e}" for r, (e, _) in enumerate(every) if e]
        if errors:
            return {"status": "failed", "error": "; ".join(errors)}
        ranks = [f for _, f in every]
        memory = {name: of_ranks(ranks, name) for name in ("peak_mib", "rest_mib", "host_mib")}
        means = {"losses": harness.losses(ranks), "step_s": harness.slowest(ranks, "step_s")}
        return {**ranks[0], "status": "ok", **means, **memory}

    def measure(self, side: str, number: int) -> Turn:
        """Build, warm up, time. Memory in MiB beyond what was there before the model."""
        setting, memory = self.setting, self.memory
        before, on_host = memory.now(), probes.resident_mib()
        trainer = self.build(side, setting)
        losses = [trainer.step(self.batches(step)) for step in range(setting.warmup)]
        data = [self.batches(setting.warmup + step) for step in range(setting.steps)]
        memory.reset_peak()
        seconds = [
            self.timed(lambda taken=taken: losses.append(trainer.step(taken))) for taken in data
        ]
        found = {
            "losses": losses,
            "step_s": seconds,
            "backend": dist.get_backend(),
            "peak_mib": probes.difference(memory.peak(), before),
            "host_mib": probes.difference(probes.peak_resident_mib(), on_host),
            "rest_mib": probes.difference(memory.now(), before),
        }
        if self.job.get("trace") and number + 1 == self.job["rounds"]:
            kept = Path(self.job["trace"], f"gpu-trace-{side}-{setting.accumulation}.json.gz")
            found["trace"] = profile(trainer, data[-2:], memory, None if self.number else kept)
        return found

    def batches(self, step: int) -> list[Batch]:
        """This rank's micro-batches of a step, on the device."""
        return gpt.batches(self.setting, step, self.number)

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


def profile(
    trainer: trainers.Trainer, data: Sequence[list[Batch]], memory: Memory, path: Path | None
) -> dict[str, float]:
    """Profile steps over `data`; seconds of GPU work a step by kind and how much of it overlapped: of
    communication and copies ("comm_s"), of the rest, of "both" at a time, "idle_s"; "pinned_s" and
    "pageable_s": of the copies between device and host, by their memory. Keeps the trace at `path`.
    """
    from onefold.observe.trace import covered

    activities = [torch.profiler.ProfilerActivity.CPU]
    if memory.cuda:
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    with torch.profiler.profile(activities=activities) as profiler:
        for taken in data:
            trainer.step(taken)
        memory.synchronize()
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        profiler.export_chrome_trace(str(path))
    moving: list[tuple[float, float]] = []
    computing: list[tuple[float, float]] = []
    through = {"pinned": 0.0, "pageable": 0.0}
    for event in profiler.events() or ():
        # What somebody has named (an optimizer's step) stands on the GPU's time line too, from its
        # first piece of work to its last.
        if event.device_type.name != "CUDA" or event.is_user_annotation:
            continue
        name, span = event.name.lower(), (event.time_range.start, event.time_range.end)
        for kind in through:
            through[kind] += span[1] - span[0] if kind in name else 0.0
        across = "nccl" in name or name.startswith(("memcpy dtoh", "memcpy htod", "memcpy ptop"))
        (moving if across else computing).append(span)
    everything = [*moving, *computing]
    first = min((start for start, _ in everything), default=0.0)
    last = max((end for _, end in everything), default=0.0)
    busy, across, inside = map(covered, (everything, moving, computing))
    found = {"comm": across, "compute": inside, "both": across + inside - busy}
    found |= {"idle": last - first - busy, **through}
    return {f"{name}_s": microseconds / 1e6 / len(data) for name, microseconds in found.items()}
