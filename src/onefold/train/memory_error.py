"""The error message for a run that is out of memory: what was held where, and which options need
less.
"""

from __future__ import annotations

import torch

import onefold
from onefold.observe.memory import resident_memory
from onefold.recipe import Tier
from onefold.train.prepare import Run
from onefold.wording import TrainError, readable

#: Parts of the messages with which torch and Python report a failed allocation, in lower case.
_WORDS = ("out of memory", "can't allocate memory", "not enough memory", "cannot allocate memory")


def is_out_of_memory(error: BaseException) -> bool:
    """Whether the error is an allocation that failed, on a device or the host."""
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return True
    return isinstance(error, RuntimeError) and any(word in str(error).lower() for word in _WORDS)


def explain(run: Run, error: BaseException) -> TrainError:
    """Return the error for an allocation that failed in this run's loop."""
    engine = onefold.engine_of(run.model)
    unit, phase = engine.passes.raised_in or ("(between units)", engine.phase)
    held = ", ".join(f"{name} {readable(n)}" for name, n in engine.memory.now().items())
    planned = run.choice.predicted
    expected = f", planned at most {readable(planned.peak_bytes)}" if planned is not None else ""
    return TrainError(
        f"rank {run.ranks.rank} ran out of memory in the {phase} pass of unit {unit!r} (step"
        f" {engine.step_count + 1}): {str(error).splitlines()[0][:160]}\nThe engine held"
        f" {held or 'nothing'}; the process {readable(resident_memory()[0])}{expected}.\nTo change:"
        f" {_advice(run)}."
    )


def _advice(run: Run) -> str:
    """Return the options that would lower the peak, the cheapest first."""
    config, recipe, on_cpu = run.config, run.recipe, run.ranks.device.type == "cpu"
    half = f"--micro-batch {run.choice.micro_batch // 2}"
    same = f"{half} (with --global-batch {run.order.global_batch} the batch stays the same)"
    helps = {
        same: run.choice.micro_batch > 1,
        "--activation-checkpointing full": config.activation_checkpointing == "none",
        f"--stage {run.choice.stage + 1}": run.choice.stage < 3 and run.ranks.world_size > 1,
        "--precision bf16": config.precision == "fp32",
        "--offload-optimizer cpu": not on_cpu and recipe.optimizer.tier is Tier.DEVICE,
        "--offload-optimizer nvme --nvme FOLDER": recipe.optimizer.tier is not Tier.NVME,
        "--offload-activations cpu": not on_cpu and recipe.offload_activations is None,
    }
    found = [advice for advice, would_help in helps.items() if would_help]
    return ", ".join(found) or "fewer tokens (--seq), more ranks, or a smaller model"
