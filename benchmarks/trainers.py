"""One class a library: how it is built and how it takes one optimizer step. Everything else of a run
is shared.

Every side starts from the same fp32 weights, uses `torch.optim.AdamW(fused=True)` and averages
gradients over ranks and micro-batches. bf16 is each library's documented way of computing in bf16
over fp32 master weights.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol

import torch
from torch import nn

from benchmarks.gpt import Batch, Setting
from benchmarks.launch import on_deepspeed

LEARNING_RATE = 3e-4
WEIGHT_DECAY = 0.1


class Trainer(Protocol):
    """A model that is ready to train."""

    def step(self, batches: Sequence[Batch]) -> float:
        """One optimizer step over the micro-batches; the mean of their losses on this rank."""

    def ledger_bytes(self) -> int | None:
        """Bytes that the library itself says this rank has sent, None if it keeps no count."""


def adamw(parameters: Any) -> torch.optim.AdamW:
    """The optimizer of every side."""
    return torch.optim.AdamW(parameters, lr=LEARNING_RATE, weight_decay=WEIGHT_DECAY, fused=True)


class Torch:
    """The ordinary loop of PyTorch; the sides below differ in how they fill its attributes."""

    def __init__(self, setting: Setting) -> None:
        self.setting = setting
        self.model: nn.Module
        self.optimizer: torch.optim.Optimizer
        self.autocast = setting.precision == "bf16"

    def between_boundaries(self) -> contextlib.AbstractContextManager[Any]:
        """The context of every micro-batch but the last of a step."""
        return contextlib.nullcontext()

    def clip(self) -> None:
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.setting.clip)

    def ledger_bytes(self) -> int | None:
        return None

    def step(self, batches: Sequence[Batch]) -> float:
        total = torch.zeros((), device=self.setting.device)
        for number, (ids, labels) in enumerate(batches, 1):
            last = number == len(batches)
            with contextlib.nullcontext() if last else self.between_boundaries():
                with torch.autocast(self.setting.device, torch.bfloat16, enabled=self.autocast):
                    loss = self.model(ids, labels)
                (loss / len(batches)).backward()
            total += loss.detach().float()
        if self.setting.clip:
            self.clip()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return float(total) / len(batches)


class Plain(Torch):
    """PyTorch alone, on one rank."""

    def __init__(self, setting: Setting, model: nn.Module) -> None:
        super().__init__(setting)
        self.model = model
        self.optimizer = adamw(model.parameters())


class DDP(Torch):
    """DistributedDataParallel."""

    def __init__(self, setting: Setting, model: nn.Module) -> None:
        super().__init__(setting)
        self.ddp = nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
        self.model = self.ddp
        self.optimizer = self.make_optimizer()

    def make_optimizer(self) -> torch.optim.Optimizer:
        return adamw(self.ddp.parameters())

    def between_boundaries(self) -> contextlib.AbstractContextManager[Any]:
        return self.ddp.no_sync()


class ZeroOptimizer(DDP):
    """DDP, its optimizer states divided by torch's ZeroRedundancyOptimizer."""

    def make_optimizer(self) -> torch.optim.Optimizer:
        from torch.distributed.optim import ZeroRedundancyOptimizer

        return ZeroRedundancyOptimizer(
            self.ddp.parameters(),
            torch.optim.AdamW,
            parameters_as_bucket_view=True,
            lr=LEARNING_RATE,
            weight_decay=WEIGHT_DECAY,
            fused=True,
        )


class FSDP2(Torch):
    """`fully_shard` on each block, then on the root: the set-up of its tutorial. Reduces every
    micro-batch.

    Args:
        hybrid: (groups, ranks in each) shards inside a group and replicates across; empty shards
            over all ranks. offload: with CPUOffloadPolicy.
    """

    def __init__(
        self,
        setting: Setting,
        model: nn.Module,
        hybrid: tuple[int, ...] = (),
        *,
        offload: bool = False,
    ) -> None:
        super().__init__(setting)
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

        self.autocast = False
        sizes = hybrid or (setting.ranks,)
        names = ("replicate", "shard")[-len(sizes) :]
        dtype = torch.bfloat16 if setting.precision == "bf16" else None
        wide = torch.float32 if dtype else None
        how: dict[str, Any] = {
            "mesh": init_device_mesh(setting.device, sizes, mesh_dim_names=names),
            "mp_policy": MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=wide),
        }
        if offload:
            how["offload_policy"] = CPUOffloadPolicy(pin_memory=setting.device == "cuda")
        for block in model.get_submodule("blocks").children():
            fully_shard(block, **how)
        fully_shard(model, **how)
        self.model = model
        self.optimizer = adamw(model.parameters())


def deepspeed_config(setting: Setting, **zero: Any) -> dict[str, Any]:
    """DeepSpeed's configuration; `zero` are the keys of its `zero_optimization`."""
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": setting.accumulation,
        "gradient_clipping": setting.clip,  # the default is 1.0 since 0.19, hence always said
        "zero_optimization": zero,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "bf16": {"enabled": setting.precision == "bf16"},
        "steps_per_print": 10**9,
    }
    if setting.precision == "bf16":
        config["data_types"] = {"grad_accum_dtype": "fp32"}
    return config


class DeepSpeed:
    """DeepSpeed's engine, which clips by itself. `zero` are keys of its `zero_optimization`."""

    def __init__(
        self, setting: Setting, model: nn.Module, *, own_adam: bool = False, **zero: Any
    ) -> None:
        self.setting = setting
        deepspeed = importlib.import_module("deepspeed")
        if own_adam:
            made = importlib.import_module("deepspeed.ops.adam").DeepSpeedCPUAdam
            how = {"lr": LEARNING_RATE, "weight_decay": WEIGHT_DECAY, "adamw_mode": True}
            optimizer = made(model.parameters(), **how)
        else:
            optimizer = self.make_optimizer(model)
        config = deepspeed_config(setting, **zero)
        self.engine: Any = deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0]

    def make_optimizer(self, model: nn.Module) -> Any:
        return adamw(model.parameters())

    def ledger_bytes(self) -> int | None:
        return None

    def step(self, batches: Sequence[Batch]) -> float:
        total = torch.zeros((), device=self.setting.device)
        for ids, labels in batches:
            loss = self.engine(ids, labels)
            self.engine.backward(loss)
            self.engine.step()
            total += loss.detach().float()
        return float(total) / len(batches)


class Onefold(Torch):
    """`onefold.shard` at one stage, with further arguments of `Recipe.zero`; `ranks` are those of
    `shard` that name a mesh.
    """

    def __init__(
        self,
        setting: Setting,
        model: nn.Module,
        stage: int,
        ranks: Mapping[str, Any] = MappingProxyType({}),
        **recipe: Any,
    ) -> None:
        super().__init__(setting)
        self.onefold: Any = importlib.import_module("onefold")
        self.autocast = False
        made = self.onefold.Recipe.zero(stage, precision=setting.precision, **recipe)
        self.model = self.onefold.shard(model, made, **ranks)
        self.optimizer = adamw(self.model.parameters())

    @property
    def engine(self) -> Any:
        """Onefold's engine."""
        return self.onefold.engine_of(self.model)

    def between_boundaries(self) -> contextlib.AbstractContextManager[Any]:
        context: contextlib.AbstractContextManager[Any] = self.onefold.no_sync(self.model)
        return context

    def clip(self) -> None:
        self.onefold.clip_grad_norm_(self.model, self.setting.clip)

    def ledger_bytes(self) -> int | None:
        return int(self.engine.traffic.sent().nbytes)


def prepare(side: str, device: str = "cpu") -> None:
    """Import what the side needs before memory is measured, and nothing of Onefold for another
    library: a library is no state.
    """
    if on_deepspeed(side):
        os.environ.setdefault("DS_ACCELERATOR", device)
        # Its ninja stands beside the interpreter, which need not be on the PATH when no environment
        # is activated.
        beside = str(Path(sys.executable).parent)
        os.environ["PATH"] = os.pathsep.join([beside, os.environ.get("PATH", "")])
        importlib.import_module("deepspeed")
    elif side.startswith("fsdp2"):
        importlib.import_module("torch.distributed.fsdp")
    elif side == "zero-optimizer":
        importlib.import_module("torch.distributed.optim")
    elif not side.startswith(("ddp", "plain")):
        importlib.import_module("onefold.observe")


PEERS: dict[str, Callable[..., Trainer]] = {
    "plain": Plain,  # PyTorch alone
    "ddp": DDP,
    "zero-optimizer": ZeroOptimizer,
    "fsdp2": FSDP2,
    **{f"deepspeed-{stage}": partial(DeepSpeed, stage=stage) for stage in (1, 2, 3)},
    **{f"onefold-{stage}": partial(Onefold, stage=stage) for stage in (0, 1, 2, 3)},
}


def build(side: str, setting: Setting, model: nn.Module) -> Trainer:
    """The side of that name around `model`, which holds whole fp32 weights on every rank."""
    return PEERS[side](setting, model)
