"""The learning rate as a function of the step: a factor on the peak, for
`torch.optim.lr_scheduler.LambdaLR`.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from onefold.train.errors import TrainError

#: Share of the run in which "wsd" (warm-up, stable, decay) falls.
WSD_DECAY = 0.2


def warmup_steps(warmup: float, steps: int) -> int:
    """Steps of warm-up: `warmup` itself if it is 1 or more, else that share of `steps`
    (rounded).
    """
    return round(warmup) if warmup >= 1 else round(warmup * steps)


def lr_factor(kind: str, steps: int, warmup: int, minimum: float) -> Callable[[int], float]:
    """Return step (from 0) -> factor on the peak learning rate.

    The first step already learns: warm-up gives (step + 1) / (warmup + 1). After the last step the
        factor is `minimum`.

    Args:
        kind: "constant", "cosine", "linear" or "wsd".
        steps: optimizer steps of the run.
        warmup: steps before the peak.
        minimum: factor at the end, unless constant.
    """
    if kind not in ("constant", "cosine", "linear", "wsd"):
        raise TrainError(f"schedule {kind!r}: expected constant, cosine, linear or wsd.")
    start = steps - max(1, round(WSD_DECAY * steps)) if kind == "wsd" else warmup
    start = max(start, warmup)

    def factor(step: int) -> float:
        if step < warmup:
            return (step + 1) / (warmup + 1)
        if kind == "constant" or step < start:
            return 1.0
        progress = min(1.0, (step - start) / max(1, steps - start))
        fall = 0.5 * (1 + math.cos(math.pi * progress)) if kind == "cosine" else 1 - progress
        return minimum + (1 - minimum) * fall

    return factor


#: The step (from 0) that is recorded unless told otherwise: the first ones also build optimizer
#: states and learn orders.
RECORDED = 3


def steps_of(trace: str | None, steps: int) -> tuple[int, int]:
    """The first and the last step to record, from 0. `trace` is "FROM:TO" or one step, from 1, both
    included.

    Raises:
        TrainError: it is neither, or lies outside the run.
    """
    if trace is None:
        one = min(RECORDED, steps - 1)
        return one, one
    parts = trace.split(":")
    if len(parts) > 2 or not all(p.strip().isdigit() for p in parts):
        raise TrainError(
            f"--trace {trace}: expected one step or FROM:TO, counted from 1, such as 4:6."
        )
    first, last = int(parts[0]), int(parts[-1])
    if not 1 <= first <= last <= steps:
        raise TrainError(
            f"--trace {trace}: the run has steps 1 to {steps}, and FROM is at most TO."
        )
    return first - 1, last - 1
