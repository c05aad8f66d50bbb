"""One rank of a chapter of the first hour: `python -m benchmarks.on_gpu.first_worker JOB.json RANK`.

The job names one of `WORK`: blocks that train, an exchange beside a product, or memory after each
communicator. See benchmarks/on_gpu/first.py.
"""

from __future__ import annotations

import gc
import os
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from typing import Any, NoReturn

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from benchmarks.offload.traced import overlap
from benchmarks.on_gpu import worker as one_rank
from benchmarks.peers import probes, worker
from benchmarks.peers.settings import Setting

MIB = 1 << 20


class Here:
    """This rank: its device, and the time line of what it does."""

    def __init__(self, job: dict[str, Any], path: Path, rank: int) -> None:
        self.job, self.path, self.rank = job, path, rank
        self.setting = Setting(**job["setting"])
        self.cuda = self.setting.device == "cuda"
        self.device = torch.device("cpu")
        self.backend = "none"

    def join(self) -> None:
        self.backend = one_rank.join(self.setting, self.path, self.rank)
        if self.cuda:
            self.device = torch.device("cuda", torch.cuda.current_device())

    def wait(self) -> None:
        """For the device, and for all ranks."""
        one_rank.synchronize(self.setting)
        dist.barrier()

    def seconds(self, act: Callable[[], object], times: int) -> float:
        """The median seconds of `act`, from all ranks' start to the end of the device's work."""
        found = []
        for _ in range(times):
            self.wait()
            begun = time.perf_counter()
            act()
            one_rank.synchronize(self.setting)
            found.append(time.perf_counter() - begun)
        return median(found)


# -- blocks that train -----------------------------------------------------------------------------


class Block(nn.Module):
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


class Blocks(nn.Module):
    """`count` blocks of one shape, one after another."""

    def __init__(self, shape: list[int], count: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(*shape) for _ in range(count))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x.float().square().mean()


def blocks(here: Here) -> dict[str, Any]:
    """Train stage 3 over blocks: seconds of a step, losses, waits by the ledger and exposed time by
    a trace of two steps; memory at peak. `job["compile"]`: each block by inductor.
    """
    import onefold

    here.join()
    job, setting = here.job, here.setting
    torch.manual_seed(0)
    with here.device:
        model: nn.Module = Blocks(job["shape"], job["blocks"])
    numel = sum(p.numel() for p in model.parameters())
    if job.get("compile"):
        for block in model.blocks:  # type: ignore[union-attr]
            block.compile()
    recipe = onefold.Recipe.zero(3, precision="bf16", **job.get("recipe", {}))
    model = onefold.shard(model, recipe, units=["Block"], device=here.device)
    engine = onefold.engine_of(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    generator = torch.Generator().manual_seed(here.rank)
    x = torch.randn(1, setting.tokens, job["shape"][0], generator=generator).to(here.device)
    losses: list[torch.Tensor] = []

    def step() -> None:
        losses.append(model(x))
        losses[-1].backward()
        optimizer.step()
        optimizer.zero_grad()

    begun = time.perf_counter()
    step()
    here.wait()
    first = time.perf_counter() - begun
    for _ in range(setting.warmup - 1):
        step()
    here.wait()
    engine.traffic.reset()
    if here.cuda:
        torch.cuda.reset_peak_memory_stats()
    seconds = here.seconds(step, setting.steps)
    waits = engine.traffic.exposed / setting.steps
    peak = torch.cuda.max_memory_allocated() / MIB if here.cuda else None
    return {
        "backend": here.backend, "numel": numel, "first_s": first, "step_s": seconds, "waits_s": waits, "peak_mib": peak,
        "losses": [float(loss.detach()) for loss in losses], "trace": traced(here, step, 2),
    }  # fmt: skip


def traced(here: Here, step: Callable[[], None], steps: int) -> dict[str, float] | None:
    """Seconds of one step by torch's profiler: what the backend's kernels take, what others take,
    and how much of the former has none of the latter beside it. None on a CPU.
    """
    if not here.cuda:
        return None
    kinds = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=kinds) as profiler:
        for _ in range(steps):
            step()
        torch.cuda.synchronize()
    moving, computing = [], []
    for event in profiler.events() or ():
        if event.device_type.name != "CUDA" or event.is_user_annotation:
            continue
        kind = moving if "nccl" in event.name.lower() else computing
        kind.append((event.time_range.start, event.time_range.end))
    found = {name: value / steps for name, value in overlap(moving, computing).items()}
    return found | {"exposed_s": found["comm_s"] - found["both_s"]}


# -- an exchange beside a product ------------------------------------------------------------------


def exchange(here: Here) -> dict[str, Any]:
    """For each size: seconds of an all-to-all with the sum of its parts, and of a reduce-scatter,
    both in bf16, alone and beside matrix products; and of the products alone.
    """
    from onefold.comm.sums import sum_parts

    here.join()
    size, rows = here.setting.ranks, []
    side = torch.cuda.Stream() if here.cuda else None
    n = here.job["matrix"]
    dtype = torch.bfloat16 if here.cuda else torch.float32
    a, b = (torch.randn(n, n, device=here.device, dtype=dtype) for _ in range(2))
    times = here.setting.steps
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
            row[f"{name}_beside_s"] = here.seconds(lambda m=move: beside(side, m, products), times)
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


def communicators(here: Here) -> dict[str, Any]:
    """Memory after each thing that takes some before any tensor of a model: MiB that torch's
    allocator has reserved, and that the driver says are taken of the device (a CPU: the process's
    resident memory).
    """
    from onefold.comm.communicators import Communicators

    rows: list[dict[str, Any]] = []

    def note(name: str) -> None:
        gc.collect()
        one_rank.synchronize(here.setting)
        if here.cuda:
            free, all_of_it = torch.cuda.mem_get_info()
            taken, reserved = (all_of_it - free) / MIB, torch.cuda.memory_reserved() / MIB
        else:
            taken, reserved = probes.resident_mib(), None
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
    if here.setting.ranks > 1:
        here.join()
        note("the process group")
        for name, move in engines_own(here, x):
            made = Communicators(list(range(here.setting.ranks)), here.device, 120.0)
            group = made.make(here.backend)
            move(group)
            here.wait()
            note(name)
            kept.append(made)
    return {"backend": here.backend, "rows": rows}


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


def engines_own(here: Here, x: torch.Tensor) -> Iterator[tuple[str, Callable[[Any], None]]]:
    """What an engine of one level runs on each of its communicators: a large move, so that the
    backend takes all the channels that it would.
    """
    size = here.setting.ranks
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


WORK: dict[str, Callable[[Here], dict[str, Any]]] = {
    "blocks": blocks,
    "exchange": exchange,
    "communicators": communicators,
}


def work() -> NoReturn:
    """One rank."""
    job, path, rank = worker.read_job()
    worker.leave(WORK[job["work"]](Here(job, path, rank)), path, rank)


if __name__ == "__main__":
    work()
