"""Claims often repeated about ZeRO, each with what the code says and the line that says it."""

from __future__ import annotations

from dataclasses import dataclass

from onefold.plan.architectures import architecture
from onefold.plan.formulas import compute, states, traffic
from onefold.plan.systems import SYSTEMS

ADAM, ACCUMULATING, INFINITY = (states.CONVENTIONS[name] for name in ("16", "18", "20"))
GB, TERA = 1e9, 1e12
#: 16 bytes a parameter: gradients are kept in the 16 bits in which they were computed. Onefold's default keeps them in fp32 (18).
SIXTEEN = "--precision fp16 --accumulate fp16"


@dataclass(frozen=True)
class Claim:
    claim: str
    checked: str
    line: str


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


def claims() -> list[Claim]:
    gpt3, thirteen = 175e9, 13e9
    ddp, three, again = (traffic.volume(s) for s in ("ddp", "zero-3", "zero-3 recompute"))
    dense, sparse, strong = (
        _scaling("azure", (128, 1024), (16, 16), 1024),
        _scaling("azure", (128, 1024), (1, 1), 1024),
        _scaling("megatron-zero3", (384, 1536), (4, 1), 2048),
    )
    bloom, nlg = architecture("bloom-176b").numel, architecture("mt-nlg-530b").numel
    plain = "onefold plan --params"
    return [
        Claim(
            "stage 1 saves 4×, stage 2 8×, stage 3 N×",
            f"limits for many ranks: {_factors(8)} at N = 8; {_factors(64)} at N = 64",
            f"{plain} 7.5e9 --gpus 64 --gpu v100-32 {SIXTEEN} --json",
        ),
        Claim(
            "64× for Adam on 8 GPUs at stage 3",
            f"{states.reduction_factor(ADAM, 3, 8):.0f}×; 64× needs N = 64 ({states.reduction_factor(ADAM, 3, 64):.0f}×)",
            f"{plain} 7.5e9 --gpus 8 --gpu v100-32 --stage 3 {SIXTEEN} --json",
        ),
        Claim(
            "GPT-3 175B: 1.4 TB of states, 175 GB a GPU on 8, so 8 × A100-80GB do",
            f"{_gb(gpt3, ADAM, 0, 1) / 1000:.1f} TB, {_gb(gpt3, ADAM, 3, 8):.0f} GB a GPU; the states "
            f"alone need {states.ranks_to_hold(gpt3, ADAM.total, 80 * GB):.0f} GPUs of 80 GB",
            f"{plain} 175e9 --gpus 8 --gpu a100-80 --stage 3 {SIXTEEN} --json",
        ),
        Claim(
            "13B: 52 GB without ZeRO, 7 GB with stage 3 on 8",
            f"{_gb(thirteen, ADAM, 0, 1):.0f} GB and {_gb(thirteen, ADAM, 3, 8):.0f} GB at 16 bytes "
            f"({_gb(thirteen, ACCUMULATING, 3, 8):.4g} at 18, {_gb(thirteen, INFINITY, 3, 8):.4g} at 20); "
            f"{4 * thirteen / GB:.0f} GB are the fp32 weights alone",
            f"{plain} 13e9 --gpus 8 --gpu a100-80 --stage 3 {SIXTEEN} --json",
        ),
        Claim(
            "stage 3 doubles communication",
            f"{three / ddp:.1f}× ({three}Ψ against {ddp}Ψ); {again / ddp:.0f}× only where recompute gathers again",
            f"{plain} 7.5e9 --gpus 64 --gpu v100-32 --stage 3 {SIXTEEN} --json",
        ),
        Claim(
            "80–95 % scaling efficiency to 128 GPUs",
            f"no primary source; published values run from 31 % to 153 %. It follows tokens a GPU and bandwidth: the time model gives "
            f"{100 * dense:.0f} % (published 99) from 128 to 1,024 GPUs at micro-batch 16, {100 * sparse:.0f} % (52) at 1, "
            f"and {100 * strong:.0f} % (31) from 384 to 1,536 at a fixed batch on slower software",
            "onefold plan gpt3-175b --gpus 1024 --per-node 8 --gpu a100-80 --link 8x200g --stage 3 --seq 1024 --micro-batch 1 --json",
        ),
        Claim(
            "BLOOM trained with ZeRO-3 and pipelines",
            f"ZeRO-1, TP 4 × PP 12 × DP 8. Without model parallelism, stage 1 on 8 ranks would hold "
            f"{_gb(bloom, ACCUMULATING, 1, 8):,.0f} GB a GPU, a 48th of it {_gb(bloom / 48, ACCUMULATING, 1, 8):.1f} GB",
            "onefold plan bloom-176b --gpus 8 --gpu a100-80 --stage 1 --precision bf16 --json",
        ),
        Claim(
            "MT-NLG 530B trained with ZeRO-3",
            f"TP 8 × PP 35 × DP 8, no ZeRO-3. Stage 3 alone would hold "
            f"{_gb(nlg, ACCUMULATING, 3, 2240):.2f} GB of states a GPU on the same 2,240",
            "onefold plan mt-nlg-530b --gpus 2240 --per-node 8 --gpu a100-80 --stage 3 --precision bf16 --json",
        ),
        Claim(
            "ZeRO-Infinity: 1T on 512 V100",
            f"yes (49 TFLOP/s a GPU), and on 16: 28 TB of NVMe hold the states of "
            f"{states.largest_model(28 * TERA, INFINITY, 0, 1) / TERA:.1f}T, of which "
            f"{states.largest_trainable(28 * TERA, INFINITY.total) / TERA:.2f}T can be expected to train; "
            f"on 512 {states.largest_trainable(32 * 28 * TERA, INFINITY.total) / TERA:.0f}T (the paper: 32T)",
            "onefold plan 1t --gpus 16 --per-node 16 --gpu v100-32 --stage 3 --offload nvme --json",
        ),
    ]
