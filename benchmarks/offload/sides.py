"""How each side is built. What the peers of `benchmarks.peers` have in common with them is theirs;
here is where state goes.
"""

from __future__ import annotations

import importlib
import os
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from benchmarks.offload.settings import CPU, PLAIN, SIDES, Side
from benchmarks.peers import adapters, model
from benchmarks.peers.adapters import LEARNING_RATE, WEIGHT_DECAY, adamw
from benchmarks.peers.settings import Setting


class Onefold(adapters.Onefold):
    """`onefold.shard` with the tiers of a side."""

    def __init__(self, setting: Setting, model: nn.Module, side: Side, disk: str | None) -> None:
        super(adapters.Onefold, self).__init__(setting)  # the next one's would shard without tiers
        self.onefold: Any = importlib.import_module("onefold")
        self.autocast = False
        recipe = self.onefold.Recipe.zero(
            side.stage, precision=setting.precision, **side.recipe(disk)
        )
        built = all(not p.is_meta for p in model.parameters())
        self.model = self.onefold.shard(model, recipe, device=None if built else setting.device)
        self.optimizer = adamw(self.model.parameters())

    @property
    def engine(self) -> Any:
        return self.onefold.engine_of(self.model)


class FSDP2(adapters._TorchPeer):
    """`fully_shard` with CPUOffloadPolicy, else as `adapters.FSDP2`."""

    def __init__(
        self, setting: Setting, model: nn.Module, init: Callable[[nn.Module], object] | None = None
    ) -> None:
        super().__init__(setting)
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

        self.autocast = False
        dtype = torch.bfloat16 if setting.precision == "bf16" else None
        how: dict[str, Any] = {
            "mesh": init_device_mesh(setting.device, (setting.ranks,)),
            "mp_policy": MixedPrecisionPolicy(
                param_dtype=dtype, reduce_dtype=torch.float32 if dtype else None
            ),
            "offload_policy": CPUOffloadPolicy(pin_memory=setting.device == "cuda"),
        }
        for block in model.get_submodule("blocks").children():
            fully_shard(block, **how)
        fully_shard(model, **how)
        if init is not None:  # it came on the meta device
            model.to_empty(device="cpu")
            model.apply(init)
        self.model = model
        self.optimizer = adamw(model.parameters())


class DeepSpeed(adapters.DeepSpeed):
    """DeepSpeed's ZeRO-Offload over torch's AdamW, or over its own."""

    def __init__(self, setting: Setting, model: nn.Module, side: Side, own_adam: bool) -> None:
        self.setting = setting
        deepspeed = importlib.import_module("deepspeed")
        if own_adam:
            optimizer = importlib.import_module("deepspeed.ops.adam").DeepSpeedCPUAdam(
                model.parameters(), lr=LEARNING_RATE, weight_decay=WEIGHT_DECAY, adamw_mode=True
            )
        else:
            optimizer = adamw(model.parameters())
        self.engine: Any = deepspeed.initialize(
            model=model, optimizer=optimizer, config=deepspeed_config(setting, side)
        )[0]


def deepspeed_config(setting: Setting, side: Side) -> dict[str, Any]:
    """What `adapters.DeepSpeed` is given, and where state goes; on a GPU with what its tutorial on
    ZeRO-Offload adds.
    """
    bf16 = setting.precision == "bf16"
    zero: dict[str, Any] = {
        "stage": side.stage,
        "offload_optimizer": {"device": side.optimizer, "pin_memory": setting.device == "cuda"},
    }
    if side.parameters == CPU:
        zero["offload_param"] = {"device": CPU, "pin_memory": setting.device == "cuda"}
    if setting.device == "cuda":
        zero |= {"overlap_comm": True, "contiguous_gradients": True}
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": setting.accumulation,
        "gradient_clipping": setting.clip,  # the default is 1.0 since 0.19, hence always said
        "zero_optimization": zero,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "bf16": {"enabled": bf16},
        "steps_per_print": 10**9,
    }
    if bf16:
        config["data_types"] = {"grad_accum_dtype": "fp32"}
    return config


def prepare(name: str, device: str = "cpu") -> None:
    """Import what the side needs, before memory is measured."""
    if device == "cuda":
        os.environ["DS_ACCELERATOR"] = "cuda"
    adapters.prepare("fsdp2" if name.startswith("fsdp2") else name)


def build(
    name: str, setting: Setting, model: nn.Module, disk: str | None = None, own_adam: bool = False
) -> Any:
    """The side around `model`, which holds whole fp32 weights on every rank; names of
    `adapters.build` are its.

    Raises ValueError for any further one.
    """
    side = {**SIDES, **PLAIN}.get(name)
    if side is None or side.optimizer == "device":
        return adapters.build(name, setting, model)
    if side.family == "onefold":
        return Onefold(setting, model, side, disk)
    if side.family == "fsdp2":
        return FSDP2(setting, model)
    return DeepSpeed(setting, model, side, own_adam)


def touch(name: str, setting: Setting, disk: str | None = None, own_adam: bool = False) -> None:
    """Let the side train a toy for a step, so that its code, lazy imports included, is resident
    before anything is measured.
    """
    toy = replace(setting, model="gpt-tiny", tokens=32)
    trainer = build(name, toy, model.build(toy.model, device=toy.device), disk, own_adam)
    ids, labels = (
        part.to(toy.device) for part in model.micro_batch(toy.model, toy.tokens, 0, 0, 0, toy.ranks)
    )
    trainer.step([(ids, labels)] * toy.accumulation)


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
