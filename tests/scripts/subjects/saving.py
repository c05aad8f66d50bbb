"""State dicts, checkpoints by hand, copies and pickles."""

from __future__ import annotations

import copy
import io
from typing import Any

import torch
import torch.distributed as dist

from scripts.loop import Net, Script
from scripts.registry import EITHER, REFUSED, ROUNDING, STALLED, habit


def through_file(value: Any) -> Any:
    """`value` as it comes back from torch.save and torch.load."""
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def from_rank_0(value: Any) -> Any:
    """What rank 0 saved, as every rank reads it from a shared folder."""
    box = [value]
    dist.broadcast_object_list(box, src=0)
    return box[0]


def adamw(s: Script) -> Any:
    return torch.optim.AdamW(s.model.parameters(), lr=0.02, eps=1e-4)


@habit("`model.state_dict()`", "end", sharded=REFUSED)
def state_dict(s: Script) -> None:
    s.note("shapes", {k: tuple(v.shape) for k, v in s.module.state_dict().items()})


# The sentence is told to rank 0; the other ranks wait for it in the next collective.
@habit(
    "`torch.save(model.state_dict(), path)` by rank 0",
    "end",
    sharded=STALLED,
    composes=False,
    options={"stall_timeout": 1.0},
)
def save(s: Script) -> None:
    if s.rank == 0:
        through_file(s.module.state_dict())


@habit("`model.load_state_dict(state)` with a whole state dict", "after", sharded=REFUSED)
def load(s: Script) -> None:
    torch.manual_seed(4)
    s.module.load_state_dict(Net().state_dict())


@habit("`param.data.copy_(state[name])` for each name (old HF, llama)", "after", sharded=EITHER)
def copy_each(s: Script) -> None:
    torch.manual_seed(4)
    state = Net().state_dict()
    for n, p in s.named():
        p.data.copy_(state[n])


@habit("`onefold.full_state_dict(model)` through a file into a fresh model", "end")
def full(s: Script) -> None:
    state = from_rank_0(
        s.whole() if s.rank == 0 or s.world.__class__.__name__ == "Onefold" else None
    )
    fresh = Net()
    fresh.load_state_dict(through_file(dict(state)))
    with torch.no_grad():
        s.note("logits", fresh(s.batch[:, :-1]).tolist())


@habit(
    "`optimizer.state_dict()` of rank 0 through torch.save, loaded everywhere into a new optimizer"
)
class OptimizerState:
    def optimizer(self, s: Script) -> Any:
        return adamw(s)

    def weights(self, s: Script) -> None:
        if s.step == 0:
            state = s.optimizer.state_dict()
            state = from_rank_0(through_file(state) if s.rank == 0 else None)
            s.optimizers = [torch.optim.AdamW(s.model.parameters(), lr=0.5)]
            s.optimizer = s.optimizers[0]
            s.optimizer.load_state_dict(state)


@habit(
    "moments looked at by hand: `optimizer.state[p]['exp_avg'].norm()`",
    sharded=EITHER,
    expect=ROUNDING,
)
class Moments:
    def optimizer(self, s: Script) -> Any:
        return adamw(s)

    def weights(self, s: Script) -> None:
        s.note(
            "norms", [s.optimizer.state[p]["exp_avg"].norm().item() for p in s.model.parameters()]
        )


@habit("`copy.deepcopy(model)`", "end", sharded=REFUSED, zero=EITHER)
def deepcopy(s: Script) -> None:
    with torch.no_grad():
        s.note("logits", copy.deepcopy(s.module)(s.batch[:, :-1]).tolist())


@habit("resume: a new model, weights and optimizer state loaded, trained on")
class Resume:
    def optimizer(self, s: Script) -> Any:
        return adamw(s)

    def weights(self, s: Script) -> None:
        if s.step != 0:
            return
        weights = from_rank_0({k: v.detach().clone() for k, v in s.whole().items()})
        state = from_rank_0(through_file(s.optimizer.state_dict()))
        fresh = Net()
        fresh.load_state_dict(weights)
        s.module, s.model = fresh, s.world.wrap(fresh)
        s.optimizers = [adamw(s)]
        s.optimizer = s.optimizers[0]
        s.optimizer.load_state_dict(state)
