"""Measuring what the ranks of this machine do while the others of their group do the same: matrix
products, blocks, copies, optimizer steps, the moves between placements as the engine makes them,
and a folder's disk.

`measure` takes rounds of one number of ranks after another; the ranks beyond it sleep meanwhile.

ranks   0 ▐matrices blocks ... steps▌▐matrices ... moves overlap steps▌▐matrices blocks ... steps▌▐matrices ... moves overlap steps▌
        1 (waits, no thread spins)   ▐matrices ... moves overlap steps▌ (waits)                   ▐matrices ... moves overlap steps▌
                 1 rank                           2 ranks                      1 rank                          2 ranks
                                round 1                                                         round 2
"""

from __future__ import annotations

import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from onefold.comm import CollectiveContext, Group
from onefold.device import current_stream, has_streams, new_event, seconds_between, synchronize
from onefold.memory import empty
from onefold.plan.benchmark_blocks import Block, Chain, Gated, Sizes, block_flops
from onefold.plan.kernels import count as kernels_of
from onefold.plan.measured import (
    ADAMW_BYTES,
    AtRanks,
    BlockPoint,
    Disk,
    HostLink,
    MatrixPoint,
    Overlap,
    PassPoint,
    Points,
    StepPoint,
    middle,
)
from onefold.plan.schema import MOVES
from onefold.recipe.rows import FLAT

#: Seconds that one timing lasts at least, so that neither the clock's own cost nor the ranks'
#: waking up shows.
SHORTEST = 0.004
#: Timings of a point over all rounds, of which the median counts.
REPEATS = 3
#: Side of the matrix products that run beside a gather.
SIDE = 512
#: Timings of the overlap over all rounds, of which the medians count.
ROUNDS = 7
#: Seconds a rank waits for another within a measurement.
TIMEOUT = 120.0
#: Bytes of one write or read of a disk.
CHUNK = 4 << 20
#: Seconds after which writing to a disk stops, whatever is left: a slow disk shows its rate
#: sooner than a fast one.
LONGEST = 8.0


@dataclass
class Bench:
    """One rank of a group that measures together: what it times is timed on all ranks at once, from
    the first's begin to the last's end.

    [Note: the group's seconds] A step ends when its last rank does. Where ranks outnumber cores,
    the system lets some run to their end before it lets others begin: each then sees a processor of its own on its own clock (4 ranks on
    2 cores: 0.5 to 0.9 of the time that passes for all). The ranks of a calibration are on one
    machine and read one clock, so their begins and ends can be compared.
    """

    group: Group
    device: torch.device
    sizes: Sizes

    def place(self, move: str) -> CollectiveContext:
        return CollectiveContext(move, "calibration", 0, "doctor")

    def together(self) -> None:
        """Until all ranks are here and this one's device has finished."""
        self.synchronize()
        self._every([0.0])

    def synchronize(self) -> None:
        synchronize(self.device)

    def span(self, call: Callable[[], object], count: int = 1) -> tuple[float, float]:
        """(begin, end) of `count` calls in a row on this rank, which begins when all are there.
        Collective.
        """
        self.together()
        begin = time.perf_counter()
        for _ in range(count):
            call()
        self.synchronize()
        return begin, time.perf_counter()

    def group_seconds(self, spans: Sequence[tuple[float, float]]) -> list[float]:
        """Seconds that passed for the group in each span, the same on all ranks. Collective; see
        [Note: the group's seconds].
        """
        every = self._every([time for span in spans for time in span])
        begins, ends = every[:, 0::2].min(dim=0).values, every[:, 1::2].max(dim=0).values
        return [float(seconds) for seconds in ends - begins]

    def greatest(self, value: float) -> float:
        """The greatest of all ranks' values. Collective."""
        return float(self._every([value]).max())

    def seconds(self, call: Callable[[], object]) -> float:
        """Median seconds of `call` for the group: the first call is not counted, then as many as
        the sizes' budget has room for.

        All ranks make the same number of calls, so `call` may be a collective.
        """
        call()
        spans = [self.span(call)]
        pilot = self.group_seconds(spans)[0]
        least = -(-REPEATS // self.sizes.rounds)
        count = max(1, round(SHORTEST / max(pilot, 1e-7)))
        budget = self.sizes.budget_s / self.sizes.rounds
        repeats = max(least, min(50, int(budget / (count * max(pilot, 1e-7)))))
        spans = spans if count == 1 else []
        while len(spans) < repeats:
            spans.append(self.span(call, count))
        return statistics.median(self.group_seconds(spans)) / count

    def _every(self, values: Sequence[float]) -> torch.Tensor:
        """[ranks, len(values)] float64 on the host. Collective; waits for all."""
        mine = torch.tensor(values, dtype=torch.float64).view(torch.uint8)
        return torch.stack(
            [
                part.view(torch.float64)
                for part in self.group.exchange_control(mine, self.place("control"))
            ]
        )


#: Takes the reference steps on a bench whose ranks are those of the process group given (None: a
#: lone process).
Steps = Callable[[Bench, "dist.ProcessGroup | None"], tuple[StepPoint, ...]]


def measure(
    sizes: Sizes,
    threads: Mapping[int, int],
    device: torch.device,
    say: Callable[[str], None],
    steps: Steps | None = None,
) -> tuple[tuple[AtRanks, ...], HostLink | None]:
    """Measure with one number of ranks after another, in rounds. Collective over all ranks; rank 0
    takes part in all, and only its result is whole.

    Args:
        threads: of one rank on a CPU, by number of ranks at work; no number is greater than the
            world size.
        say: called on rank 0 with what is measured next.
        steps: takes the reference steps; None leaves them out.
    """
    rank = dist.get_rank() if dist.is_initialized() else 0
    if rank:  # only rank 0 speaks
        say = lambda text: None  # noqa: E731
    found: dict[int, list[AtRanks]] = {}
    link: HostLink | None = None
    # Waits are on the host, where no thread spins beside those that are measured.
    everyone = dist.new_group(backend="gloo") if dist.is_initialized() else None
    members = {
        count: dist.new_group(list(range(count))) if dist.is_initialized() else None
        for count in threads
    }
    groups = {
        count: Group(members[count], device, TIMEOUT, FLAT) for count in threads if rank < count
    }
    for number in range(sizes.rounds):
        for count in threads:
            if rank < count:
                if device.type == "cpu":
                    torch.set_num_threads(threads[count])
                bench = Bench(groups[count], device, sizes)
                found.setdefault(count, []).append(
                    _measure_together(bench, members[count], say, steps)
                )
                # Ranks must agree on whether to: some of them come later
                if (number, count) == (0, next(iter(threads))):
                    link = measure_host_link(bench)
            if everyone is not None:
                dist.barrier(group=everyone)
    for group in groups.values():
        group.close()
    return tuple(middle(rounds) for rounds in found.values()), link


def says(counts: Iterable[int], sizes: Sizes, steps: bool) -> int:
    """How many times `measure` will call `say`."""
    return sizes.rounds * sum(5 + steps + (len(MOVES) + 1 if count > 1 else 0) for count in counts)


def _measure_together(
    bench: Bench, members: dist.ProcessGroup | None, say: Callable[[str], None], steps: Steps | None
) -> AtRanks:
    size = bench.group.size
    suffix = f"{size} rank{'s' if size > 1 else ''}"
    say(f"matrix products, {suffix}")
    matrices = measure_matrices(bench)
    say(f"transformer blocks, {suffix}")
    blocks = measure_passes(bench, Block)
    say(f"small operations, {suffix}")
    others = measure_passes(bench, Gated) + measure_passes(bench, Chain)
    say(f"memory, {suffix}")
    copies = measure_copies(bench)
    say(f"optimizer step, {suffix}")
    optimizer = measure_optimizer(bench)
    moves, overlap = {}, None
    if size > 1:
        for move in MOVES:
            say(f"{move}, {suffix}")
            moves[move] = measure_move(bench, move)
        say(f"gather beside compute, {suffix}")
        overlap = measure_overlap(bench)
    taken: tuple[StepPoint, ...] = ()
    if steps is not None:
        say(f"training steps, {suffix}")
        taken = steps(bench, members)
    return AtRanks(
        ranks=size,
        threads=torch.get_num_threads() if bench.device.type == "cpu" else 1,
        matrices=matrices,
        blocks=tuple(
            BlockPoint(p.dtype, hidden, tokens, block_flops(hidden, tokens) / p.seconds)
            for p, hidden, tokens in blocks
        ),
        copies=copies,
        optimizer=optimizer,
        moves=moves,
        overlap=overlap,
        passes=tuple(p for p, _, _ in blocks + others),
        steps=taken,
    )


# -- what a rank computes -------------------------------------------------------------------------


def measure_matrices(bench: Bench) -> tuple[MatrixPoint, ...]:
    """`F.linear` at every size and dtype."""
    out = []
    for dtype in bench.sizes.dtypes:
        for m, n, k in bench.sizes.matrices:
            x = torch.randn(m, k, device=bench.device).to(getattr(torch, dtype))
            w = torch.randn(n, k, device=bench.device).to(getattr(torch, dtype))
            with torch.no_grad():
                seconds = bench.seconds(lambda x=x, w=w: F.linear(x, w))  # type: ignore[misc]
            out.append(MatrixPoint(dtype, m, n, k, 2 * m * n * k / seconds))
    return tuple(out)


def measure_passes(
    bench: Bench, kind: type[Block | Gated | Chain]
) -> list[tuple[PassPoint, int, int]]:
    """(forward and backward pass, width, tokens) of one kind of module at every size and dtype,
    weights and activations in that dtype. Of gated blocks two follow each other.
    """
    sizes = {Block: bench.sizes.blocks, Gated: bench.sizes.gated, Chain: bench.sizes.chains}[kind]
    out = []
    for name in bench.sizes.dtypes:
        for hidden, tokens in sizes:
            shape = (tokens, hidden) if kind is Chain else (1, tokens, hidden)
            model = {
                Block: lambda h, t: Block(h),
                Gated: lambda h, t: nn.Sequential(Gated(h), Gated(h)),
                Chain: Chain,
            }[kind](hidden, tokens)
            dtype = getattr(torch, name)
            model.to(device=bench.device, dtype=dtype)
            x = torch.randn(shape, device=bench.device).to(dtype).requires_grad_()

            def step(model: nn.Module = model, x: torch.Tensor = x) -> None:
                model.zero_grad(set_to_none=True)
                x.grad = None
                model(x).sum().backward()

            kernels = kernels_of(step)
            out.append((PassPoint(name, kernels, bench.seconds(step)), hidden, tokens))
    return out


def measure_copies(bench: Bench) -> Points:
    """(bytes read and written, seconds) of copies within the device's memory."""
    out = []
    for nbytes in bench.sizes.copy_bytes:
        source = torch.zeros(nbytes, dtype=torch.uint8, device=bench.device)
        target = torch.ones_like(source)
        out.append((2.0 * nbytes, bench.seconds(lambda s=source, t=target: t.copy_(s))))  # type: ignore[misc]
    return tuple(out)


def measure_optimizer(bench: Bench) -> Points:
    """(bytes moved, seconds) of `torch.optim.AdamW(fused=True)` over one flat fp32 shard."""
    out = []
    for numel in bench.sizes.optimizer_numels:
        shard = nn.Parameter(torch.zeros(numel, device=bench.device))
        shard.grad = torch.full((numel,), 1e-3, device=bench.device)
        optimizer = torch.optim.AdamW([shard], lr=1e-4, fused=True)
        out.append((float(ADAMW_BYTES * numel), bench.seconds(optimizer.step)))
    return tuple(out)


def measure_host_link(bench: Bench) -> HostLink | None:
    """Copies between pinned host memory and this rank's GPU; None without one."""
    if not has_streams(bench.device):
        return None
    nbytes = bench.sizes.copy_bytes[-1]
    host = torch.zeros(nbytes, dtype=torch.uint8, pin_memory=True)
    device = torch.zeros(nbytes, dtype=torch.uint8, device=bench.device)
    down = bench.seconds(lambda: device.copy_(host, non_blocking=True))
    up = bench.seconds(lambda: host.copy_(device, non_blocking=True))
    return HostLink(to_device=nbytes / down, to_host=nbytes / up)


# -- moves ----------------------------------------------------------------------------------------


class FlatMoves:
    """The three moves of one flat fp32 buffer of `nbytes` bytes, cut evenly among the group's
    ranks.
    """

    def __init__(self, bench: Bench, nbytes: int) -> None:
        self.bench, self.group = bench, bench.group
        self.shard = max(1, nbytes // 4 // self.group.size)
        self.full = torch.zeros(self.shard * self.group.size, device=bench.device)

    def payload(self, move: str) -> int:
        """Bytes that this rank sends, as the traffic ledger counts them."""
        return 4 * self.shard * (self.group.size - 1) * (2 if move == "all-reduce" else 1)

    def call(self, move: str) -> Callable[[], object]:
        moves = (self.all_gather, self.reduce_scatter, self.all_reduce)
        return dict(zip(MOVES, moves, strict=True))[move]

    def all_gather(self) -> None:
        self.group.all_gather(self.full, self.bench.place("all-gather"), 0).wait()

    def reduce_scatter(self) -> torch.Tensor:
        """Exchange of intervals and a local sum into a received part, which would become the
        gradient: fresh memory each time.
        """
        own, parts = self._exchange("reduce-scatter")
        total, *others = parts
        for part in (own, *others):
            total.add_(part)
        return total

    def all_reduce(self) -> torch.Tensor:
        """The same, with the sums put in a whole buffer and sent to all."""
        own, parts = self._exchange("all-reduce")
        total = empty(self.full.numel(), torch.float32, self.bench.device)
        mine = self._interval(total, self.group.rank)
        torch.add(own, parts[0], out=mine)
        for part in parts[1:]:
            mine.add_(part)
        sends = [(p, mine) for p in self._peers()]
        recvs = [(p, self._interval(total, p)) for p in self._peers()]
        self.group.exchange(
            sends, recvs, self.bench.place("all-reduce"), 0, move="all-reduce"
        ).wait()
        return total

    def _exchange(self, move: str) -> tuple[torch.Tensor, list[torch.Tensor]]:
        recvs = [(p, empty(self.shard, torch.float32, self.bench.device)) for p in self._peers()]
        sends = [(p, self._interval(self.full, p)) for p in self._peers()]
        self.group.exchange(sends, recvs, self.bench.place(move), 0, move=move).wait()
        return self._interval(self.full, self.group.rank), [part for _, part in recvs]

    def _interval(self, buffer: torch.Tensor, rank: int) -> torch.Tensor:
        return buffer[rank * self.shard : (rank + 1) * self.shard]

    def _peers(self) -> list[int]:
        return [p for p in range(self.group.size) if p != self.group.rank]


def measure_move(bench: Bench, move: str) -> Points:
    """(payload bytes that one rank sends, seconds) of `move` at every size."""
    out = []
    for nbytes in bench.sizes.move_bytes:
        moves = FlatMoves(bench, nbytes)
        out.append((float(moves.payload(move)), bench.seconds(moves.call(move))))
    return tuple(out)


def measure_overlap(bench: Bench) -> Overlap:
    """A gather, matrix products that take about as long, and both at once."""
    gather = FlatMoves(bench, bench.sizes.overlap_bytes)
    a, b = torch.randn(2, SIDE, SIDE, device=bench.device)
    out = torch.empty_like(a)
    alone = bench.seconds(gather.all_gather)
    one = bench.seconds(lambda: torch.mm(a, b, out=out))
    count = max(1, round(alone / one))

    def compute() -> None:
        for _ in range(count):
            torch.mm(a, b, out=out)

    spans: list[tuple[float, float]] = []
    beside = []
    for _ in range(-(-ROUNDS // bench.sizes.rounds)):
        spans += [bench.span(compute), bench.span(gather.all_gather)]
        whole, computed = _both(bench, gather, compute)
        spans.append(whole)
        beside.append(computed)
    seconds = bench.group_seconds(spans)
    medians = [statistics.median(seconds[i::3]) for i in range(3)]
    return Overlap(
        compute=medians[0],
        gather=medians[1],
        together=medians[2],
        compute_beside=bench.greatest(statistics.median(beside)),
    )


def _both(
    bench: Bench, gather: FlatMoves, compute: Callable[[], None]
) -> tuple[tuple[float, float], float]:
    """((begin, end) until both are done, seconds of the computing)."""
    streams = has_streams(bench.device)
    marks = [new_event(bench.device, timing=True) for _ in range(2)] if streams else []
    bench.together()
    begin = time.perf_counter()
    pending = gather.group.all_gather(gather.full, bench.place("all-gather"), 0)
    for mark in marks[:1]:
        mark.record(current_stream(bench.device))
    compute()
    for mark in marks[1:]:
        mark.record(current_stream(bench.device))
    computed = time.perf_counter() - begin
    pending.wait()
    bench.synchronize()
    end = time.perf_counter()
    return (begin, end), seconds_between(*marks) if marks else computed


# -- a disk, with one bounded file that has no name: nothing is left ------------------------------


def measure_disk(folder: str | Path, nbytes: int) -> Disk:
    """Write `nbytes` at most (and at most a tenth of what is free), have them on the disk, and read
    them past the page cache.

    Raises:
        ValueError: the folder is not there, cannot be written, or is full.
    """
    path = Path(folder)
    if not path.is_dir():
        raise ValueError(f"--disk {folder}: there is no such folder.")
    free = shutil.disk_usage(path).free
    nbytes = min(nbytes, free // 10)
    if nbytes < CHUNK:
        raise ValueError(
            f"--disk {folder}: {free:,} bytes are free, too few to measure; free some space or name"
            " another folder."
        )
    try:
        with tempfile.TemporaryFile(dir=path, buffering=0) as file:
            written, write_s = _write(file.fileno(), nbytes)
            cached = not _forget(file.fileno())
            read_s = _read(file.fileno(), written)
    except OSError as error:
        raise ValueError(
            f"--disk {folder}: {error.strerror}. Name a folder that can be written."
        ) from None
    return Disk(str(path.resolve()), write=written / write_s, read=written / read_s, cached=cached)


def _write(file: int, nbytes: int) -> tuple[int, float]:
    # Random bytes: some file systems compress, and a hole takes no time.
    chunk = memoryview(os.urandom(CHUNK))
    written = 0
    begin = time.perf_counter()
    while written < nbytes and time.perf_counter() - begin < LONGEST:
        written += os.write(file, chunk[: nbytes - written])
    os.fsync(file)
    return written, time.perf_counter() - begin


def _read(file: int, nbytes: int) -> float:
    os.lseek(file, 0, os.SEEK_SET)
    chunk = bytearray(CHUNK)
    begin = time.perf_counter()
    while nbytes > 0 and (got := os.readv(file, [chunk])):
        nbytes -= got
    return time.perf_counter() - begin


def _forget(file: int) -> bool:
    """Drop the file's pages, so that reading comes from the disk. False where the system has no way
    to ask.
    """
    if not hasattr(os, "posix_fadvise"):
        return False
    os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
    return True
