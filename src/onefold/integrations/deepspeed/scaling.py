"""fp16 loss scaling by DeepSpeed's rule.

finite step    every `window` finite steps since the last overflow: scale x 2, hysteresis refilled
overflow       step skipped; hysteresis left? use one up : scale / 2, never below the minimum

Unlike torch's scaler, the scale falls only after `hysteresis` overflows.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

import onefold
from onefold.integrations.deepspeed.config import LossScaling
from onefold.optim.clip import by_device, in_memory


class LossScaler:
    """Hold the loss scale and change it. Ranks that report the same overflows have the same scale.

    Attributes:
        scale: what the loss is multiplied with.
        dynamic: False if the configuration fixes the scale.
    """

    def __init__(self, spec: LossScaling) -> None:
        self.spec = spec
        self.dynamic = spec.static == 0
        self.scale = 2.0**spec.initial_power if self.dynamic else spec.static
        self._step = 0
        self._last_overflow = -1
        self._left = spec.hysteresis

    @property
    def needed(self) -> bool:
        """Whether a loss has to be scaled: not if the scale is fixed at 1."""
        return self.dynamic or self.scale != 1

    def update(self, overflow: bool) -> None:
        """Update the scale after one optimizer step.

        Raises:
            FloatingPointError: gradients overflow although the scale is at its minimum, so training
                cannot go on in fp16.
        """
        if not self.dynamic:
            return
        if overflow:
            if self._left > 1:
                self._left -= 1
            elif self.scale <= self.spec.minimum:
                raise FloatingPointError(
                    "gradients are not finite although the loss scale is at its minimum,"
                    f" {self.spec.minimum:g}: lower the learning rate, clip gradients, or compute"
                    " in bf16."
                )
            else:
                self.scale = max(self.scale / 2, self.spec.minimum)
            self._last_overflow = self._step
        else:
            if self.spec.consecutive_hysteresis:
                self._left = self.spec.hysteresis
            stable = self._step - self._last_overflow - 1
            if stable > 0 and stable % self.spec.window == 0:
                self._left = self.spec.hysteresis
                self.scale *= 2
        self._step += 1

    def state_dict(self) -> dict[str, float]:
        """Return the state, under the names that DeepSpeed's scaler uses."""
        return {
            "cur_scale": self.scale,
            "cur_iter": self._step,
            "last_overflow_iter": self._last_overflow,
            "cur_hysteresis": self._left,
        }

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        self.scale, self._step = float(state["cur_scale"]), int(state["cur_iter"])
        self._last_overflow, self._left = (
            int(state["last_overflow_iter"]),
            int(state["cur_hysteresis"]),
        )


def scale_gradients(module: nn.Module, factor: float) -> None:
    """Multiply every gradient of this rank by `factor`, wherever it is stored.

    Gradients on NVMe are multiplied when they are next read.
    """
    with torch.no_grad():
        here, on_disk = in_memory(onefold.engine_of(module), module.parameters())
        for gradients in by_device(here):
            torch._foreach_mul_(gradients, factor)
        for storage in on_disk:
            storage.scale_gradients(torch.tensor(factor, device="cpu"))
