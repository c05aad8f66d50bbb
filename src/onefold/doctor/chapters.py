"""The chapters of `onefold doctor --check`: what decides whether a GPU is used well, each with what was
expected beside what was found.

| chapter        | question                                                                                       |
|----------------|------------------------------------------------------------------------------------------------|
| block          | how much communication is exposed around blocks of Llama 3 8B's shape, at two sequence lengths? |
| exchange       | what do an all-to-all and its sum take beside a reduce-scatter, alone and beside a product?     |
| copies         | how much of offload's copies is hidden, with 1 and 4 micro-batches?                             |
| communicators  | what do a context and each communicator take of the device?                                     |
| lost           | how long until a killed and a stopped peer are told of, and in which words?                     |
| compile        | do blocks that inductor compiles train alike, and how fast?                                     |
| sums           | what do native sums save of a step?                                                             |

A chapter is wrong if ranks fail or hang in it. Its figures are for people to compare: a slow machine
is not wrong. Rows that need several GPUs say so where there is one.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from onefold.comm.pending import GRACE
from onefold.doctor import lost_peer
from onefold.doctor.chapter_expected import (
    BLOCKS,
    expected_memory,
    expected_reduction,
    expected_step,
    machine_of,
    numel_of,
)
from onefold.doctor.chapter_runs import (
    CHAPTERS,
    CUT_OFF,
    DONE,
    FAILED,
    MEMORY,
    TIMEOUT,
    RanksRun,
    Scope,
    run_ranks,
)
from onefold.doctor.checks import LEFT_OUT, OK, WRONG
from onefold.memory.pool import free_host_memory
from onefold.wording import readable

#: Width, feed-forward, heads, heads of keys and values.
LLAMA_8B, TINY = (4096, 14336, 32, 8), (64, 128, 4, 2)
#: Of the chapter in which a peer is lost.
SMALL = (1024, 4096, 16, 4)
#: Megabytes of gradients: blocks of 27, 218 and 525 million parameters in 16 bits.
SIZES, TINY_SIZES = (54.0, 436.0, 1050.0), (0.5, 1.0)
LENGTHS, TINY_LENGTHS = (2048, 8192), (16, 32)
#: Seconds after which the engine gives a peer up.
PATIENCE, TINY_PATIENCE = 10.0, 3.0
#: Bytes of the host for a parameter whose optimizer is there: master, two moments, gradient.
ON_THE_HOST = 16
SEVERAL, DASH = "needs several GPUs", "–"
#: The least share of copies that is to be hidden.
HIDDEN = 0.9
#: Seconds that have to be left before another chapter begins.
LEAST = 10.0


@dataclass
class Chapter:
    """A table of figures, and the runs that they come from."""

    name: str
    title: str
    columns: Sequence[str]
    rows: list[list[str]] = field(default_factory=list)
    runs: list[RanksRun] = field(default_factory=list)
    seconds: float = 0.0
    reason: str = ""
    """Why nothing was measured."""

    @property
    def status(self) -> str:
        """OK; WRONG if ranks failed or hung; LEFT_OUT if the machine is too small for it, or the
        time was up.
        """
        ended = {run.status for run in self.runs}
        if ended & {FAILED, TIMEOUT}:
            return WRONG
        return OK if ended == {DONE} else LEFT_OUT

    @property
    def said(self) -> str:
        """What went wrong, or why it was left out; "" for nothing."""
        if self.status == LEFT_OUT and not self.runs:
            return self.reason or SEVERAL
        told = [run for run in self.runs if run.status != DONE]
        told.sort(key=lambda run: run.status in (MEMORY, CUT_OFF))
        return "; ".join(f"{run.name}: {run.status}: {essence(run.error)}" for run in told)

    def to_json(self) -> dict[str, Any]:
        """Return plain values."""
        return {"name": self.name, "status": self.status, "said": self.said} | {
            key: value for key, value in asdict(self).items() if key not in ("name", "reason")
        }


def measure_chapters(scope: Scope, names: Sequence[str] = ()) -> Iterator[Chapter]:
    """Measure one chapter after another, all by default. Yields each when it is done.

    Raises:
        Stopped: a signal arrived.
    """
    for name in names or CHAPTERS:
        scope.say(name)
        if scope.seconds() < LEAST:
            yield Chapter(name, name, (), reason="the time was up before its turn")
            continue
        begun = time.monotonic()
        found = CHAPTER[name](scope)
        found.seconds = time.monotonic() - begun
        yield found


# -- running ---------------------------------------------------------------------------------------


def trained(name: str, scope: Scope, tokens: int, ranks: int = 0, **job: Any) -> RanksRun:
    """Train the blocks, at stage 3 if `job` has no other recipe."""
    usual: dict[str, Any] = {"work": "blocks", "shape": shape_of(scope), "blocks": BLOCKS}
    usual |= {"tokens": tokens, "warmup": 2, "steps": scope.steps} | job
    usual["recipe"] = {"stage": 3, **job.get("recipe", {})}
    return run_ranks(name, scope, ranks or scope.gpus, usual)


def shape_of(scope: Scope) -> Sequence[int]:
    """Return the shape of the blocks that train."""
    return TINY if scope.tiny else LLAMA_8B


def lengths_of(scope: Scope) -> Sequence[int]:
    """Return the sequence lengths."""
    return TINY_LENGTHS if scope.tiny else LENGTHS


def ms(seconds: float | None, digits: int = 2) -> str:
    """Milliseconds as text."""
    return DASH if seconds is None or not math.isfinite(seconds) else f"{1000 * seconds:.{digits}f}"


def whole(number: float | None) -> str:
    """A whole number as text."""
    return DASH if number is None else f"{number:,.0f}"


def relative(mine: Sequence[float], theirs: Sequence[float]) -> float:
    """Return the largest relative difference of two series."""
    return max(abs(a - b) / abs(b) for a, b in zip(mine, theirs, strict=True))


def essence(error: str) -> str:
    """Return the line of a rank's output that says most: the last that names an error, else the
    last.
    """
    lines = [line.strip() for line in error.splitlines() if line.strip()] or [""]
    named = (line for line in reversed(lines) if "Error" in line or "error:" in line)
    return next(named, lines[-1])[:300]


# -- the chapters ----------------------------------------------------------------------------------


def block(scope: Scope) -> Chapter:
    """A row a sequence length."""
    ranks, shape = scope.gpus, shape_of(scope)
    columns = (
        "tokens", "ranks", "backend", "step ms", "compute ms", "expected", "comm ms", "expected", "exposed ms", "expected", "waits ms",
    )  # fmt: skip
    title = (
        f"Exposed time: {BLOCKS} blocks of {numel_of(shape) / 1e6:,.1f}M parameters, stage 3, bf16"
    )
    chapter = Chapter("block", title, columns)
    for tokens in lengths_of(scope):
        found = trained(f"block, {tokens:,} tokens", scope, tokens)
        chapter.runs.append(found)
        if found.status != DONE:
            chapter.rows.append([f"{tokens:,}", str(ranks), found.status, *[DASH] * 8])
            continue
        said = found.ranks[0]
        seen = said["trace"] or {}
        wanted = expected_step(machine_of(scope, ranks), shape, tokens)
        row = [f"{tokens:,}", str(ranks), said["backend"], ms(said["step_s"])]
        row += [ms(seen.get("compute_s")), ms(wanted["compute_s"])]
        for part in ("comm_s", "exposed_s"):
            row += [SEVERAL, DASH] if ranks == 1 else [ms(seen.get(part)), ms(wanted[part])]
        chapter.rows.append([*row, ms(said["waits_s"])])
    return chapter


def exchange(scope: Scope) -> Chapter:
    """A row a size and way."""
    ranks = scope.gpus
    columns = (
        "MB",
        "way",
        "alone ms",
        "expected",
        "products ms",
        "both ms",
        "expected",
        "added by it ms",
    )
    chapter = Chapter("exchange", f"Reductions in 16 bits beside products, {ranks} ranks", columns)
    sizes = TINY_SIZES if scope.tiny else SIZES
    ways = {"ordered": "all-to-all and sum", "native": "reduce-scatter"}
    if ranks == 1:
        chapter.rows = [[f"{size:,.0f}", way, SEVERAL, *[DASH] * 5] for size in sizes for way in ways.values()]  # fmt: skip
        return chapter
    matrix = 64 if scope.tiny else 8192
    job = {"work": "exchange", "megabytes": sizes, "matrix": matrix, "steps": scope.steps}
    found = run_ranks("exchange", scope, ranks, job)
    chapter.runs.append(found)
    if found.status != DONE:
        chapter.rows.append([found.status, *[DASH] * 7])
        return chapter
    machine = machine_of(scope, ranks)
    for row in found.ranks[0]["rows"]:
        for way, name in ways.items():
            alone, both, products = (row[f"{way}_s"], row[f"{way}_beside_s"], row["products_s"])
            wanted = expected_reduction(machine, row["megabytes"] * 1e6, way)
            chapter.rows.append([
                f"{row['megabytes']:,g}", name, ms(alone), ms(wanted), ms(products), ms(both), ms(max(products, alone)),
                ms(both - products),
            ])  # fmt: skip
    return chapter


def copies(scope: Scope) -> Chapter:
    """A row a number of micro-batches, of stage 2 with its optimizer on the host."""
    columns = (
        "micro-batches",
        "step ms",
        "copies ms",
        "hidden",
        "expected",
        "exposed ms",
        "pinned",
    )
    millions = BLOCKS * numel_of(shape_of(scope)) / 1e6
    title = f"Copies of offload, one GPU: {millions:,.0f}M parameters, optimizer on the host, bf16"
    chapter = Chapter("copies", title, columns)
    needed, free = round(ON_THE_HOST * millions * 1e6), free_host_memory()
    if needed > free:
        chapter.reason = f"needs {readable(needed)} of host memory, {readable(free)} are free"
        return chapter
    for accumulation in (1, 4):
        found = trained(
            f"copies, {accumulation} micro-batch{'es' if accumulation > 1 else ''}",
            scope, lengths_of(scope)[-1], 1, accumulation=accumulation, fused=True,
            recipe={"stage": 2, "offload_optimizer": "cpu"}, across="copies", steps=2,
        )  # fmt: skip
        chapter.runs.append(found)
        row = [str(accumulation)]
        if found.status != DONE:
            chapter.rows.append([*row, found.status, *[DASH] * 5])
            continue
        mine = found.ranks[0]
        row.append(ms(mine["step_s"]))
        seen = mine["trace"]
        if seen is None:
            chapter.rows.append([*row, "no streams", *[DASH] * 4])
            continue
        copied, through = seen["copies_s"], seen["pinned_s"] + seen["pageable_s"]
        chapter.rows.append([
            *row, ms(copied), f"{seen['both_s'] / copied:.0%}" if copied else DASH, f"{HIDDEN:.0%} or more", ms(seen["exposed_s"]),
            f"{seen['pinned_s'] / through:.0%}" if through else DASH,
        ])  # fmt: skip
    return chapter


def communicators(scope: Scope) -> Chapter:
    """A row for each thing that takes memory, on the rank where it takes most."""
    ranks = scope.gpus
    columns = ("after", "torch reserved MiB", "driver MiB", "more, beside torch's", "expected")
    title = f"Memory after each communicator, {ranks} rank{'s' if ranks > 1 else ''}"
    chapter = Chapter("communicators", title, columns)
    numel = 1 << 12 if scope.tiny else numel_of(LLAMA_8B)
    found = run_ranks("communicators", scope, ranks, {"work": "communicators", "numel": numel})
    chapter.runs.append(found)
    if found.status != DONE:
        chapter.rows.append([found.status, *[DASH] * 4])
        return chapter
    wanted = expected_memory(machine_of(scope, ranks))
    own = [growth(rank["rows"]) for rank in found.ranks]
    for at, row in enumerate(found.ranks[0]["rows"]):
        more = max((part for each in own if (part := each[at]) is not None), default=None)
        reserved, driver, due = row["reserved_mib"], row["driver_mib"], wanted.get(row["after"])
        chapter.rows.append([row["after"], *map(whole, (reserved, driver, more, due))])
    if ranks == 1:
        chapter.rows.append(["each communicator", SEVERAL, *[DASH] * 3])
    return chapter


def growth(rows: list[dict[str, Any]]) -> list[float | None]:
    """Return what each row takes more than the one before it, beside what torch's allocator has."""
    beside: list[float | None] = [
        None if row["driver_mib"] is None else row["driver_mib"] - (row["reserved_mib"] or 0.0)
        for row in rows
    ]
    return [
        None if a is None or b is None else b - a for a, b in itertools.pairwise([None, *beside])
    ]


def lost(scope: Scope) -> Chapter:
    """A row a way to lose the last rank."""
    ranks = max(2, scope.gpus)
    patience = TINY_PATIENCE if scope.tiny else PATIENCE
    title = f"A peer is lost, {ranks} ranks, stall_timeout={patience:g}"
    columns = ("peer", "backend", "told after s", "expected", "error", "text")
    chapter = Chapter("lost", title, columns)
    backend = "gloo" if scope.device == "cpu" or scope.gpus < ranks else "nccl"
    shape, tokens = (TINY, 16) if scope.tiny else (SMALL, 512)
    for how in lost_peer.SIGNALS:
        limit = min(scope.seconds() - 5, 90 + 6 * patience)
        job = {"how": how, "after": 3, "shape": shape, "tokens": tokens, "stall_timeout": patience, "limit_s": limit}  # fmt: skip
        found = run_ranks(f"lost: {how}", scope, ranks, job, lost_peer.MODULE)
        chapter.runs.append(found)
        # A killed process closes its connections, which gloo notices at once. Whoever gives up waits
        # for the notes of the others
        noticed = 0.0 if (how, backend) == ("killed", "gloo") else patience
        wanted = f"{noticed + GRACE:g} and a step"
        if found.status != DONE:
            chapter.rows.append(
                [how, backend, found.status, wanted, DASH, essence(found.error)[:200]]
            )
            continue
        others = [rank for rank in found.ranks if not rank["victim"]]
        told = [rank for rank in others if rank.get("seconds") is not None]
        slowest = max(told, key=lambda rank: rank["seconds"]) if len(told) == len(others) else None
        said = slowest or next(rank for rank in others if rank not in told)
        seconds = f"{slowest['seconds']:.1f}" if slowest is not None else "never"
        words = " ".join(said["text"].split())[:300]
        chapter.rows.append([how, backend, seconds, wanted, said["kind"] or "none", words])
        if slowest is None or slowest["kind"] != "StallError":
            found.status, found.error = FAILED, f"a rank that was {how}: {said['text'][-300:]}"
    if scope.gpus == 1 and scope.device == "cuda":
        chapter.rows.append(["on NCCL", SEVERAL, *[DASH] * 4])
    return chapter


def compiled(scope: Scope) -> Chapter:
    """Blocks as they are, and compiled by inductor."""
    ranks = scope.gpus
    columns = (
        "blocks",
        "ranks",
        "first step s",
        "step ms",
        "× eager",
        "expected",
        "loss difference",
    )
    title = f"Blocks compiled by inductor, stage 3, bf16, {ranks} rank{'s' if ranks > 1 else ''}"
    chapter = Chapter("compile", title, columns)
    eager, inductor = chapter.runs = [
        trained(f"compile: {name}", scope, lengths_of(scope)[0], compile=compile)
        for name, compile in (("eager", False), ("inductor", True))
    ]
    base = eager.ranks[0] if eager.status == DONE else None
    for name, found, wanted in (("eager", eager, DASH), ("inductor", inductor, "1.0 or less")):
        if found.status != DONE:
            chapter.rows.append([name, str(ranks), found.status, *[DASH] * 4])
            continue
        mine = found.ranks[0]
        times = f"{mine['step_s'] / base['step_s']:.2f}" if base else DASH
        apart = f"{relative(mine['losses'], base['losses']):.1e}" if base else DASH
        step = [f"{mine['first_s']:.1f}", ms(mine["step_s"])]
        chapter.rows.append([name, str(ranks), *step, times, wanted, apart])
    return chapter


def sums(scope: Scope) -> Chapter:
    """Steps with ordered and with native sums."""
    ranks = scope.gpus
    columns = (
        "sums", "step ms", "expected less ms", "found less ms", "exposed ms", "peak MiB", "loss difference",
    )  # fmt: skip
    title = f"Who adds gradients up, stage 3, bf16, {ranks} rank{'s' if ranks > 1 else ''}"
    chapter = Chapter("sums", title, columns)
    if ranks == 1:
        chapter.rows = [[name, SEVERAL, *[DASH] * 5] for name in ("ordered", "native")]
        return chapter
    ways = ["ordered"] if scope.device == "cpu" else ["ordered", "native"]
    for way in ways:
        recipe = {"reduce": way}
        chapter.runs.append(trained(f"sums: {way}", scope, lengths_of(scope)[0], recipe=recipe))
    machine, nbytes = machine_of(scope, ranks), 2.0 * numel_of(shape_of(scope))
    less = BLOCKS * (
        expected_reduction(machine, nbytes, "ordered")
        - expected_reduction(machine, nbytes, "native")
    )
    base = chapter.runs[0].ranks[0] if chapter.runs[0].status == DONE else None
    for way, found in zip(ways, chapter.runs, strict=True):
        if found.status != DONE:
            chapter.rows.append([way, found.status, *[DASH] * 5])
            continue
        mine, first = found.ranks[0], found is chapter.runs[0]
        saved = [DASH, DASH]
        if not first:
            saved = [ms(less), ms(base["step_s"] - mine["step_s"]) if base else DASH]
        exposed = ms((mine["trace"] or {}).get("exposed_s"))
        apart = f"{relative(mine['losses'], base['losses']):.1e}" if base else DASH
        chapter.rows.append(
            [way, ms(mine["step_s"]), *saved, exposed, whole(mine["peak_mib"]), apart]
        )
    if scope.device == "cpu":
        chapter.rows.append(["native", "gloo has none", *[DASH] * 5])
    return chapter


CHAPTER: dict[str, Callable[[Scope], Chapter]] = {
    "block": block,
    "exchange": exchange,
    "copies": copies,
    "communicators": communicators,
    "lost": lost,
    "compile": compiled,
    "sums": sums,
}
