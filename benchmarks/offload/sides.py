"""What is measured: a library with its state in a certain place, and how each is built."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from benchmarks.peers import adapters
from benchmarks.peers.settings import Setting

DEVICE, CPU, NVME = "device", "cpu", "nvme"


@dataclass(frozen=True)
class Side:
    """A library with its state in a certain place.

    Attributes:
        family: "onefold", "fsdp2", "deepspeed", or "plain" (PyTorch alone, on one rank).
        stage: the ZeRO stage, where the family has stages.
        optimizer, parameters: "device", "cpu" or "nvme": where masters and moments, and where
            parameters rest.
        behind: units are stepped behind the rest of the backward pass.
    """

    family: str
    stage: int = 0
    optimizer: str = DEVICE
    parameters: str = DEVICE
    behind: bool = False

    @property
    def on_disk(self) -> bool:
        return NVME in (self.optimizer, self.parameters)

    def recipe(self, disk: str | None) -> dict[str, Any]:
        """Further options of `Recipe.zero`; `disk`: the folder for what rests on NVMe."""
        out: dict[str, Any] = {}
        if self.optimizer != DEVICE:
            out["offload_optimizer"] = self.optimizer
        if self.parameters != DEVICE:
            out["offload_param"] = self.parameters
        if self.on_disk:
            out["nvme"] = disk
        if self.behind:
            out["step_in_backward"] = True
        return out

    def zero(self, device: str) -> dict[str, Any]:
        """Keys of DeepSpeed's `zero_optimization`; on a GPU with those of its tutorial."""
        cuda = device == "cuda"
        out: dict[str, Any] = {
            "stage": self.stage,
            "offload_optimizer": {"device": self.optimizer, "pin_memory": cuda},
        }
        if self.parameters == CPU:
            out["offload_param"] = {"device": CPU, "pin_memory": cuda}
        return out | ({"overlap_comm": True, "contiguous_gradients": True} if cuda else {})


SIDES: dict[str, Side] = {
    "onefold-2": Side("onefold", 2),
    "onefold-3": Side("onefold", 3),
    "onefold-2-cpu": Side("onefold", 2, CPU),
    "onefold-2-cpu-behind": Side("onefold", 2, CPU, behind=True),
    "onefold-3-cpu": Side("onefold", 3, CPU),
    "onefold-3-cpu-behind": Side("onefold", 3, CPU, behind=True),
    "onefold-3-cpu-param": Side("onefold", 3, CPU, CPU),
    "onefold-3-nvme": Side("onefold", 3, NVME),
    "onefold-3-nvme-behind": Side("onefold", 3, NVME, behind=True),
    "onefold-3-nvme-param": Side("onefold", 3, NVME, NVME),
    "fsdp2": Side("fsdp2", 3),
    "fsdp2-cpu": Side("fsdp2", 3, CPU, CPU),
    "deepspeed-2-cpu": Side("deepspeed", 2, CPU),
    "deepspeed-3-cpu": Side("deepspeed", 3, CPU),
    "deepspeed-3-cpu-param": Side("deepspeed", 3, CPU, CPU),
}
"""Every side, in the order of a round."""

PLAIN = {"plain": Side("plain")}
"""PyTorch alone: for one rank, on a GPU."""

REFERENCE = "onefold-3"
"""The side whose losses all others are compared with."""

PAIRS: tuple[tuple[str, str], ...] = (
    ("onefold-2-cpu", "deepspeed-2-cpu"),
    ("onefold-2-cpu-behind", "deepspeed-2-cpu"),
    ("onefold-3-cpu", "deepspeed-3-cpu"),
    ("onefold-3-cpu-behind", "deepspeed-3-cpu"),
    ("onefold-3-cpu-param", "deepspeed-3-cpu-param"),
    ("onefold-3-cpu-param", "fsdp2-cpu"),
    ("onefold-3", "fsdp2"),
)
"""Ours and theirs, with the same state in the same place."""

NOTES: dict[str, str] = {
    "onefold-N": "onefold.shard with Recipe.zero(N), everything on the device",
    "-cpu": "offload_optimizer='cpu': masters, moments and gradients on the host",
    "-nvme": "offload_optimizer='nvme': masters, moments and gradients on the disk",
    "-param": "with offload_param on the same tier",
    "-behind": "with step_in_backward=True: units are stepped behind the rest of the backward pass",
    "fsdp2, fsdp2-cpu": (
        "fully_shard of each block and the root, without and with CPUOffloadPolicy (which moves"
        " parameters, gradients and states); memory is pinned beside a GPU, and cannot be on CPU"
        " ranks"
    ),
    "deepspeed-N-cpu": (
        "DeepSpeed ZeRO stage N with offload_optimizer cpu (-param: offload_param too) and"
        " torch.optim.AdamW(fused=True), which zero_force_ds_cpu_optimizer=false allows. Its own"
        " DeepSpeedCPUAdam is compiled at its first use, which a plain machine cannot;"
        " --deepspeed-adam asks for it"
    ),
}
"""How each side is set up, printed under the tables."""


def on_disk(name: str) -> bool:
    """Whether a side has state on the disk; a peer has none."""
    return name in SIDES and SIDES[name].on_disk


def those(sides: Sequence[str], setting: Setting) -> list[str]:
    """The sides that mean anything here: what is stepped behind cannot be clipped."""
    return [side for side in sides if not (SIDES[side].behind and setting.clip)]


def build(
    name: str,
    setting: Setting,
    model: nn.Module,
    disk: str | None = None,
    own_adam: bool = False,
    init: Callable[[nn.Module], object] | None = None,
) -> Any:
    """The side around whole fp32 weights, or (FSDP2, with `init`) a model on the meta device."""
    side = {**SIDES, **PLAIN}.get(name)
    if side is None or (side.optimizer == DEVICE and init is None):
        return adapters.build(name, setting, model)
    if side.family == "onefold":
        return adapters.Onefold(setting, model, side.stage, **side.recipe(disk))
    if side.family == "fsdp2":
        return adapters.FSDP2(setting, model, offload=side.optimizer == CPU, init=init)
    return adapters.DeepSpeed(setting, model, own_adam=own_adam, **side.zero(setting.device))


class Watch:
    """Seconds of the last optimizer step of a trainer, and what `counters` counted in it."""

    def __init__(self, trainer: Any, counters: Callable[[], dict[str, float]]) -> None:
        owner = trainer.engine if isinstance(trainer, adapters.DeepSpeed) else trainer.optimizer
        inner = owner.step
        self.seconds, self.counted = 0.0, dict[str, float]()

        def step(*arguments: Any, **named: Any) -> Any:
            before, begun = counters(), time.perf_counter()
            try:
                return inner(*arguments, **named)
            finally:
                self.seconds = time.perf_counter() - begun
                self.counted = {key: value - before[key] for key, value in counters().items()}

        owner.step = step
