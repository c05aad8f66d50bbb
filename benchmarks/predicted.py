"""The plan's bytes beside those of real runs of `onefold train`: at rest, on the wire, moved, at peak.

    python -m benchmarks predicted [--only TEXT]      # 19 runs of four steps on 2 and 4 ranks, three minutes

Each run plans itself before it starts, and its first rank records what it held and sent; both accounts
lie in its output folder. Bytes at rest, sent and moved must be equal, the engine's peak within 5 %. The
whole peak adds activations, which the plan traces and a rank's ledger counts as they are saved.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks import harness, pages
from onefold.observe.runfile import read_observed

SCHEMA = "onefold-predicted/1"
RUN = "--tokenizer bytes --data topics --seq 64 --steps 4 --warmup 1 --eval-every 0 --precision fp32 --seed 0"
TWO = {
    "stage 0": "--stage 0",
    "stage 1": "--stage 1",
    "stage 2": "--stage 2",
    "stage 3": "--stage 3",
    "stage 3 in bf16": "--stage 3 --precision bf16",
    "stage 2, 3 micro-batches": "--stage 2 --global-batch 12",
    "stage 3, checkpointing": "--stage 3 --activation-checkpointing full",
    "stage 3, moments in int8": "--stage 3 --moments int8",
    "stage 3, LoRA on nf4": "--stage 3 --lora 8 --frozen nf4 --precision bf16",
    "states on the host": "--stage 3 --offload-optimizer cpu",
    "everything on the host": "--stage 3 --offload-optimizer cpu --offload-param cpu",
    "states on NVMe": "--stage 3 --offload-optimizer nvme",
    "ZeRO++ in int8, int4": "--stage 3 --gather-codec int8 --reduce-codec int4",
}
FOUR = {
    "stage 3 in groups of 2": "--stage 3 --group 2",
    "hybrid: shard group of 2": "--stage 3 --shard-group 2",
    "MiCS: states over all ranks": "--stage 3 --shard-group 2 --optimizer-over all",
    "ZeRO++: second copy in groups of 2": "--stage 3 --group 2 --second-copy",
    "stage 3 and tensor parallelism of 2": "--stage 3 --tp 2",
    "stage 1 and tensor parallelism of 2": "--stage 1 --tp 2",
}
COMPARED = {"rest": "at rest", "sent": "sent in a step", "moved": "moved between tiers in a step",
            "engine": "engine at its peak", "peak": "at peak"}  # fmt: skip
PEAK = 0.05


def pair(name: str) -> pages.Cell:
    """Planned and measured MiB, once if they are equal to the byte."""

    def cell(row: Any) -> str:
        a, b = row[name]
        return f"{a / 2**20:.3f}" if a == b else f"{a / 2**20:.3f} -> {b / 2**20:.3f}"

    return cell


COLUMNS: pages.Columns = {
    "run": pages.shown("run"),
    "ranks": pages.shown("ranks"),
    "at rest": pair("rest"),
    "sent": pair("sent"),
    "moved": pair("moved"),
    "engine at peak": pair("engine"),
    "all at peak": pair("peak"),
    "measured / planned": lambda row: f"{row['peak'][1] / row['peak'][0]:.2f}",
}


def trained(name: str, ranks: int, model: str, folder: Path) -> dict[str, Any]:
    """{figure: (planned, measured)} of the first rank, in bytes."""
    words = f"train --model {model} {RUN} --nproc {ranks} --output {folder / 'run'} {(TWO | FOUR)[name]}"
    (disk := folder / "disk").mkdir()
    nvme = ["--nvme", str(disk)] if "nvme" in words else []
    command = [sys.executable, "-m", "onefold", *words.split(), *nvme]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise harness.Refused(f"{name}: {(done.stderr or done.stdout).strip()[-400:]}")
    run = read_observed(folder / "run")
    assert run.plan is not None
    both = [
        {title: value for title, part, _, value in account.lines() if not part}
        for account in (run.plan, run.ranks[0].measured)
    ]
    found = {key: [table[title] for table in both] for key, title in COMPARED.items()}
    return {"run": name, "ranks": ranks, "options": (TWO | FOUR)[name], **found}


@harness.command(
    "predicted",
    __doc__,
    model=("llama:10m", "as `onefold train --model` takes it"),
    only=("", "runs whose name has this text"),
)
def main(args: harness.Options) -> int:
    rows = []
    for name in (*TWO, *FOUR):
        if args.only in name:
            with tempfile.TemporaryDirectory(prefix="onefold-predicted-") as folder:
                rows.append(trained(name, 4 if name in FOUR else 2, args.model, Path(folder)))
            print(" ".join(pages.cells(COLUMNS, rows[-1])), flush=True)
    if not rows:
        raise harness.Refused(
            f"--only {args.only!r}: no run is called so; choose from {', '.join(TWO | FOUR)}."
        )
    other = sum(row[key][0] != row[key][1] for row in rows for key in ("rest", "sent", "moved"))
    off = max(abs(b / a - 1) for a, b in (row["engine"] for row in rows))
    goals = [
        harness.goal("figures at rest, sent and moved that are not equal", other, 0, "{}"),
        harness.goal("the engine's peak is off by at most", off, PEAK, "{:.1%}"),
    ]

    def page(found: dict[str, Any]) -> str:
        legend = "MiB of the first rank, planned -> measured; one figure where both are equal to the byte."
        return pages.page(
            pages.where(found), pages.goals(goals), pages.table(COLUMNS, rows), legend
        )

    pages.show(page(harness.keep(args, SCHEMA, page, goals=goals, rows=rows)))
    return 0
