"""One rank of a turn that saves or loads, started by `launch.run_ranks`.

Every rank trains on the same batches, so that losses can be compared between runs on different
numbers of ranks: the two steps after a save and the same two after a load must have the same
losses, the second of which depends on the optimizer's states.
"""

from __future__ import annotations

import gc
import os
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks import probes
from benchmarks.checkpoint import disk
from benchmarks.checkpoint.adapters import Keeper, keeper
from benchmarks.checkpoint.settings import Counts, Turn
from benchmarks.peers import adapters, model
from benchmarks.peers.settings import Setting

PROOF = 1000
"""The number of the first of the two steps that prove a load."""


class Bench:
    """A trainer and what saves it, on this rank."""

    def __init__(self, turn: Turn, setting: Setting, counts: Counts, folder: Path) -> None:
        self.turn, self.setting, self.counts, self.folder = turn, setting, counts, folder
        self.first = dist.get_rank() == 0
        self.taken = 0
        self._touch_libraries()
        self.trainer, self.keeper = self._made(setting)

    def _made(self, setting: Setting) -> tuple[adapters.Peer, Keeper]:
        trainer = adapters.build(self.turn.peer, setting, model.build(setting.model))
        return trainer, keeper(self.turn.peer, trainer)

    def _touch_libraries(self) -> None:
        """Save and load a toy once, so that lazy imports are there before anything is measured."""
        toy = replace(self.setting, model="gpt-tiny", tokens=32)
        trainer, keeps = self._made(toy)
        trainer.step(_batch(toy, 0))
        place = self.folder.with_name(f"{self.folder.name}-toy")
        keeps.save(place)
        for way in keeps.behind if self.turn.kind == "save" and self.counts.behind else ():
            keeps.save_async(place.with_name(f"{place.name}-{way}"), way).wait()
        keeps.load(place)
        keeps.close()
        dist.barrier()
        if self.first:
            for path in self.folder.parent.glob(f"{place.name}*"):
                disk.remove(path)
        del trainer, keeps
        gc.collect()

    def step(self) -> float:
        """One more step; its seconds."""
        begun = time.perf_counter()
        self.trainer.step(_batch(self.setting, self.taken))
        self.taken += 1
        return time.perf_counter() - begun

    def proof(self) -> list[float]:
        """The losses of two steps that no other takes."""
        return [self.trainer.step(_batch(self.setting, PROOF + k)) for k in range(2)]

    def settle(self) -> float | None:
        """Give the heap back and forget the peak, all together. Returns the resident MiB."""
        gc.collect()
        probes.give_back_free_heap()
        dist.barrier()
        self.resettable = probes.reset_peak()
        return probes.resident_mib()

    def peak_above(self, rest: float | None) -> float | None:
        """MiB needed beyond `rest` since `settle`; None where the peak cannot be reset."""
        return probes.difference(probes.peak_resident_mib(), rest) if self.resettable else None

    def clear(self) -> None:
        """Remove the checkpoint and flush the disk; `settle` has the others wait for that."""
        if self.first:
            disk.remove(self.folder)
            os.sync()

    # -- a turn that saves -------------------------------------------------------------------------

    def save_turn(self) -> dict[str, Any]:
        """Steps, saves of both kinds, and the disk beside them; the last checkpoint stays."""
        for _ in range(self.counts.warmup):
            self.step()
        numbers = range(self.counts.behind)
        behind = [self._behind(way, number) for way in self.keeper.behind for number in numbers]
        saves = []
        for number in range(self.counts.saves):
            saves.append(self._save())
            saves[-1]["disk"] = self._disk(saves[-1]["folder_bytes"], alone=number == 0)
        return {"behind": behind, "saves": saves, "proof": self.proof()}

    def _save(self) -> dict[str, Any]:
        self.clear()
        rest = self.settle()
        before, begun = probes.moved_bytes(), time.perf_counter()
        self.keeper.save(self.folder)
        seconds = time.perf_counter() - begun
        peak, moved = self.peak_above(rest), probes.moved_since(before)
        dist.barrier()
        flush = disk.flush(self.folder) if self.first else 0.0
        nbytes = self._agreed(disk.nbytes_of(self.folder) if self.first else 0)
        found = {"seconds": seconds, "flush_s": flush, "folder_bytes": nbytes, "peak_mib": peak}
        return {**found, **moved}

    def _disk(self, nbytes: int, alone: bool) -> dict[str, Any]:
        """Seconds to write, read, and write past the cache; `alone`: also one rank's."""
        path = self.folder.with_name(f"{self.folder.name}-raw{dist.get_rank()}")
        found: dict[str, Any] = {"bytes": nbytes // dist.get_world_size()}
        self.settle()
        found["write_s"] = disk.write(path, found["bytes"])
        disk.evict(path)
        dist.barrier()
        found["read_s"] = disk.read(path)
        self._remove_raw(path)
        found["direct_s"] = disk.write_direct(path, found["bytes"])
        self._remove_raw(path)
        if alone and self.first:
            found["alone_bytes"], found["alone_write_s"] = nbytes, disk.write(path, nbytes)
        self._remove_raw(path)
        return found

    def _remove_raw(self, path: Path) -> None:
        dist.barrier()
        disk.remove(path)
        dist.barrier()
        if self.first:
            os.sync()
        dist.barrier()

    def _behind(self, way: str, number: int) -> dict[str, Any]:
        """One save behind the training: its stall, and the steps until it is whole."""
        alone = [self.step() for _ in range(self.counts.steps)]
        self.clear()
        rest = self.settle()
        begun = time.perf_counter()
        pending = self.keeper.save_async(self.folder, way)
        stall = time.perf_counter() - begun
        copy = self.peak_above(rest)
        beside = []
        while not self._agreed(int(pending.ended()), dist.ReduceOp.MIN):
            start = time.perf_counter() - begun
            beside.append([start, start + self.step()])
        pending.wait()
        found = {"way": way, "number": number, "alone_s": alone, "beside": beside}
        whole = pending.whole_at() - begun
        return {**found, "stall_s": stall, "whole_s": whole, "copy_mib": copy}

    def _agreed(self, value: int, how: Any = dist.ReduceOp.MAX) -> int:
        """The largest (or smallest) value over ranks."""
        box = torch.tensor(value)
        dist.all_reduce(box, how)
        return int(box)

    # -- a turn that loads -------------------------------------------------------------------------

    def load_turn(self) -> dict[str, Any]:
        """Load into a fresh model twice: from the disk, then with the files in the page cache."""
        if self.first:
            disk.evict(self.folder)
        found = {"cold": self._load(), "warm": self._load()}
        return {**found, "folder_bytes": disk.nbytes_of(self.folder), "proof": self.proof()}

    def _load(self) -> dict[str, Any]:
        rest = self.settle()
        before, begun = probes.moved_bytes(), time.perf_counter()
        self.keeper.load(self.folder)
        seconds = time.perf_counter() - begun
        peak, moved = self.peak_above(rest), probes.moved_since(before)
        stays = probes.difference(probes.resident_mib(), rest)
        dist.barrier()
        return {"seconds": seconds, "peak_mib": peak, "stays_mib": stays, **moved}


def _batch(setting: Setting, step: int) -> list[adapters.Batch]:
    return [model.micro_batch(setting.model, setting.tokens, step, 0, 0, 1)]


def prepare(job: dict[str, Any]) -> None:
    adapters.prepare(job["turn"]["peer"])


def measure(job: dict[str, Any]) -> dict[str, Any]:
    """What this rank measured in the job's turn; the process group is there."""
    turn = Turn(**job["turn"])
    bench = Bench(turn, Setting(**job["setting"]), Counts(**job["counts"]), Path(job["folder"]))
    found = bench.save_turn() if turn.kind == "save" else bench.load_turn()
    bench.keeper.close()
    return {"rank": dist.get_rank(), **found}
