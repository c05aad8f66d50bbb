"""Onefold on a CUDA machine in under ten minutes, one GPU being enough: `python benchmarks/gpu.py`.

What tells most comes first, and each result is written at once: a call that is cut off has left its
gpu.json and gpu.md.

| chapter   | question                                                                                        | by default         |
|-----------|-------------------------------------------------------------------------------------------------|--------------------|
| check     | is it right here: numbers, groups, copies? `onefold doctor --check`                             | yes                |
| block     | communication that is exposed around blocks of Llama 3 8B's width, at two lengths, by a profile | yes                |
| communica-| what a context and each communicator take of the device                                         | yes                |
|    tors   |                                                                                                 |                    |
| ranks     | step time and peak memory of DDP, FSDP2, DeepSpeed and Onefold's stages, native sums and codecs | on several GPUs    |
| step      | the same at world size 1 beside plain PyTorch: what does sharding cost where there is nothing   | yes                |
|           | to shard? The goal is 1.02 × its time and memory                                                |                    |
| host      | optimizer and parameters on the host beside FSDP2's CPUOffloadPolicy and ZeRO-Offload, with a   | yes                |
|           | profile of the copies                                                                           |                    |
| memory    | activations on the host                                                                        | yes                |
| codecs    | are codecs as quick as memory? See benchmarks/codecs.py                                         | yes                |
| fp32      | `ranks` and `step` with the larger model in fp32, which takes longest                           | yes                |
| offload   | host and NVMe with a profile of the copies, with 1 and 8 micro-batches                          | `--only offload`   |

Sides take turns in one process for each comparison (benchmarks/gpu_turns.py); DeepSpeed takes part
where it is installed, in one of its own. `--tiny` runs every row with a tiny model on a CPU.
Without a GPU it says so and exits 0.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# Started as a file: Python put its folder on the path, not the repository
if __package__ in (None, ""):
    sys.path[0:0] = [str(Path(__file__).resolve().parents[1])]

import torch

from benchmarks import codecs, communicators, harness, launch, pages
from benchmarks.gpt import PRECISIONS, SHAPES, Setting, count_parameters
from benchmarks.gpu_turns import Turn, take_turns
from benchmarks.harness import ROOT, Options, Row, Run
from benchmarks.pages import Cell, Columns, Table, cells, shown

SCHEMA = "onefold-gpu/2"
CHAPTERS = (
    "check", "block", "communicators", "ranks", "step", "host", "memory", "codecs", "fp32", "offload",
)  # fmt: skip
USUAL = CHAPTERS[: CHAPTERS.index("offload")]
STAGES = ("onefold-0", "onefold-1", "onefold-2", "onefold-3")
GOAL = 1.02  # of plain PyTorch's step time and memory at world size 1
Outcomes = list[dict[str, Any]]


class Report:
    """What is known by now: written as gpu.json and gpu.md whenever something is added."""

    def __init__(self, options: Options) -> None:
        self.options = options
        self.deadline = time.monotonic() + options.seconds
        self.tables: dict[str, Table] = {}
        self.outcomes: dict[str, Outcomes] = {}
        device = torch.cuda.get_device_name() if options.device == "cuda" else "cpu"
        self.head = harness.about(options, SCHEMA)
        self.head["machine"] |= {"gpu": device, "gpus": torch.cuda.device_count()}

    def left(self) -> float:
        """Seconds before everything should have ended."""
        return self.deadline - time.monotonic()

    def put(self, name: str, table: Table, outcomes: Outcomes) -> None:
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
        parts = [str(table) for table in self.tables.values()]
        title = f"# Onefold on {self.head['machine']['gpu']}"
        harness.write(self.options, result, pages.page(title, pages.where(self.head), *parts))


# -- chapters whose sides take turns -----------------------------------------------------------------


@dataclass(frozen=True)
class Comparison:
    """Sides that take turns; `to` is their measure, `goal` the most that a stage may be of it, `trace`
    asks for a profile of the last round.
    """

    title: str
    setting: Setting
    sides: tuple[str, ...]
    to: str
    goal: float = 0.0
    trace: bool = False


def compared(options: Options) -> Iterator[tuple[str, Comparison]]:
    """(chapter, what it compares on this machine), what tells most first."""

    def setting(
        ranks: int = 1, model: str = options.model, precision: str = "bf16", **more: Any
    ) -> Any:
        shared: dict[str, Any] = {"warmup": 1 if options.tiny else 3, "steps": options.steps}
        shared |= {"threads": options.threads, "device": options.device, "tokens": options.tokens}
        return Setting(model=model, precision=precision, ranks=ranks, **{**shared, **more})

    gpus = 2 if options.tiny else torch.cuda.device_count() if options.device == "cuda" else 0
    # gloo, which ranks on CPUs speak, has no sums of its own
    natives = () if options.device == "cpu" else ("onefold-2-native", "onefold-3-native")
    deepspeed = ("deepspeed-1", "deepspeed-2", "deepspeed-3")
    alone = ("plain", "fsdp2", *STAGES, *deepspeed)
    together = ("ddp", "fsdp2", *STAGES, *natives, "onefold-3-codecs", *deepspeed)
    names = dict.fromkeys((options.model, options.smaller))
    for precision, name in (
        (p, n) for p in ("bf16", "fp32") for n in names if p in options.precisions
    ):
        title = f"{name}, {precision}, {options.tokens:,} tokens a rank"
        last = precision == "fp32" and name == options.model
        one, many = setting(1, name, precision), setting(gpus, name, precision)
        if gpus > 1:
            yield (
                "fp32" if last else "ranks",
                Comparison(f"{gpus} ranks: {title}", many, together, "ddp"),
            )
        case = Comparison(f"World size 1: {title}", one, alone, "plain", GOAL)
        yield "fp32" if last else "step", case
    for name in ("gpt-tiny",) if options.tiny else ("blocks-2k", "blocks-8k"):
        tokens = SHAPES[name].seq
        title = f"Blocks of Llama 3 8B's width, bf16, {gpus} ranks of {tokens:,} tokens"
        case = setting(gpus, name, tokens=tokens, steps=max(2, options.steps // 2))
        yield "block", Comparison(title, case, ("plain", "onefold-3"), "plain", trace=True)
    about = f"{options.model}, bf16, {options.tokens:,} tokens"
    several = setting(accumulation=2 if options.tiny else 4, steps=max(2, options.steps // 2))
    host = ("plain", "onefold-2-cpu", "onefold-2-cpu-behind", "onefold-3-cpu-param", "fsdp2-cpu")
    host += ("deepspeed-2-cpu", "deepspeed-3-cpu-param")
    title = f"State on the host: {about}, {several.accumulation} micro-batches"
    yield "host", Comparison(title, several, host, "plain", trace=True)
    tight = ("plain", "onefold-3", "onefold-3-activations")
    title = f"Activations on the host: {about}"
    yield "memory", Comparison(title, setting(), tight, "plain")
    nvme = (
        "onefold-3",
        *host[1:4],
        "onefold-3-nvme",
        "onefold-3-nvme-behind",
        "onefold-3-nvme-param",
    )
    for micro in options.accumulations:
        title = f"State off the device: {about}, {micro} micro-batches"
        case = setting(accumulation=micro, steps=max(3, options.steps // micro))
        yield "offload", Comparison(title, case, ("plain", *nvme, *host[4:]), "plain", trace=True)


def table(comparison: Comparison, turns: Sequence[Turn], absent: set[str]) -> Table:
    """A row of each side, as far as its turns have come; "!" behind a multiple of a stage that is over
    the goal.
    """
    setting = comparison.setting
    runs = [Run(t["side"], t["round"], t["status"], [t], t.get("error", "")) for t in turns]
    base = harness.by_round(runs, comparison.to)
    their_peak = harness.over_rounds(base.values(), "peak_mib")

    def row(_: str, good: list[Run]) -> Row:
        timed = harness.timings(good, base)
        peak = harness.over_rounds(good, "peak_mib")
        traces = [run.ranks[0]["trace"] for run in good if run.ranks[0].get("trace")]
        return {
            **timed,
            "tokens_a_second": setting.tokens_a_step / timed["step_s"],
            "tflops": flops(setting) / timed["step_s"] / 1e12,
            "peak_mib": peak,
            "larger": peak / their_peak if peak and their_peak else None,
            "rest_mib": harness.over_rounds(good, "rest_mib"),
            "host_mib": harness.over_rounds(good, "host_mib"),
            "loss_difference": harness.loss_difference(good, base),
            **(of_trace(traces[-1]) if traces else {}),
        }

    def marked(name: str) -> Cell:
        def cell(row: Row) -> str:
            over = comparison.goal and row["side"] in STAGES and (row[name] or 0) > comparison.goal
            return shown(name, "{:.3f}")(row) + ("!" if over else "")

        return cell

    columns: Columns = {
        "side": shown("side"),
        "step ms": shown("step_s", "{:.1f}", 1e-3),
        f"time × {comparison.to}": marked("ratio"),
        "tokens/s": shown("tokens_a_second", "{:,.0f}"),
        "TFLOP/s a rank": shown("tflops", "{:.1f}"),
        "peak MiB": shown("peak_mib", "{:,.0f}"),
        f"peak × {comparison.to}": marked("larger"),
        "rest MiB": shown("rest_mib", "{:,.0f}"),
        "host MiB": shown("host_mib", "{:,.0f}"),
        "loss difference": shown("loss_difference", "{:.1e}"),
        "rounds": shown("rounds"),
    }
    if comparison.trace:
        columns = {
            **columns,
            "comm + copies ms": shown("comm_s", "{:.1f}", 1e-3),
            "of it hidden": shown("hidden", "{:.0%}"),
            "exposed ms": shown("exposed_s", "{:.1f}", 1e-3),
            "pinned": shown("pinned", "{:.0%}"),
            "idle ms": shown("idle_s", "{:.1f}", 1e-3),
        }
    found = {row["side"]: row for row in harness.rows_of(runs, row)}
    lines = []
    for side in comparison.sides:
        missing = {"side": side, "status": "not installed" if side in absent else "not reached"}
        lines.append(cells(columns, found.get(side) or missing))
    return Table(comparison.title, list(columns), lines)


def flops(setting: Setting) -> float:
    """Floating-point operations of a rank's forward and backward passes in a step: 6 a parameter and
    token, and half of what attention computes, since the rest is masked (Chowdhery et al. 2022, PaLM,
    appendix B).
    """
    shape, tokens = SHAPES[setting.model], setting.tokens * setting.accumulation
    whole = 6.0 * count_parameters(setting.model) + 6.0 * shape.layers * shape.width * shape.seq
    return tokens * whole


def of_trace(seen: dict[str, float]) -> Row:
    """Communication and copies of a step: their hidden, exposed and pinned part; idle time."""
    copies, moving = seen["pinned_s"] + seen["pageable_s"], seen["comm_s"]
    return {
        "comm_s": moving,
        "hidden": seen["both_s"] / moving if moving else None,
        "exposed_s": moving - seen["both_s"],
        "pinned": seen["pinned_s"] / copies if copies else None,
        "idle_s": seen["idle_s"],
    }


def taken(comparison: Comparison, options: Options, report: Report, name: str) -> None:
    """Let the sides take turns, and report after each."""
    absent = launch.absent(comparison.sides, options)
    sides = [side for side in comparison.sides if side not in absent]

    def show(turns: list[Turn]) -> None:
        report.put(name, table(comparison, turns, absent), list(turns))

    job = {"rounds": options.rounds}
    if comparison.trace:
        job["trace"] = str(options.output.resolve())
    show(take_turns(comparison.setting, sides, options, report.left, show, **job))
    print(f"# {comparison.title}: {options.seconds - report.left():.0f} s by now", file=sys.stderr)


# -- the other chapters ------------------------------------------------------------------------------


def check(options: Options, report: Report) -> tuple[Table, Outcomes]:
    """`onefold doctor --check`; its JSON is kept too."""
    table = Table("onefold doctor --check", ("check", "found", "seconds", "said"))
    options.output.mkdir(parents=True, exist_ok=True)
    file = options.output / "gpu-check.json"
    command = [sys.executable, "-m", "onefold", "doctor", "--check"]
    command += ["--device", options.device, "--json"]
    how: dict[str, Any] = {"cwd": ROOT, "env": launch.environment(options.threads)}
    how |= {"capture_output": True, "text": True, "timeout": options.timeout, "check": False}
    try:
        done = subprocess.run(command, **how)
    except subprocess.TimeoutExpired:
        error = f"not finished after {options.timeout:.0f} s"
        return table, [{"side": "check", "status": "timeout", "error": error}]
    if done.returncode not in (0, 1) or not done.stdout:
        error = (done.stderr or done.stdout)[-600:]
        return table, [{"side": "check", "status": "failed", "error": error}]
    file.write_text(done.stdout)
    found = json.loads(done.stdout)
    for c in found["checks"]:
        table.add(c["name"], c["status"], f"{c['seconds']:.1f}", c["said"])
    wrong = [f"{c['name']}: {c['said']}" for c in found["checks"] if c["status"] == "wrong"]
    outcome = {"side": "check", "status": "failed" if wrong else "ok", "error": "\n".join(wrong)}
    return table, [{**outcome, "report": found}]


SINGLE: dict[str, Callable[[Options, Report], tuple[Table, Outcomes]]] = {
    "check": check,
    "communicators": lambda options, report: communicators.chapter(options),
    "codecs": lambda options, report: codecs.chapter(options),
}
TINY = {"device": "cpu", "model": "gpt-tiny", "smaller": "gpt-tiny", "tokens": 64, "steps": 2}
TINY |= {"rounds": 1, "threads": 1}
BOTH = list(PRECISIONS)


@harness.command(
    "gpu.py",
    __doc__,
    rounds=2,
    steps=8,
    threads=8,
    timeout=240.0,
    deepspeed_python=sys.executable,
    only=(list(USUAL), "chapters", CHAPTERS),
    seconds=(570.0, "no turn goes on beyond that"),
    model=("gpt-1b", "which GPT", SHAPES),
    smaller=("gpt-110m", "the other model of `step` and `ranks`", SHAPES),
    tokens=(8192, "tokens a rank and micro-batch"),
    precisions=(BOTH, "what is computed in", BOTH),
    accumulations=([1, 8], "micro-batches a step of `offload`"),
    disk=(Path.cwd(), "a folder on the disk for state on NVMe"),
    deepspeed_adam=(False, "DeepSpeedCPUAdam in place of torch's AdamW: it needs a compiler"),
    device=("cuda", "cpu: a rehearsal of the script itself", ["cuda", "cpu"]),
    tiny=(False, "every row with a tiny model on a CPU, several GPUs being two ranks over gloo"),
)
def main(options: Options) -> int:
    """0 when every turn ended well or there is no GPU, else 1."""
    if options.tiny:
        vars(options).update(TINY)
    if options.device == "cuda" and not torch.cuda.is_available():
        print("no CUDA device: nothing was measured")
        return 0
    report, comparisons = Report(options), list(compared(options))
    with harness.stoppable():
        for name in options.only:
            if name in SINGLE and report.left() > 0:
                options.timeout = min(options.timeout, max(10.0, report.left()))
                report.put(name, *SINGLE[name](options, report))
            for number, (chapter, comparison) in enumerate(comparisons):
                if chapter == name:
                    taken(comparison, options, report, f"{name} {number}")
        report.write(finished=True)
    asked = [o for name, part in report.outcomes.items() for o in part]
    failed = [outcome for outcome in asked if outcome["status"] != "ok"]
    for outcome in failed:
        print(f"{outcome['side']} {outcome['status']}: {outcome['error']}\n", file=sys.stderr)
    gpu, over = report.head["machine"]["gpu"], f'"!": over the goal of {GOAL} × plain PyTorch'
    print(f"\nmeasured on {gpu}; {over}\n")
    for table in report.tables.values():
        pages.show(str(table))
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
