"""A run as a trainer would leave it, of figures that are made up but belong together: ZeRO-3 with
twelve blocks on four ranks.
"""

from __future__ import annotations

import json
import math
import random
from dataclasses import replace
from pathlib import Path

from onefold.comm import TrafficEvent
from onefold.observe.runfile import write_observed
from onefold.observe.trace import Recording, covered
from onefold.plan import schema
from onefold.plan.schema import Account
from onefold.recipe import Recipe

MIB = 1 << 20
BLOCKS = 12
RANKS = 4
BLOCK, ROOT = 28 * MIB, 96 * MIB  # bytes of a unit, in fp32


def units() -> list[str]:
    return ["(root)", *(f"model.layers.{i}" for i in range(BLOCKS))]


class Clock:
    """Builds a step along one clock: what is computed, gathered ahead, reduced behind, and waited
    for.
    """

    def __init__(self, rank: int) -> None:
        self.random = random.Random(rank)
        self.now = 100.0
        self.step = Recording(100.0, 100.0, 1, activations_watched=True)
        self.device = self.step.tiers["device"]
        states = (ROOT + BLOCKS * BLOCK) // RANKS
        self.device.held = {
            schema.PARAMETERS: 0,
            schema.MASTERS: states,
            schema.MOMENTS: 2 * states,
        }
        self.slow = 1.15 if rank == 2 else 1.0

    def change(self, at: float, category: str, unit: str, delta: int) -> None:
        self.device.changes.append((at, category, unit, delta))

    def move(
        self, kind: str, unit: str, launched: float, size: int, exposed: float, phase: str
    ) -> float:
        landed = max(launched + size / (2e9 if kind == "all-gather" else 1.4e9), self.now)
        nbytes = size * (RANKS - 1) // RANKS
        self.step.moves.append(
            TrafficEvent(
                kind,
                unit,
                nbytes,
                dtype="float32",
                phase=phase,
                launched=launched,
                landed=landed + exposed,
                exposed=exposed,
            )
        )
        return landed + exposed

    def compute(self, seconds: float) -> None:
        self.now += seconds * self.slow * self.random.uniform(0.95, 1.05)


def recorded(rank: int = 0) -> Recording:
    """One step of one rank."""
    clock = Clock(rank)
    for phase in ("forward", "backward"):
        order = units() if phase == "forward" else units()[::-1]
        begun, ahead = clock.now, clock.now
        for number, unit in enumerate(order):
            size = ROOT if unit == "(root)" else BLOCK
            exposed = (
                0.030 if unit == "(root)" else 0.006 if number < 3 else 0.0
            ) * clock.random.uniform(0.8, 1.2)
            clock.change(ahead, schema.GATHERED, unit, size)
            clock.now = max(clock.now, clock.move("all-gather", unit, ahead, size, exposed, phase))
            ahead = clock.now
            clock.compute(0.022 if phase == "forward" else 0.044)
            clock.change(clock.now, schema.GATHERED, unit, -size)
            saved = 18 * MIB if unit != "(root)" else 2 * MIB
            clock.change(clock.now, schema.ACTIVATIONS, "", saved if phase == "forward" else -saved)
            if phase == "backward":
                last = unit == "(root)"
                clock.change(clock.now, schema.REDUCTION, unit, size)
                landed = clock.move(
                    "reduce-scatter", unit, clock.now, size, 0.028 if last else 0.0, phase
                )
                clock.change(landed, schema.REDUCTION, unit, -size)
                clock.change(landed, schema.GRADIENTS, unit, size // RANKS)
                if last:
                    clock.now = landed
        if phase == "forward":
            clock.change(clock.now, schema.LOGITS, "", 64 * MIB)
            clock.compute(0.012)
            clock.change(clock.now + 0.004, schema.LOGITS, "", -64 * MIB)
        assert clock.now > begun
    step = clock.step
    step.updates.append((clock.now, clock.now + 0.055))
    clock.device.changes.append(
        (clock.now + 0.056, schema.GRADIENTS, "", -(ROOT + BLOCKS * BLOCK) // RANKS)
    )
    step.end = clock.now + 0.062
    step.exposed = covered(step.waits())
    clock.device.changes.sort(key=lambda change: change[0])
    step.moves.sort(key=lambda move: move.launched)
    return step


def account(step: Recording) -> Account:
    """What was measured, made of the recorded step."""
    rest = {c: n for c, n in step.tiers["device"].held.items() if n}
    seconds = {
        "compute": step.compute,
        "exposed communication": step.exposed,
        "optimizer": step.optimizer,
        "step": step.seconds,
    }
    wire = step.wire()
    links = {"inside": sum(wire.values())}
    figures = {
        "rest": rest,
        "peak": step.peak(),
        "ledger": step.peak(schema.ENGINE),
        "wire": wire,
        "links": links,
        "seconds": seconds,
    }
    return Account(**figures, tokens_per_s=5120.0, mfu=0.412)


def planned() -> Account:
    """A plan that is close in most lines and off in one."""
    real = account(recorded(0))
    peak = {c: int(n * 1.02) for c, n in real.peak.items()}
    seconds = {
        name: s * f
        for (name, s), f in zip(real.seconds.items(), (0.93, 1.4, 1.0, 0.97), strict=True)
    }
    return replace(real, peak=peak, seconds=seconds, tokens_per_s=5300.0, mfu=0.43)


def write_metrics(folder: Path, steps: int = 200) -> None:
    made = random.Random(7)
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "metrics.jsonl").open("w", encoding="utf-8") as file:
        for step in range(1, steps + 1):
            loss = 2.1 + 1.9 * math.exp(-step / 55) + made.gauss(0, 0.05)
            rate = (5100 if step > 3 else 2400) + made.gauss(0, 90)
            row = {
                "step": step,
                "loss": loss,
                "tokens_per_s": rate,
                "step_ms": 8192e3 / rate,
                "lr": 3e-4,
                "memory_peak": 900 * MIB,
            }
            if step % 40 == 0:
                row["eval_loss"] = loss + 0.08
            file.write(json.dumps(row) + "\n")
        file.write(json.dumps({"done": True, "steps": steps, "stopped": False}) + "\n")


def write_run(folder: Path, ranks: int = RANKS) -> Path:
    """A whole run folder."""
    write_metrics(folder)
    facts = {
        "model": "SmolLM2-135M",
        "data": "python-reference",
        "global batch": 32,
        "sequence": 256,
        "backend": "gloo",
        "recipe": Recipe.zero(3).describe(),
    }
    for rank in range(ranks):
        step = recorded(rank)
        write_observed(
            folder,
            rank,
            ranks,
            account(step),
            plan=planned(),
            step=step,
            facts=facts,
        )
    return folder
