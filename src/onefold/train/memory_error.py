"""The error message for a run that is out of memory: which line of the plan was wrong, and which
options need less.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

import onefold
from onefold.observe.memory import resident_memory
from onefold.plan.schema import ENGINE, Account
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
    held = engine.memory.now()
    lines = [
        f"rank {run.ranks.rank} ran out of memory in the {phase} pass of unit {unit!r} (step"
        f" {engine.step_count + 1}): " + str(error).splitlines()[0][:160],
        f"the engine held {_told(held) or 'nothing'}; the process {readable(resident_memory()[0])}.",
    ]
    if run.choice.predicted is not None:
        lines.append(_wrong_line(run.choice.predicted, held, run.choice.available))
    lines.append(f"To change: {_advice(run)}.")
    return TrainError("\n".join(lines))


def _told(sizes: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {readable(size)}" for name, size in sizes.items())


def _wrong_line(predicted: Account, held: Mapping[str, int], available: int) -> str:
    """Name the line of the plan that was exceeded: one of the engine's, or one of the others."""
    planned = {c: max(predicted.peak.get(c, 0), predicted.ledger.get(c, 0)) for c in ENGINE}
    worst = max(ENGINE, key=lambda category: held.get(category, 0) - planned[category])
    if held.get(worst, 0) > planned[worst]:
        return f"the plan was wrong about {worst}: it expected at most {readable(planned[worst])}."
    others = {k: v for k, v in predicted.peak.items() if k not in ENGINE}
    return (
        f"the plan expected a peak of {readable(predicted.peak_bytes)} of {readable(available)}"
        f" free; the engine's lines hold, so it was wrong about the others ({_told(others)}), or"
        " about what was free: other programs may have taken memory since."
    )


def _advice(run: Run) -> str:
    """Return the options that would lower the peak, the cheapest first."""
    micro_batch, stage = run.choice.micro_batch, run.choice.stage
    smaller = (
        f"--micro-batch {micro_batch // 2} (with --global-batch {run.order.global_batch} the batch"
        " stays the same)"
    )
    out = [
        advice
        for helps, advice in (
            (micro_batch > 1, smaller),
            (
                run.config.activation_checkpointing == "none",
                "--activation-checkpointing full",
            ),
            (stage < 3 and run.ranks.world_size > 1, f"--stage {stage + 1}"),
            (run.config.precision == "fp32", "--precision bf16"),
        )
        if helps
    ]
    out += _colder(run)
    return ", ".join(out) or "fewer tokens (--seq), more ranks, or a smaller model"


def _colder(run: Run) -> list[str]:
    """Return options that offload more: from a GPU to the host, else to a disk."""
    p, o = run.recipe.parameters.tier, run.recipe.optimizer.tier
    whole = run.recipe.offload_bytes is None and run.recipe.offload_share >= 1
    out = []
    if run.ranks.device.type != "cpu" and (o is Tier.DEVICE or not whole):
        out.append("--offload-optimizer cpu")
    elif o is not Tier.NVME or not whole:
        out.append("--offload-optimizer nvme --nvme FOLDER")
    elif p is not Tier.NVME:
        out.append(
            "--offload-param nvme" if run.choice.stage == 3 else "--stage 3 --offload-param nvme"
        )
    if run.ranks.device.type != "cpu" and run.recipe.offload_activations is None:
        out.append("--offload-activations cpu")
    return out
