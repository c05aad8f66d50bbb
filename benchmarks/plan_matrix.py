"""The plan's seconds beside measured ones: settings planned, then trained on real ranks, stages in turns.

    python -m benchmarks plan_matrix [--quick] [--rounds 7] [--ranks 2] [--models llama:10m]

Stages 0 to 3 × fp32 and bf16 × accumulation 1 and 4 × checkpointing none and full × ranks. It needs a
machine that `onefold doctor --calibrate --ranks N` has measured with as many ranks as are asked for. The stages of a setting live side
by side and take their steps in turns, each round beginning with another. On shared hosts a machine's
speed changes by the minute, which a plan cannot know: around every round a block is timed that was
timed at the beginning too, and the round's seconds are divided by how much slower the machine is now
(its pace). A step must be within 25 % of the plan, and the stages in the planned order, unless plan or
measurement call them a tie (`order`). Ends with status 1 where one is not.
"""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from statistics import median, quantiles
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import onefold
from benchmarks import harness, launch, pages
from onefold.models.build import load_model
from onefold.plan.account import Question
from onefold.plan.api import machine_here, room_beside
from onefold.plan.job import Job, Scheme
from onefold.plan.modules import model_shape
from onefold.tracing.blocks import recompute
from onefold.tracing.trace import Activity, trace

SCHEMA = "onefold-plan-matrix/2"
STAGES = (0, 1, 2, 3)
VOCABULARY, SAMPLES, SEQ, WARMUP = 256, 2, 64, 3
#: Relative error that a step's time may have. Two stages that are predicted to differ by less than NEAR
#: take the same; of the rounds, the share that must show an order for it to count.
TIME, NEAR, AGREE = 0.25, 0.05, 0.8
#: Width and tokens of the block of the pace.
HIDDEN, TOKENS, PASSES = 256, 256, 5


@dataclass(frozen=True)
class Setting:
    """Micro-batches of two samples of 64 tokens, `accumulation` of them in a step of a rank."""

    model: str
    ranks: int
    precision: str
    accumulation: int
    checkpointing: str

    def __str__(self) -> str:
        return (
            f"{self.model}, {self.ranks} ranks, {self.precision}, accumulation"
            f" {self.accumulation}, checkpointing {self.checkpointing}"
        )


def build(model: str) -> nn.Module:
    """The model, as `onefold train --model` builds it, with the same weights on every rank."""
    return load_model(model, "bytes", 0, SEQ).module


def batch(samples: int, seed: int) -> dict[str, torch.Tensor]:
    """Token ids and labels, [samples, SEQ]."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, VOCABULARY, (samples, SEQ), generator=generator)
    return {"input_ids": ids, "labels": ids.clone()}


# -- the plan --------------------------------------------------------------------------------------


@lru_cache(maxsize=64)
def _activity(model: str, precision: str, checkpointing: str, samples: int) -> Activity:
    how: Any = {"checkpointing": checkpointing, "precision": precision, "device": "cpu"}
    return trace(build(model), batch(samples, 0), **how)


def predicted(setting: Setting) -> list[float]:
    """Seconds of a step at each stage. Refuses a machine that is not calibrated for so many ranks."""
    s = setting
    machine = machine_here(s.ranks, s.ranks, 1 << 40, "cpu", room_beside(()))
    if not machine.is_timed:
        raise harness.Refused(
            f"this machine is not calibrated for {s.ranks} ranks: run `onefold doctor --calibrate"
            f" --ranks {s.ranks}` first."
        )
    job = Job(
        seq=SEQ,
        micro_batch=SAMPLES,
        global_batch=SAMPLES * s.ranks * s.accumulation,
        precision=s.precision,
        checkpointing=s.checkpointing,
    )

    def activities(samples: int, how: str) -> Activity:
        return _activity(s.model, s.precision, how, samples)

    question = Question(model_shape(build(s.model)), activities, machine, job)
    schemes = [Scheme(stage, s.checkpointing, "none", SAMPLES) for stage in STAGES]
    return [question.answer(scheme).account.seconds["step"] for scheme in schemes]


# -- a rank ----------------------------------------------------------------------------------------


class Training:
    """A stage's model under the engine, warmed up. Collective, as are its methods."""

    def __init__(self, setting: Setting, stage: int, rank: int) -> None:
        self.setting, self.rank, self.number = setting, rank, 0
        model = build(setting.model)
        recompute(model, setting.checkpointing)
        recipe = onefold.Recipe.zero(stage, precision=setting.precision, stall_timeout=60.0)
        self.model = onefold.shard(model.train(), recipe)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=True)
        for _ in range(WARMUP):
            self.step()

    def step(self) -> float:
        """Seconds of one optimizer step with all its micro-batches, of the slowest rank."""
        self.number += 1
        meet()
        begun = time.perf_counter()
        for k in range(self.setting.accumulation):
            last = k + 1 == self.setting.accumulation
            with contextlib.nullcontext() if last else onefold.no_sync(self.model):
                given = batch(SAMPLES, 10_000 * self.number + 100 * k + self.rank)
                self.model(**given).loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return slowest(time.perf_counter() - begun)


def meet() -> None:
    if dist.is_initialized():
        dist.barrier()


def slowest(value: float) -> float:
    if dist.is_initialized():
        every = torch.tensor([value], dtype=torch.float64)
        dist.all_reduce(every, dist.ReduceOp.MAX)
        return float(every)
    return value


def pace(block: nn.Module, usual: float) -> float:
    """Seconds of the block's passes on all ranks together ÷ the usual."""
    x, times = torch.randn(1, TOKENS, HIDDEN, requires_grad=True), []
    for _ in range(PASSES):
        meet()
        begun = time.perf_counter()
        block.zero_grad(set_to_none=True)
        block(x).sum().backward()
        times.append(slowest(time.perf_counter() - begun))
    return median(times) / usual


def join(job: dict[str, Any]) -> None:
    """One rank alone meets nobody."""
    if job["ranks"] > 1:
        launch.join(job)


def measure(job: dict[str, Any]) -> dict[str, Any]:
    """Of each setting its rounds: seconds of a step at each stage, and the pace."""
    block, found = nn.TransformerEncoderLayer(HIDDEN, 4, 4 * HIDDEN, 0.0), []
    usual = pace(block, 1.0)
    for setting in (Setting(**values) for values in job["settings"]):
        trained = [Training(setting, stage, job["rank"]) for stage in STAGES]
        rounds = []
        for number in range(job["rounds"]):
            before, seconds = pace(block, usual), [0.0] * len(STAGES)
            for i in range(len(STAGES)):
                at = (number + i) % len(STAGES)
                trained[at].step()  # after another stage: one that warms up
                seconds[at] = trained[at].step()
            now = (before + pace(block, usual)) / 2
            rounds.append({"pace": now, "seconds": [second / now for second in seconds]})
        found.append(rounds)
    return {"settings": found}


# -- rows ------------------------------------------------------------------------------------------


def order(a: dict[str, Any], b: dict[str, Any]) -> str:
    """Whether two stages came in the predicted order: "right", "turned", or a "tie": where the plan
    says that they take the same, within `NEAR` or within the spread of the measurement (half the
    distance between the quartiles of the rounds' differences), and where fewer than `AGREE` of the
    rounds came in one order.
    """
    expected = b["predicted"] / a["predicted"] - 1
    differences = [y / x - 1 for x, y in zip(a["rounds"], b["rounds"], strict=True)]
    low, _, high = (
        quantiles(differences, n=4, method="inclusive") if differences[1:] else (0.0,) * 3
    )
    later = sum(d > 0 for d in differences) / len(differences)
    if abs(expected) <= max(NEAR, (high - low) / 2) or 1 - AGREE < later < AGREE:
        return "tie"
    return "right" if (expected > 0) == (later >= AGREE) else "turned"


def rows_of(setting: Setting, rounds: Sequence[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """A row a stage."""
    rows: list[dict[str, Any]] = []
    for stage, expected in zip(STAGES, predicted(setting), strict=True):
        seconds = [r["seconds"][stage] for r in rounds]
        row: dict[str, Any] = {**asdict(setting), "stage": stage, "predicted": expected}
        row |= {"measured": median(seconds), "rounds": seconds, "ratio": median(seconds) / expected}
        row |= {"pace": median(r["pace"] for r in rounds)}
        row["orders"] = {other["stage"]: order(other, row) for other in rows}
        turned = [str(other) for other, found in row["orders"].items() if found == "turned"]
        wrong = [f"turned with stage {', '.join(turned)}"] if turned else []
        wrong += ["more than 25 % off"] if abs(row["ratio"] - 1) > TIME else []
        rows.append({**row, "wrong": "; ".join(wrong)})
        yield rows[-1]


COLUMNS: pages.Columns = {
    **{name: pages.shown(name) for name in (*Setting.__dataclass_fields__, "stage")},
    "predicted ms": pages.shown("predicted", "{:.0f}", 1e-3),
    "measured ms": pages.shown("measured", "{:.0f}", 1e-3),
    "ratio": pages.shown("ratio", "{:.2f}"),
    "pace": pages.shown("pace", "{:.2f}"),
    "wrong": pages.shown("wrong"),
}


def page(found: dict[str, Any]) -> str:
    rows = found["rows"]
    orders = [order for row in rows for order in row["orders"].values()]
    counts = ", ".join(f"{orders.count(kind)} {kind}" for kind in ("right", "tie", "turned"))
    near = sum(abs(row["ratio"] - 1) <= TIME for row in rows)
    ratios = sorted(row["ratio"] for row in rows)
    said = (
        f"{len(rows)} settings and stages: {near} within 25 %; measured ÷ predicted from {ratios[0]:.2f} to"
        f" {ratios[-1]:.2f}, median {median(ratios):.2f}. Orders of two stages: {counts}."
    )
    return pages.page(
        "# Planned and measured", pages.where(found), said, pages.table(COLUMNS, rows, 5)
    )


@harness.command(
    "plan_matrix",
    __doc__,
    rounds=7,
    threads=1,
    timeout=1800.0,
    quick=(False, "bf16, four micro-batches, two rounds"),
    ranks=([2], "how many ranks"),
    models=(["llama:10m"], "as in `onefold train --model`"),
)
def main(options: harness.Options) -> int:
    precisions, accumulations = (["bf16"], [4]) if options.quick else (["fp32", "bf16"], [1, 4])
    rows: list[dict[str, Any]] = []
    for model, ranks in itertools.product(options.models, options.ranks):
        how = itertools.product(precisions, accumulations, ("none", "full"))
        settings = [Setting(model, ranks, p, a, c) for p, a, c in how]
        predicted(settings[0])  # refuses a machine without a calibration
        job = {
            "rounds": 2 if options.quick else options.rounds,
            "settings": [asdict(s) for s in settings],
        }
        limit: Any = {"threads": options.threads, "timeout": options.timeout}
        seen = launch.run_ranks("benchmarks.plan_matrix", job, ranks, **limit)
        if seen["status"] != "ok":
            raise RuntimeError(f"{ranks} ranks: {seen['error']}")
        for setting, rounds in zip(settings, seen["ranks"][0]["settings"], strict=True):
            rows += rows_of(setting, rounds)
            ratios = " ".join(f"{row['ratio']:.2f}" for row in rows[-len(STAGES) :])
            harness.say(f"{setting}: {ratios}")
        result = harness.keep(options, SCHEMA, page, rows=rows)
    pages.show(page(result))
    return int(any(row["wrong"] for row in rows))
