"""Onefold on a CUDA machine in under ten minutes, one GPU being enough: `python benchmarks/gpu.py`.

What tells most comes first, and each result is written at once: a call that is cut off has left its
gpu.json and gpu.md.

| chapter   | question                                                                                        | by default         |
|-----------|-------------------------------------------------------------------------------------------------|--------------------|
| check     | is it right here? `onefold doctor --check`                                                      | yes                |
| ranks     | step time and peak memory of DDP, FSDP2, DeepSpeed and Onefold's stages, native sums and codecs | on several GPUs    |
| step      | the same at world size 1 beside plain PyTorch: what does sharding cost where there is nothing   | yes                |
|           | to shard? The goal is 1.02 × its time and memory                                                |                    |
| host      | optimizer and parameters on the host beside FSDP2's CPUOffloadPolicy and ZeRO-Offload           | yes                |
| memory    | activations on the host, weights in tiles                                                       | yes                |
| codecs    | are codecs as quick as memory, do kernels write what torch writes? See benchmarks/codecs.py      | yes                |
| fp32      | `ranks` and `step` with the larger model in fp32, which takes longest                           | yes                |
| overlap   | a profile: how much of communication and copies had a compute kernel beside it                  | `--only overlap`   |
| numbers   | losses of several ranks that share one GPU over gloo, beside one process on the whole batch     | `--only numbers`   |
| offload   | host and NVMe with a trace of the copies. See benchmarks/offload/on_gpu.py                      | `--only offload`   |
| largest   | how large a model does each side train on this GPU? See benchmarks/offload/on_gpu.py            | `--only largest`   |
| groups    | groups and codecs with streams as without. See benchmarks/wires/on_gpu.py                       | `--only groups`    |

Sides take turns in one process for each comparison (benchmarks/gpu_turns.py); DeepSpeed takes part
where it is installed, in one of its own. `--tiny` runs every row with a tiny model on a CPU.
Without a GPU it says so and exits 0.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any, NoReturn

# Started as a file: Python put its folder on the path, not the repository
if __package__ in (None, ""):
    sys.path[0:0] = [str(Path(__file__).resolve().parents[1])]

import torch
import torch.distributed as dist

from benchmarks import gpu_turns, harness
from benchmarks.harness import Table
from benchmarks.offload import sides
from benchmarks.offload.traced import overlap as overlap
from benchmarks.offload.traced import profile
from benchmarks.offload.worker import Ledgers
from benchmarks.peers import adapters, launch, model, probes, worker
from benchmarks.peers.settings import Setting
from benchmarks.wires import sides as in_groups

SCHEMA = "onefold-gpu/1"
CHAPTERS = (
    "check",
    "ranks",
    "step",
    "host",
    "memory",
    "codecs",
    "fp32",
    "overlap",
    "numbers",
    "offload",
    "largest",
    "groups",
)
USUAL = CHAPTERS[:7]
GOAL = 1.02  # of plain PyTorch's step time and memory at world size 1
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
        backend,
        init_method=f"file://{path.with_name('store')}",
        rank=rank,
        world_size=setting.ranks,
    )
    return backend


def synchronize(setting: Setting) -> None:
    """Wait for the GPU, if there is one."""
    if setting.device == "cuda":
        torch.cuda.synchronize()


def measure(job: dict[str, Any], setting: Setting, path: Path, rank: int) -> dict[str, Any]:
    """Train, and time or profile; memory in MiB allocated on the GPU (resident on a CPU), peak over
    the timed steps.
    """
    peer, whole_batch, cuda = job["peer"], job.get("whole_batch_of", 0), setting.device == "cuda"
    how = {"disk": job.get("disk"), "own_adam": job.get("own_adam", False)}
    sides.prepare(peer, setting.device)
    if "ranks_a_node" in job:
        # As a launcher would say where nodes end
        os.environ["LOCAL_WORLD_SIZE"] = str(job["ranks_a_node"])
    backend = "none" if peer == "plain" else join(setting, path, rank)
    if "ranks_a_node" not in job:  # there memory is not what is asked
        sides.touch(peer, setting, **how)
    synchronize(setting)
    on_host = probes.resident_mib()
    baseline = torch.cuda.memory_allocated() / 2**20 if cuda else on_host
    whole = model.build(setting.model, device=setting.device)
    numel = sum(p.numel() for p in whole.parameters())
    if "ranks_a_node" in job:
        trainer = in_groups.build(
            peer, setting, whole, job["ranks_a_node"], **job.get("changes", {})
        )
    else:
        trainer = sides.build(peer, setting, whole, **how)
    ledgers = Ledgers(trainer)

    def batches(step: int) -> list[adapters.Batch]:
        ranks = whole_batch or setting.ranks
        # A single process takes every rank's part, one after another
        taken = range(ranks) if whole_batch else [rank]
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
        result["between_bytes"] = trainer.onefold.engine_of(trainer.model).traffic.by_link()[
            "between"
        ]
    if peer.startswith("onefold"):
        result["observed"] = observed(trainer, data[-1])
    if job.get("trace"):
        result["trace"] = profile(
            trainer, data[-2:], setting, Path(job["trace"]) if rank == 0 else None
        )
    return result


def observed(trainer: Any, taken: Sequence[adapters.Batch]) -> dict[str, Any]:
    """One more step of Onefold as its ledgers saw it, beside the allocator's books; and a row of
    metrics.
    """
    from onefold.observe import Meter, measured, reconciled, record

    meter = Meter(trainer.model, trainer.optimizer)
    with record(trainer.model, trainer.optimizer, activations=True) as seen:
        loss = trainer.step(taken)
    row = meter.step(loss=torch.tensor(loss, device=taken[0][0].device))
    account = measured(trainer.model, trainer.optimizer, seen)
    return {
        "account": account.to_json(),
        "machine": reconciled(trainer.model, account).to_json(),
        "row": row,
    }


def work() -> NoReturn:
    """`python -m benchmarks.gpu JOB.json RANK`, started by `launch.run_ranks`."""
    job, path, rank = worker.read_job()
    setting = Setting(**job["setting"])
    worker.leave(measure(job, setting, path, rank), path, rank)


# --- the command ---


def run(
    peer: str,
    setting: Setting,
    options: argparse.Namespace,
    python: str = sys.executable,
    **more: Any,
) -> dict[str, Any]:
    """One peer in fresh processes; the outcome of `launch.run_ranks` with what was asked for."""
    job = {"peer": peer, "setting": setting.to_json(), **more}
    outcome = launch.run_ranks(
        "benchmarks.gpu",
        job,
        setting.ranks,
        threads=setting.threads,
        python=python,
        timeout=options.timeout,
    )
    print(
        f"# {peer} {setting.precision} {setting.ranks} ranks: {outcome['status']} in"
        f" {outcome['wall_s']:.0f} s",
        file=sys.stderr,
        flush=True,
    )
    return {"peer": peer, "setting": setting.to_json(), **outcome}


def relative(mine: Sequence[float], theirs: Sequence[float]) -> float:
    """The largest relative difference of two series."""
    return max(abs(a - b) / abs(b) for a, b in zip(mine, theirs, strict=True))


def mean_losses(outcome: dict[str, Any]) -> list[float]:
    """Loss of each step, the mean over ranks."""
    return [
        fmean(step) for step in zip(*(rank["losses"] for rank in outcome["ranks"]), strict=True)
    ]


def same_numbers(options: argparse.Namespace) -> tuple[Table, list[dict[str, Any]]]:
    """The reference is one process that takes the ranks' parts one after another."""
    table = Table(
        "Several ranks, one GPU: losses",
        (
            "peer",
            "precision",
            "ranks",
            "backend",
            "last loss",
            "× one process's",
            "largest difference",
        ),
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


# --- sides in turns ---


@dataclass(frozen=True)
class Comparison:
    """Sides that take turns, and the one that the others are measured by. `goal`: the most that a
    stage may be of it, 0 for none.
    """

    title: str
    setting: Setting
    sides: tuple[str, ...]
    to: str
    goal: float = 0.0


def compared(options: argparse.Namespace) -> dict[str, list[Comparison]]:
    """What each chapter compares on this machine, what tells most first."""

    def setting(
        ranks: int = 1, model: str = options.model, precision: str = "bf16", **more: Any
    ) -> Setting:
        shared = {
            "warmup": 1 if options.tiny else 3,
            "steps": options.steps,
            "threads": options.threads,
            "device": options.device,
        }
        return Setting(
            model=model,
            tokens=options.tokens,
            precision=precision,
            ranks=ranks,
            **{**shared, **more},
        )

    gpus = 2 if options.tiny else torch.cuda.device_count() if options.device == "cuda" else 0
    natives = tuple(
        side for side in ("onefold-2-native", gpu_turns.NATIVE) if gpu_turns.known(side)
    )
    deepspeed = ("deepspeed-1", "deepspeed-2", "deepspeed-3")
    alone = ("plain", "fsdp2", *STAGES, *deepspeed)
    together = ("ddp", "fsdp2", *STAGES, *natives, "onefold-3-codecs", *deepspeed)
    found: dict[str, list[Comparison]] = {"ranks": [], "step": [], "fp32": []}
    cases = dict.fromkeys(
        (precision, name)
        for precision in ("bf16", "fp32")
        for name in (options.model, options.smaller)
    )
    for precision, name in (case for case in cases if case[0] in options.precisions):
        title = f"{name}, {precision}, {options.tokens:,} tokens a rank"
        last = precision == "fp32" and name == options.model
        if gpus > 1:
            many = Comparison(
                f"{gpus} ranks: {title}", setting(gpus, name, precision), together, "ddp"
            )
            found["fp32" if last else "ranks"].append(many)
        one = Comparison(
            f"World size 1: {title}", setting(1, name, precision), alone, "plain", GOAL
        )
        found["fp32" if last else "step"].append(one)
    about = f"{options.model}, bf16, {options.tokens:,} tokens"
    several = setting(accumulation=2 if options.tiny else 4, steps=max(2, options.steps // 2))
    host = ("plain", "onefold-2-cpu", "onefold-2-cpu-behind", "onefold-3-cpu-param", "fsdp2-cpu")
    host += ("deepspeed-2-cpu", "deepspeed-3-cpu-param")
    found["host"] = [
        Comparison(
            f"State on the host: {about}, {several.accumulation} micro-batches",
            several,
            host,
            "plain",
        )
    ]
    tight = ("plain", "onefold-3", "onefold-3-activations", "onefold-3-tiles")
    found["memory"] = [
        Comparison(f"Activations on the host, weights in tiles: {about}", setting(), tight, "plain")
    ]
    return found


class Report:
    """What is known by now: written as gpu.json and gpu.md whenever something is added."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.deadline = time.monotonic() + options.seconds
        self.tables: dict[str, Table] = {}
        self.outcomes: dict[str, list[dict[str, Any]]] = {}
        device = torch.cuda.get_device_name() if options.device == "cuda" else "cpu"
        self.head = harness.about(options, SCHEMA)
        self.head["machine"] |= {"gpu": device, "gpus": torch.cuda.device_count()}

    def left(self) -> float:
        """Seconds before everything should have ended."""
        return self.deadline - time.monotonic()

    def put(self, name: str, table: Table, outcomes: list[dict[str, Any]]) -> None:
        """Another table, or the same with more rows."""
        self.tables[name], self.outcomes[name] = table, outcomes
        self.write()

    def write(self, finished: bool = False) -> None:
        """Both files, whole at any moment."""
        tables = [
            {"title": t.title, "columns": list(t.columns), "rows": t.rows}
            for t in self.tables.values()
        ]
        result = {**self.head, "finished": finished, "tables": tables, "runs": self.outcomes}
        text = [f"# Onefold on {self.head['machine']['gpu']}", "", harness.where(self.head), ""]
        text += [table.markdown() for table in self.tables.values()]
        harness.keep(self.options, result, "\n".join(text))


def take_turns(
    comparison: Comparison, options: argparse.Namespace, report: Report, name: str
) -> None:
    """Let the sides take turns, and report after every one. A side that ends its process or stands
    still loses its turns only.
    """
    have = {
        p: launch.interpreter_has(python, p)
        for p, python in (("deepspeed", options.deepspeed_python), ("onefold", sys.executable))
    }
    absent = [
        side
        for side in comparison.sides
        if (package := adapters.requirement(side)) and not have[package]
    ]
    here = [side for side in comparison.sides if side not in absent]
    # DeepSpeed patches what it finds of torch, and may have another interpreter: its sides have
    # processes of their own.
    parts = [
        [side for side in here if not side.startswith("deepspeed")],
        [side for side in here if side.startswith("deepspeed")],
    ]
    turns: list[dict[str, Any]] = []
    outcomes: list[dict[str, Any]] = []
    for waiting in parts:
        while waiting and report.left() > 0:
            with tempfile.TemporaryDirectory(prefix="gpu-") as folder:
                lines = Path(folder, "turns.jsonl")
                deepspeed = waiting[0].startswith("deepspeed")
                job = {
                    "setting": comparison.setting.to_json(),
                    "sides": waiting,
                    "rounds": options.rounds,
                    "lines": str(lines),
                }
                python = options.deepspeed_python if deepspeed else sys.executable
                limit = min(options.timeout, report.left())
                with ThreadPoolExecutor(1) as pool:
                    running = pool.submit(
                        launch.run_ranks, "benchmarks.gpu_turns", job | {"deepspeed": deepspeed}, comparison.setting.ranks,
                        threads=comparison.setting.threads, python=python, timeout=limit,
                    )  # fmt: skip
                    before = list(turns)
                    while True:
                        ended = running.done()
                        turns = before + gpu_turns.read(lines)
                        report.put(
                            name,
                            _turned(comparison, turns, absent),
                            _outcomes(comparison, turns) + outcomes,
                        )
                        if ended:
                            break
                        time.sleep(0.5)
                outcome = running.result()
            if outcome["status"] == "ok":
                break
            done = {turn["side"] for turn in turns}
            lost = next((side for side in waiting if side not in done), None)
            if lost is not None:
                turns.append(
                    {"side": lost, "round": 0, "status": "failed", "error": outcome["error"][-600:]}
                )
                waiting = waiting[waiting.index(lost) + 1 :]
            else:  # its first round is there
                outcomes.append(
                    {"peer": waiting[-1], "setting": comparison.setting.to_json(), **outcome}
                )
                break
            report.put(
                name, _turned(comparison, turns, absent), _outcomes(comparison, turns) + outcomes
            )
    report.put(name, _turned(comparison, turns, absent), _outcomes(comparison, turns) + outcomes)
    print(report.tables[name], file=sys.stderr, flush=True)


def _outcomes(comparison: Comparison, turns: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """A run for each turn, as the other chapters give them."""
    setting = comparison.setting.to_json()
    return [{"peer": turn["side"], "setting": setting, "error": "", **turn} for turn in turns]


def _turned(comparison: Comparison, turns: list[dict[str, Any]], absent: Sequence[str]) -> Table:
    """A row of each side; "–" for what is not there yet."""
    by = comparison.to
    columns = (
        "side",
        "step ms",
        f"time × {by}",
        "tokens/s",
        "peak MiB",
        f"peak × {by}",
        "rest MiB",
        "loss difference",
        "rounds",
    )
    table = Table(comparison.title, columns)
    found = gpu_turns.by_side(turns)
    base = found.get(by, {})
    for side in comparison.sides:
        mine = found.get(side)
        if mine is None or "error" in mine:
            said = (
                "not installed" if side in absent else "not reached" if mine is None else "failed"
            )
            table.rows.append([side, said, *["–"] * 7])
            continue
        slower = gpu_turns.ratio(turns, side, by)
        if slower is None and "step_s" in base:
            slower = mine["step_s"] / base["step_s"]
        larger = (
            mine["peak_mib"] / base["peak_mib"]
            if mine["peak_mib"] and base.get("peak_mib")
            else None
        )
        goal = comparison.goal if side in STAGES else 0.0
        table.rows.append([
            side,
            f"{1000 * mine['step_s']:.1f}",
            _marked(slower, goal),
            f"{comparison.setting.tokens_a_step / mine['step_s']:,.0f}",
            f"{mine['peak_mib']:,.0f}" if mine["peak_mib"] is not None else "–",
            _marked(larger, goal),
            f"{mine['rest_mib']:,.0f}" if mine["rest_mib"] is not None else "–",
            f"{relative(mine['losses'], base['losses']):.1e}" if "losses" in base else "–",
            str(mine["rounds"]),
        ])  # fmt: skip
    return table


def _marked(multiple: float | None, goal: float) -> str:
    """A multiple; with "!" where it is over the goal."""
    if multiple is None:
        return "–"
    return f"{multiple:.3f}" + ("!" if goal and multiple > goal else "")


def check(options: argparse.Namespace) -> tuple[Table, list[dict[str, Any]]]:
    """`onefold doctor --check` on all GPUs; its JSON stays beside ours."""
    table = Table("onefold doctor --check", ("check", "found", "seconds", "said"))
    file = options.output / "gpu-check.json"
    command = [
        sys.executable,
        "-m",
        "onefold",
        "doctor",
        "--check",
        "--device",
        options.device,
        "--json",
        str(file),
    ]
    try:
        done = subprocess.run(
            command, cwd=launch.ROOT, env=launch.environment(options.threads), capture_output=True, text=True, timeout=options.timeout,
            check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return table, [
            {
                "peer": "check",
                "status": "timeout",
                "error": f"not finished after {options.timeout:.0f} s",
            }
        ]
    if done.returncode not in (0, 1) or not file.exists():
        return table, [
            {"peer": "check", "status": "failed", "error": (done.stderr or done.stdout)[-600:]}
        ]
    report = json.loads(file.read_text())
    table.rows = [
        [c["name"], c["status"], f"{c['seconds']:.1f}", c["said"]] for c in report["checks"]
    ]
    wrong = [f"{c['name']}: {c['said']}" for c in report["checks"] if c["status"] == "wrong"]
    return table, [
        {
            "peer": "check",
            "status": "failed" if wrong else "ok",
            "error": "\n".join(wrong),
            "report": report,
        }
    ]


def hidden(options: argparse.Namespace) -> tuple[Table, list[dict[str, Any]]]:
    """Profiled steps of rank 0."""
    gpus = torch.cuda.device_count() if options.device == "cuda" else 0
    columns = (
        "peer",
        "ranks",
        "backend",
        "comm + copies ms",
        "of it hidden",
        "compute ms",
        "idle ms",
    )
    table = Table("Overlap in two profiled steps of rank 0", columns)
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
    """The options; the defaults take under ten minutes on one large GPU."""
    p = harness.parser(
        "gpu",
        __doc__,
        rounds=2,
        steps=8,
        threads=8,
        timeout=240.0,
        output=harness.RESULTS,
        deepspeed_python=sys.executable,
    )
    p.prog = "python benchmarks/gpu.py"
    p.set_defaults(name="gpu")
    p.add_argument("--only", nargs="+", default=list(USUAL), choices=CHAPTERS)
    p.add_argument("--seconds", type=float, default=570.0, help="no turn goes on beyond that")
    p.add_argument("--model", default="gpt-1b", choices=list(model.SHAPES))
    p.add_argument(
        "--smaller",
        default="gpt-110m",
        choices=list(model.SHAPES),
        help="the other model of `step` and `ranks`",
    )
    p.add_argument("--tokens", type=int, default=8192, help="tokens a rank and micro-batch")
    p.add_argument("--precisions", nargs="+", default=["fp32", "bf16"], choices=["fp32", "bf16"])
    p.add_argument("--ranks", nargs="+", type=int, default=[2, 3], help="ranks of `numbers`")
    p.add_argument(
        "--accumulations",
        nargs="+",
        type=int,
        default=[1, 8],
        help="micro-batches a step of `offload`",
    )
    p.add_argument(
        "--blocks", type=int, default=16, help="blocks of the first attempt of `largest`"
    )
    p.add_argument(
        "--width",
        type=int,
        default=4096,
        help="width of the blocks of `largest`, a multiple of 128",
    )
    p.add_argument("--largest-tokens", type=int, default=1024, help="tokens a step of `largest`")
    p.add_argument(
        "--disk", type=Path, default=Path.cwd(), help="a folder on the disk for state on NVMe"
    )
    p.add_argument(
        "--deepspeed-adam",
        action="store_true",
        help="DeepSpeedCPUAdam in place of torch's AdamW: it needs a compiler",
    )
    p.add_argument(
        "--device",
        default="cuda",
        choices=["cuda", "cpu"],
        help="cpu: a rehearsal of the script itself",
    )
    p.add_argument(
        "--tiny",
        action="store_true",
        help="every row with a tiny model on a CPU, several GPUs being two ranks over gloo",
    )
    return p


def main(arguments: Sequence[str] | None = None) -> int:
    """0 when every turn ended well or there is no GPU, else 1."""
    options = harness.parsed(parser(), arguments)
    if options.tiny:
        tiny = {
            "device": "cpu",
            "model": "gpt-tiny",
            "smaller": "gpt-tiny",
            "tokens": 64,
            "steps": 2,
            "rounds": 1,
            "threads": 1,
        }
        vars(options).update(tiny)
    if options.device == "cuda" and not torch.cuda.is_available():
        print("no CUDA device: nothing was measured")
        return 0
    from benchmarks import codecs  # these three are made of what is above
    from benchmarks.offload import on_gpu
    from benchmarks.wires import on_gpu as groups

    chapters = {
        "check": check,
        "numbers": same_numbers,
        "overlap": hidden,
        "offload": on_gpu.offload,
        "largest": on_gpu.largest,
    }
    chapters |= {"codecs": codecs.chapter, "groups": groups.chapter}
    comparisons = compared(options)
    report = Report(options)
    with harness.stoppable():
        for name in options.only:
            if name in chapters and report.left() > 0:
                options.timeout = min(options.timeout, max(10.0, report.left()))
                report.put(name, *chapters[name](options))
            for number, comparison in enumerate(comparisons.get(name, ())):
                take_turns(comparison, options, report, f"{name} {number}")
        report.write(finished=True)
    failed = [
        o
        for name, part in report.outcomes.items()
        for o in part
        if o["status"] != "ok" and name != "largest"
    ]
    for outcome in failed:
        print(f"{outcome['peer']} {outcome['status']}: {outcome['error']}\n", file=sys.stderr)
    print(
        f'\nmeasured on {report.head["machine"]["gpu"]}; "!": over the goal of {GOAL} × plain'
        " PyTorch\n"
    )
    for table in report.tables.values():
        print(table)
    return int(bool(failed))


if __name__ == "__main__":
    if len(sys.argv) == 3 and sys.argv[1].endswith("job.json"):
        work()
    sys.exit(main())
