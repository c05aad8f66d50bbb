"""What the host spends on a step of 48 small blocks: `python -m benchmarks.host [--against OTHER/src ...] [--rounds 5] [--name host]`.

The blocks compute almost nothing, so a step is hooks, attribute calls and the optimizer's own loop. Each round measures every source of
Onefold (this one, and the `src` folders of other checkouts) and DDP in turns, each in processes of its own: two ranks over gloo, one
thread each. A figure of a process is the median of its steps, of its slower rank; of a source, the median of its processes. Writes
benchmarks/results/NAME.json.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

SCHEMA = "onefold-host/1"
ROOT = Path(__file__).parents[1]
RESULTS = Path(__file__).parent / "results"
SIDES = ("ddp", "0", "1", "2", "3")
FIGURES = ("step_s", "optimizer_s", "cpu_s", "loss")
BLOCKS, WIDTH, LAYERS, WARMUP = 48, 16, 8, 5


class Block(nn.Module):
    """Eight small layers: 16 parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + layer(x).tanh()
        return x


# -- one rank ----------------------------------------------------------------------------------------------------------------------


def rank_main(rank: int, side: str, folder: str, count: int) -> None:
    """Write the seconds of each step, of the optimizer's part of it, of the processor (all threads), and the last loss."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
    torch.manual_seed(0)
    model: nn.Module = nn.Sequential(*(Block() for _ in range(BLOCKS)))
    if side == "ddp":
        model = nn.parallel.DistributedDataParallel(model)
    else:
        import onefold

        onefold.shard(model, onefold.Recipe.zero(int(side)), units=(Block,))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    x = torch.randn(4, WIDTH)
    steps, stepping, cpu = [], [], 0.0
    for number in range(WARMUP + count):
        dist.barrier()
        cpu = time.process_time() if number == WARMUP else cpu
        start = time.perf_counter()
        loss = model(x).square().mean()
        loss.backward()
        before = time.perf_counter()
        optimizer.step()
        optimizer.zero_grad()
        end = time.perf_counter()
        steps.append(end - start)
        stepping.append(end - before)
    cpu = (time.process_time() - cpu) / count
    dist.barrier()
    Path(folder, f"{rank}.json").write_text(json.dumps([steps[WARMUP:], stepping[WARMUP:], [cpu] * count, loss.item()]))
    dist.destroy_process_group()


def measured(source: Path, side: str, count: int) -> dict[str, Any]:
    """Seconds of a step, of the optimizer in it, of the processor, and the last loss, of two ranks that import Onefold from `source`."""
    with tempfile.TemporaryDirectory() as folder:
        found = {**os.environ, "PYTHONPATH": os.pathsep.join([str(source), str(ROOT)]), "OMP_NUM_THREADS": "1"}
        work = [sys.executable, "-m", "benchmarks.host", "--steps", str(count), "--rank"]
        ranks = [subprocess.Popen([*work, str(rank), side, folder], env=found) for rank in (0, 1)]
        codes = [rank.wait(600) for rank in ranks]
        if any(codes):
            raise RuntimeError(f"{side} of {source} failed; what it said stands above")
        said = [json.loads(Path(folder, f"{rank}.json").read_text()) for rank in (0, 1)]
    slower = [[max(each) for each in zip(*(rank[i] for rank in said), strict=True)] for i in range(3)]
    return {"step_s": median(slower[0]), "optimizer_s": median(slower[1]), "cpu_s": slower[2][0], "loss": said[0][3]}


# -- all of them -------------------------------------------------------------------------------------------------------------------


def main(arguments: Sequence[str] | None = None) -> int:
    """0 if every side was measured and all sources had the same losses."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rank", nargs=3, help=argparse.SUPPRESS)
    parser.add_argument("--against", nargs="*", type=Path, default=[], help="`src` folders of other checkouts")
    parser.add_argument("--sides", nargs="+", choices=SIDES, default=list(SIDES))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=30, help=f"measured in each process, behind {WARMUP}")
    parser.add_argument("--name", default="host")
    parser.add_argument("--output", type=Path, default=RESULTS)
    options = parser.parse_args(arguments)
    if options.rank:
        rank, side, folder = options.rank
        rank_main(int(rank), side, folder, options.steps)
        return 0
    from benchmarks.peers import summary

    sources = {"this": ROOT / "src"} | {_commit(path): path for path in options.against}
    runs: dict[str, list[dict[str, Any]]] = {}
    for number in range(options.rounds):
        cells = [(side, name) for side in options.sides for name in (["this"] if side == "ddp" else sources)]
        for side, name in cells if number % 2 == 0 else reversed(cells):
            runs.setdefault(f"{side} {name}", []).append(measured(sources[name], side, options.steps))
    rows = []
    for side in options.sides:
        for name in ["this"] if side == "ddp" else sources:
            found = runs[f"{side} {name}"]
            row = {"side": side, "source": name} | {key: median(run[key] for run in found) for key in FIGURES}
            rows.append(row | {"of_this": row["step_s"] / median(run["step_s"] for run in runs[f"{side} this"]), "runs": found})
            told = "   ".join(f"{key[:-2]} {1e3 * row[key]:7.2f} ms" for key in FIGURES[:3])
            print(f"{side:4} {name:10} {told}   loss {row['loss']!r}")
    document = {
        "schema": SCHEMA,
        "command": " ".join(["python -m benchmarks.host", *_without_paths(sys.argv[1:] if arguments is None else arguments)]),
        "date": datetime.datetime.now().astimezone().isoformat(timespec="seconds"),
        "machine": summary.machine(),
        "versions": summary.versions(sys.executable),
        "rows": rows,
    }
    options.output.mkdir(parents=True, exist_ok=True)
    (options.output / f"{options.name}.json").write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    same = all(len({row["loss"] for row in rows if row["side"] == side}) == 1 for side in options.sides)
    return 0 if same else 1


def _commit(source: Path) -> str:
    asked = subprocess.run(["git", "-C", str(source), "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    return asked.stdout.strip() or source.parent.name


def _without_paths(arguments: Sequence[str]) -> list[str]:
    """A path says nothing elsewhere; the rows name commits."""
    return ["PATH" if os.sep in word else word for word in arguments]


if __name__ == "__main__":
    sys.exit(main())
