"""Onefold on a CUDA machine in under ten minutes, one GPU being enough: `python benchmarks/gpu.py`.

The first chapters measure what decides whether the rest is worth a look, each beside what was
expected. They are those of `onefold doctor --check` (src/onefold/doctor/chapters.py), and take about
five minutes; `--only` names others.

What tells most comes first, and each result is written at once: a call that is cut off has left its
gpu.json and gpu.md.

| chapter   | question                                                                                        | by default         |
|-----------|-------------------------------------------------------------------------------------------------|--------------------|
| check     | is it right here? `onefold doctor --check --quick`                                              | yes                |
| block     | exposed time around blocks of Llama 3 8B's shape, at two sequence lengths                       | yes                |
| exchange  | all-to-all and sum beside reduce-scatter, with a product running beside                         | on several GPUs    |
| copies    | how much of offload's copies is hidden, with 1 and 4 micro-batches                              | yes                |
| communica-| what a context and each communicator take of the device                                         | yes                |
|    tors   |                                                                                                 |                    |
| lost      | a killed and a stopped peer: how long until the others are told, and what                       | yes                |
| compile   | blocks compiled by inductor                                                                     | yes                |
| sums      | native sums beside ordered ones                                                                 | on several GPUs    |
| ranks     | step time and peak memory of DDP, FSDP2, DeepSpeed and Onefold's stages, native sums and codecs | on several GPUs    |
| step      | the same at world size 1 beside plain PyTorch: what does sharding cost where there is nothing   | yes                |
|           | to shard? The goal is 1.02 × its time and memory                                                |                    |
| host      | optimizer and parameters on the host beside FSDP2's CPUOffloadPolicy and ZeRO-Offload           | yes                |
| memory    | activations on the host, weights in tiles                                                       | yes                |
| codecs    | are codecs as quick as memory, do kernels write what torch writes? See benchmarks/codecs.py      | yes                |
| fp32      | `ranks` and `step` with the larger model in fp32, which takes longest                           | yes                |
| overlap   | a profile: how much of communication and copies had a compute kernel beside it                  | `--only overlap`   |
| numbers   | losses of several ranks that share one GPU over gloo, beside one process on the whole batch     | `--only numbers`   |
| offload   | host and NVMe with a trace of the copies. See benchmarks/on_gpu/offload.py                      | `--only offload`   |
| largest   | how large a model does each side train on this GPU? See benchmarks/on_gpu/largest.py            | `--only largest`   |
| groups    | groups and codecs with streams as without. See benchmarks/on_gpu/chapters.py                       | `--only groups`    |

Sides take turns in one process for each comparison (benchmarks/on_gpu/turns.py); DeepSpeed takes part
where it is installed, in one of its own. `--tiny` runs every row with a tiny model on a CPU.
Without a GPU it says so and exits 0.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

# Started as a file: Python put its folder on the path, not the repository
if __package__ in (None, ""):
    sys.path[0:0] = [str(Path(__file__).resolve().parents[1])]

import torch

from benchmarks import codecs, harness, pages
from benchmarks.on_gpu import chapters, largest, offload
from benchmarks.on_gpu.comparison import GOAL, compared
from benchmarks.on_gpu.turns import Report, take_turns
from benchmarks.peers.model import SHAPES

CHAPTERS = (
    "check", *chapters.CHAPTERS, "ranks", "step", "host", "memory", "codecs", "fp32", "overlap",
    "numbers", "offload", "largest", "groups",
)  # fmt: skip
USUAL = CHAPTERS[: CHAPTERS.index("overlap")]
SINGLE: dict[str, Callable[[harness.Options], chapters.Chapter]] = {
    "check": chapters.check,
    "codecs": codecs.chapter,
    "numbers": chapters.same_numbers,
    "overlap": chapters.hidden,
    "offload": offload.chapter,
    "largest": largest.chapter,
    "groups": chapters.groups,
}
TINY = {"device": "cpu", "model": "gpt-tiny", "smaller": "gpt-tiny", "tokens": 64, "steps": 2}
TINY |= {"rounds": 1, "threads": 1}


BOTH = ["fp32", "bf16"]


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
    ranks=([2, 3], "ranks of `numbers`"),
    accumulations=([1, 8], "micro-batches a step of `offload`"),
    blocks=(16, "blocks of the first attempt of `largest`"),
    width=(4096, "width of the blocks of `largest`, a multiple of 128"),
    largest_tokens=(1024, "tokens a step of `largest`"),
    disk=(Path.cwd(), "a folder on the disk for state on NVMe"),
    deepspeed_adam=(False, "DeepSpeedCPUAdam in place of torch's AdamW: it needs a compiler"),
    device=("cuda", "cpu: a rehearsal of the script itself", ["cuda", "cpu"]),
    tiny=(False, "every row with a tiny model on a CPU, several GPUs being two ranks over gloo"),
)
def main(options: harness.Options) -> int:
    """0 when every turn ended well or there is no GPU, else 1."""
    if options.tiny:
        vars(options).update(TINY)
    if options.device == "cuda" and not torch.cuda.is_available():
        print("no CUDA device: nothing was measured")
        return 0
    comparisons = compared(options)
    report = Report(options)
    with harness.stoppable():
        for name in options.only:
            if name in chapters.CHAPTERS and report.left() > 0:
                report.put(name, *chapters.of_the_first_hour(name, options, report.left()))
            if name in SINGLE and report.left() > 0:
                options.timeout = min(options.timeout, max(10.0, report.left()))
                report.put(name, *SINGLE[name](options))
            for number, comparison in enumerate(comparisons.get(name, ())):
                take_turns(comparison, options, report, f"{name} {number}")
        report.write(finished=True)
    asked = [o for name, part in report.outcomes.items() for o in part if name != "largest"]
    failed = [outcome for outcome in asked if outcome["status"] != "ok"]
    for outcome in failed:
        print(f"{outcome['peer']} {outcome['status']}: {outcome['error']}\n", file=sys.stderr)
    gpu, over = report.head["machine"]["gpu"], f'"!": over the goal of {GOAL} × plain PyTorch'
    print(f"\nmeasured on {gpu}; {over}\n")
    for table in report.tables.values():
        pages.show(str(table))
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
