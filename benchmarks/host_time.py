"""What the host spends on a step of many small blocks:
`python -m benchmarks.host_time [--blocks 48 96] [--against OTHER/src ...]`.

The blocks compute almost nothing, so a step is hooks, attribute calls and the optimizer's own loop.

| world  | ranks                 | sides                                       | what it shows                                      |
|--------|-----------------------|---------------------------------------------|----------------------------------------------------|
| "gloo" | two, one thread each  | stages 0 to 3 beside DDP and FSDP2          | the host's time of a step, as multiples of theirs  |
| "gloo" | two, one thread each  | `--sides 3 3+inductor ...`: blocks compiled | what torch.compile of the blocks gains             |
| "fake" | one process as rank 0 of 8, 64, 1,024 | stages 1 and 3              | what grows with the ranks besides the wire         |

Each round measures every side in turns, each in processes of its own, in the other direction every
other round. With `--against` the `src` folders of other checkouts take their turns too. A figure of
a process is the median of its steps, of its slower rank; of a side, the median of its processes.
Ratios are medians of the rounds' own ratios. Writes benchmarks/results/NAME.json.
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
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from benchmarks import harness
from benchmarks.harness import RESULTS, ROOT

SCHEMA = "onefold-host-time/1"
SIDES = ("ddp", "fsdp2", "0", "1", "2", "3")
#: At the end of a side's name: its blocks are compiled by inductor.
INDUCTOR = "+inductor"
COMPILED_SIDES = tuple(side + INDUCTOR for side in SIDES if side != "fsdp2")
FAKE_SIDES = ("1", "3")
FIGURES = ("step_s", "optimizer_s", "cpu_s", "loss")
WIDTH, LAYERS, WARMUP = 16, 8, 5
#: What a stage is compared with, and the goal.
GOALS = {"1": ("ddp", 1.5), "2": ("ddp", 1.5), "3": ("fsdp2", 0.5)}
#: How much longer a step may take on the most ranks than on the fewest.
FAKE_GOAL = 2.0


class Block(nn.Module):
    """Eight small layers: 16 parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + layer(x).tanh()
        return x


@dataclass(frozen=True)
class Cell:
    """One thing that is measured: `ranks` of 2 are two processes over gloo, more are one process
    over torch's fake backend.
    """

    side: str
    blocks: int
    ranks: int
    source: str

    @property
    def world(self) -> str:
        return "gloo" if self.ranks == 2 else "fake"


# -- one rank --------------------------------------------------------------------------------------


def rank_main(rank: int, side: str, blocks: int, ranks: int, folder: str, count: int) -> None:
    """Write the seconds of each step, of the optimizer's part of it, of the processor (all
    threads), and the last loss.
    """
    torch.set_num_threads(1)
    if ranks == 2:
        dist.init_process_group(
            "gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=ranks
        )
    else:
        from torch.testing._internal.distributed.fake_pg import FakeStore

        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=ranks)
    torch.manual_seed(0)
    model = _on(side, nn.Sequential(*(Block() for _ in range(blocks))), ranks)
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
    Path(folder, f"{rank}.json").write_text(
        json.dumps([steps[WARMUP:], stepping[WARMUP:], [cpu] * count, loss.item()])
    )
    dist.destroy_process_group()


def _on(side: str, model: nn.Module, ranks: int) -> nn.Module:
    if side.endswith(INDUCTOR):
        side = side.removesuffix(INDUCTOR)
        for block in model.children():
            forward: Any = torch.compile(block.forward)
            block.forward = forward
    if side == "ddp":
        return nn.parallel.DistributedDataParallel(model)
    if side == "fsdp2":
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        mesh = init_device_mesh("cpu", (ranks,))
        for block in model.children():
            fully_shard(block, mesh=mesh)
        return fully_shard(model, mesh=mesh)
    import onefold

    return onefold.shard(model, onefold.Recipe.zero(int(side)), units=(Block,))


def measured(cell: Cell, source: Path, count: int) -> dict[str, Any]:
    """Seconds of a step, of the optimizer in it, of the processor, and the last loss; Onefold comes
    from `source`.
    """
    with tempfile.TemporaryDirectory() as folder:
        found = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(source), str(ROOT)]),
            "OMP_NUM_THREADS": "1",
        }
        work = [sys.executable, "-m", "benchmarks.host_time", "--steps", str(count), "--rank"]
        here = (0, 1) if cell.ranks == 2 else (0,)
        ranks = [
            subprocess.Popen(
                [*work, str(r), cell.side, str(cell.blocks), str(cell.ranks), folder], env=found
            )
            for r in here
        ]
        codes = [rank.wait(600) for rank in ranks]
        if any(codes):
            raise RuntimeError(f"{cell} of {source} failed; what it said stands above")
        said = [json.loads(Path(folder, f"{rank}.json").read_text()) for rank in here]
    slower = [
        [max(each) for each in zip(*(rank[i] for rank in said), strict=True)] for i in range(3)
    ]
    return {
        "step_s": median(slower[0]),
        "optimizer_s": median(slower[1]),
        "cpu_s": slower[2][0],
        "loss": said[0][3],
    }


# -- all of them -----------------------------------------------------------------------------------


def main(arguments: Sequence[str] | None = None) -> int:
    """0 if every side was measured and all sources had the same losses over gloo."""
    parser = harness.parser(
        "host_time", __doc__, rounds=5, steps=30, name="host_time", output=RESULTS
    )
    parser.add_argument("--rank", nargs=5, help=argparse.SUPPRESS)
    parser.add_argument(
        "--against", nargs="*", type=Path, default=[], help="`src` folders of other checkouts"
    )
    parser.add_argument(
        "--sides",
        nargs="*",
        choices=[*SIDES, *COMPILED_SIDES],
        default=list(SIDES),
        help=f"those that end in {INDUCTOR} have their blocks compiled",
    )
    parser.add_argument("--blocks", nargs="+", type=int, default=[48, 96])
    parser.add_argument(
        "--fake",
        nargs="*",
        type=int,
        default=[8, 64, 1024],
        help="ranks over torch's fake backend; none: leave it out",
    )
    options = harness.parsed(parser, arguments)
    if options.rank:
        rank, side, blocks, ranks, folder = options.rank
        rank_main(int(rank), side, int(blocks), int(ranks), folder, options.steps)
        return 0
    sources = {"this": ROOT / "src"} | {harness.commit(path): path for path in options.against}
    cells = [
        Cell(side, blocks, ranks, name)
        for blocks in options.blocks
        for ranks in (2, *(options.fake if blocks == options.blocks[0] else ()))
        for side in (options.sides if ranks == 2 else FAKE_SIDES)
        for name in (["this"] if side in ("ddp", "fsdp2") else sources)
    ]
    runs: dict[Cell, list[dict[str, Any]]] = {cell: [] for cell in cells}
    for _, cell in harness.in_turns(cells, options.rounds):
        runs[cell].append(measured(cell, sources[cell.source], options.steps))
    rows = [_row(cell, runs) for cell in cells]
    for row in rows:
        print(_line(row))
    harness.keep(options, {**harness.about(options, SCHEMA), "rows": rows})
    # What the fake backend brings is undefined
    places = {(cell.side, cell.blocks, cell.ranks) for cell in cells if cell.world == "gloo"}
    same = all(
        len(
            {
                run["loss"]
                for cell in cells
                if place == (cell.side, cell.blocks, cell.ranks)
                for run in runs[cell]
            }
        )
        == 1
        for place in places
    )
    return 0 if same else 1


def _row(cell: Cell, runs: dict[Cell, list[dict[str, Any]]]) -> dict[str, Any]:
    """A side's medians, and its multiples: of the peer of its goal ("gloo"), of the fewest ranks
    ("fake"), of this source.
    """
    own = runs[cell]
    row: dict[str, Any] = {
        "world": cell.world,
        "ranks": cell.ranks,
        "blocks": cell.blocks,
        "side": cell.side,
        "source": cell.source,
    }
    row |= {key: median(run[key] for run in own) for key in FIGURES}
    if cell.world == "gloo":
        for peer in ("ddp", "fsdp2"):
            if found := runs.get(Cell(peer, cell.blocks, 2, "this")):
                row[f"of_{peer}"] = _ratio(own, found)
        row["goal"] = "of_{} {}".format(*GOALS[cell.side]) if cell.side in GOALS else None
        eager = runs.get(replace(cell, side=cell.side.removesuffix(INDUCTOR)))
        if cell.side.endswith(INDUCTOR) and eager:
            row["of_eager"] = _ratio(own, eager)
    else:
        fewest = min(
            (
                c
                for c in runs
                if (c.side, c.blocks, c.source, c.world)
                == (cell.side, cell.blocks, cell.source, "fake")
            ),
            key=lambda c: c.ranks,
        )
        row["of_fewest_ranks"], row["goal"] = (
            _ratio(own, runs[fewest]),
            f"of_fewest_ranks {FAKE_GOAL}",
        )
    if cell.source != "this":
        row["of_this"] = _ratio(own, runs[Cell(cell.side, cell.blocks, cell.ranks, "this")])
    return row | {"runs": own}


def _ratio(own: list[dict[str, Any]], other: list[dict[str, Any]]) -> float:
    return median(a["step_s"] / b["step_s"] for a, b in zip(own, other, strict=True))


def _line(row: dict[str, Any]) -> str:
    times = "   ".join(f"{key[:-2]} {1e3 * row[key]:7.2f} ms" for key in FIGURES[:3])
    ratios = "   ".join(
        f"{key} {row[key]:.2f}"
        for key in ("of_ddp", "of_fsdp2", "of_eager", "of_fewest_ranks", "of_this")
        if key in row
    )
    return (
        f"{row['world']} {row['ranks']:4} {row['blocks']:3} {row['side']:10} {row['source']:10}"
        f" {times}   {ratios}"
    )


if __name__ == "__main__":
    sys.exit(main())
