"""The NVMe store beside a plain copy: `python -m benchmarks nvme FOLDER... [--mib 512] [--rounds 7]`.

A chunk of the optimizer's step on NVMe reads masters, two moments and gradients, and writes masters
and moments: 4 regions read, 3 written, 16 MiB of each at a time. What the disk gives for this is
asked of plain loops of direct reads and writes over files of the same sizes:

    copy          one thread: read 4 chunks, write 3, and so on: the plain sequential copy that the goal is measured against
    store         Nvme, three sets of buffers: reads of the next chunk and writes of the last one under way together
    store, step   the same with torch's fused AdamW on each chunk in between, as the runtime has it

All take turns in one run, the order turned about each round. Rates count bytes read and written.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch

from benchmarks import harness, pages, probes
from onefold.memory import empty
from onefold.offload.nvme import Nvme, Transfer

SCHEMA = "onefold-nvme/1"
READS, WRITES, SETS = 4, 3, 3
MIB = 1 << 20
GOAL = 0.85
COLUMNS: pages.Columns = {
    "way": pages.shown("way"),
    "MB/s": pages.shown("mb_s", "{:,.0f}"),
    "of the copy": pages.shown("of_copy", "{:.2f}"),
}


def pages_of(nbytes: int) -> torch.Tensor:
    return empty(nbytes, torch.uint8, torch.device("cpu"), paged=True)


class Plain:
    """Files without names, opened for direct transfers, and loops over them."""

    def __init__(self, folder: Path, nbytes: int, chunk: int) -> None:
        self.nbytes, self.chunk = nbytes, chunk
        self.files = []
        for _ in range(READS):
            with tempfile.TemporaryFile(dir=folder, buffering=0) as file:
                os.posix_fallocate(file.fileno(), 0, nbytes)
                self.files.append(
                    os.open(f"/proc/self/fd/{file.fileno()}", os.O_RDWR | os.O_DIRECT)
                )
        self.memory = memoryview(pages_of(READS * chunk).numpy())
        self.memory[:] = os.urandom(
            len(self.memory)
        )  # some disks have an easy way with repetitions
        for file in self.files:
            for at in range(0, nbytes, chunk):
                os.pwrite(file, self.memory[:chunk], at)

    def read(self, at: int) -> None:
        for i, file in enumerate(self.files):
            view = self.memory[i * self.chunk : (i + 1) * self.chunk]
            assert os.preadv(file, [view], at) == len(view)

    def write(self, at: int) -> None:
        for i, file in enumerate(self.files[:WRITES]):
            view = self.memory[i * self.chunk : (i + 1) * self.chunk]
            assert os.pwritev(file, [view], at) == len(view)

    def copy(self) -> None:
        for at in range(0, self.nbytes, self.chunk):
            self.read(at)
            self.write(at)


class Stored:
    """Four regions of a store, and the optimizer's pipeline over them through sets of buffers."""

    def __init__(self, paths: list[Path], nbytes: int, chunk: int, threads: int) -> None:
        self.store = Nvme(paths, name="benchmark", threads=threads)
        self.numel, self.chunk = nbytes // 4, chunk // 4
        self.regions = [
            self.store.region(name, self.numel, torch.float32)
            for name in ("masters", "exp_avg", "exp_avg_sq", "gradients")
        ]
        self.sets = [
            [pages_of(chunk).view(torch.float32) for _ in self.regions] for _ in range(SETS)
        ]
        for region in self.regions:
            for start in range(0, self.numel, self.chunk):
                region.write(start, self.sets[0][0]).wait()
        self.t = torch.ones(())

    def adamw(self, buffers: list[torch.Tensor]) -> None:
        masters, first, second, gradients = ([b] for b in buffers)
        torch._fused_adamw_(
            masters, gradients, first, second, [], [self.t],
            lr=1e-4, beta1=0.9, beta2=0.95, weight_decay=0.1, eps=1e-8, amsgrad=False, maximize=False,
        )  # fmt: skip

    def run(self, step: Callable[[list[torch.Tensor]], None] | None) -> None:
        starts = list(range(0, self.numel, self.chunk))
        reading: list[list[Transfer]] = [[] for _ in self.sets]
        writing: list[list[Transfer]] = [[] for _ in self.sets]

        def read(i: int) -> None:
            turn = i % SETS
            for transfer in writing[turn]:
                transfer.wait()
            reading[turn] = [
                region.read(starts[i], buffer)
                for region, buffer in zip(self.regions, self.sets[turn], strict=True)
            ]

        read(0)
        for i, start in enumerate(starts):
            if i + 1 < len(starts):
                read(i + 1)
            turn = i % SETS
            for transfer in reading[turn]:
                transfer.wait()
            if step is not None:
                step(self.sets[turn])
            writing[turn] = [
                region.write(start, buffer)
                for region, buffer in zip(self.regions[:WRITES], self.sets[turn], strict=False)
            ]
        for transfers in writing:
            for transfer in transfers:
                transfer.wait()


@harness.command(
    "nvme",
    __doc__,
    rounds=7,
    threads=4,
    mib=(512, "of each of the four regions"),
    chunk=(16, "MiB of each region at a time"),
    folders=(..., "on the disks to measure; the plain copies use the first", Path, {"nargs": "+"}),
)
def main(args: harness.Options) -> int:
    torch.set_num_threads(1)
    nbytes, chunk = args.mib * MIB, args.chunk * MIB
    moved = nbytes * (READS + WRITES)
    plain, stored = (
        Plain(args.folders[0], nbytes, chunk),
        Stored(args.folders, nbytes, chunk, args.threads),
    )
    ways: dict[str, Callable[[], None]] = {
        "copy": plain.copy,
        "store": lambda: stored.run(None),
        "store, step": lambda: stored.run(stored.adamw),
    }
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for way in ways.values():  # everything touched once
        way()
    for _, name in harness.in_turns(ways, args.rounds):
        begun = time.perf_counter()
        ways[name]()
        seconds[name].append(time.perf_counter() - begun)
    cached = probes.cached_bytes(
        Path(f"/proc/self/fd/{file.file.fileno()}") for file in stored.store.files
    )
    stored.store.close()
    rows = [
        {"way": name, "mb_s": moved / median(own) / 1e6, "seconds": own}
        | {"of_copy": median(a / b for a, b in zip(seconds["copy"], own, strict=True))}
        for name, own in seconds.items()
    ]
    share = rows[-1]["of_copy"]
    goals = [harness.goal(f"with the step at least {GOAL} of the copy", share, 9, least=GOAL)]

    def page(found: dict[str, Any]) -> str:
        return pages.page(pages.where(found), pages.goals(goals), pages.table(COLUMNS, rows))

    what = {"bytes": moved, "folders": len(args.folders), "bytes_in_the_page_cache": cached}
    pages.show(page(harness.keep(args, SCHEMA, page, **what, goals=goals, rows=rows)))
    return 0
