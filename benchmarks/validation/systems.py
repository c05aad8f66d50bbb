"""Published systems in terms of the time model, each with the one constant that was fitted to it
and the rows it was fitted on.

Two constants describe DeepSpeed's ZeRO-3 schedule of 2021 to 2023 in all of its reports: it fetches
by leaf module, six times a block and pass, and hides little behind compute (`DEEPSPEED_OVERLAP`).
The latter, `Software.hop_seconds` and `Software.kernel_share` were fitted together to one report,
Azure's 175B runs at 1,024 tokens, without the rows at micro-batch 1 and 16 on 128 and 1,024 GPUs,
which are cases of `planner_cases.csv`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from benchmarks.validation.closed_form import Software, Times, Traffic, Work, step_times
from benchmarks.validation.formulas import traffic as formulas
from onefold.plan import hardware
from onefold.plan.hardware import Machine
from onefold.plan.shapes import ModelShape

Scheme = Literal["zero-2", "zero-3", "zero++"]

#: Share of the compute that DeepSpeed's ZeRO-3 of those years hides communication behind.
DEEPSPEED_OVERLAP = 0.1
#: Collectives a block and pass: one for each leaf module with parameters (two norms, four linear
#: layers).
DEEPSPEED_MESSAGES = 6


@dataclass(frozen=True)
class System:
    """A published system: its machine, its software, and where its one constant comes from.

    Attributes:
        messages: collectives a block and pass.
        fitted: the name of the fitted constant, a field of `Software`; fitted_on: the rows.
    """

    name: str
    gpu: str
    per_node: int
    link: str
    software: Software
    messages: int
    precision: str
    fitted: str
    fitted_on: str

    def machine(self, gpus: int, link: str = "") -> Machine:
        return hardware.machine(gpus, self.per_node, self.gpu, link or self.link)

    def run(
        self, numel: float, blocks: int, flops: float, machine: Machine, scheme: Scheme = "zero-3"
    ) -> Times:
        """A step in which each GPU does `flops` FLOPs (recompute included)."""
        return step_times(
            work(numel, blocks, flops, machine, scheme, self.messages, self.precision),
            machine,
            self.software,
        )


def work(
    numel: float,
    blocks: int,
    flops: float,
    machine: Machine,
    scheme: Scheme,
    messages: int = 1,
    precision: str = "bf16",
) -> Work:
    """A step of one micro-batch in 16 bits, `messages` collectives a block and pass."""
    calls = messages * blocks
    if scheme == "zero++":
        wanted = formulas.zeropp_bytes(numel)
        weights = formulas.zeropp_bytes(numel, quantized_gradients=False)
        copy = 2 * numel * (machine.local - 1) / machine.local
        gathers = weights["between"] - 2 * numel
        local, nodes = machine.local, machine.nodes
        summed = wanted["inside"] - weights["inside"]
        between = (wanted["between"] - gathers) / local
        moves = [
            Traffic.ring("all-gather", gathers, calls, machine),
            Traffic("all-gather", copy, 0.0, calls, local - 1, local),
            Traffic("reduce-scatter", summed, 0.0, calls, local - 1, local),
            Traffic("reduce-scatter", 0.0, between, calls, nodes - 1, nodes),
        ]
    else:
        once = formulas.wire_bytes(numel, "ddp", machine.ranks) / 2
        passes = 2 if scheme == "zero-3" else 1
        moves = [
            Traffic.ring("all-gather", passes * once, passes * calls, machine),
            Traffic.ring("reduce-scatter", once, calls, machine),
        ]
    states = 16 * numel / machine.ranks
    return Work(flops, moves, precision=precision, optimizer_bytes=28 / 16 * states)


def blocks_of(numel: float) -> int:
    """Blocks of a model of which only the size is published, as `ModelShape.of_size` has it."""
    return len(ModelShape.of_size(int(numel)).units) - 1


def _deepspeed(
    name: str, gpu: str, per_node: int, link: str, link_share: float, fitted_on: str
) -> System:
    """ZeRO-3 of DeepSpeed: the share of the nominal link that it got is fitted."""
    software, precision = Software(link_share=link_share, overlap=DEEPSPEED_OVERLAP), "fp16"
    how = (software, DEEPSPEED_MESSAGES, precision, "link_share", fitted_on)
    return System(name, gpu, per_node, link, *how)


def _other(
    name: str,
    gpu: str,
    per_node: int,
    link: str,
    kernel_share: float,
    fitted_on: str,
    precision: str = "fp16",
) -> System:
    """A system whose share of the peak in kernels is fitted."""
    software = Software(kernel_share=kernel_share)
    return System(name, gpu, per_node, link, software, 1, precision, "kernel_share", fitted_on)


SYSTEMS: Mapping[str, System] = {
    "azure": _deepspeed(
        "DeepSpeed ZeRO-3 on Azure, 2022", "a100-80", 8, "8x200g", 0.64,
        "175B at 1,024 tokens, all rows but micro-batch 1 and 16 on 128 and 1,024 GPUs",
    ),
    "megatron-zero3": _deepspeed(
        "ZeRO-3 as Megatron-LM compared with it, 2021", "a100-80", 8, "8x200g", 0.17, "174.6B on 768 GPUs",
    ),
    "zero++": _deepspeed(
        "ZeRO-3 and ZeRO++ on 384 V100, 2023", "v100-32", 16, "100g", 1.0,
        "both columns of all rows but 138B at 100 Gbit/s and 1,024 tokens",
    ),
    "zero-2": _other(
        "ZeRO-2 on DGX-2, 2020", "v100-32", 16, "dgx-2", 0.69, "6B (Fig. 4, without model parallelism)"
    ),
    "zero-offload": _other(
        "ZeRO-Offload on one V100, 2021", "v100-32", 16, "dgx-2", 0.59, "10B (Fig. 8)"
    ),
    "zero-infinity": _other(
        "ZeRO-Infinity on one DGX-2, 2021", "v100-32", 16, "dgx-2", 0.66, "10B, everything on the GPUs (Fig. 5c)"
    ),
    "fsdp": _other(
        "PyTorch FSDP, 2023", "a100-80", 8, "2000g", 0.67, "GPT-175B, batch 1 on 128 GPUs", "bf16"
    ),
    "torchtitan": _other(
        "torchtitan with torch.compile, 2024", "h100-96", 8, "8x400g", 0.53, "Llama 3.1 8B, FSDP and compile, 8 GPUs", "bf16"
    ),
}  # fmt: skip
