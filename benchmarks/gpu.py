"""Onefold on a CUDA machine in under ten minutes, one GPU being enough: `python benchmarks/gpu.py`.

One call and one JSON, written after each comparison: a call that is cut off has left what it found.
What tells most comes first.

| comparison | question                                                                                  |
|------------|-------------------------------------------------------------------------------------------|
| check      | is it right here: numbers, groups, copies? `onefold doctor --check`                       |
| block      | communication that is exposed around blocks of Llama 3 8B's width, by a profile           |
| ranks      | step time and peak memory beside DDP and FSDP2 (several GPUs)                             |
| step       | the same at world size 1 beside plain PyTorch; the goal is 1.02 × its time and memory     |
| host       | states and parameters on the host beside FSDP2's CPUOffloadPolicy, with a profile         |
| memory     | activations on the host                                                                   |
| codecs     | are codecs as quick as memory? See benchmarks/codecs.py                                   |

The sides of a comparison take turns in one process a rank, so that what drifts (clocks, temperature)
falls on all alike. `--tiny` runs every row with a tiny model on a CPU. Without a GPU it says so and
exits 0.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

# Started as a file: Python put its folder on the path, not the repository
if __package__ in (None, ""):
    sys.path[0:0] = [str(Path(__file__).resolve().parents[1])]

import torch
import torch.distributed as dist

from benchmarks import codecs, gpt, harness, launch, offload, pages, trainers, training
from benchmarks.gpt import SHAPES, Setting
from benchmarks.harness import Options, Row, Run
from benchmarks.pages import shown

STAGES = ("onefold-0", "onefold-1", "onefold-2", "onefold-3")
FURTHER: dict[str, dict[str, Any]] = {
    "onefold-3-activations": {"offload_activations": "cpu"},
    "onefold-3-native": {"reduce": "native"},
    "onefold-3-codecs": {"gather_codec": "int8", "reduce_codec": "int4"},
}
"""Sides beside Onefold's stages and tiers: further arguments of `Recipe.zero` at stage 3."""
PROFILED = ("block", "host")
MOVED = ("moving_s", "exposed_s", "pageable_s", "idle_s")
COLUMNS = {
    **training.times("the first"),
    **training.MEMORY,
    "peak ×": shown("peak_ratio", "{:.3f}"),
    **{f"{name} ms".replace("_s", ""): shown(name, "{:.1f}", 1e-3) for name in MOVED},
    **training.LOSS,
}


def comparisons(options: Options) -> dict[str, tuple[Setting, tuple[str, ...]]]:
    """Setting and sides of each on this machine; ratios refer to the first side."""
    gpus = 2 if options.tiny else torch.cuda.device_count()
    name, device = ("gpt-tiny", "cpu") if options.tiny else (options.model, "cuda")
    one = Setting(name, 64 if options.tiny else 8192, "bf16", 1, steps=options.steps, device=device)
    few = replace(one, steps=max(2, options.steps // 2))
    # gloo, which ranks on CPUs speak, has no sums of its own
    native = () if options.tiny else ("onefold-3-native",)
    found: dict[str, tuple[Setting, tuple[str, ...]]] = {}
    for blocks in ("gpt-tiny",) if options.tiny else ("blocks-2k", "blocks-8k"):
        tokens = SHAPES[blocks].seq
        setting = replace(few, model=blocks, tokens=tokens, ranks=gpus)
        found[f"block of {tokens}"] = (setting, ("plain", "onefold-3"))
    if gpus > 1:
        sides = ("ddp", "fsdp2", *STAGES, *native, "onefold-3-codecs")
        found["ranks"] = (replace(one, ranks=gpus), sides)
    for precision in ("bf16", "fp32"):
        found[f"step in {precision}"] = (
            replace(one, precision=precision),
            ("plain", "fsdp2", *STAGES),
        )
    host = ("plain", "onefold-2-cpu", "onefold-2-cpu-behind", "onefold-3-cpu-param", "fsdp2-cpu")
    found["host"] = (replace(few, accumulation=4), host)
    found["memory"] = (one, ("plain", "onefold-3", "onefold-3-activations"))
    return found


# -- a rank ----------------------------------------------------------------------------------------


def join(job: dict[str, Any]) -> None:
    launch.join(job, job["setting"]["device"])


def measure(job: dict[str, Any]) -> int:
    """Every side in every round, each a line of a file at once."""
    setting = Setting(**job["setting"])
    for number, side in harness.in_turns(job["sides"], job["rounds"]):
        watch = Profile(setting, job) if job["profiled"] else None

        def made(setting: Setting, side: str = side) -> trainers.Trainer:
            model = gpt.build(setting.model, device=setting.device)
            if side not in FURTHER:
                return offload.build(side, setting, model)
            return trainers.Onefold(setting, model, 3, **FURTHER[side])

        torch.cuda.empty_cache()  # what the side before has left
        error, found = "", {}
        try:
            found = training.measured(job, setting, made, watch=watch)
        except Exception as raised:
            error = f"{type(raised).__name__}: {str(raised)[:300]}"
        every: list[Any] = [None] * job["ranks"]
        dist.all_gather_object(every, (error, found))
        error = "; ".join(f"rank {r}: {e}" for r, (e, _) in enumerate(every) if e)
        run = Run(side, number, "failed" if error else "ok", [f for _, f in every], error)
        if job["rank"] == 0:
            with Path(job["lines"]).open("a", encoding="utf-8") as file:
                file.write(json.dumps(run.to_json()) + "\n")
    return job["rounds"]


class Profile(training.Watch):
    """Seconds of GPU work of one more step: communication and copies, how much of it nothing hid,
    copies of pageable memory, and idle.
    """

    def __init__(self, setting: Setting, job: dict[str, Any]) -> None:
        self.setting, self.rank = setting, job["rank"]

    def built(self, trainer: trainers.Trainer) -> None:
        self.trainer = trainer

    def found(self) -> dict[str, float]:
        from onefold.observe.trace import covered

        with torch.profiler.profile() as seen:
            self.trainer.step(gpt.batches(self.setting, 0, self.rank))
        moving, computing, pageable = [], [], []
        for event in seen.events() or ():
            # What somebody has named stands on the GPU's time line too, around its pieces of work
            if event.device_type.name != "CUDA" or event.is_user_annotation:
                continue
            name, span = event.name.lower(), (event.time_range.start, event.time_range.end)
            moves = "nccl" in name or name.startswith(("memcpy dtoh", "memcpy htod", "memcpy ptop"))
            (moving if moves else computing).append(span)
            pageable += [span] if "pageable" in name else []
        both = [*moving, *computing]
        busy, whole = covered(both), max((end for _, end in both), default=0.0)
        whole -= min((start for start, _ in both), default=0.0)
        found = {"moving_s": covered(moving), "exposed_s": busy - covered(computing)}
        found |= {"pageable_s": covered(pageable), "idle_s": whole - busy}
        return {name: microseconds / 1e6 for name, microseconds in found.items()}


# -- the command -----------------------------------------------------------------------------------


def compared(
    name: str, setting: Setting, sides: tuple[str, ...], rounds: int, timeout: float
) -> Row:
    """What the turns of a comparison have found, those of one that was cut off too."""
    with tempfile.TemporaryDirectory(prefix="gpu-") as folder:
        lines = Path(folder, "turns.jsonl")
        job = {"setting": asdict(setting), "sides": sides, "lines": str(lines)}
        job |= {"rounds": rounds, "profiled": name.startswith(PROFILED)}
        ended = launch.run_ranks("benchmarks.gpu", job, setting.ranks, timeout=timeout)
        text = lines.read_text(encoding="utf-8") if lines.exists() else ""
    runs = [Run(**json.loads(line)) for line in text.splitlines(keepends=True) if line[-1] == "\n"]
    base = harness.by_round(runs, sides[0])

    def row(_: str, good: list[Run]) -> Row:
        moved = {name: harness.over_rounds(good, name) for name in MOVED}
        return {**training.row(setting, good, base), **moved}

    rows = harness.rows_of(runs, row)
    return {
        "error": "",
        **ended,
        "setting": asdict(setting),
        "rows": rows,
        "runs": [r.to_json() for r in runs],
    }


def check(device: str) -> Row:
    """`onefold doctor --check`."""
    command = [sys.executable, "-m", "onefold", "doctor", "--check", "--device", device, "--json"]
    env = launch.environment(8)
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    status = "failed" if done.returncode else "ok"
    return {"status": status, "error": done.stderr[-600:], **json.loads(done.stdout or "{}")}


@harness.command(
    "gpu.py",
    __doc__,
    rounds=2,
    steps=8,
    timeout=240.0,
    seconds=(570.0, "no comparison goes on beyond that"),
    only=([], "the beginning of comparisons", str),
    model=("gpt-1b", "which GPT", SHAPES),
    tiny=(False, "every row with a tiny model on a CPU, several GPUs being two ranks over gloo"),
)
def main(options: Options) -> int:
    """0 when every turn ended well or there is no GPU, else 1."""
    device, failed = "cpu" if options.tiny else "cuda", 0
    if device == "cuda" and not torch.cuda.is_available():
        print("no CUDA device: nothing was measured")
        return 0
    deadline, found = time.monotonic() + options.seconds, {}
    cases = comparisons(options)
    with harness.stoppable():
        for name in ("check", *cases, "codecs"):
            left = deadline - time.monotonic()
            if left < 5 or not name.startswith(tuple(options.only) or ""):
                continue
            if name == "check":
                seen = check(device)
            elif name == "codecs":
                rates = codecs.measured(device, 1 << (20 if options.tiny else 28), 5)
                seen = {"status": "ok", "error": "", "rates": rates}
            else:
                seen = compared(name, *cases[name], options.rounds, min(options.timeout, left))
            found[name] = seen
            gpu = torch.cuda.get_device_name() if device == "cuda" else device
            harness.keep(options, "onefold-gpu/3", gpu=gpu, found=found)
            print(f"\n{name}: {seen['status']} {seen['error']}")
            rows = seen.get("rows", [])
            pages.show(pages.table(COLUMNS, rows) if rows else "")
            failed += any(each["status"] != "ok" for each in (seen, *rows))
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
