"""Saving and loading of Onefold beside torch's distributed checkpoints (FSDP2) and DeepSpeed: one
model, one disk, one run.

    python -m benchmarks checkpoint --deepspeed-python PYTHON     # three rounds of gpt-110m on 2 ranks, an hour or so
    python -m benchmarks checkpoint --model gpt-tiny --rounds 1   # a minute or two: does it run?

In a round every peer saves, saves behind the training, and loads on as many ranks, on twice and on half
as many, each in fresh processes. Beside each save the same processes write as many bytes to the disk:
what it gives just then. Every rank trains on the same batches: the two steps after a save and the same
two after a load must have the same losses.

Before a load the checkpoint's files are taken out of the page cache with posix_fadvise(DONTNEED),
which needs no privilege; that the bytes then came from the disk shows in `read_bytes` of /proc/self/io.
What a virtual disk's host keeps in its memory cannot be seen from here.

A run's "ranks" are the tasks of a turn: {"task", "ranks", "saved", "told": [what each rank said]}.
"""

from __future__ import annotations

import gc
import importlib
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from benchmarks import gpt, harness, launch, pages, probes, trainers
from benchmarks.harness import Row, Run, middle, of_ranks, relative, scaled
from benchmarks.pages import Cell, shown

PEERS: tuple[str, ...] = ("onefold-3", "onefold-1", "fsdp2", "deepspeed-3", "deepspeed-1")
"""In the order of a round. A number is the ZeRO stage."""

NOTES: dict[str, str] = {
    "onefold-N": (
        "onefold.shard with Recipe.zero(N); onefold.save, save_async and load of model and AdamW"
    ),
    "fsdp2": (
        "fully_shard of each block and the root; get_state_dict, dcp.save, dcp.async_save (a"
        " process group of its own) and dcp.load into get_state_dict, then set_state_dict."
        " 'default': async_save as its tutorial has it; 'kept': with one DefaultStager for all"
        " saves, so that its buffers are reused. DCP stores a tied weight under both names"
    ),
    "deepspeed-N": (
        "DeepSpeed ZeRO stage N, save_checkpoint and load_checkpoint; it does not flush, so `until"
        " on disk` is what counts. It stores a copy of the weights beside the fp32 masters, and"
        " loads on as many ranks as saved"
    ),
}
PROOF = 1000
"""The number of the first of the two steps that prove a load."""
BUFFER = 8.0
"""MiB that a load may take beside a rank's part of the checkpoint: `onefold.checkpoint.parts.CHUNK` elements of at most 8 bytes."""


@dataclass(frozen=True)
class Setting(gpt.Setting):
    """`saves` and `behind` count saves that the training waits for, and those behind it in each of the
    peer's ways; `steps` are timed alone before each of these. `elsewhere`: loads on other numbers of
    ranks too.
    """

    saves: int = 2
    behind: int = 3
    elsewhere: bool = True

    @property
    def title(self) -> str:
        numel = gpt.count_parameters(self.model)
        return (
            f"{self.model}, {numel:,} parameters in fp32 with AdamW ({12 * numel / 1e9:.2f} GB of"
            f" state), {self.ranks} ranks, {self.tokens} tokens a rank and step"
        )


# -- the disk --------------------------------------------------------------------------------------

CHUNK = 4 << 20
#: Bytes that differ, so that a disk which compresses or finds doubles gains nothing.
VARIED = 64 << 20


def write(path: Path, nbytes: int) -> float:
    """Seconds to write and flush a new file of random bytes."""
    whole = memoryview(os.urandom(min(nbytes, VARIED) or 1))
    begun, at = time.perf_counter(), 0
    with path.open("xb", buffering=0) as file:
        while at < nbytes:
            place = at % len(whole)
            at += file.write(whole[place : place + min(CHUNK, nbytes - at)])
        os.fsync(file.fileno())
    return time.perf_counter() - begun


def files(folder: Path) -> list[Path]:
    """Every file below the folder; or the file itself."""
    return [folder] if folder.is_file() else sorted(p for p in folder.rglob("*") if p.is_file())


def nbytes_of(folder: Path) -> int:
    """Bytes of every file below the folder."""
    return sum(path.stat().st_size for path in files(folder))


def flush(folder: Path) -> float:
    """Seconds to flush every file below the folder: none where the library has done it."""
    begun = time.perf_counter()
    for path in files(folder):
        with path.open("rb") as file:
            os.fsync(file.fileno())
    return time.perf_counter() - begun


def evict(folder: Path) -> None:
    """Take every file below the folder out of this machine's page cache."""
    flush(folder)
    for path in files(folder):
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def remove(folder: Path) -> None:
    """Remove the folder or file, if it is there."""
    if folder.is_dir():
        shutil.rmtree(folder)
    else:
        folder.unlink(missing_ok=True)


# -- how each peer saves and loads -----------------------------------------------------------------


@dataclass
class Pending:
    """A save that goes on behind the training.

    Attributes:
        ended: whether it has, on this rank. wait: until it has; raises what went wrong. whole_at:
            when it was whole, as perf_counter tells time; to be called after `wait`.
    """

    ended: Callable[[], bool]
    wait: Callable[[], Any]
    whole_at: Callable[[], float]


class Onefold:
    """`onefold.save`, `save_async` and `load`."""

    behind: tuple[str, ...] = ("default",)

    def __init__(self, trainer: Any) -> None:
        self.onefold: Any = importlib.import_module("onefold")
        self.parts = {"model": trainer.model, "optimizer": trainer.optimizer}

    def save(self, path: Path) -> None:
        self.onefold.save(path, **self.parts)

    def save_async(self, path: Path, way: str) -> Pending:
        begun = time.perf_counter()
        saving = self.onefold.save_async(path, **self.parts)
        return Pending(lambda: saving.done, saving.wait, lambda: begun + saving.seconds)

    def load(self, path: Path) -> None:
        self.onefold.load(path, **self.parts, rng=False)

    def close(self) -> None:
        """Nothing is kept beside the model."""


class Distributed:
    """torch.distributed.checkpoint of an FSDP2 model."""

    behind: tuple[str, ...] = ("default", "kept")

    def __init__(self, trainer: Any) -> None:
        self.dcp: Any = importlib.import_module("torch.distributed.checkpoint")
        self.state: Any = importlib.import_module("torch.distributed.checkpoint.state_dict")
        self.staging: Any = importlib.import_module("torch.distributed.checkpoint.staging")
        self.model, self.optimizer = trainer.model, trainer.optimizer
        # The training's would be used by two threads at once
        self.group = dist.new_group(backend="gloo")
        self.stager: Any = None

    def _states(self) -> dict[str, Any]:
        model, optimizer = self.state.get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer}

    def save(self, path: Path) -> None:
        self.dcp.save(self._states(), checkpoint_id=path)

    def save_async(self, path: Path, way: str) -> Pending:
        kept: dict[str, Any] = {}
        if way == "kept":
            if self.stager is None:
                # The rest of them needs CUDA
                options = self.staging.StagingOptions(False, False, False, False)
                self.stager = self.staging.DefaultStager(options)
            kept["async_stager"] = self.stager
        future = self.dcp.async_save(
            self._states(), checkpoint_id=path, process_group=self.group, **kept
        )
        ended: list[float] = []
        future.add_done_callback(lambda _: ended.append(time.perf_counter()))
        return Pending(lambda: bool(ended), future.result, lambda: ended[0])

    def load(self, path: Path) -> None:
        states = self._states()
        self.dcp.load(states, checkpoint_id=path)
        self.state.set_state_dict(
            self.model,
            self.optimizer,
            model_state_dict=states["model"],
            optim_state_dict=states["optimizer"],
        )

    def close(self) -> None:
        if self.stager is not None:
            self.stager.close()


class DeepSpeed:
    """`save_checkpoint` and `load_checkpoint` of the engine."""

    behind: tuple[str, ...] = ()

    def __init__(self, trainer: Any) -> None:
        self.engine = trainer.engine

    def save(self, path: Path) -> None:
        self.engine.save_checkpoint(str(path), tag="saved")

    def save_async(self, path: Path, way: str) -> Pending:
        raise ValueError("DeepSpeed's default writer saves while the training waits.")

    def load(self, path: Path) -> None:
        found, _ = self.engine.load_checkpoint(str(path), tag="saved")
        if found is None:
            raise RuntimeError(f"DeepSpeed found no checkpoint in {path}")

    def close(self) -> None:
        """Nothing is kept beside the engine."""


KEEPERS: dict[str, type] = {"onefold": Onefold, "fsdp2": Distributed, "deepspeed": DeepSpeed}


# -- a rank that saves or loads --------------------------------------------------------------------


def settled() -> float | None:
    """Give the heap back and forget the peak, all together; the resident MiB."""
    gc.collect()
    probes.give_back_free_heap()
    dist.barrier()
    probes.reset_peak()
    return probes.resident_mib()


def above(rest: float | None) -> float | None:
    """MiB needed beyond `rest` since `settled`."""
    return probes.difference(probes.peak_resident_mib(), rest)


def agreed(value: int, how: Any = dist.ReduceOp.MAX) -> int:
    """The largest (or smallest) value over ranks."""
    box = torch.tensor(value)
    dist.all_reduce(box, how)
    return int(box)


class Bench:
    """A trainer and what saves it, on this rank."""

    def __init__(self, side: str, setting: Setting, folder: Path) -> None:
        self.side, self.setting, self.folder, self.taken = side, setting, folder, 0
        self.first = dist.get_rank() == 0
        self._touch_libraries()
        self.trainer, self.keeper = self._made(setting)

    def _made(self, setting: Setting) -> tuple[trainers.Trainer, Any]:
        trainer = trainers.build(self.side, setting, gpt.build(setting.model))
        return trainer, KEEPERS[self.side.partition("-")[0]](trainer)

    def _touch_libraries(self) -> None:
        """Save and load a toy once, so that lazy imports are there before anything is measured."""
        toy = replace(self.setting, model="gpt-tiny", tokens=32)
        trainer, keeps = self._made(toy)
        trainer.step(gpt.batches(toy, 0, 0, 1))
        place = self.folder.with_name(f"{self.folder.name}-toy")
        keeps.save(place)
        for way in keeps.behind if self.setting.behind else ():
            keeps.save_async(place.with_name(f"{place.name}-{way}"), way).wait()
        keeps.load(place)
        keeps.close()
        dist.barrier()
        if self.first:
            for path in self.folder.parent.glob(f"{place.name}*"):
                remove(path)
        del trainer, keeps
        gc.collect()

    def step(self) -> float:
        """One more step; its seconds."""
        begun = time.perf_counter()
        self.trainer.step(gpt.batches(self.setting, self.taken, 0, 1))
        self.taken += 1
        return time.perf_counter() - begun

    def proof(self) -> list[float]:
        """The losses of two steps that no other takes."""
        return [self.trainer.step(gpt.batches(self.setting, PROOF + k, 0, 1)) for k in range(2)]

    def clear(self) -> None:
        """Remove the checkpoint and flush the disk; `settled` has the others wait for that."""
        if self.first:
            remove(self.folder)
            os.sync()

    def save_turn(self) -> dict[str, Any]:
        """Steps, saves of both kinds, and the disk beside them; the last checkpoint stays."""
        for _ in range(self.setting.warmup):
            self.step()
        numbers = range(self.setting.behind)
        behind = [self._behind(way, number) for way in self.keeper.behind for number in numbers]
        saves = [self._save() for _ in range(self.setting.saves)]
        return {"behind": behind, "saves": saves, "proof": self.proof()}

    def _save(self) -> dict[str, Any]:
        self.clear()
        rest, begun = settled(), time.perf_counter()
        self.keeper.save(self.folder)
        seconds, peak = time.perf_counter() - begun, above(rest)
        dist.barrier()
        flushed = flush(self.folder) if self.first else 0.0
        nbytes = agreed(nbytes_of(self.folder) if self.first else 0)
        raw = self.folder.with_name(f"{self.folder.name}-raw{dist.get_rank()}")
        settled()
        written = write(raw, nbytes // dist.get_world_size())
        dist.barrier()
        remove(raw)
        found = {"seconds": seconds, "flush_s": flushed, "folder_bytes": nbytes}
        return {**found, "peak_mib": peak, "disk_s": written}

    def _behind(self, way: str, number: int) -> dict[str, Any]:
        """One save behind the training: its stall, and the steps until it is whole."""
        alone = [self.step() for _ in range(self.setting.steps)]
        self.clear()
        rest, begun = settled(), time.perf_counter()
        pending = self.keeper.save_async(self.folder, way)
        stall, taken, beside = time.perf_counter() - begun, above(rest), []
        while not agreed(int(pending.ended()), dist.ReduceOp.MIN):
            beside.append(self.step())
        pending.wait()
        found = {"way": way, "number": number, "alone_s": alone, "beside_s": beside}
        return {**found, "stall_s": stall, "whole_s": pending.whole_at() - begun, "copy_mib": taken}

    def load_turn(self) -> dict[str, Any]:
        """Load into a fresh model, from the disk."""
        if self.first:
            evict(self.folder)
        rest, before, begun = settled(), probes.moved_bytes(), time.perf_counter()
        self.keeper.load(self.folder)
        seconds, peak, moved = time.perf_counter() - begun, above(rest), probes.moved_since(before)
        stays = probes.difference(probes.resident_mib(), rest)
        dist.barrier()
        found = {"seconds": seconds, "peak_mib": peak, "stays_mib": stays, **moved}
        return {**found, "folder_bytes": nbytes_of(self.folder), "proof": self.proof()}


def prepare(job: dict[str, Any]) -> None:
    trainers.prepare(job["side"])


def measure(job: dict[str, Any]) -> dict[str, Any]:
    """What this rank says of the job's task."""
    bench = Bench(job["side"], Setting(**job["setting"]), Path(job["folder"]))
    found = bench.save_turn() if job["task"] == "save" else bench.load_turn()
    bench.keeper.close()
    return found


# -- rows: slowest ranks, medians over rounds; GB are 10^9 bytes --------------------------------------

LEGEND = (
    "returns: until the call returns on the slowest rank; on disk: until the disk also knows every"
    " file; GB/s: of that; / disk's: the same ranks writing and flushing as many bytes with write(2)"
    " alone, beside each save, over it. Memory: resident beyond rest, the largest rank. Behind the"
    " training, stall: what the call takes; whole: from the call until the checkpoint is whole on"
    " disk; lost: what a save costs the training, its stall and the delay of the steps beside it;"
    " copy: memory beyond rest after the first call; first: of a run, which makes its buffers. Loads,"
    " from the disk: owned: a rank's part of the checkpoint; read: what the rank that reads most asked"
    " of the kernel; disk: what the disk gave; loss diff: the two steps after the load to the two"
    " after the save."
)
SAVES: dict[str, Cell] = {
    "side": shown("side"),
    "GB": shown("folder_gb", "{:.2f}"),
    "returns s": shown("seconds", "{:.2f}"),
    "on disk s": shown("on_disk_s", "{:.2f}"),
    "GB/s": shown("gb_s", "{:.2f}"),
    "/ disk's": shown("rate", "{:.2f}"),
    "peak MiB": shown("peak_mib", "{:,.0f}"),
}
BEHIND: dict[str, Cell] = {
    "side": shown("side"),
    "way": shown("way"),
    "first stall s": shown("first_stall_s", "{:.3f}"),
    "later stall s": shown("stall_s", "{:.3f}"),
    "whole s": shown("whole_s", "{:.2f}"),
    "stall / whole": shown("stall_share", "{:.1%}"),
    "step alone s": shown("alone_s", "{:.2f}"),
    "step beside s": shown("beside_s", "{:.2f}"),
    "lost s": shown("lost_s", "{:.2f}"),
    "copy MiB": shown("copy_mib", "{:,.0f}"),
}
LOADS: dict[str, Cell] = {
    "side": shown("side"),
    "saved on -> loaded on": lambda row: f"{row['saved']} -> {row['ranks']}",
    "s": shown("seconds", "{:.2f}"),
    "owned GB": shown("need_gb", "{:.2f}"),
    "read GB": shown("read_gb", "{:.2f}"),
    "disk GB, all ranks": shown("disk_gb", "{:.2f}"),
    "peak MiB": shown("peak_mib", "{:,.0f}"),
    "stays MiB": shown("stays_mib", "{:,.0f}"),
    "loss diff": shown("loss_difference", "{:.1e}"),
}


def told(good: Sequence[Run], task: str, ranks: int = 0) -> list[list[dict[str, Any]]]:
    """What the ranks said of each round's task."""
    return [
        t["told"] for r in good for t in r.ranks if t["task"] == task and ranks in (0, t["ranks"])
    ]


def over(rounds: Sequence[Sequence[dict[str, Any]]], look: Any, how: Any = max) -> float | None:
    """The median over rounds of the largest value over ranks."""
    return middle(of_ranks(ranks, look, how) for ranks in rounds)


def each(good: Sequence[Run], name: str) -> list[tuple[dict[str, Any], ...]]:
    """Of every save in every round, what the ranks said of it."""
    return [
        saved
        for ranks in told(good, "save")
        for saved in zip(*(r[name] for r in ranks), strict=True)
    ]


def save_row(good: Sequence[Run]) -> Row:
    saves = each(good, "saves")
    on_disk = [max(s["seconds"] for s in ranks) + ranks[0]["flush_s"] for ranks in saves]
    disk = [max(s["disk_s"] for s in ranks) for ranks in saves]
    total = median(ranks[0]["folder_bytes"] for ranks in saves) / 1e9
    return {
        "folder_gb": total,
        "seconds": over(saves, "seconds"),
        "on_disk_s": median(on_disk),
        "gb_s": total / median(on_disk),
        "rate": median(d / s for d, s in zip(disk, on_disk, strict=True)),
        "peak_mib": over(saves, "peak_mib"),
    }


def behind_rows(side: str, good: Sequence[Run]) -> Iterator[Row]:
    """A row for each way of saving behind the training."""
    saves = each(good, "behind")
    for way in dict.fromkeys(ranks[0]["way"] for ranks in saves):
        mine = [ranks for ranks in saves if ranks[0]["way"] == way]
        first = [ranks for ranks in mine if ranks[0]["number"] == 0]
        later = [ranks for ranks in mine if ranks[0]["number"]] or mine
        alone = [s for ranks in mine for s in harness.slowest(ranks, "alone_s")]
        base, lost, beside = median(alone), [], []
        for ranks in later:
            steps = harness.slowest(ranks, "beside_s")
            beside += steps
            lost.append(max(s["stall_s"] for s in ranks) + sum(step - base for step in steps))
        stall, whole = over(later, "stall_s") or 0.0, over(later, "whole_s") or 0.0
        yield {
            "side": side,
            "way": way,
            "first_stall_s": over(first, "stall_s"),
            "stall_s": stall,
            "whole_s": whole,
            "stall_share": stall / whole,
            "alone_s": base,
            "beside_s": middle(beside),
            "lost_s": median(lost),
            "copy_mib": over(first, "copy_mib"),
        }


def load_rows(side: str, good: Sequence[Run]) -> Iterator[Row]:
    """A row for each number of ranks that loaded."""
    sizes = dict.fromkeys(
        (t["saved"], t["ranks"]) for r in good for t in r.ranks if t["task"] == "load"
    )
    for saved, ranks in sizes:
        loads = told(good, "load", ranks)
        proofs = zip(loads, told(good, "save"), strict=True)
        differences = [relative(a[0]["proof"], b[0]["proof"]) for a, b in proofs]
        total = loads[0][0]["folder_bytes"] / 1e9
        yield {
            "side": side,
            "saved": saved,
            "ranks": ranks,
            "seconds": over(loads, "seconds"),
            "need_gb": total / ranks,
            "read_gb": scaled(over(loads, "read_calls"), 1e9),
            "disk_gb": scaled(over(loads, "read_disk", sum), 1e9),
            "peak_mib": over(loads, "peak_mib"),
            "stays_mib": over(loads, "stays_mib"),
            "loss_difference": max(d for d in differences if d is not None),
        }


class Checkpoints(harness.Study):
    schema, module, known = "onefold-checkpoint/2", "benchmarks.checkpoint", PEERS
    read, notes, legend, reference = Setting, NOTES, LEGEND, ""

    def measure(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="checkpoints-", dir=self.options.folder))
        try:
            super().measure()
        finally:
            shutil.rmtree(self.folder, ignore_errors=True)

    def take(self, setting: Setting, side: str) -> dict[str, Any]:
        """All tasks of a peer, each of which starts where the one before has left the folder."""
        folder, n = self.folder / side, setting.ranks
        tasks = [("save", n), ("load", n)]
        if setting.elsewhere and not side.startswith("deepspeed"):
            tasks += [("load", 2 * n)] + [("load", n // 2)] * (n > 1)
        done, wall = [], 0.0
        try:
            for task, ranks in tasks:
                how = {"task": task, "folder": str(folder)}
                asked = replace(setting, ranks=ranks)
                found = launch.run_side(self.module, side, asked, self.options, **how)
                wall += found["wall_s"]
                if found["status"] != "ok":
                    return {**found, "error": f"{task} on {ranks}: {found['error']}"}
                done.append({"task": task, "ranks": ranks, "saved": n, "told": found["ranks"]})
        finally:
            remove(folder)
        return {"status": "ok", "ranks": done, "wall_s": wall}

    def row(self, comparison: harness.Comparison, side: str, good: list[Run]) -> Row:
        return save_row(good)

    def columns(self, setting: Setting) -> Mapping[str, Cell]:
        return SAVES

    def further(self, make: Callable[[str, list[Run]], Iterator[Row]]) -> list[Row]:
        """The rows of another table of the checkpoints."""
        good = [run for c in self.comparisons for run in c.runs if run.status == "ok"]
        sides = dict.fromkeys(run.side for run in good)
        return [row for side in sides for row in make(side, [r for r in good if r.side == side])]

    def document(self) -> dict[str, Any]:
        tables = {"behind": self.further(behind_rows), "loads": self.further(load_rows)}
        return {"file_system": probes.file_system(self.options.folder or Path.cwd()), **tables}

    def more(self, result: dict[str, Any]) -> Iterable[str]:
        if result["behind"]:
            yield "**Saves behind the training**"
            yield pages.table(BEHIND, result["behind"])
        if result["loads"]:
            yield f"**Loads** ({result['file_system']})"
            yield pages.table(LOADS, result["loads"])

    def goals(self, judged: Any) -> list[Row]:
        rows, goal = [row for _, found in judged for row in found], harness.goal
        behind, loads = self.further(behind_rows), self.further(load_rows)
        theirs = min((row["stall_s"] for row in behind if row["side"] == "fsdp2"), default=None)
        found = []
        for row in (row for row in rows if row["side"].startswith("onefold")):
            text = f"{row['side']}: rate of saving at least 0.80 of the disk's"
            found.append(goal(text, row["rate"], 9, least=0.8))
        for row in (row for row in behind if row["side"].startswith("onefold")):
            text = f"{row['side']}: stall at most 5 % of the time until whole"
            found.append(goal(text, row["stall_share"], 0.05, "{:.1%}"))
            text = f"{row['side']}: stall at most that of the better of DCP's"
            found.append(goal(text, theirs and row["stall_s"] / theirs, 1))
        for row in (row for row in loads if row["side"].startswith("onefold")):
            sizes = f"{row['side']}, {row['saved']} -> {row['ranks']}"
            owned = row["need_gb"] * 1e9 / 2**20 + BUFFER
            read = row["read_gb"] and row["read_gb"] / row["need_gb"]
            found.append(goal(f"{sizes}: reads at most 1.05 of what it owns", read, 1.05))
            peak = row["peak_mib"] and row["peak_mib"] / owned
            text = f"{sizes}: peak at most what it owns and {BUFFER:.0f} MiB"
            found.append(goal(text, peak, 1))
        return found


@harness.command(
    "checkpoint",
    __doc__,
    rounds=3,
    timeout=900.0,
    sides=(list(PEERS), f"which of {', '.join(PEERS)}"),
    model=("gpt-110m", "which GPT", gpt.SHAPES),
    ranks=(2, "who saves; loads are on as many, on twice and on half as many"),
    saves=(2, "saves of a turn that the training waits for"),
    behind=(3, "saves of a turn behind the training, in each of the peer's ways"),
    steps=(3, "steps timed alone before each of these"),
    tokens=(256, "tokens a rank and step"),
    same_ranks=(False, "no loads on other numbers of ranks"),
    folder=(None, "where checkpoints go while they are needed: on the disk to be measured", Path),
    **harness.OPTIONS,
)
def main(options: harness.Options) -> int:
    """A round takes about 20 minutes on two cores."""
    harness.check_at_least(options, 1, "ranks", "rounds", "saves", "steps", "tokens")
    harness.check_at_least(options, 0, "behind")
    names = ("model", "ranks", "saves", "behind", "steps", "tokens", "threads")
    shared = {name: getattr(options, name) for name in names}
    return Checkpoints(options, [Setting(elsewhere=not options.same_ranks, **shared)]).run()
