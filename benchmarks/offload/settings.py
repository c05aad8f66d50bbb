"""What is measured: the sides and what they are compared with."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

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
        """The options of `Recipe.zero` beside stage and precision; `disk`: the folder for what
        rests on NVMe.
        """
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


def applies(side: str, setting: Setting) -> bool:
    """Whether the side means anything here: nobody can clip what is stepped before the norm is
    known.
    """
    return not (SIDES[side].behind and setting.clip)


def chosen(names: list[str]) -> list[str]:
    """Sides in the order of a round; a family's name, or the beginning of some names, takes all
    that begin so.

    Raises:
        ValueError: a name is of no side.
    """
    for name in names:
        if not any(side == name or side.startswith(f"{name}-") for side in SIDES):
            raise ValueError(
                f"There is no side {name!r}; choose from {', '.join(SIDES)}, or a family such as"
                " 'onefold'."
            )
    return [
        s for s in SIDES if any(s == n or (n not in SIDES and s.startswith(f"{n}-")) for n in names)
    ]
