"""`onefold.plan(...)`: one call from a model and a machine to the recommended recipe."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from onefold.device import available, default_device, free_memory
from onefold.memory.host import free_host_memory
from onefold.plan import hardware
from onefold.plan.auto import Beside, machine_here
from onefold.plan.hardware import Machine
from onefold.plan.job import Job
from onefold.plan.planner import Plan
from onefold.plan.planner import plan as _plan
from onefold.plan.shapes import ModelShape


def plan(
    model: nn.Module | ModelShape | str | Path | float,
    machine: Machine | None = None,
    *,
    gpus: int | None = None,
    per_node: int = 8,
    gpu: str = "h100-80",
    link: str = "8x200g",
    stage: int | None = None,
    batch: Callable[[int], Any] | None = None,
    loss: Callable[[Any], torch.Tensor] | None = None,
    largest: bool = True,
    **job: Any,
) -> Plan:
    """What every stage of a job would hold, send and take on a machine, and which to use. `print`
    it, or `shard(model, plan.recipe)`.

        onefold.plan("llama-3-70b", gpus=64, gpu="h100-80", seq=4096)
        onefold.plan(model, micro_batch=4, seq=1024, precision="bf16")     # on this machine

    Args:
        model: a module (also on the meta device), an architecture's name, a Hugging Face folder or
            config.json, `package.module:factory`, or a number of parameters.
        machine: what to plan for; else `gpus` of a kind, in nodes of `per_node` joined by `link`;
            else one rank of this machine.
        stage: only this one; None for the lowest that fits.
        batch, loss: for modules that are no language model of `input_ids` and `labels`; see
            `plan.planner.plan`.
        largest: also find the largest micro-batch and model for each stage.
        job: the fields of `plan.job.Job`: seq, micro_batch, global_batch, precision,
            accumulate_dtype, checkpointing, optimizer, lora_rank, offload; and arguments of `Recipe.zero` (reduce_at,
            units, offload_optimizer, nvme, tile, shard_group, gather_codec, ...), which the plan
            and its recipe follow. On this machine states go to a disk only if `nvme` names folders
            there.

    Raises:
        ValueError: a name, an option or a figure that cannot be; the message says what to change.
    """
    if stage is not None and stage not in (0, 1, 2, 3):
        raise ValueError(
            f"stage={stage!r}: expected 0, 1, 2 or 3, or None for the lowest that fits."
        )
    asked = Job.of(job, "onefold.plan")
    if machine is None and gpus is not None:
        for name, count in (("gpus", gpus), ("per_node", per_node)):
            if not isinstance(count, int) or isinstance(count, bool) or count < 1:
                raise ValueError(f"{name}={count!r}: expected a whole number, 1 or more.")
        for name, text in (("gpu", gpu), ("link", link)):
            if not isinstance(text, str):
                raise ValueError(
                    f"{name}={text!r}: expected a name such as"
                    f" {'h100-80' if name == 'gpu' else '8x200g'}."
                )
        machine = hardware.machine(gpus, min(per_node, gpus), gpu, link)
    if machine is None:
        free = free_memory() if available() else free_host_memory()
        machine, _ = machine_here(1, 1, free, default_device().type, Beside.here(asked.folders))
    stages = () if stage is None else (stage,)
    return _plan(model, machine, asked, stages=stages, batch=batch, loss=loss, largest=largest)
