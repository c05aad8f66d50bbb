"""Claims often repeated about ZeRO, each with what the code says, the line that says it and where
the line shows it.

The figures are the formulas' (`benchmarks.validation.formulas`) wherever there is one, so that the line,
which answers for the real engine, is checked against something else than itself
(tests/cli/test_plan_command.py runs every line and reads its keys).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

from benchmarks.validation.formulas import compute, states, traffic
from benchmarks.validation.systems import SYSTEMS
from onefold.plan.evaluate import Candidate
from onefold.plan.hardware import machine
from onefold.plan.job import Job
from onefold.plan.planner import plan
from onefold.plan.shapes import architecture

ADAM, ACCUMULATING, INFINITY = (states.CONVENTIONS[name] for name in ("16", "18", "20"))
GB, TERA = 1e9, 1e12
#: 16 bytes a parameter: gradients are kept in the 16 bits in which they were computed. Onefold's
#: default keeps them in fp32 (18).
SIXTEEN = "--precision fp16 --accumulate-dtype fp16"


@dataclass(frozen=True)
class Figure:
    """A key of the line's JSON (a table's values are summed), and what stands there."""

    key: str
    value: float | None
    unit: str = "GB"

    def __str__(self) -> str:
        return (
            f"`{self.key}` null"
            if self.value is None
            else f"`{self.key}` {self.value:,.4g} {self.unit}"
        )


@dataclass(frozen=True)
class Claim:
    claim: str
    checked: str
    line: str
    shows: tuple[Figure, ...]


def _factors(ranks: int) -> str:
    return ", ".join(f"{states.reduction_factor(ADAM, stage, ranks):.3g}×" for stage in (1, 2, 3))


def _gb(numel: float, convention: states.Convention, stage: int, ranks: int) -> float:
    return states.model_states(numel, convention, stage, ranks) / GB


def _scaling(system: str, gpus: tuple[int, int], micro_batch: tuple[int, int], seq: int) -> float:
    found = SYSTEMS[system]
    rates = []
    for n, batch in zip(gpus, micro_batch, strict=True):
        flops = compute.megatron_flops(batch, seq, 96, 12_288)
        rates.append(flops / found.run(175e9, 96, flops, found.machine(n)).step)
    return rates[1] / rates[0]


def _states(
    numel: float, convention: states.Convention, ranks: int, *stages: int
) -> tuple[Figure, ...]:
    """The papers' model states at these stages, which a plan shows beside what the engine holds."""
    return tuple(Figure(f"stages[{s}].states", _gb(numel, convention, s, ranks)) for s in stages)


@cache
def _planned(name: str | float, gpus: int, per_node: int, gpu: str, **job: object) -> Candidate:
    """Stage 3 of a plan, for figures that have no formula."""
    return plan(
        name, machine(gpus, per_node, gpu, "8x200g"), Job(**job), stages=(3,), largest=False
    ).stages[3]  # type: ignore[arg-type]


def claims() -> list[Claim]:
    gpt3, thirteen = 175e9, 13e9
    at_turn = _planned(7.5e9, 64, 8, "v100-32", precision="fp16")
    ddp, three, again = (traffic.volume(s) for s in ("ddp", "zero-3", "zero-3 recompute"))
    dense, sparse, strong = (
        _scaling("azure", (128, 1024), (16, 16), 1024),
        _scaling("azure", (128, 1024), (1, 1), 1024),
        _scaling("megatron-zero3", (384, 1536), (4, 1), 2048),
    )
    bloom, nlg = architecture("bloom-176b").numel, architecture("mt-nlg-530b").numel
    trillion = architecture("1t").numel
    alone = _planned("gpt3-175b", 1024, 8, "a100-80", seq=1024, micro_batch=1)
    infinity = _planned(
        "1t", 16, 16, "v100-32", seq=2048, precision="fp16", offload="nvme", checkpointing="full"
    )
    plain = "onefold plan --params"
    return [
        Claim(
            "stage 1 saves 4×, stage 2 8×, stage 3 N×",
            f"limits for many ranks: {_factors(8)} at N = 8; {_factors(64)} at N = 64, of all"
            " states at once",
            f"{plain} 7.5e9 --gpus 64 --gpu v100-32 {SIXTEEN} --json",
            _states(7.5e9, ADAM, 64, 0, 1, 2, 3),
        ),
        Claim(
            "64× for Adam on 8 GPUs at stage 3",
            f"{states.reduction_factor(ADAM, 3, 8):.0f}×; 64× needs N = 64"
            f" ({states.reduction_factor(ADAM, 3, 64):.0f}×)",
            f"{plain} 7.5e9 --gpus 8 --gpu v100-32 --stage 3 {SIXTEEN} --json",
            _states(7.5e9, ADAM, 8, 0, 1, 2, 3),
        ),
        Claim(
            "GPT-3 175B: 1.4 TB of states, 175 GB a GPU on 8, so 8 × A100-80GB do",
            f"{_gb(gpt3, ADAM, 0, 1) / 1000:.1f} TB, {_gb(gpt3, ADAM, 3, 8):.0f} GB a GPU; the"
            f" states alone need {states.ranks_to_hold(gpt3, ADAM.total, 80 * GB):.0f} GPUs of"
            " 80 GB",
            f"{plain} 175e9 --gpus 8 --gpu a100-80 --stage 3 {SIXTEEN} --json",
            _states(gpt3, ADAM, 8, 0, 3),
        ),
        Claim(
            "13B: 52 GB without ZeRO, 7 GB with stage 3 on 8",
            f"{_gb(thirteen, ADAM, 0, 1):.0f} GB and {_gb(thirteen, ADAM, 3, 8):.0f} GB at 16 bytes"
            f" ({_gb(thirteen, ACCUMULATING, 3, 8):.4g} at 18, without `--accumulate-dtype fp16`);"
            f" {4 * thirteen / GB:.0f} GB are the fp32 weights alone",
            f"{plain} 13e9 --gpus 8 --gpu a100-80 --stage 3 {SIXTEEN} --json",
            _states(thirteen, ADAM, 8, 0, 3),
        ),
        Claim(
            "stage 3 doubles communication",
            f"{three / ddp:.1f}× ({three}Ψ against {ddp}Ψ), a little less in the line, whose last"
            f" block stays gathered between the passes; {again / ddp:.0f}× only where recompute"
            " gathers again",
            f"{plain} 7.5e9 --gpus 64 --gpu v100-32 --stage 3 {SIXTEEN} --json",
            (
                # Payload that a rank sends in a step, in 16 bits, of a volume in parameters
                Figure("stages[0].account.wire", ddp * 2 * 7.5e9 * 63 / 64 / GB),
                Figure("stages[3].account.wire", at_turn.account.wire_bytes / GB),
            ),
        ),
        Claim(
            "80–95 % scaling efficiency to 128 GPUs",
            "no primary source; published values run from 31 % to 153 %. It follows tokens a GPU"
            " and bandwidth. With the constants fitted to the Azure report (its table is below)"
            f" the time model gives {100 * dense:.0f} % (published 99) from 128 to 1,024 GPUs at"
            f" micro-batch 16 and {100 * sparse:.0f} % (52) at 1, with those of Megatron-LM's"
            f" comparison {100 * strong:.0f} % (31) from 384 to 1,536 at a fixed batch. The line"
            " answers for Onefold's own schedule: what part of a step on 1,024 GPUs is"
            " communication",
            "onefold plan gpt3-175b --gpus 1024 --per-node 8 --gpu a100-80 --link 8x200g --stage 3"
            " --seq 1024 --micro-batch 1 --json",
            tuple(
                Figure(f"stages[3].account.seconds.{k}", alone.account.seconds[k], "s")
                for k in ("exposed communication", "step")
            ),
        ),
        Claim(
            "BLOOM trained with ZeRO-3 and pipelines",
            "ZeRO-1, TP 4 × PP 12 × DP 8. Without model parallelism, stage 1 on 8 ranks would hold"
            f" {_gb(bloom, ACCUMULATING, 1, 8):,.0f} GB a GPU, a 48th of it"
            f" {_gb(bloom / 48, ACCUMULATING, 1, 8):.1f} GB",
            "onefold plan bloom-176b --gpus 8 --gpu a100-80 --stage 1 --precision bf16 --json",
            _states(bloom, ACCUMULATING, 8, 1),
        ),
        Claim(
            "MT-NLG 530B trained with ZeRO-3",
            "TP 8 × PP 35 × DP 8, no ZeRO-3. Stage 3 alone would hold "
            f"{_gb(nlg, ACCUMULATING, 3, 2240):.2f} GB of states a GPU on the same 2,240",
            "onefold plan mt-nlg-530b --gpus 2240 --per-node 8 --gpu a100-80 --stage 3 --precision"
            " bf16 --json",
            _states(nlg, ACCUMULATING, 2240, 3),
        ),
        Claim(
            "ZeRO-Infinity: 1T on 512 V100",
            "the paper: yes (49 TFLOP/s a GPU), and on 16. By the states alone (its table is"
            " below) 28 TB of NVMe hold"
            f" {states.largest_model(28 * TERA, INFINITY, 0, 1) / TERA:.1f}T, of which"
            f" {states.largest_trainable(28 * TERA, INFINITY.total) / TERA:.2f}T can be expected to"
            f" train, on 512 {states.largest_trainable(32 * 28 * TERA, INFINITY.total) / TERA:.0f}T"
            " (the paper: 32T). Onefold's own plan says no, on any number of V100, while whole"
            f" blocks are gathered, {2 * 12 * 25_600**2 / GB:.1f} GB each in 16 bits; with `--tile"
            " 512MB`, as the paper tiles them, it says yes, on 16",
            "onefold plan 1t --gpus 16 --per-node 16 --gpu v100-32 --stage 3 --offload nvme"
            " --activation-checkpointing full --precision fp16 --json",
            (
                Figure("recommended", None),
                *_states(trillion, ACCUMULATING, 16, 3),
                Figure("stages[3].account.peak", infinity.account.peak_bytes / GB),
                Figure("stages[3].usable", infinity.usable / GB),
            ),
        ),
    ]
