"""How each side is built. All have the same weights, matrices, rates and momentum."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate
from torch.optim import _muon

from benchmarks.peers import adapters
from benchmarks.peers.model import Batch
from benchmarks.whole.newton_schulz import Spent
from benchmarks.whole.settings import Setting

MUON: dict[str, float] = {"lr": 0.02, "weight_decay": 0.1, "momentum": 0.95}
ADAMW: dict[str, Any] = {
    "lr": adapters.LEARNING_RATE,
    "weight_decay": adapters.WEIGHT_DECAY,
    "betas": (0.9, 0.999),
    "eps": 1e-8,
}


def divided(model: nn.Module) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """The matrices of the blocks, and all other parameters."""
    named = list(model.named_parameters())
    matrices = [p for name, p in named if p.ndim == 2 and ".blocks." in f".{name}"]
    mine = set(map(id, matrices))
    return matrices, [p for _, p in named if id(p) not in mine]


class Counted:
    """A side that knows what it has spent in Newton-Schulz."""

    setting: Setting

    def __init__(self, setting: Setting, *arguments: Any, **named: Any) -> None:
        self.spent = Spent()
        super().__init__(setting, *arguments, **named)

    def step(self, batches: Sequence[Batch]) -> float:
        self.spent.step()
        loss: float = super().step(batches)  # type: ignore[misc]
        return loss

    def counted(self) -> dict[str, list[Any]]:
        """Of each timed step."""
        timed = slice(-self.setting.steps, None)
        return {
            "newton_schulz_s": self.spent.seconds[timed],
            "newton_schulz_calls": self.spent.calls[timed],
        }


class Onefold(Counted, adapters.Onefold):
    def __init__(self, setting: Setting, model: nn.Module, stage: int, *, muon: bool) -> None:
        super().__init__(setting, model, stage, borders=muon)
        if muon:
            self.spent.watch_torch(setting.iterations)
            made = importlib.import_module("onefold.optim.muon").MuonWithAdamW
            matrices, rest = divided(self.model)
            self.optimizer = made(
                [
                    {"params": matrices, "use_muon": True, **MUON},
                    {"params": rest, "use_muon": False, "fused": True, **ADAMW},
                ]
            )


class GatheredMuon(torch.optim.Optimizer):
    """Muon over FSDP2, gathering everywhere: each rank makes every update whole, and uses its part."""

    def __init__(self, params: Sequence[nn.Parameter]) -> None:
        super().__init__(params, dict(MUON))

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state["momentum_buffer"] = torch.zeros_like(p)
                state["momentum_buffer"].lerp_(p.grad, 1 - group["momentum"])
                nesterov = p.grad.lerp(state["momentum_buffer"], group["momentum"]).full_tensor()
                given = (_muon.DEFAULT_A, _muon.DEFAULT_B, _muon.DEFAULT_C)
                whole = _muon._zeropower_via_newtonschulz(
                    nesterov, given, _muon.DEFAULT_NS_STEPS, _muon.EPS
                )
                everywhere = DTensor.from_local(whole, p.device_mesh, [Replicate()])
                update = everywhere.redistribute(placements=p.placements)
                p.mul_(1 - group["lr"] * group["weight_decay"])
                p.add_(update, alpha=-_muon._adjust_lr(group["lr"], None, p.shape))


class Both:
    """Two optimizers that are stepped as one."""

    def __init__(self, *optimizers: torch.optim.Optimizer) -> None:
        self.optimizers = optimizers

    def step(self) -> None:
        for optimizer in self.optimizers:
            optimizer.step()

    def zero_grad(self) -> None:
        for optimizer in self.optimizers:
            optimizer.zero_grad()


class FSDP2(Counted, adapters.FSDP2):
    def __init__(self, setting: Setting, model: nn.Module, *, muon: bool) -> None:
        super().__init__(setting, model)
        if muon:
            self.spent.watch_torch(setting.iterations)
            matrices, rest = divided(self.model)
            self.optimizer: Any = Both(GatheredMuon(matrices), adapters.adamw(rest))


class DeepSpeed(Counted, adapters.DeepSpeed):
    def make_optimizer(self, model: nn.Module) -> Any:
        """Its own, of parameters marked as its engine marks them."""
        self.spent.watch_deepspeed(self.setting.iterations)
        theirs: Any = importlib.import_module("deepspeed.runtime.zero.muon.muon_optimizer")
        matrices, rest = divided(model)
        for use_muon, params in ((True, matrices), (False, rest)):
            for p in params:
                p.use_muon = use_muon  # type: ignore[attr-defined]
        groups = [
            {"params": matrices, "use_muon": True, **MUON},
            {"params": rest, "use_muon": False, **ADAMW},
        ]
        fused = {"adam_optimizer_kwargs": {"fused": True}}
        return theirs.MuonWithAuxAdam(groups, adam_optimizer=torch.optim.AdamW, **fused)


def build(side: str, setting: Setting, model: nn.Module) -> Any:
    """The side around whole fp32 weights.

    Raises:
        ValueError: there is no such side.
    """
    family, _, how = side.partition("-")
    stage, _, optimizer = how.rpartition("-")
    muon = optimizer == "muon"
    if family == "fsdp2" and how in ("adamw", "muon"):
        return FSDP2(setting, model, muon=muon)
    if stage in ("1", "2", "3") and family == "onefold" and optimizer in ("adamw", "muon"):
        return Onefold(setting, model, int(stage), muon=muon)
    if stage in ("1", "2", "3") and family == "deepspeed" and muon:
        more = {"reduce_scatter": False} if stage == "3" else {}
        return DeepSpeed(setting, model, stage=int(stage), **more)
    raise ValueError(f"There is no side {side!r}.")
