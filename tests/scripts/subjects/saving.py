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


@habit("`model.state_dict()[name].copy_(tensor)`", "after", sharded=REFUSED)
def into_state(s: Script) -> None:
    s.module.state_dict()["norm.weight"].copy_(torch.full((10,), 2.0))


@habit("`onefold.full_state_dict(model)` through a file into a fresh model", "end")
def full(s: Script) -> None:
    state = from_rank_0(
        s.whole() if s.rank == 0 or s.world.__class__.__name__ == "Onefold" else None
    )
    fresh = Net()
    fresh.load_state_dict(through_file(dict(state)))
    with torch.no_grad():
        s.note("logits", fresh(s.batch[:, :-1]).tolist())


@habit("`onefold.load_full_state_dict(model, state, strict=False)`", "after")
def load_full(s: Script) -> None:
    s.load_whole(
        {"norm.weight": torch.full((10,), 2.0), "head.weight": torch.full((17, 10), 0.1)},
        strict=False,
    )


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


@habit("moments' shapes by hand: `optimizer.state[p]['exp_avg'].shape == p.shape`", sharded=EITHER)
class MomentShapes:
    def optimizer(self, s: Script) -> Any:
        return adamw(s)

    def weights(self, s: Script) -> None:
        s.note(
            "same", [s.optimizer.state[p]["exp_avg"].shape == p.shape for p in s.model.parameters()]
        )


@habit("moments reset: `optimizer.state[p]['exp_avg'].zero_()`")
class MomentsReset:
    def optimizer(self, s: Script) -> Any:
        return adamw(s)

    def weights(self, s: Script) -> None:
        if s.step == 0:
            for p in s.model.parameters():
                s.optimizer.state[p]["exp_avg"].zero_()


@habit("a new optimizer mid-run over the same parameters")
class NewOptimizer:
    def weights(self, s: Script) -> None:
        if s.step == 0:
            s.optimizers = [adamw(s)]
            s.optimizer = s.optimizers[0]


@habit("`copy.deepcopy(model)`", "end", sharded=REFUSED, zero=EITHER)
def deepcopy(s: Script) -> None:
    with torch.no_grad():
        s.note("logits", copy.deepcopy(s.module)(s.batch[:, :-1]).tolist())


@habit("`copy.deepcopy(optimizer)`", "end", sharded=EITHER, zero=EITHER)
def deepcopy_optimizer(s: Script) -> None:
    s.note("groups", len(copy.deepcopy(s.optimizer).param_groups))


@habit("`torch.save([p.data for p in model.parameters()])`", "end", sharded=EITHER, zero=EITHER)
def save_data(s: Script) -> None:
    s.note(
        "sums",
        [p.double().sum().item() for p in through_file([p.data for p in s.model.parameters()])],
    )


@habit(
    "`{n: p.cpu() for n, p in model.named_parameters()}` saved by torch.save",
    "end",
    sharded=EITHER,
    zero=EITHER,
)
def save_dict(s: Script) -> None:
    state = {n: p.detach().cpu() for n, p in s.named()}
    s.note("sums", [v.double().sum().item() for v in through_file(state).values()])


@habit("`torch.save(p.grad)`", "gradients", sharded=EITHER, zero=EITHER)
def save_grad(s: Script) -> None:
    s.note("sum", through_file(s.module.head.weight.grad).double().sum().item())


@habit("`safetensors`-like: `p.detach().contiguous().numpy().tobytes()`", "end", sharded=EITHER)
def to_bytes(s: Script) -> None:
    s.note("bytes", [len(p.detach().contiguous().numpy().tobytes()) for p in s.model.parameters()])


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
