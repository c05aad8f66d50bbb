"""The chapters of the first hour on a machine, each with what was expected beside what was found.

| chapter        | question                                                                                       |
|----------------|------------------------------------------------------------------------------------------------|
| block          | how much communication is exposed around blocks of Llama 3 8B's shape, at two sequence lengths? |
| exchange       | what do an all-to-all and its sum take beside a reduce-scatter, alone and beside a product?     |
| copies         | how much of offload's copies is hidden, with 1 and 4 micro-batches?                             |
| communicators  | what do a context and each communicator take of the device?                                     |
| lost           | how long until a killed and a stopped peer are told of, and in which words?                     |
| compile        | do blocks that inductor compiles train alike, and how fast?                                     |
| sums           | what do native sums save of a step?                                                             |

Expected figures come from the plan's own formulas for the GPU that is here (that of an H100 if it is
in no table). Rows that need several GPUs say so where there is one.
"""

from __future__ import annotations

import argparse
import itertools
import math
import sys
from typing import Any

import torch

from benchmarks.harness import DASH, Table, essence
from benchmarks.on_gpu.run import relative, run
from benchmarks.peers import launch
from benchmarks.peers.settings import Setting
from onefold.comm.pending import GRACE
from onefold.plan import hardware
from onefold.plan.alternatives import reduction_seconds
from onefold.plan.hardware import Machine
from onefold.plan.reserve import CHANNEL, COMMUNICATOR, CONTEXT, channels_to_a_peer
from onefold.plan.traffic import Software, Traffic
from onefold.recipe import Recipe

CHAPTERS = ("block", "exchange", "copies", "communicators", "lost", "compile", "sums")
#: Width, feed-forward, heads, heads of keys and values.
LLAMA_8B, TINY = [4096, 14336, 32, 8], [64, 128, 4, 2]
BLOCKS = 4
#: Megabytes of gradients: blocks of 27, 218 and 525 million parameters in 16 bits.
SIZES, TINY_SIZES = (54.0, 436.0, 1050.0), (0.5, 1.0)
LENGTHS, TINY_LENGTHS = (2048, 8192), (16, 32)
#: Seconds after which the engine gives a peer up.
PATIENCE, TINY_PATIENCE = 10.0, 3.0
SEVERAL = "needs several GPUs"
#: The least share of copies that is to be hidden.
HIDDEN = 0.9

Found = tuple[Table, list[dict[str, Any]]]


# -- what is here, and what is expected of it ------------------------------------------------------


def gpus_of(options: argparse.Namespace) -> int:
    """GPUs here; in a rehearsal on a CPU two ranks stand for them."""
    return 2 if options.device == "cpu" else torch.cuda.device_count()


def machine_of(options: argparse.Namespace, ranks: int) -> Machine:
    """The table's machine that is most like this one: `ranks` GPUs in one node."""
    name = torch.cuda.get_device_name().lower() if options.device == "cuda" else ""
    known = hardware.builtin().gpus
    like = next((kind for kind in known if kind.partition("-")[0] in name), "h100-80")
    return hardware.machine(ranks, ranks, like if name else "h100-80")


def shape_of(options: argparse.Namespace) -> list[int]:
    return TINY if options.tiny else LLAMA_8B


def numel_of(shape: list[int]) -> int:
    """Parameters of one block, without its norms."""
    width, forward, heads, shared = shape
    return 2 * width * width + 2 * width * (width // heads) * shared + 3 * width * forward


def expected_step(machine: Machine, shape: list[int], tokens: int) -> dict[str, float]:
    """Seconds of a step of stage 3 over `BLOCKS` blocks: computing, communication, and what is
    exposed of it: the first gather, or what computing does not cover.
    """
    numel, soft, n = numel_of(shape), Software(), machine.ranks
    attention = 6.0 * tokens * tokens * shape[0]  # causal, forward and backward
    compute = BLOCKS * (6.0 * numel * tokens + attention) / machine.matrix_rate("bf16")
    if n == 1:
        return {"compute_s": compute, "comm_s": 0.0, "exposed_s": 0.0}
    gather = Traffic.ring("all-gather", 2 * numel * (n - 1) / n, 1, machine).seconds(machine, soft)
    reduction = expected_reduction(machine, 2 * numel, "ordered")
    # The last block stays gathered from the forward to the backward pass
    comm = (2 * BLOCKS - 1) * gather + BLOCKS * reduction
    exposed = max(gather, comm - soft.overlap * compute)
    return {"compute_s": compute, "comm_s": comm, "exposed_s": exposed}


def expected_reduction(machine: Machine, nbytes: float, reduce: Any) -> float:
    """Seconds of one reduction of `nbytes` in 16 bits, its sum included."""
    recipe = Recipe.zero(2, precision="bf16", reduce=reduce)
    return reduction_seconds(recipe, machine, Software(), nbytes, 2, 4)


def expected_memory(machine: Machine) -> dict[str, float]:
    """MiB that the driver should count more, by what was made."""
    peers = (machine.ranks - 1) * channels_to_a_peer(machine.gpu.link) * CHANNEL
    return {
        "the context": CONTEXT / 2**20,
        "the process group": 0.0,
        "the communicator of gathers": COMMUNICATOR / 2**20,
        "the communicator of reductions: all-to-all": (COMMUNICATOR + peers) / 2**20,
        "one of native sums: reduce-scatter": COMMUNICATOR / 2**20,
    }


# -- running ---------------------------------------------------------------------------------------


def setting_of(options: argparse.Namespace, ranks: int, tokens: int, **more: Any) -> Setting:
    steps = {"warmup": 2, "steps": max(2, options.steps // 2)} | more
    return Setting(
        model="blocks", tokens=tokens, precision="bf16", ranks=ranks, threads=options.threads, device=options.device, **steps,
    )  # fmt: skip


def ranks_run(
    name: str,
    work: str,
    setting: Setting,
    options: argparse.Namespace,
    module: str = "first_worker",
    **job: Any,
) -> dict[str, Any]:
    """The outcome of one start of ranks."""
    whole = {"work": work, "setting": setting.to_json(), **job}
    outcome = launch.run_ranks(
        f"benchmarks.on_gpu.{module}", whole, setting.ranks, threads=setting.threads, timeout=options.timeout
    )  # fmt: skip
    print(
        f"# {name}: {outcome['status']} in {outcome['wall_s']:.0f} s", file=sys.stderr, flush=True
    )
    return {"peer": name, "error": "", **outcome}


def trained(name: str, setting: Setting, options: argparse.Namespace, **job: Any) -> dict[str, Any]:
    return ranks_run(
        name, "blocks", setting, options, shape=shape_of(options), blocks=BLOCKS, **job
    )


def ms(seconds: float | None, digits: int = 2) -> str:
    return DASH if seconds is None or not math.isfinite(seconds) else f"{1000 * seconds:.{digits}f}"


# -- the chapters ----------------------------------------------------------------------------------


def block(options: argparse.Namespace) -> Found:
    """A row a sequence length."""
    ranks = gpus_of(options)
    columns = (
        "tokens", "ranks", "backend", "step ms", "compute ms", "expected", "comm ms", "expected", "exposed ms", "expected", "waits ms",
    )  # fmt: skip
    table = Table(
        f"Exposed time: {BLOCKS} blocks of {numel_of(shape_of(options)) / 1e6:,.1f}M parameters, stage 3, bf16",
        columns,
    )
    outcomes = []
    for tokens in TINY_LENGTHS if options.tiny else LENGTHS:
        setting = setting_of(options, ranks, tokens)
        found = trained(f"block, {tokens:,} tokens", setting, options)
        outcomes.append(found)
        if found["status"] != "ok":
            table.rows.append([f"{tokens:,}", str(ranks), found["status"], *[DASH] * 8])
            continue
        said = found["ranks"][0]
        seen = said["trace"] or {}
        wanted = expected_step(machine_of(options, ranks), shape_of(options), tokens)
        row = [f"{tokens:,}", str(ranks), said["backend"], ms(said["step_s"])]
        row += [ms(seen.get("compute_s")), ms(wanted["compute_s"])]
        for part in ("comm_s", "exposed_s"):
            row += [SEVERAL, DASH] if ranks == 1 else [ms(seen.get(part)), ms(wanted[part])]
        table.rows.append([*row, ms(said["waits_s"])])
    return table, outcomes


def exchange(options: argparse.Namespace) -> Found:
    """A row a size and way."""
    ranks = gpus_of(options)
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
    table = Table(f"Reductions in 16 bits beside products, {ranks} ranks", columns)
    sizes = TINY_SIZES if options.tiny else SIZES
    ways = {"ordered": "all-to-all and sum", "native": "reduce-scatter"}
    if ranks == 1:
        table.rows = [[f"{size:,.0f}", way, SEVERAL, *[DASH] * 5] for size in sizes for way in ways.values()]  # fmt: skip
        return table, []
    setting = setting_of(options, ranks, 1)
    found = ranks_run(
        "exchange", "exchange", setting, options, megabytes=sizes, matrix=64 if options.tiny else 8192
    )  # fmt: skip
    if found["status"] != "ok":
        table.rows.append([found["status"], *[DASH] * 7])
        return table, [found]
    machine = machine_of(options, ranks)
    for row in found["ranks"][0]["rows"]:
        for way, name in ways.items():
            alone, both, products = (row[f"{way}_s"], row[f"{way}_beside_s"], row["products_s"])
            wanted = expected_reduction(machine, row["megabytes"] * 1e6, way)
            table.rows.append([
                f"{row['megabytes']:,g}", name, ms(alone), ms(wanted), ms(products), ms(both), ms(max(products, alone)),
                ms(both - products),
            ])  # fmt: skip
    return table, [found]


def copies(options: argparse.Namespace) -> Found:
    """A row a number of micro-batches, of Onefold with its optimizer on the host."""
    columns = (
        "micro-batches",
        "step ms",
        "copies ms",
        "hidden",
        "expected",
        "exposed ms",
        "pinned",
    )
    table = Table(f"Copies of offload, one GPU: {options.model}, bf16", columns)
    outcomes = []
    for accumulation in (1, 4):
        setting = Setting(
            model=options.model, tokens=options.tokens, precision="bf16", ranks=1, accumulation=accumulation, warmup=2, steps=2,
            threads=options.threads, device=options.device,
        )  # fmt: skip
        trace = str(options.output.resolve() / f"gpu-trace-copies-{accumulation}.json.gz")
        found = run("onefold-2-cpu", setting, options, trace=trace)
        outcomes.append(found)
        row = [str(accumulation)]
        if found["status"] != "ok":
            table.rows.append([*row, found["status"], *[DASH] * 5])
            continue
        rank = found["ranks"][0]
        seen = rank["trace"]
        moved = seen["pinned_s"] + seen["pageable_s"]
        table.rows.append([
            *row, ms(sorted(rank["step_s"])[len(rank["step_s"]) // 2]), ms(seen["comm_s"] / 2) if moved else "no streams",
            f"{seen['both_s'] / seen['comm_s']:.0%}" if seen["comm_s"] else DASH, f"{HIDDEN:.0%} or more",
            ms((seen["comm_s"] - seen["both_s"]) / 2), f"{seen['pinned_s'] / moved:.0%}" if moved else DASH,
        ])  # fmt: skip
    return table, outcomes


def communicators(options: argparse.Namespace) -> Found:
    """A row for each thing that takes memory, on the rank where it takes most."""
    ranks = gpus_of(options)
    columns = ("after", "torch reserved MiB", "driver MiB", "more, beside torch's", "expected")
    table = Table(f"Memory after each communicator, {ranks} ranks", columns)
    numel = 1 << 12 if options.tiny else numel_of(LLAMA_8B)
    found = ranks_run(
        "communicators", "communicators", setting_of(options, ranks, 1), options, numel=numel
    )
    if found["status"] != "ok":
        table.rows.append([found["status"], *[DASH] * 4])
        return table, [found]
    wanted = expected_memory(machine_of(options, ranks))
    own = [growth(rank["rows"]) for rank in found["ranks"]]
    for at, row in enumerate(found["ranks"][0]["rows"]):
        more = max((each[at] for each in own if each[at] is not None), default=None)
        reserved, driver = row["reserved_mib"], row["driver_mib"]
        table.rows.append([
            row["after"], DASH if reserved is None else f"{reserved:,.0f}", DASH if driver is None else f"{driver:,.0f}",
            DASH if more is None else f"{more:,.0f}", f"{wanted[row['after']]:,.0f}" if row["after"] in wanted else DASH,
        ])  # fmt: skip
    if ranks == 1:
        table.rows.append(["each communicator", SEVERAL, *[DASH] * 3])
    return table, [found]


def growth(rows: list[dict[str, Any]]) -> list[float | None]:
    """What each row takes more than the one before it, beside what torch's allocator has."""
    beside = [
        None if row["driver_mib"] is None else row["driver_mib"] - (row["reserved_mib"] or 0.0)
        for row in rows
    ]
    return [None] + [
        None if a is None or b is None else b - a for a, b in itertools.pairwise(beside)
    ]


def lost(options: argparse.Namespace) -> Found:
    """A row a way to lose the last rank."""
    ranks = max(2, gpus_of(options))
    patience = TINY_PATIENCE if options.tiny else PATIENCE
    table = Table(
        f"A peer is lost, {ranks} ranks, stall_timeout={patience:g}",
        ("peer", "backend", "told after s", "expected", "error", "text"),
    )
    outcomes = []
    backend = "gloo" if options.device == "cpu" or gpus_of(options) < ranks else "nccl"
    shape, tokens = (TINY, 16) if options.tiny else ([1024, 4096, 16, 4], 512)
    for how in ("killed", "stopped"):
        found = ranks_run(
            f"lost: {how}", "lost", setting_of(options, ranks, tokens), options, module="lost", how=how, after=3, shape=shape,
            stall_timeout=patience, limit_s=min(options.timeout - 5, 90 + 6 * patience),
        )  # fmt: skip
        outcomes.append(found)
        # A killed process closes its connections, which gloo notices at once. Whoever gives up waits
        # for the notes of the others
        noticed = 0.0 if (how, backend) == ("killed", "gloo") else patience
        wanted = f"{noticed + GRACE:g} and a step"
        if found["status"] != "ok":
            table.rows.append([how, backend, found["status"], wanted, DASH, essence(found["error"])[:200]])  # fmt: skip
            continue
        others = [rank for rank in found["ranks"] if not rank["victim"]]
        told = [rank for rank in others if rank.get("seconds") is not None]
        slowest = max(told, key=lambda rank: rank["seconds"]) if len(told) == len(others) else None
        said = slowest or next(rank for rank in others if rank not in told)
        seconds = f"{slowest['seconds']:.1f}" if slowest is not None else "never"
        table.rows.append([how, backend, seconds, wanted, said["kind"] or "none", " ".join(said["text"].split())[:300]])  # fmt: skip
        if slowest is None or slowest["kind"] != "StallError":
            found |= {"status": "failed", "error": f"a rank that was {how}: {said['text'][-300:]}"}
    if gpus_of(options) == 1 and options.device == "cuda":
        table.rows.append(["on NCCL", SEVERAL, *[DASH] * 4])
    return table, outcomes


def compiled(options: argparse.Namespace) -> Found:
    """Blocks as they are, and compiled by inductor."""
    ranks = gpus_of(options)
    columns = (
        "blocks",
        "ranks",
        "first step s",
        "step ms",
        "× eager",
        "expected",
        "loss difference",
    )
    table = Table(f"Blocks compiled by inductor, stage 3, bf16, {ranks} ranks", columns)
    setting = setting_of(options, ranks, (TINY_LENGTHS if options.tiny else LENGTHS)[0])
    eager, inductor = (
        trained(f"compile: {name}", setting, options, compile=compile)
        for name, compile in (("eager", False), ("inductor", True))
    )
    base = eager["ranks"][0] if eager["status"] == "ok" else None
    for name, found, wanted in (("eager", eager, DASH), ("inductor", inductor, "1.0 or less")):
        if found["status"] != "ok":
            table.rows.append([name, str(ranks), found["status"], *[DASH] * 4])
            continue
        mine = found["ranks"][0]
        times = f"{mine['step_s'] / base['step_s']:.2f}" if base else DASH
        apart = f"{relative(mine['losses'], base['losses']):.1e}" if base else DASH
        table.rows.append([name, str(ranks), f"{mine['first_s']:.1f}", ms(mine["step_s"]), times, wanted, apart])  # fmt: skip
    return table, [eager, inductor]


def sums(options: argparse.Namespace) -> Found:
    """Steps with ordered and with native sums."""
    ranks = gpus_of(options)
    columns = (
        "sums",
        "step ms",
        "expected less ms",
        "found less ms",
        "exposed ms",
        "peak MiB",
        "loss difference",
    )
    table = Table(f"Who adds gradients up, stage 3, bf16, {ranks} ranks", columns)
    tokens = (TINY_LENGTHS if options.tiny else LENGTHS)[0]
    if ranks == 1:
        table.rows = [[name, SEVERAL, *[DASH] * 5] for name in ("ordered", "native")]
        return table, []
    setting = setting_of(options, ranks, tokens)
    outcomes = [trained("sums: ordered", setting, options, recipe={"reduce": "ordered"})]
    if options.device != "cpu":
        outcomes.append(trained("sums: native", setting, options, recipe={"reduce": "native"}))
    machine, nbytes = machine_of(options, ranks), 2.0 * numel_of(shape_of(options))
    less = BLOCKS * (
        expected_reduction(machine, nbytes, "ordered")
        - expected_reduction(machine, nbytes, "native")
    )
    base = outcomes[0]["ranks"][0] if outcomes[0]["status"] == "ok" else None
    for found in outcomes:
        name = found["peer"].partition(": ")[2]
        if found["status"] != "ok":
            table.rows.append([name, found["status"], *[DASH] * 5])
            continue
        mine, first = found["ranks"][0], found is outcomes[0]
        peak = DASH if mine["peak_mib"] is None else f"{mine['peak_mib']:,.0f}"
        table.rows.append([
            name, ms(mine["step_s"]), DASH if first else ms(less), DASH if first or base is None else ms(base["step_s"] - mine["step_s"]),
            ms((mine["trace"] or {}).get("exposed_s")), peak, f"{relative(mine['losses'], base['losses']):.1e}" if base else DASH,
        ])  # fmt: skip
    if options.device == "cpu":
        table.rows.append(["native", "gloo has none", *[DASH] * 5])
    return table, outcomes


def quick(options: argparse.Namespace) -> argparse.Namespace:
    """The options of one chapter: none may take the time of those behind it."""
    return argparse.Namespace(**{**vars(options), "timeout": min(options.timeout, 120.0)})


CHAPTER = {
    "block": block,
    "exchange": exchange,
    "copies": copies,
    "communicators": communicators,
    "lost": lost,
    "compile": compiled,
    "sums": sums,
}
