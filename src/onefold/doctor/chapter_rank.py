"""One rank of a chapter: `python -m onefold.doctor.chapter_rank FOLDER RANK`.

The job names one of `WORK`: blocks that train, an exchange beside a product, or memory after each
communicator. See `chapters`.
"""

from __future__ import annotations

import contextlib
import gc
import os
import re
import subprocess
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import onefold
from onefold.comm.communicators import Communicators
from onefold.comm.sums import sum_parts
from onefold.doctor.chapter_runs import as_a_rank, join
from onefold.observe.trace import covered

MIB = 1 << 20


class ChapterRank:
    """This rank: its job, its device, and how it waits for the others."""

    def __init__(self, job: dict[str, Any], folder: Path, rank: int) -> None:
        self.job, self.folder, self.rank = job, folder, rank
        self.size: int = job["ranks"]
        self.cuda = job["device"] == "cuda"
        self.device = torch.device("cpu")
        self.backend = "none"

    def join(self) -> None:
        """Take a device and join the other ranks."""
        self.backend = join(self.job, self.folder, self.rank)
        if self.cuda:
            self.device = torch.device("cuda", torch.cuda.current_device())

    def synchronize(self) -> None:
        """Wait for the device."""
        if self.cuda:
            torch.cuda.synchronize()

    def wait(self) -> None:
        """Wait for the device, and for all ranks."""
        self.synchronize()
        dist.barrier()

    def seconds(self, act: Callable[[], object], times: int) -> float:
        """Return the median seconds of `act`, from all ranks' start to the end of the device's
        work.
        """
        found = []
        for _ in range(times):
            self.wait()
            begun = time.perf_counter()
            act()
            self.synchronize()
            found.append(time.perf_counter() - begun)
        return median(found)


# -- blocks that train -----------------------------------------------------------------------------


class LlamaBlock(nn.Module):
    """A block of Llama 3's shape: grouped attention, a gated feed-forward. `shape`: width,
    feed-forward, heads, heads of keys and values.
    """

    def __init__(self, width: int, forward: int, heads: int, shared: int) -> None:
        super().__init__()
        self.heads, self.shared, self.size = heads, shared, width // heads
        self.before, self.between = nn.RMSNorm(width), nn.RMSNorm(width)
        self.q = nn.Linear(width, width, bias=False)
        self.kv = nn.Linear(width, 2 * shared * self.size, bias=False)
        self.o = nn.Linear(width, width, bias=False)
        self.up, self.gate = (nn.Linear(width, forward, bias=False) for _ in range(2))
        self.down = nn.Linear(forward, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.before(x)
        q = self.q(h).unflatten(-1, (self.heads, self.size)).transpose(1, 2)
        k, v = (
            part.unflatten(-1, (self.shared, self.size)).transpose(1, 2)
            for part in self.kv(h).chunk(2, -1)
        )
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + self.o(mixed.transpose(1, 2).flatten(2))
        h = self.between(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


class LlamaBlocks(nn.Module):
    """`count` blocks of one shape, one after another."""

    def __init__(self, shape: list[int], count: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(LlamaBlock(*shape) for _ in range(count))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x.float().square().mean()


def blocks(here: ChapterRank) -> dict[str, Any]:
    """Train over blocks: seconds of a step, losses, waits by the ledger and exposed time by a trace
    of two steps; memory at peak.

    `job["recipe"]`: arguments of `Recipe.zero`. `job["accumulation"]`: micro-batches of a step.
    `job["compile"]`: each block by inductor.
    """
    here.join()
    job = here.job
    torch.manual_seed(0)
    with here.device:
        model: nn.Module = LlamaBlocks(job["shape"], job["blocks"])
    numel = sum(p.numel() for p in model.parameters())
    if job.get("compile"):
        for block in model.blocks:  # type: ignore[union-attr]
            block.compile()
    recipe = onefold.Recipe.zero(precision="bf16", **job["recipe"])
    model = onefold.shard(model, recipe, units=["LlamaBlock"], device=here.device)
    engine = onefold.engine_of(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=job.get("fused"))
    generator = torch.Generator().manual_seed(here.rank)
    x = torch.randn(1, job["tokens"], job["shape"][0], generator=generator, device="cpu").to(
        here.device
    )
    losses: list[torch.Tensor] = []
    micro_batches = job.get("accumulation", 1)

    def step() -> None:
        for number in range(1, micro_batches + 1):
            last = number == micro_batches
            with contextlib.nullcontext() if last else onefold.no_sync(model):
                losses.append(model(x))
                (losses[-1] / micro_batches).backward()
        optimizer.step()
        optimizer.zero_grad()

    begun = time.perf_counter()
    step()
    here.wait()
    first = time.perf_counter() - begun
    for _ in range(job["warmup"] - 1):
        step()
    here.wait()
    engine.traffic.reset()
    if here.cuda:
        torch.cuda.reset_peak_memory_stats()
    seconds = here.seconds(step, job["steps"])
    waits = engine.traffic.exposed / job["steps"]
    peak = torch.cuda.max_memory_allocated() / MIB if here.cuda else None
    return {
        "backend": here.backend, "numel": numel, "first_s": first, "step_s": seconds, "waits_s": waits, "peak_mib": peak,
        "losses": [float(loss.detach()) for loss in losses], "trace": traced(here, step, 2),
    }  # fmt: skip


def traced(here: ChapterRank, step: Callable[[], None], steps: int) -> dict[str, float] | None:
    """Return the seconds of one step by torch's profiler; None on a CPU.

    "comm_s" or "copies_s": what the backend's kernels take, or copies between host and device;
    `job["across"]` says which. "compute_s": what everything else takes. "both_s", "exposed_s": how
    much of the former had some of the latter beside it, and how much had none. "pinned_s",
    "pageable_s": copies through pinned memory, and those that were not.
    """
    if not here.cuda:
        return None
    kinds = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=kinds) as profiler:
        for _ in range(steps):
            step()
        torch.cuda.synchronize()
    found = seconds_by_kind(profiler.events() or (), here.job.get("across", "comm"))
    return {name: value / steps for name, value in found.items()}


def seconds_by_kind(events: Any, across: str) -> dict[str, float]:
    """Return the figures of `traced` of all events together."""
    spans: dict[str, list[tuple[float, float]]] = {"comm": [], "copies": [], "compute": []}
    through = {"pinned": 0.0, "pageable": 0.0}
    for event in events:
        # What somebody has named (an optimizer's step) stands on the GPU's time line too, from its
        # first piece of work to its last
        if event.device_type.name != "CUDA" or event.is_user_annotation:
            continue
        name, span = event.name.lower(), (event.time_range.start, event.time_range.end)
        for memory in through:
            through[memory] += span[1] - span[0] if memory in name else 0.0
        kind = "compute"
        if "nccl" in name:
            kind = "comm"
        elif name.startswith(("memcpy dtoh", "memcpy htod", "memcpy ptop")):
            kind = "copies"
        spans[kind].append(span)
    moving = spans.pop(across)
    rest = [span for kind in spans.values() for span in kind]
    both = covered(moving) + covered(rest) - covered([*moving, *rest])
    found = {
        f"{across}_s": covered(moving), "compute_s": covered(rest), "both_s": both,
        "exposed_s": covered(moving) - both, **{f"{m}_s": s for m, s in through.items()},
    }  # fmt: skip
    return {name: microseconds / 1e6 for name, microseconds in found.items()}


# -- an exchange beside a product ------------------------------------------------------------------


def exchange(here: ChapterRank) -> dict[str, Any]:
    """For each size: seconds of an all-to-all with the sum of its parts, and of a reduce-scatter,
    both in bf16, alone and beside matrix products; and of the products alone.
    """
    here.join()
    size, rows = here.size, []
    side = torch.cuda.Stream() if here.cuda else None
    n = here.job["matrix"]
    dtype = torch.bfloat16 if here.cuda else torch.float32
    a, b = (torch.randn(n, n, device=here.device, dtype=dtype) for _ in range(2))
    times = here.job["steps"]
    for megabytes in here.job["megabytes"]:
        part = max(1, int(megabytes * 1e6) // 2 // size)
        sent = torch.randn(part * size, device=here.device).bfloat16()
        got, own = torch.empty_like(sent), torch.empty(part, device=here.device)
        narrow = torch.empty(part, device=here.device, dtype=torch.bfloat16)

        def ordered(
            sent: torch.Tensor = sent, got: torch.Tensor = got, own: torch.Tensor = own
        ) -> None:
            dist.all_to_all_single(got, sent)
            sum_parts(got.view(size, -1), own, 1 / size)

        def native(sent: torch.Tensor = sent, narrow: torch.Tensor = narrow) -> None:
            dist.reduce_scatter_single(narrow, sent)

        row: dict[str, Any] = {"megabytes": megabytes}
        for name, move in (("ordered", ordered), ("native", native)):
            move()  # NCCL connects in the first one
            row[f"{name}_s"] = here.seconds(move, times)
        # Products that take as long as the slower of the two
        one = here.seconds(lambda: torch.mm(a, b), times)
        count = max(1, round(max(row["ordered_s"], row["native_s"]) / one)) if here.cuda else 1

        def products(count: int = count) -> None:
            for _ in range(count):
                torch.mm(a, b)

        row["products_s"] = here.seconds(products, times)
        for name, move in (("ordered", ordered), ("native", native)):
            row[f"{name}_beside_s"] = here.seconds(partial(beside, side, move, products), times)
        rows.append(row)
    return {"backend": here.backend, "rows": rows}


def beside(side: Any, move: Callable[[], None], products: Callable[[], None]) -> None:
    """Run both at once, each on a stream of its own; one after the other without streams."""
    if side is None:
        products()
        move()
        return
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        move()
    products()
    torch.cuda.current_stream().wait_stream(side)


# -- memory after each communicator ----------------------------------------------------------------


def communicators(here: ChapterRank) -> dict[str, Any]:
    """Memory after each thing that takes some before any tensor of a model: MiB that torch's
    allocator has reserved, and that the driver says are taken of the device (a CPU: the process's
    resident memory).
    """
    rows: list[dict[str, Any]] = []

    def note(name: str) -> None:
        gc.collect()
        here.synchronize()
        reserved: float | None = None
        taken = resident_mib()
        if here.cuda:
            free, all_of_it = torch.cuda.mem_get_info()
            taken, reserved = (all_of_it - free) / MIB, torch.cuda.memory_reserved() / MIB
        rows.append({"after": name, "reserved_mib": reserved, "driver_mib": taken})

    if here.cuda:
        gpus = torch.cuda.device_count()
        torch.cuda.set_device(here.rank % gpus)
        if (before := taken_before(here.rank % gpus)) is not None:
            rows.append({"after": "nothing", "reserved_mib": 0.0, "driver_mib": before})
    else:
        note("nothing")
    device = torch.device("cuda") if here.cuda else torch.device("cpu")
    x = torch.ones(1 << 20, device=device)
    (x.view(1 << 10, 1 << 10) @ x.view(1 << 10, 1 << 10)).sum().item()
    note("the context")
    if here.size > 1:
        here.join()
        note("the process group")
        for name, move in engines_own(here, x):
            made = Communicators(list(range(here.size)), here.device, 120.0)
            group = made.make(here.backend)
            move(group)
            here.wait()
            note(name)
            kept.append(made)
    return {"backend": here.backend, "rows": rows}


def resident_mib() -> float | None:
    """MiB of this process in memory, as the kernel counts them; None if it does not tell."""
    try:
        said = Path("/proc/self/status").read_text()
    except OSError:
        return None
    found = re.search(r"^VmRSS:\s+(\d+) kB", said, re.MULTILINE)
    return int(found.group(1)) / 1024 if found else None


def taken_before(number: int) -> float | None:
    """MiB that are taken of a GPU, known without a context of our own; None if nobody says."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    name = visible[number] if number < len(visible) and visible[number] else str(number)
    command = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits", "-i", name]
    try:
        said = subprocess.run(command, capture_output=True, text=True, check=True, timeout=20)
        return float(said.stdout)
    except (OSError, ValueError, subprocess.SubprocessError):
        return None


#: Communicators stay until the process ends.
kept: list[Any] = []


def engines_own(here: ChapterRank, x: torch.Tensor) -> Iterator[tuple[str, Callable[[Any], None]]]:
    """What an engine of one level runs on each of its communicators: a large move, so that the
    backend takes all the channels that it would.
    """
    size = here.size
    numel = here.job["numel"] // size * size
    whole = torch.zeros(numel, device=here.device, dtype=torch.bfloat16)
    other = torch.empty_like(whole)
    mine = whole[: numel // size]

    yield (
        "the communicator of gathers",
        lambda group: dist.all_gather_single(whole, mine.clone(), group=group),
    )
    yield (
        "the communicator of reductions: all-to-all",
        lambda group: dist.all_to_all_single(other, whole, group=group),
    )
    yield (
        "one of native sums: reduce-scatter",
        lambda group: dist.reduce_scatter_single(other[: numel // size], whole, group=group),
    )


WORK: dict[str, Callable[[ChapterRank], dict[str, Any]]] = {
    "blocks": blocks,
    "exchange": exchange,
    "communicators": communicators,
}


if __name__ == "__main__":
    as_a_rank(lambda job, folder, rank: WORK[job["work"]](ChapterRank(job, folder, rank)))
