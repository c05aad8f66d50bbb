"""When memory runs out all the same: what was held, where it happened, which line of the plan was
wrong, what to change.
"""

from __future__ import annotations

import onefold
from onefold.observe.process import resident_memory
from onefold.plan.schema import ENGINE, Account
from onefold.recipe import Tier
from onefold.train.errors import TrainError
from onefold.train.machine import readable
from onefold.train.prepare import Run

#: How torch and Python say on each device that an allocation failed.
_WORDS = ("out of memory", "can't allocate memory", "not enough memory", "cannot allocate memory")


def is_out_of_memory(error: BaseException) -> bool:
    """Whether the error is an allocation that failed, on a device or the host."""
    import torch

    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return True
    return isinstance(error, RuntimeError) and any(word in str(error).lower() for word in _WORDS)


def explain(run: Run, error: BaseException) -> TrainError:
    """The sentence for an allocation that failed in this run's loop."""
    engine = onefold.engine_of(run.model)
    unit, phase = engine.raised_in or ("(between units)", engine.phase)
    held = engine.memory.now()
    lines = [
        f"rank {run.ranks.rank} ran out of memory in the {phase} pass of unit {unit!r} (step"
        f" {engine.step + 1}): " + str(error).splitlines()[0][:160],
        "the engine held "
        + (", ".join(f"{k} {readable(v)}" for k, v in held.items()) or "nothing")
        + f"; the process {readable(resident_memory()[0])}.",
    ]
    predicted = run.choice.predicted
    if predicted is not None:
        lines.append(_wrong_line(predicted, held, run.choice.available))
    lines.append(f"To change: {_advice(run)}.")
    return TrainError("\n".join(lines))


def _wrong_line(predicted: Account, held: dict[str, int], available: int) -> str:
    """The line of the plan that reality exceeded: one of the engine's, or what is not the
    engine's.
    """
    worst = max(
        ENGINE,
        key=lambda c: held.get(c, 0) - max(predicted.peak.get(c, 0), predicted.ledger.get(c, 0)),
    )
    planned = max(predicted.peak.get(worst, 0), predicted.ledger.get(worst, 0))
    if held.get(worst, 0) > planned:
        return f"the plan was wrong about {worst}: it expected at most {readable(planned)}."
    others = {k: v for k, v in predicted.peak.items() if k not in ENGINE}
    told = ", ".join(f"{k} {readable(v)}" for k, v in others.items())
    return (
        f"the plan expected a peak of {readable(predicted.peak_bytes)} of {readable(available)}"
        f" free; the engine's lines hold, so it was wrong about the others ({told}), or about what"
        " was free: other programs may have taken memory since."
    )


def _advice(run: Run) -> str:
    """What would lower the peak, the cheapest first."""
    out = []
    if run.choice.micro_batch > 1:
        half = max(1, run.choice.micro_batch // 2)
        out.append(
            f"--micro-batch {half} (with --global-batch {run.order.global_batch} the batch stays"
            " the same)"
        )
    if run.config.activation_checkpointing == "none":
        out.append("--activation-checkpointing full")
    if run.choice.stage < 3 and run.ranks.world_size > 1:
        out.append(f"--stage {run.choice.stage + 1}")
    if run.config.precision == "fp32":
        out.append("--precision bf16")
    out += _colder(run)
    return ", ".join(out) or "fewer tokens (--seq), more ranks, or a smaller model"


def _colder(run: Run) -> list[str]:
    """What could leave the device that has not left it: to the host beside a GPU, whose memory is
    another; else to a disk.
    """
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
    elif run.recipe.tile is None:
        out.append("--tile 256MB (if one weight is what does not fit)")
    if run.ranks.device.type != "cpu" and run.recipe.offload_activations is None:
        out.append("--offload-activations cpu")
    return out
