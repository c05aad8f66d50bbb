"""torch.distributed.checkpoint between FSDP2 and Onefold: what one saved the other goes on from, at
any stage and number of ranks.
"""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import onefold
from on_ranks import on_ranks, slow
from onefold.checkpoint import CheckpointError
from promises.jobs import first_ranks
from reference import differences, train
from zoo import TinyGPT, tokens_of

Trained = tuple[Any, torch.optim.Optimizer]


class Scaled(nn.LayerNorm):
    """Has extra state."""

    note = 0

    def get_extra_state(self) -> int:
        return self.note

    def set_extra_state(self, state: int) -> None:
        self.note = state


def build(seed: int) -> nn.Module:
    """Tied weights, a frozen parameter, a buffer, extra state; all of them depend on `seed`."""
    torch.manual_seed(seed)
    model = TinyGPT(depth=2, tied=True)
    model.positions.weight.requires_grad_(False)
    model.norm = Scaled(20)
    model.norm.note = seed
    model.register_buffer("scale", torch.tensor([1.5, 2.5]) + seed)
    return model


def is_small(name: str) -> bool:
    return "norm" in name or "bias" in name


def adamw(model: nn.Module, lr: float, turned: bool = False) -> torch.optim.AdamW:
    """Two groups; `turned`: the other way round."""
    small, rest = (
        [p for n, p in model.named_parameters() if is_small(n) == which] for which in (True, False)
    )
    groups = [{"params": small, "weight_decay": 0.0}, {"params": rest, "lr": 2 * lr}]
    return torch.optim.AdamW(groups[::-1] if turned else groups, lr=lr)


def steps(model: nn.Module, optimizer: torch.optim.Optimizer, numbers: range) -> list[float]:
    optimizer.zero_grad()
    return train(model, optimizer, [tokens_of(10 * n + dist.get_rank()) for n in numbers])


def fsdp(seed: int, lr: float) -> Trained:
    model, mesh = build(seed), init_device_mesh("cpu", (dist.get_world_size(),))
    for part in (*model.blocks, model):
        fully_shard(part, mesh=mesh)
    return model, adamw(model, lr)


def sharded(stage: int, seed: int, lr: float, group: Any = None, turned: bool = False) -> Trained:
    model = onefold.shard(build(seed), onefold.Recipe.zero(stage, stall_timeout=30.0), group=group)
    return model, adamw(model, lr, turned)


def whole_of_fsdp(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Weights, buffers and states ("name/key"), without extra state."""
    weights, state = get_state_dict(model, optimizer)
    states = {f"{n}/{k}": v for n, values in state["state"].items() for k, v in values.items()}
    whole = {n: v.full_tensor() if isinstance(v, DTensor) else v for n, v in weights.items()}
    whole |= {n: v.full_tensor() if isinstance(v, DTensor) else v for n, v in states.items()}
    return copy.deepcopy({n: v for n, v in whole.items() if isinstance(v, Tensor)})


def whole(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """The same of an Onefold run, on rank 0."""
    names = {id(p): n for n, p in model.named_parameters()}
    order = [names[id(p)] for g in optimizer.param_groups for p in g["params"]]
    found, states = onefold.full_state_dict(model), optimizer.state_dict()["state"]
    if dist.get_rank() == 0:
        found |= {f"{order[i]}/{k}": v for i, of in states.items() for k, v in of.items()}
    return {n: v.clone() for n, v in found.items() if isinstance(v, Tensor)}


def is_loaded(trained: Trained, wanted: dict[str, Tensor], lr: float, note: int) -> None:
    model, optimizer = trained
    found = whole(model, optimizer)
    assert dist.get_rank() or not differences(wanted, found)
    names = {id(p): n for n, p in model.named_parameters()}
    for group in optimizer.param_groups:
        expected = (lr, 0.0) if is_small(names[id(group["params"][0])]) else (2 * lr, 0.01)
        assert (group["lr"], group["weight_decay"]) == expected
    assert model.norm.note == note


@on_ranks(3)
def test_what_fsdp2_saved_onefold_goes_on_from_at_any_stage_and_number_of_ranks(
    folder: Path,
) -> None:
    reference, optimizer = fsdp(seed=1, lr=0.01)
    steps(reference, optimizer, range(2))
    weights, state = get_state_dict(reference, optimizer)
    dcp.save({"model": weights, "optimizer": state}, checkpoint_id=folder / "saved")
    wanted = whole_of_fsdp(reference, optimizer)
    expected = torch.tensor(steps(reference, optimizer, range(2, 4)))
    for ranks, stage in ((3, 3), (2, 1), (1, 0)):
        group = first_ranks(ranks)
        if dist.get_rank() < ranks:
            model, mine = sharded(stage, 2, 0.5, group, turned=stage == 3)
            model(tokens_of(0))  # keeps whole parameters, which the load makes stale
            state = onefold.dcp_state_dict(model, mine)
            dcp.load(state, checkpoint_id=folder / "saved", process_group=group)
            is_loaded((model, mine), wanted, 0.01, note=1)
            if ranks == 3:
                losses = torch.tensor(steps(model, mine, range(2, 4)))
                assert torch.allclose(losses, expected, rtol=1e-5)
        dist.barrier()


@on_ranks(3)
@pytest.mark.parametrize(("ranks", "stage"), [(3, 3), (2, 1), pytest.param(3, 0, marks=slow)])
def test_what_onefold_saved_fsdp2_goes_on_from_and_so_does_onefold(
    ranks: int, stage: int, folder: Path
) -> None:
    group, told = first_ranks(ranks), [None]
    if dist.get_rank() < ranks:
        model, mine = sharded(stage, 3, 0.02, group)
        steps(model, mine, range(2))
        told = [whole(model, mine)]
        state = onefold.dcp_state_dict(model, mine)
        writing = dcp.async_save(state, checkpoint_id=folder / "saved", process_group=group)
        expected = steps(model, mine, range(2, 4))  # while it is written
        writing.result()
    dist.barrier()
    dist.broadcast_object_list(told)
    wanted: Any = told[0]
    other, theirs = fsdp(seed=9, lr=0.5)
    weights, state = get_state_dict(other, theirs)
    dcp.load({"model": weights, "optimizer": state}, checkpoint_id=folder / "saved")
    set_state_dict(other, theirs, model_state_dict=weights, optim_state_dict=state)
    found = whole_of_fsdp(other, theirs)
    assert not differences(found, {n: t for n, t in wanted.items() if n in found})
    if ranks == 3:
        losses = torch.tensor(steps(other, theirs, range(2, 4)))
        assert torch.allclose(losses, torch.tensor(expected), rtol=1e-5)
    again, mine = sharded(stage, 10, 0.5)
    dcp.load(onefold.dcp_state_dict(again, mine), checkpoint_id=folder / "saved")
    is_loaded((again, mine), wanted, 0.02, note=3)
    assert ranks < 3 or steps(again, mine, range(2, 4)) == expected


@on_ranks(2)
def test_what_cannot_be_saved_or_loaded_so_says_so(folder: Path) -> None:
    model, optimizer = sharded(3, 5, 0.1)
    steps(model, optimizer, range(1))
    state = onefold.dcp_state_dict(model, optimizer)
    leaf = state["model"].state_dict()["norm.weight"]
    one = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    other = onefold.dcp_state_dict(model, one)["optimizer"]
    stranger = onefold.dcp_state_dict(model, adamw(build(0), 0.1))["optimizer"]
    rows: dict[str, Callable[[], object]] = {
        "was to be pickled.*flattens": lambda: pickle.dumps(leaf),
        "top of its dict": lambda: pickle.dumps(state),
        "nothing can be computed with it": lambda: leaf + 1,
        "in 2 groups": lambda: other.load_state_dict(state["optimizer"].state_dict()),
        "belongs to another model": stranger.state_dict,
    }  # fmt: skip
    for words, call in rows.items():
        with pytest.raises(CheckpointError, match=words):
            call()
    average = onefold.ema.EMA(model, 0.9)
    with average.applied():
        for part in state.values():
            with pytest.raises(RuntimeError, match=r"inside ema\.applied"):
                part.load_state_dict(part.state_dict())
    writer = HuggingFaceStorageWriter(str(folder / "a"), save_distributed=True)
    with pytest.raises(CheckpointException, match="of which torch keeps one piece"):
        dcp.save(state, storage_writer=writer)


@on_ranks(2)
def test_moments_in_fp32_of_bf16_masters_come_back_in_fp32(folder: Path) -> None:
    recipe = onefold.Recipe.zero(2, precision="bf16", master_dtype="bf16", moments="fp32")
    found = []
    for seed in (1, 2):
        model: Any = onefold.shard(build(seed), recipe)
        optimizer = adamw(model, 0.1)
        if seed == 1:
            steps(model, optimizer, range(1))
            dcp.save(onefold.dcp_state_dict(model, optimizer), checkpoint_id=folder)
        else:
            dcp.load(onefold.dcp_state_dict(model, optimizer), checkpoint_id=folder)
        found.append(whole(model, optimizer))
    assert dist.get_rank() or not differences(*found)
    assert dist.get_rank() or found[1]["norm.weight/exp_avg"].dtype == torch.float32
