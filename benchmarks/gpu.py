"""Onefold on a CUDA machine, one GPU being enough: `python benchmarks/gpu.py`.

Seven questions, each answered in fresh processes:

1. Same numbers? Several ranks over gloo share the GPU (NCCL refuses that); the losses of Onefold's stages, of DDP and
   of one process on the whole batch are compared.
2. What does sharding cost where there is nothing to shard? Plain PyTorch, FSDP2 and Onefold at world size 1: step time
   and allocated memory, as multiples of plain PyTorch's.
3. Does communication hide behind computation? A profile of Onefold's stage 3: which part of the time in communication
   and copies had a compute kernel beside it, and how long the GPU idled. NCCL with a rank a GPU where there are
   several GPUs, else gloo with two ranks on one.
4. What does state on the host or on NVMe cost, beside plain PyTorch, FSDP2's CPUOffloadPolicy and DeepSpeed's ZeRO-Offload, and
5. how large a model does each of them train on this GPU? See benchmarks/offload/on_gpu.py. DeepSpeed takes part if it is installed.
6. Are codecs as quick as memory, and do their kernels write what torch writes? See benchmarks/codecs.py.
7. Do groups and codecs train the same with streams as without? See benchmarks/wires/on_gpu.py.

Prints its tables last; writes gpu.json and the traces (chrome://tracing) to --output.
Without a GPU it says so and exits 0.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import fmean, median
from typing import Any, NoReturn

if __package__ in (None, ""):  # started as a file: Python put its folder on the path, not the repository
    sys.path[0:0] = [str(Path(__file__).resolve().parents[1])]

import torch
import torch.distributed as dist

from benchmarks.offload import sides
from benchmarks.offload.cli import shown_command
from benchmarks.offload.traced import overlap as overlap
from benchmarks.offload.traced import profile
from benchmarks.offload.worker import Ledgers
from benchmarks.peers import adapters, launch, model, probes, summary, worker
from benchmarks.peers.settings import Setting
from benchmarks.wires import sides as in_groups

SCHEMA = "onefold-gpu/1"
CHAPTERS = ("numbers", "alone", "overlap", "offload", "largest", "codecs", "groups")
STAGES = ("onefold-0", "onefold-1", "onefold-2", "onefold-3")


# --- one rank ---


def join(setting: Setting, path: Path, rank: int) -> str:
    """Take a GPU and join the other ranks; answers the backend: NCCL with a GPU each, else gloo."""
    backend = "gloo"
    if setting.device == "cuda":
        gpus = torch.cuda.device_count()
        torch.cuda.set_device(rank % gpus)
        backend = "nccl" if setting.ranks <= gpus else "gloo"
    dist.init_process_group(
        backend, init_method=f"file://{path.with_name('store')}", rank=rank, world_size=setting.ranks
    )
    return backend


def synchronize(setting: Setting) -> None:
    """Wait for the GPU, if there is one."""
    if setting.device == "cuda":
        torch.cuda.synchronize()


def measure(job: dict[str, Any], setting: Setting, path: Path, rank: int) -> dict[str, Any]:
    """Train, and time or profile; memory in MiB allocated on the GPU (resident on a CPU), peak over the timed steps."""
    peer, whole_batch, cuda = job["peer"], job.get("whole_batch_of", 0), setting.device == "cuda"
    how = {"disk": job.get("disk"), "own_adam": job.get("own_adam", False)}
    sides.prepare(peer, setting.device)
    if "ranks_a_node" in job:
        os.environ["LOCAL_WORLD_SIZE"] = str(job["ranks_a_node"])  # as a launcher would say where nodes end
    backend = "none" if peer == "plain" else join(setting, path, rank)
    if "ranks_a_node" not in job:  # there memory is not what is asked
        sides.touch(peer, setting, **how)
    synchronize(setting)
    on_host = probes.resident_mib()
    baseline = torch.cuda.memory_allocated() / 2**20 if cuda else on_host
    whole = model.build(setting.model, device=setting.device)
    numel = sum(p.numel() for p in whole.parameters())
    if "ranks_a_node" in job:
        trainer = in_groups.build(peer, setting, whole, job["ranks_a_node"], **job.get("changes", {}))
    else:
        trainer = sides.build(peer, setting, whole, **how)
    ledgers = Ledgers(trainer)

    def batches(step: int) -> list[adapters.Batch]:
        ranks = whole_batch or setting.ranks
        taken = range(ranks) if whole_batch else [rank]  # a single process takes every rank's part, one after another
        made = [
            model.micro_batch(setting.model, setting.tokens, step, m, r, ranks)
            for m in range(setting.accumulation)
            for r in taken
        ]
        return [(ids.to(setting.device), labels.to(setting.device)) for ids, labels in made]

    losses = [trainer.step(batches(step)) for step in range(setting.warmup)]
    data = [batches(setting.warmup + step) for step in range(setting.steps)]
    synchronize(setting)
    if cuda:
        torch.cuda.reset_peak_memory_stats()
    probes.reset_peak()
    ledgers.start()
    seconds = []
    for taken in data:
        start = time.perf_counter()
        losses.append(trainer.step(taken))
        synchronize(setting)
        seconds.append(time.perf_counter() - start)
    peak = torch.cuda.max_memory_allocated() / 2**20 if cuda else probes.peak_resident_mib()
    result = {
        "rank": rank,
        "backend": backend,
        "losses": losses,
        "step_s": seconds,
        "peak_mib": probes.difference(peak, baseline),
        "reserved_mib": torch.cuda.max_memory_reserved() / 2**20 if cuda else None,
        "host_mib": probes.difference(probes.peak_resident_mib(), on_host),
        "held": ledgers.held(),
        "moved": ledgers.moved(),
        "numel": numel,
    }
    if "ranks_a_node" in job:
        result["between_bytes"] = trainer.onefold.engine_of(trainer.model).traffic.by_link()["between"]
    if peer.startswith("onefold"):
        result["observed"] = observed(trainer, data[-1])
    if job.get("trace"):
        result["trace"] = profile(trainer, data[-2:], setting, Path(job["trace"]) if rank == 0 else None)
    return result


def observed(trainer: Any, taken: Sequence[adapters.Batch]) -> dict[str, Any]:
    """One more step of Onefold as its ledgers saw it, beside the allocator's books; and a row of metrics."""
    from onefold.observe import Meter, measured, reconciled, record

    meter = Meter(trainer.model, trainer.optimizer)
    with record(trainer.model, trainer.optimizer, activations=True) as seen:
        loss = trainer.step(taken)
    row = meter.step(loss=torch.tensor(loss, device=taken[0][0].device))
    account = measured(trainer.model, trainer.optimizer, seen)
    return {"account": account.to_json(), "machine": reconciled(trainer.model, account).to_json(), "row": row}


def work() -> NoReturn:
    """`python -m benchmarks.gpu JOB.json RANK`, started by `launch.run_ranks`."""
    worker.exit_with_the_launcher()
    job, path, rank = worker.read_job()
    setting = Setting(**job["setting"])
    torch.set_num_threads(setting.threads)
    worker.leave(measure(job, setting, path, rank), path, rank)


# --- the command ---


@dataclass
class Table:
    """A heading, column names and rows of text; the first column is aligned left."""

    title: str
    columns: Sequence[str]
    rows: list[list[str]] = field(default_factory=list)

    def __str__(self) -> str:
        lines = [list(self.columns), *self.rows]
        widths = [max(len(line[i]) for line in lines) for i in range(len(self.columns))]
        text = [
            "  ".join(c.rjust(w) if i else c.ljust(w) for i, (c, w) in enumerate(zip(line, widths, strict=True)))
            for line in lines
        ]
        return "\n".join([self.title, text[0], "-" * len(text[0]), *text[1:], ""])


def run(
    peer: str, setting: Setting, options: argparse.Namespace, python: str = sys.executable, **more: Any
) -> dict[str, Any]:
    """One peer in fresh processes; the outcome of `launch.run_ranks` with what was asked for."""
    job = {"peer": peer, "setting": setting.to_json(), **more}
    outcome = launch.run_ranks(
        "benchmarks.gpu", job, setting.ranks, threads=setting.threads, python=python, timeout=options.timeout
    )
    print(
        f"# {peer} {setting.precision} {setting.ranks} ranks: {outcome['status']} in {outcome['wall_s']:.0f} s",
        file=sys.stderr,
        flush=True,
    )
    return {"peer": peer, "setting": setting.to_json(), **outcome}


def relative(mine: Sequence[float], theirs: Sequence[float]) -> float:
    """The largest relative difference of two series."""
    return max(abs(a - b) / abs(b) for a, b in zip(mine, theirs, strict=True))


def mean_losses(outcome: dict[str, Any]) -> list[float]:
    """Loss of each step, the mean over ranks."""
    return [fmean(step) for step in zip(*(rank["losses"] for rank in outcome["ranks"]), strict=True)]


def same_numbers(options: argparse.Namespace) -> tuple[Table, list[dict[str, Any]]]:
    """Question 1. The reference is one process that takes the ranks' parts one after another."""
    table = Table(
        "1. Several ranks, one GPU: losses",
        ("peer", "precision", "ranks", "backend", "last loss", "× one process's", "largest difference"),
    )
    outcomes = []
    for precision in options.precisions:
        for ranks in options.ranks:
            many = Setting(
                model="gpt-tiny",
                tokens=256,
                precision=precision,
                ranks=ranks,
                warmup=0,
                steps=6,
                threads=1,
                device=options.device,
            )
            one = replace(many, ranks=1)
            reference = run("plain", one, options, whole_batch_of=ranks)
            outcomes.append(reference)
            for peer in ("ddp", *STAGES):
                outcome = run(peer, many, options)
                outcomes.append(outcome)
                row = [peer, precision, str(ranks)]
                if outcome["status"] != "ok" or reference["status"] != "ok":
                    table.rows.append([*row, "–", outcome["status"], "–", "–"])
                    continue
                losses, expected = mean_losses(outcome), mean_losses(reference)
                backend = outcome["ranks"][0]["backend"]
                table.rows.append(
                    [
                        *row,
                        backend,
                        f"{losses[-1]:.6f}",
                        f"{losses[-1] / expected[-1]:.6f}",
                        f"{relative(losses, expected):.1e}",
                    ]
                )
    return table, outcomes


def alone(options: argparse.Namespace) -> tuple[Table, list[dict[str, Any]]]:
    """Question 2. Rounds alternate over the peers; a ratio is the median over rounds."""
    columns = ("peer", "precision", "step ms", "× plain", "tokens/s", "peak MiB", "× plain", "loss difference")
    table = Table(f"2. One GPU, world size 1: {options.model}, {options.tokens:,} tokens a step", columns)
    peers = ("plain", "fsdp2", *STAGES)
    outcomes = []
    for precision in options.precisions:
        setting = Setting(
            model=options.model,
            tokens=options.tokens,
            precision=precision,
            ranks=1,
            warmup=3,
            steps=options.steps,
            device=options.device,
        )
        found: dict[str, list[dict[str, Any]]] = {peer: [] for peer in peers}
        for _ in range(options.rounds):
            for peer in peers:
                outcome = run(peer, setting, options)
                outcomes.append(outcome)
                if outcome["status"] == "ok":
                    found[peer].append(outcome["ranks"][0])
        for peer in peers:
            table.rows.append(_alone_row(peer, setting, found[peer], found["plain"]))
    return table, outcomes


def _alone_row(peer: str, setting: Setting, mine: list[dict[str, Any]], plain: list[dict[str, Any]]) -> list[str]:
    if not mine or len(mine) != len(plain):
        return [peer, setting.precision, "failed", *["–"] * 5]
    step = median(second for rank in mine for second in rank["step_s"])
    slower = median(median(a["step_s"]) / median(b["step_s"]) for a, b in zip(mine, plain, strict=True))
    peak, base = (median(rank["peak_mib"] for rank in part) for part in (mine, plain))
    difference = relative(mine[0]["losses"][:6], plain[0]["losses"][:6])
    return [
        peer,
        setting.precision,
        f"{1000 * step:.1f}",
        f"{slower:.3f}",
        f"{setting.tokens / step:,.0f}",
        f"{peak:,.0f}",
        f"{peak / base:.3f}" if base else "–",
        f"{difference:.1e}",
    ]


def hidden(options: argparse.Namespace) -> tuple[Table, list[dict[str, Any]]]:
    """Question 3."""
    gpus = torch.cuda.device_count() if options.device == "cuda" else 0
    columns = ("peer", "ranks", "backend", "comm + copies ms", "of it hidden", "compute ms", "idle ms")
    table = Table("3. Overlap in two profiled steps of rank 0", columns)
    outcomes = []
    for peer in ("fsdp2", *STAGES):
        setting = Setting(
            model=options.model,
            tokens=options.tokens,
            precision="bf16",
            ranks=max(2, gpus),
            warmup=3,
            steps=2,
            device=options.device,
        )
        trace = options.output.resolve() / f"gpu-trace-{peer}.json.gz"
        outcome = run(peer, setting, options, trace=str(trace))
        outcomes.append(outcome)
        if outcome["status"] != "ok":
            table.rows.append([peer, str(setting.ranks), "–", outcome["status"], "–", "–", "–"])
            continue
        rank = outcome["ranks"][0]
        seen = rank["trace"]
        share = f"{seen['both_s'] / seen['comm_s']:.0%}" if seen["comm_s"] else "–"
        times = [f"{1000 * seen[name]:.1f}" for name in ("comm_s", "compute_s", "idle_s")]
        table.rows.append([peer, str(setting.ranks), rank["backend"], times[0], share, *times[1:]])
    return table, outcomes


def parser() -> argparse.ArgumentParser:
    """The options; the defaults take some ten minutes on one large GPU."""
    p = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    p.add_argument("--only", nargs="+", default=["numbers", "alone", "overlap"], choices=CHAPTERS)
    p.add_argument("--model", default="gpt-1b", choices=list(model.SHAPES))
    p.add_argument("--tokens", type=int, default=8192, help="tokens a rank and micro-batch of questions 2 to 4")
    p.add_argument("--precisions", nargs="+", default=["fp32", "bf16"], choices=["fp32", "bf16"])
    p.add_argument("--ranks", nargs="+", type=int, default=[2, 3], help="ranks of question 1")
    p.add_argument("--rounds", type=int, default=2)
    p.add_argument("--steps", type=int, default=10)
    p.add_argument("--accumulations", nargs="+", type=int, default=[1, 8], help="micro-batches a step of question 4")
    p.add_argument("--blocks", type=int, default=16, help="blocks of the first attempt of question 5")
    p.add_argument("--width", type=int, default=4096, help="width of the blocks of question 5, a multiple of 128")
    p.add_argument("--largest-tokens", type=int, default=1024, help="tokens a step of question 5")
    p.add_argument("--threads", type=int, default=8, help="threads of a process of questions 4 and 5: they step the optimizer")
    p.add_argument("--disk", type=Path, default=Path.cwd(), help="a folder on the disk for state on NVMe")
    p.add_argument("--deepspeed-python", default=sys.executable, help="an interpreter that has DeepSpeed, if not this one")
    p.add_argument("--deepspeed-adam", action="store_true", help="DeepSpeedCPUAdam in place of torch's AdamW: it needs a compiler")
    p.add_argument("--timeout", type=float, default=240.0, help="seconds a turn may take")
    p.add_argument("--output", type=Path, default=launch.ROOT / "benchmarks" / "results")
    p.add_argument("--device", default="cuda", choices=["cuda", "cpu"], help="cpu: a rehearsal of the script itself")
    return p


def main(arguments: Sequence[str] | None = None) -> int:
    """0 when every turn ended well or there is no GPU, else 1."""
    options = parser().parse_args(arguments)
    if options.device == "cuda" and not torch.cuda.is_available():
        print("no CUDA device: nothing was measured")
        return 0
    options.output.mkdir(parents=True, exist_ok=True)
    from benchmarks import codecs  # these three are made of what is above
    from benchmarks.offload import on_gpu
    from benchmarks.wires import on_gpu as groups

    chapters = {"numbers": same_numbers, "alone": alone, "overlap": hidden, "offload": on_gpu.offload, "largest": on_gpu.largest}
    chapters |= {"codecs": codecs.chapter, "groups": groups.chapter}
    tables, outcomes = [], {}
    with contextlib.suppress(KeyboardInterrupt):  # what is complete by then is written and shown
        for name in options.only:
            table, outcomes[name] = chapters[name](options)
            tables.append(table)
    device = torch.cuda.get_device_name() if options.device == "cuda" else "cpu"
    result = {
        "schema": SCHEMA,
        "command": shown_command(sys.argv[1:] if arguments is None else arguments, "python benchmarks/gpu.py"),
        "date": datetime.datetime.now().astimezone().isoformat(timespec="seconds"),
        "machine": {**summary.machine(), "gpu": device, "gpus": torch.cuda.device_count()},
        "versions": summary.versions(options.deepspeed_python),
        "tables": [{"title": t.title, "columns": list(t.columns), "rows": t.rows} for t in tables],
        "runs": outcomes,
    }
    (options.output / "gpu.json").write_text(json.dumps(result, indent=1))
    failed = [o for name, part in outcomes.items() for o in part if o["status"] != "ok" and name != "largest"]
    for outcome in failed:
        print(f"{outcome['peer']} {outcome['status']}: {outcome['error']}\n", file=sys.stderr)
    print(f"\nmeasured on {device}\n")
    for table in tables:
        print(table)
    return int(bool(failed))


if __name__ == "__main__":
    if len(sys.argv) == 3 and sys.argv[1].endswith("job.json"):
        work()
    sys.exit(main())
