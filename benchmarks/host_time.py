"""What the host spends on a step of many small blocks, which compute almost nothing: hooks, attribute
calls and the optimizer's own loop.

    python -m benchmarks host_time [--blocks 48 96] [--sides 3 3+inductor] [--against OTHER/src ...]

| ranks                | sides                                     | what it shows                                     |
|----------------------|-------------------------------------------|---------------------------------------------------|
| two over gloo        | stages 0 to 3 beside DDP and FSDP2        | the host's time of a step, as multiples of theirs |
| two over gloo        | those that end in "+inductor"             | what torch.compile of the blocks gains            |
| rank 0 of 8, 64, 1,024 of torch's fake backend | stages 1 and 3  | what grows with the ranks besides the wire        |

With `--against` the `src` folders of other checkouts take their turns too, as SIDE@FOLDER. A figure of
a turn is the median of its steps, of its slower rank; of a side, the median of its turns. Ratios are
medians of the rounds' own ratios.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from benchmarks import harness, launch
from benchmarks.harness import Row, Run
from benchmarks.pages import Cell, shown

PLAIN = ("ddp", "fsdp2")
SIDES = (*PLAIN, "0", "1", "2", "3")
#: At the end of a side's name: its blocks are compiled by inductor.
INDUCTOR = "+inductor"
COMPILED = tuple(side + INDUCTOR for side in SIDES if side != "fsdp2")
FAKE_SIDES = ("1", "3")
WIDTH, LAYERS, WARMUP = 16, 8, 5
#: What a stage is compared with, and the goal.
GOALS = {"1": ("ddp", 1.5), "2": ("ddp", 1.5), "3": ("fsdp2", 0.5)}
#: How much longer a step may take on the most ranks than on the fewest.
FAKE_GOAL = 2.0
NOTES = {
    "of ...": "the step over that of ddp, of fsdp2, of the same side not compiled, of this checkout",
    "optimizer ms": "what optimizer.step() and zero_grad() take of a step",
}


@dataclass(frozen=True)
class Setting:
    """Two ranks are processes over gloo, more are one process on the fake backend."""

    blocks: int
    ranks: int
    steps: int
    threads: int = 1

    @property
    def title(self) -> str:
        over = "gloo" if self.ranks == 2 else "the fake backend"
        return f"{self.blocks} blocks, {self.ranks:,} ranks over {over}"


class Block(nn.Module):
    """Eight small layers: 16 parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + layer(x).tanh()
        return x


def join(job: dict[str, Any]) -> None:
    """Over gloo, or alone as rank 0 of the setting's ranks over torch's fake backend."""
    if job["setting"]["ranks"] == 2:
        launch.join(job)
        return
    from torch.testing._internal.distributed.fake_pg import FakeStore

    world = job["setting"]["ranks"]
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world)


def measure(job: dict[str, Any]) -> dict[str, Any]:
    """Seconds of each step, of the optimizer's part, of the processor; and the losses."""
    torch.manual_seed(0)
    setting = Setting(**job["setting"])
    blocks = nn.Sequential(*(Block() for _ in range(setting.blocks)))
    model = _on(job["side"].partition("@")[0], blocks, setting.ranks)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    x = torch.randn(4, WIDTH)
    steps, stepping, losses, cpu = [], [], [], 0.0
    for number in range(WARMUP + setting.steps):
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
        losses.append(loss.item())
    cpu = (time.process_time() - cpu) / setting.steps
    dist.barrier()
    timed = {"step_s": steps[WARMUP:], "optimizer_s": stepping[WARMUP:]}
    return {**timed, "cpu_s": cpu, "losses": losses}


def _on(side: str, model: nn.Module, ranks: int) -> nn.Module:
    if side.endswith(INDUCTOR):
        side = side.removesuffix(INDUCTOR)
        for block in model.children():
            block.forward = torch.compile(block.forward)  # type: ignore[method-assign]
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


class HostTime(harness.Study):
    schema, module, read, notes = "onefold-host-time/2", "benchmarks.host_time", Setting, NOTES

    def __init__(self, options: harness.Options) -> None:
        self.sources = {path.resolve().parent.name: path for path in options.against}
        others = list(self.sources)
        asked = [s for s in options.sides if s.partition(INDUCTOR)[0] not in PLAIN]
        options.sides = [*options.sides, *(f"{side}@{other}" for side in asked for other in others)]
        self.known = [*SIDES, *COMPILED, *(s for s in options.sides if "@" in s)]
        first, steps = options.blocks[0], options.steps
        settings = [Setting(blocks, 2, steps) for blocks in options.blocks]
        super().__init__(
            options, settings + [Setting(first, ranks, steps) for ranks in options.fake]
        )

    def those(self, setting: Setting) -> list[str]:
        if setting.ranks == 2:
            return self.sides
        return [*FAKE_SIDES, *(f"{side}@{name}" for side in FAKE_SIDES for name in self.sources)]

    def take(self, setting: Setting, side: str) -> dict[str, Any]:
        job = {"side": side, "setting": vars(setting)}
        source = self.sources.get(side.partition("@")[2], harness.ROOT / "src")
        return launch.run_ranks(self.module, job, 2 if setting.ranks == 2 else 1, source=source)

    def row(self, comparison: harness.Comparison, side: str, good: list[Run]) -> Row:
        def of(other: str) -> float | None:
            theirs = harness.by_round(comparison.runs, other)
            return None if other == side else harness.middle(harness.ratios(good, theirs))

        name, _, source = side.partition("@")
        optimizer = [median(harness.slowest(run.ranks, "optimizer_s")) for run in good]
        return {
            "step_s": median(median(harness.step_seconds(run)) for run in good),
            "optimizer_s": median(optimizer),
            "cpu_s": harness.over_rounds(good, "cpu_s"),
            **{f"of_{peer}": of(peer) for peer in PLAIN},
            "of_eager": of(name.removesuffix(INDUCTOR)) if name.endswith(INDUCTOR) else None,
            "of_this": of(name) if source else None,
            "loss": good[0].ranks[0]["losses"][-1],
        }

    def columns(self, setting: Setting) -> Mapping[str, Cell]:
        times = {"step ms": "step_s", "optimizer ms": "optimizer_s", "cpu ms": "cpu_s"}
        ratios = ("of_ddp", "of_fsdp2", "of_eager", "of_this")
        return {
            "side": shown("side"),
            **{title: shown(name, "{:.2f}", 1e-3) for title, name in times.items()},
            **{name.replace("_", " "): shown(name, "{:.2f}") for name in ratios},
        }

    def goals(self, judged: Any) -> list[Row]:
        found, steps = [], dict[str, dict[int, float]]()
        for setting, rows in judged:
            for row in (row for row in rows if row["status"] == "ok"):
                if setting.ranks != 2:
                    steps.setdefault(row["side"], {})[setting.ranks] = row["step_s"]
                elif row["side"] in GOALS:
                    peer, most = GOALS[row["side"]]
                    text = f"{setting.title}: stage {row['side']} at most {most} × {peer}"
                    figure = row[f"of_{peer}"]
                    found.append(harness.goal(text, figure, most))
        for side, by_ranks in steps.items():
            few, many = min(by_ranks), max(by_ranks)
            text = f"stage {side} on {many:,} ranks: at most {FAKE_GOAL} × on {few:,}"
            figure = by_ranks[many] / by_ranks[few]
            found.append(harness.goal(text, figure, FAKE_GOAL))
        return found

    @property
    def failed(self) -> bool:
        """Or a source has other losses over gloo; what the fake backend brings is undefined."""
        told: dict[Any, set[float]] = {}
        for c in (c for c in self.asked if c.setting.ranks == 2):
            for row in (row for row in self.rows(c) if row["status"] == "ok"):
                told.setdefault((c.setting, row["side"].partition("@")[0]), set()).add(row["loss"])
        return super().failed or any(len(losses) > 1 for losses in told.values())


@harness.command(
    "host_time",
    __doc__,
    rounds=5,
    steps=30,
    against=[],
    sides=(list(SIDES), "which sides", [*SIDES, *COMPILED]),
    blocks=([48, 96], "blocks of the model"),
    fake=([8, 64, 1024], "ranks over torch's fake backend; none: leave it out", {"nargs": "*"}),
)
def main(options: harness.Options) -> int:
    return HostTime(options).run()
