"""What is done where the loss or the gradients are not finite: the step's update is never applied.

| --on-nonfinite | then                                                                            | the run ends              |
|----------------|---------------------------------------------------------------------------------|---------------------------|
| stop           | nothing                                                                         | at the first              |
| skip           | the step's samples are left out, the weights stay                               | at the `limit`-th in a row |
| rollback       | the last checkpoint is loaded, and the run goes on behind the bad step's samples | at the `limit`-th in a row |

Going back, none of the samples between the checkpoint and the bad step is read again: repeated bit for bit they would lead to the
same weights, and to the same bad step or the next one. From the second time in a row on the checkpoint before is taken.

In fp16 gradients that overflow are the loss scaler's business: it skips the step and lowers the scale, up to `SCALER_LIMIT` times in a
row. A loss that is not finite was so before any scaling, and is handled as in the table.

On a device with streams a step is judged while the next one is under way, and the device has left the update out by itself by then: see
[Note: a step late] in loop.py. What is said and done, and of which step, is the same.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Callable
from dataclasses import dataclass

from onefold.train.errors import TrainError
from onefold.train.prepare import Run

#: A scale of 65536 has fallen to nothing by then.
SCALER_LIMIT = 40


class Verdict(enum.Enum):
    APPLY = "apply"
    SKIP = "skip"
    ROLLBACK = "rollback"


@dataclass
class NonFinite:
    """Judges each step; all ranks come to the same verdict, since loss and norm are the same on all.

    Attributes:
        total: steps that were not finite, earlier starts of the run counted in. in_a_row: since the last good step behind the worst.
    """

    run: Run
    alert: Callable[[str], None]
    total: int = 0
    in_a_row: int = 0
    _scaler_in_a_row: int = 0
    _worst: int = -1

    def judge(self, step: int, loss: float, norm: float, where: Callable[[], str], scale: float | None = None) -> Verdict:
        """What to do with a step (from 0) of that loss and gradient norm. Collective where they are not finite.

        Args:
            where: finds out where it came from, a sentence. Collective.
            scale: the loss scale of that step; None: it is the scaler's still.

        Raises:
            TrainError: the run ends here.
        """
        if math.isfinite(loss) and self.run.scaler is not None:
            return self._of_scaler(step, norm, scale)
        if math.isfinite(loss) and (math.isfinite(norm) or self.run.recipe.step_in_backward):
            if step > self._worst:
                self.in_a_row = 0
            return Verdict.APPLY
        self.total += 1
        self.in_a_row += 1
        self._worst = max(self._worst, step)
        what = f"the loss at step {step + 1} is {loss}" if not math.isfinite(loss) else f"the gradient norm at step {step + 1} is {norm}"
        text, config = f"{what}; {where()}", self.run.config
        how = config.on_nonfinite
        if how == "stop":
            hint = "Try a lower --lr, a longer --warmup, or --clip; --on-nonfinite skip or rollback goes on without the step."
            raise TrainError(f"{text}. {hint}")
        if self.in_a_row >= config.nonfinite_limit:
            raise TrainError(
                f"{text}. That makes {self.in_a_row} such steps in a row (--nonfinite-limit) with --on-nonfinite {how}. "
                "Try a lower --lr, a longer --warmup, or --clip."
            )
        self.alert(f"{text}. " + ("The step is left out." if how == "skip" else "Going back to the last checkpoint."))
        return Verdict.SKIP if how == "skip" else Verdict.ROLLBACK

    def _of_scaler(self, step: int, norm: float, scale: float | None) -> Verdict:
        self._scaler_in_a_row = 0 if math.isfinite(norm) else self._scaler_in_a_row + 1
        if self._scaler_in_a_row >= SCALER_LIMIT:
            raise TrainError(
                f"the gradients overflowed in fp16 for {SCALER_LIMIT} steps in a row, up to step {step + 1}; the loss scale is "
                f"{self.run.scaler.get_scale() if scale is None else scale:g}. Use --precision bf16 or fp32, or a lower --lr."
            )
        if math.isfinite(norm) and step > self._worst:
            self.in_a_row = 0
        return Verdict.APPLY
