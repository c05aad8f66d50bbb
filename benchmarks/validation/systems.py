"""Published systems in terms of the time model, each with the one constant that was fitted to it
and the rows it was fitted on.

Two constants describe DeepSpeed's ZeRO-3 schedule of 2021 to 2023 in all of its reports: it fetches
by leaf module, six times a block and pass, and hides little behind compute (`DEEPSPEED_OVERLAP`).
The latter, `Software.hop_seconds` and `Software.kernel_share` were fitted together to one report,
Azure's 175B runs at 1,024 tokens, without the rows at micro-batch 1 and 16 on 128 and 1,024 GPUs,
which are cases of `planner_cases.csv`. `benchmarks/validation/fits.py` fits every constant again from
the published rows and compares.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from benchmarks.validation.formulas import traffic as formulas
from onefold.plan import hardware
from onefold.plan.hardware import Machine
from onefold.plan.shapes import ModelShape
from onefold.plan.times import Times, Work, step_times
from onefold.plan.traffic import Software, Traffic

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
        """A step in which each GPU does `flops` FLOPs (recompute included) on its one
        micro-batch.
        """
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
    """A step of one micro-batch with 16 bits on the wire, `messages` collectives a block and
    pass.
    """
    calls = messages * blocks
    if scheme == "zero++":
        wanted = formulas.zeropp_bytes(numel)
        weights = formulas.zeropp_bytes(numel, quantized_gradients=False)
        copy = 2 * numel * (machine.local - 1) / machine.local
        gathers = weights["between"] - 2 * numel
        local = machine.local
        moves = [
            Traffic.ring("all-gather", gathers, calls, machine),
            Traffic("all-gather", copy, 0.0, calls, local - 1, local),
            Traffic(
                "reduce-scatter",
                wanted["inside"] - weights["inside"],
                0.0,
                calls,
                local - 1,
                local,
            ),
            Traffic(
                "reduce-scatter",
                0.0,
                (wanted["between"] - gathers) / local,
                calls,
                machine.nodes - 1,
                machine.nodes,
            ),
        ]
    else:
        once = formulas.wire_bytes(numel, "ddp", machine.ranks) / 2
        passes = 2 if scheme == "zero-3" else 1
        moves = [
            Traffic.ring("all-gather", passes * once, passes * calls, machine),
            Traffic.ring("reduce-scatter", once, calls, machine),
        ]
    states = 16 * numel / machine.ranks
    return Work(
        flops, moves, precision=precision, forward_share=1 / 4, optimizer_bytes=28 / 16 * states
    )


def blocks_of(numel: float) -> int:
    """Blocks of a model of which only the size is published, as `ModelShape.of_size` has it."""
    return len(ModelShape.of_size(int(numel)).units) - 1


def _deepspeed(link_share: float) -> Software:
    return Software(link_share=link_share, overlap=DEEPSPEED_OVERLAP)


SYSTEMS: Mapping[str, System] = {
    "azure": System(
        name="DeepSpeed ZeRO-3 on Azure, 2022",
        gpu="a100-80",
        per_node=8,
        link="8x200g",
        software=_deepspeed(0.64),
        messages=DEEPSPEED_MESSAGES,
        precision="fp16",
        fitted="link_share",
        fitted_on="175B at 1,024 tokens, all rows but micro-batch 1 and 16 on 128 and 1,024 GPUs",
    ),
    "megatron-zero3": System(
        name="ZeRO-3 as Megatron-LM compared with it, 2021",
        gpu="a100-80",
        per_node=8,
        link="8x200g",
        software=_deepspeed(0.17),
        messages=DEEPSPEED_MESSAGES,
        precision="fp16",
        fitted="link_share",
        fitted_on="174.6B on 768 GPUs",
    ),
    "zero++": System(
        name="ZeRO-3 and ZeRO++ on 384 V100, 2023",
        gpu="v100-32",
        per_node=16,
        link="100g",
        software=_deepspeed(1.0),
        messages=DEEPSPEED_MESSAGES,
        precision="fp16",
        fitted="link_share",
        fitted_on="both columns of all rows but 138B at 100 Gbit/s and 1,024 tokens",
    ),
    "zero-2": System(
        name="ZeRO-2 on DGX-2, 2020",
        gpu="v100-32",
        per_node=16,
        link="dgx-2",
        software=Software(kernel_share=0.69),
        messages=1,
        precision="fp16",
        fitted="kernel_share",
        fitted_on="6B (Fig. 4, without model parallelism)",
    ),
    "zero-offload": System(
        name="ZeRO-Offload on one V100, 2021",
        gpu="v100-32",
        per_node=16,
        link="dgx-2",
        software=Software(kernel_share=0.59),
        messages=1,
        precision="fp16",
        fitted="kernel_share",
        fitted_on="10B (Fig. 8)",
    ),
    "zero-infinity": System(
        name="ZeRO-Infinity on one DGX-2, 2021",
        gpu="v100-32",
        per_node=16,
        link="dgx-2",
        software=Software(kernel_share=0.66),
        messages=1,
        precision="fp16",
        fitted="kernel_share",
        fitted_on="10B, everything on the GPUs (Fig. 5c)",
    ),
    "fsdp": System(
        name="PyTorch FSDP, 2023",
        gpu="a100-80",
        per_node=8,
        link="2000g",
        software=Software(kernel_share=0.67),
        messages=1,
        precision="bf16",
        fitted="kernel_share",
        fitted_on="GPT-175B, batch 1 on 128 GPUs",
    ),
    "torchtitan": System(
        name="torchtitan with torch.compile, 2024",
        gpu="h100-96",
        per_node=8,
        link="8x400g",
        software=Software(kernel_share=0.53),
        messages=1,
        precision="bf16",
        fitted="kernel_share",
        fitted_on="Llama 3.1 8B, FSDP and compile, 8 GPUs",
    ),
}
