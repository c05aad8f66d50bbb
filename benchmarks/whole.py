"""Muon on whole matrices: Onefold beside gathering everywhere and DeepSpeed's own Muon, with the share
of Newton-Schulz told apart.

    python -m benchmarks whole --deepspeed-python PYTHON     # 2 and 4 ranks, as many rounds as 12 minutes allow
    python -m benchmarks whole --ranks 2 --sides onefold fsdp2 --iterations 5
"""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean, median
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate
from torch.optim import _muon

from benchmarks import gpt, harness, probes, trainers, training
from benchmarks.gpt import SHAPES, Batch
from benchmarks.harness import Row, Run
from benchmarks.pages import Cell, range_of, shown

STAGES = (1, 2, 3)
SIDES: tuple[str, ...] = (
    *(f"onefold-{stage}-adamw" for stage in STAGES),
    *(f"onefold-{stage}-muon" for stage in STAGES),
    "fsdp2-adamw",
    "fsdp2-muon",
    *(f"deepspeed-{stage}-muon" for stage in STAGES),
)
"""In the order of a round. A number is the ZeRO stage."""

GOAL = 1.15
"""What a step without its share of Newton-Schulz should take at most, × AdamW's at that stage."""

NOTES: dict[str, str] = {
    "-muon": (
        "Muon for the matrices of the blocks, torch.optim.AdamW(fused=True) for embeddings, norms"
        " and biases"
    ),
    "-adamw": "AdamW for all: what Muon's step is compared with",
    "onefold-N": (
        "onefold.shard with Recipe.zero(N), as `onefold train` does;"
        " onefold.optim.muon.MuonWithAdamW"
    ),
    "fsdp2-muon": (
        "gathering everywhere: fully_shard of each block and the root; each rank gathers every"
        " whole gradient, orthogonalizes it, and keeps its part of the update"
    ),
    "deepspeed-N": (
        "DeepSpeed's own MuonWithAuxAdam at its stage N with default buckets (stage 3 with"
        " reduce_scatter false, which it asks for) and its default method, gram"
    ),
    "Newton-Schulz": (
        "in fp32 on all sides, since processors without bf16 units take some fifty times as long"
        " in bf16"
    ),
}
LEGEND = (
    f"{training.LEGEND} NS s: seconds of Newton-Schulz in a step, the mean over ranks (DeepSpeed's with"
    " the momentum). calls: of all ranks together in a step. rest: a step without its NS s. rest ×"
    " AdamW: over the step of the same stage and library with AdamW alone, the median of the rounds'"
    " own ratios, with their range. for Muon: bytes that a rank sent more than with AdamW alone, the"
    " mean over ranks."
)


@dataclass(frozen=True)
class Setting(gpt.Setting):
    """`iterations`: of Newton-Schulz in a step; Muon's are 5."""

    iterations: int = 5

    @property
    def title(self) -> str:
        return f"{super().title}, {self.iterations} of Newton-Schulz's 5 iterations"


# -- Newton-Schulz, whoever calls it ------------------------------------------------------------------


@dataclass
class Spent:
    """What each optimizer step since `step` was first called has spent in Newton-Schulz."""

    seconds: list[float] = field(default_factory=list)
    calls: list[int] = field(default_factory=list)

    def step(self) -> None:
        """A step begins."""
        self.seconds.append(0.0)
        self.calls.append(0)

    def timed(self, function: Callable[..., Any], **named: Any) -> Callable[..., Any]:
        """The function, with these arguments too; its calls in a step are counted and timed."""

        def call(*arguments: Any, **more: Any) -> Any:
            begun = time.perf_counter()
            out = function(*arguments, **more, **named)
            if self.calls:  # not what a library tries before the first step
                self.seconds[-1] += time.perf_counter() - begun
                self.calls[-1] += 1
            return out

        call.timed = function  # type: ignore[attr-defined]
        return call

    def watch_torch(self, iterations: int) -> None:
        """Of torch.optim.Muon. Stays for the life of the process."""
        _muon._zeropower_via_newtonschulz = self.timed(in_fp32, iterations=iterations)

    def watch_deepspeed(self, iterations: int) -> None:
        """The same of DeepSpeed's, which does the momentum in the same function."""
        theirs: Any = importlib.import_module("deepspeed.runtime.zero.muon.original_muon")
        theirs.ns_compute_dtype = lambda method="gram": torch.float32
        # A model before this one may have watched it
        function = getattr(theirs.muon_update, "timed", theirs.muon_update)
        theirs.muon_update = self.timed(function, ns_steps=iterations)


def in_fp32(
    grad: Tensor,
    coefficients: tuple[float, float, float],
    steps: int,
    eps: float,
    iterations: int | None = None,
) -> Tensor:
    """torch's `_zeropower_via_newtonschulz` (Jordan et al., Muon, 2024) without its cast to bf16.

    Args:
        grad: a matrix.
        iterations: in place of `steps`.
    """
    a, b, c = coefficients
    tall = grad.size(0) > grad.size(1)
    x = grad.T if tall else grad
    x = x / x.norm().clamp(min=eps)
    for _ in range(steps if iterations is None else iterations):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.T if tall else x


# -- sides: all have the same weights, matrices, rates and momentum ----------------------------------

MUON: dict[str, float] = {"lr": 0.02, "weight_decay": 0.1, "momentum": 0.95}
ADAMW: dict[str, Any] = {
    "lr": trainers.LEARNING_RATE,
    "weight_decay": trainers.WEIGHT_DECAY,
    "betas": (0.9, 0.999),
    "eps": 1e-8,
}


def divided(model: nn.Module) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """The matrices of the blocks, and all other parameters."""
    named = list(model.named_parameters())
    matrices = [p for name, p in named if p.ndim == 2 and ".blocks." in f".{name}"]
    mine = set(map(id, matrices))
    return matrices, [p for _, p in named if id(p) not in mine]


class Counted:
    """A side that knows what it has spent in Newton-Schulz."""

    setting: Setting

    def __init__(self, setting: Setting, *arguments: Any, **named: Any) -> None:
        self.spent = Spent()
        super().__init__(setting, *arguments, **named)

    def step(self, batches: Sequence[Batch]) -> float:
        self.spent.step()
        loss: float = super().step(batches)  # type: ignore[misc]
        return loss


class Onefold(Counted, trainers.Onefold):
    def __init__(self, setting: Setting, model: nn.Module, stage: int, *, muon: bool) -> None:
        super().__init__(setting, model, stage)
        if muon:
            self.spent.watch_torch(setting.iterations)
            made = importlib.import_module("onefold.optim.muon").MuonWithAdamW
            matrices, rest = divided(self.model)
            self.optimizer = made(
                [
                    {"params": matrices, "use_muon": True, **MUON},
                    {"params": rest, "use_muon": False, "fused": True, **ADAMW},
                ]
            )


class GatheredMuon(torch.optim.Optimizer):
    """Muon over FSDP2, gathering everywhere: each rank makes every update whole, and uses its part."""

    def __init__(self, params: Sequence[nn.Parameter]) -> None:
        super().__init__(params, dict(MUON))

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state["momentum_buffer"] = torch.zeros_like(p)
                state["momentum_buffer"].lerp_(p.grad, 1 - group["momentum"])
                nesterov = p.grad.lerp(state["momentum_buffer"], group["momentum"]).full_tensor()
                given = (_muon.DEFAULT_A, _muon.DEFAULT_B, _muon.DEFAULT_C)
                whole = _muon._zeropower_via_newtonschulz(
                    nesterov, given, _muon.DEFAULT_NS_STEPS, _muon.EPS
                )
                everywhere = DTensor.from_local(whole, p.device_mesh, [Replicate()])
                update = everywhere.redistribute(placements=p.placements)
                p.mul_(1 - group["lr"] * group["weight_decay"])
                p.add_(update, alpha=-_muon._adjust_lr(group["lr"], None, p.shape))


class Both:
    """Two optimizers that are stepped as one."""

    def __init__(self, *optimizers: torch.optim.Optimizer) -> None:
        self.optimizers = optimizers

    def step(self) -> None:
        for optimizer in self.optimizers:
            optimizer.step()

    def zero_grad(self) -> None:
        for optimizer in self.optimizers:
            optimizer.zero_grad()


class FSDP2(Counted, trainers.FSDP2):
    def __init__(self, setting: Setting, model: nn.Module, *, muon: bool) -> None:
        super().__init__(setting, model)
        if muon:
            self.spent.watch_torch(setting.iterations)
            matrices, rest = divided(self.model)
            self.optimizer: Any = Both(GatheredMuon(matrices), trainers.adamw(rest))


class DeepSpeed(Counted, trainers.DeepSpeed):
    def make_optimizer(self, model: nn.Module) -> Any:
        """Its own, of parameters marked as its engine marks them."""
        self.spent.watch_deepspeed(self.setting.iterations)
        theirs: Any = importlib.import_module("deepspeed.runtime.zero.muon.muon_optimizer")
        matrices, rest = divided(model)
        for use_muon, params in ((True, matrices), (False, rest)):
            for p in params:
                p.use_muon = use_muon  # type: ignore[attr-defined]
        groups = [
            {"params": matrices, "use_muon": True, **MUON},
            {"params": rest, "use_muon": False, **ADAMW},
        ]
        fused = {"adam_optimizer_kwargs": {"fused": True}}
        return theirs.MuonWithAuxAdam(groups, adam_optimizer=torch.optim.AdamW, **fused)


def build(side: str, setting: Setting, model: nn.Module) -> Any:
    """The side around whole fp32 weights."""
    family, *stage, optimizer = side.split("-")
    muon = optimizer == "muon"
    if family == "fsdp2":
        return FSDP2(setting, model, muon=muon)
    if family == "onefold":
        return Onefold(setting, model, int(*stage), muon=muon)
    more = {"reduce_scatter": False} if stage == ["3"] else {}
    return DeepSpeed(setting, model, stage=int(*stage), **more)


class Watch(training.Watch):
    """What the timed steps have spent in Newton-Schulz."""

    def built(self, trainer: Any) -> None:
        self.trainer = trainer

    def found(self) -> dict[str, Any]:
        spent, timed = self.trainer.spent, slice(-self.trainer.setting.steps, None)
        return {"newton_schulz_s": spent.seconds[timed], "newton_schulz_calls": spent.calls[timed]}


def prepare(job: dict[str, Any]) -> None:
    trainers.prepare(job["side"])


def measure(job: dict[str, Any]) -> dict[str, Any]:
    """One side on this rank."""

    def made(setting: Any) -> Any:
        return build(job["side"], setting, gpt.build(setting.model))

    return training.measured(job, Setting(**job["setting"]), made, watch=Watch())


# -- rows ------------------------------------------------------------------------------------------


def newton_schulz(run: Run) -> float:
    """Seconds a step: the median over steps of the mean over ranks."""
    steps = zip(*(rank["newton_schulz_s"] for rank in run.ranks), strict=True)
    return median(fmean(step) for step in steps)


def sent(run: Run) -> float | None:
    """Bytes that a rank has sent in all steps, the mean over ranks."""
    return harness.of_ranks(run.ranks, "sent_bytes", fmean)


class Whole(training.Steps):
    schema, module, known, notes = "onefold-whole/2", "benchmarks.whole", SIDES, NOTES
    read, reference, legend = Setting, "onefold-1-muon", LEGEND

    def row(self, comparison: harness.Comparison, side: str, good: list[Run]) -> Row:
        found = super().row(comparison, side, good)
        base = harness.by_round(comparison.runs, f"{side.rpartition('-')[0]}-adamw")
        both = [(run, base[run.round]) for run in good if run.round in base]
        rest = {run.round: median(harness.step_seconds(run)) - newton_schulz(run) for run in good}
        ratios = [rest[r.round] / median(harness.step_seconds(other)) for r, other in both]
        more = [probes.difference(sent(run), sent(other)) for run, other in both]
        found |= dict(
            zip(("ratio", "ratio_low", "ratio_high"), harness.spread(ratios), strict=True)
        )
        if not side.endswith("muon"):
            found["loss_difference"] = None
        return {
            **found,
            "newton_schulz_s": median(newton_schulz(run) for run in good),
            "calls": sum(rank["newton_schulz_calls"][-1] for rank in good[0].ranks),
            "rest_s": median(rest.values()),
            "more_bytes": harness.scaled(harness.middle(more), comparison.setting.steps),
        }

    def columns(self, setting: gpt.Setting) -> Mapping[str, Cell]:
        return {
            "side": shown("side"),
            "step s": shown("step_s", "{:.3f}"),
            "NS s": shown("newton_schulz_s", "{:.3f}"),
            "calls": shown("calls"),
            "rest s": shown("rest_s", "{:.3f}"),
            "rest × AdamW": shown("ratio", "{:.2f}"),
            "range": range_of("ratio_low", "ratio_high"),
            "cpu s": shown("cpu_s", "{:.3f}"),
            **training.MEMORY,
            **training.WIRE,
            "for Muon": shown("more_bytes", "{:,.1f}", 2**20),
            **training.LOSS,
        }

    def goals(self, judged: Any) -> list[Row]:
        found = []
        for setting, rows in judged:
            ratio = {row["side"]: row["ratio"] for row in rows}
            for stage in STAGES:
                text = (
                    f"{setting.ranks} ranks, stage {stage}: the rest at most {GOAL} × AdamW's step"
                )
                own = ratio.get(f"onefold-{stage}-muon")
                found.append(harness.goal(text, own, GOAL))
        return found


OPTIONS = {**harness.OPTIONS, "budget": 12.0}


@harness.command(
    "whole",
    __doc__,
    name="whole_matrices",
    rounds=9,
    steps=2,
    warmup=1,
    timeout=300.0,
    ranks=([2, 4], "how many ranks"),
    tokens=(256, "tokens a rank and micro-batch"),
    iterations=(1, "of Newton-Schulz: Muon's are 5"),
    model=("gpt-110m", "which GPT", SHAPES),
    sides=(list(SIDES), f"which of {', '.join(SIDES)}; a family's name takes all of it"),
    **OPTIONS,
)
def main(options: harness.Options) -> int:
    harness.check_at_least(options, 1, "ranks", "steps", "rounds", "tokens", "iterations")
    harness.check_at_least(options, 0, "warmup")
    shared = ("model", "warmup", "steps", "threads", "tokens", "iterations")
    how = {option: getattr(options, option) for option in shared}
    return Whole(options, [Setting(ranks=ranks, **how) for ranks in options.ranks]).run()
