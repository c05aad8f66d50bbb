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

import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from benchmarks import harness, launch

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
    """What is measured: two ranks are processes over gloo, more are one on the fake backend."""

    side: str
    blocks: int
    ranks: int
    source: str

    @property
    def world(self) -> str:
        return "gloo" if self.ranks == 2 else "fake"


# -- one rank --------------------------------------------------------------------------------------


def join(job: dict[str, Any]) -> None:
    """Over gloo, or alone as rank 0 of `world` over torch's fake backend."""
    if job["world"] == 2:
        launch.join(job)
        return
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=job["world"])


def measure(job: dict[str, Any]) -> dict[str, Any]:
    """Seconds of each step, of the optimizer's part, of the processor; and the last loss."""
    torch.manual_seed(0)
    blocks, count = nn.Sequential(*(Block() for _ in range(job["blocks"]))), job["steps"]
    model = _on(job["side"], blocks, job["world"])
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
    timed = {"step_s": steps[WARMUP:], "optimizer_s": stepping[WARMUP:]}
    return {**timed, "cpu_s": cpu, "loss": loss.item()}


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
    """The medians of `measure` over steps, of the slower rank; Onefold comes from `source`."""
    job = {"side": cell.side, "blocks": cell.blocks, "world": cell.ranks, "steps": count}
    here = 2 if cell.world == "gloo" else 1
    ranks = launch.all_ranks("benchmarks.host_time", job, here, source=source)
    slower = {n: median(harness.slowest(ranks, n)) for n in ("step_s", "optimizer_s")}
    return {**slower, "cpu_s": max(rank["cpu_s"] for rank in ranks), "loss": ranks[0]["loss"]}


# -- all of them -----------------------------------------------------------------------------------


@harness.command(
    "host_time",
    __doc__,
    rounds=5,
    steps=30,
    against=[],
    sides=(
        list(SIDES),
        f"those that end in {INDUCTOR} have their blocks compiled",
        [*SIDES, *COMPILED_SIDES],
        {"nargs": "*"},
    ),
    blocks=([48, 96], "blocks of the model"),
    fake=([8, 64, 1024], "ranks over torch's fake backend; none: leave it out", {"nargs": "*"}),
)
def main(options: harness.Options) -> int:
    """0 if every side was measured and all sources had the same losses over gloo."""
    sources = harness.sources(options)
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
    harness.keep(options, SCHEMA, rows=rows)
    losses: dict[Cell, set[float]] = {}
    for cell in cells:
        if cell.world == "gloo":  # what the fake backend brings is undefined
            at = replace(cell, source="this")
            losses.setdefault(at, set()).update(run["loss"] for run in runs[cell])
    return 0 if all(len(found) == 1 for found in losses.values()) else 1


def _row(cell: Cell, runs: dict[Cell, list[dict[str, Any]]]) -> dict[str, Any]:
    """A side's medians, and its multiples of peers, of the fewest ranks, of this source."""
    own = runs[cell]
    row: dict[str, Any] = {"world": cell.world, "ranks": cell.ranks, "blocks": cell.blocks}
    row |= {"side": cell.side, "source": cell.source}
    row |= {key: median(run[key] for run in own) for key in FIGURES}
    others = {"of_this": replace(cell, source="this")} if cell.source != "this" else {}
    if cell.world == "gloo":
        others |= {f"of_{peer}": Cell(peer, cell.blocks, 2, "this") for peer in ("ddp", "fsdp2")}
        if cell.side.endswith(INDUCTOR):
            others["of_eager"] = replace(cell, side=cell.side.removesuffix(INDUCTOR))
        row["goal"] = "of_{} {}".format(*GOALS[cell.side]) if cell.side in GOALS else None
    else:
        alike = [c for c in runs if c.world == "fake" and replace(c, ranks=cell.ranks) == cell]
        others["of_fewest_ranks"] = min(alike, key=lambda c: c.ranks)
        row["goal"] = f"of_fewest_ranks {FAKE_GOAL}"
    row |= {key: _ratio(own, runs[other]) for key, other in others.items() if other in runs}
    return row | {"runs": own}


def _ratio(own: list[dict[str, Any]], other: list[dict[str, Any]]) -> float:
    return median(a["step_s"] / b["step_s"] for a, b in zip(own, other, strict=True))


def _line(row: dict[str, Any]) -> str:
    times = "   ".join(f"{key[:-2]} {1e3 * row[key]:7.2f} ms" for key in FIGURES[:3])
    ratios = "   ".join(f"{key} {row[key]:.2f}" for key in row if key.startswith("of_"))
    place = f"{row['world']} {row['ranks']:4} {row['blocks']:3} {row['side']:10} {row['source']:10}"
    return f"{place} {times}   {ratios}"


if __name__ == "__main__":
    sys.exit(main())
