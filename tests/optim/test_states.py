"""`optimizer.state_dict()` and `load_state_dict()` are torch's own over whole parameters: saved under
one recipe and loaded under any other, on other ranks, and by DDP.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import looks
import onefold
from on_ranks import on_ranks, slow
from optim.optimizers import ELEMENTWISE, Make
from promises.jobs import first_ranks
from reference import built, ddp, differences, leaves, train
from zoo import Odd, TinyMLP, features_of


def mlp() -> nn.Module:
    """Matrices of several pieces and of some blocks of low-bit moments."""
    return TinyMLP(5, 70, 2)


NVME = {"stage": 3, "offload_optimizer": "nvme", "offload_param": "nvme"}
HYBRID = {"stage": 3, "shard_group": 2, "optimizer_over": "all"}
#: Each row's states are loaded under the next row's recipe.
ROWS: dict[str, tuple[dict[str, Any], str, Callable[[], nn.Module]]] = {
    "stage 0": ({"stage": 0}, "SGD, Nesterov", Odd),
    "stage 1": ({"stage": 1}, "Adam, AMSGrad", Odd),
    "stage 2": ({"stage": 2}, "RMSprop", Odd),
    "stage 3": ({"stage": 3}, "AdamW, fused", mlp),
    "HSDP": ({"stage": 3, "shard_group": 2}, "AdamW", Odd),
    "on the host": ({"stage": 3, "offload_optimizer": "cpu"}, "AdamW", mlp),
    "hybrid": (HYBRID, "RAdam", Odd),
    "on NVMe": (NVME, "AdamW", mlp),
    "stage 0 on NVMe": ({"stage": 0, "offload_optimizer": "nvme"}, "AdamW", Odd),
}
OTHERS = ("SGD", "NAdam", "Adagrad", "Adadelta", "Adamax", "ASGD", "Rprop")
#: Moments at rest in few bits, masters in 16: they come out in torch's names and shapes.
FORMATS: dict[str, dict[str, Any]] = {
    "int8": {"stage": 3, "moments": "int8"},
    "int4 on NVMe": {"stage": 3, "moments": "int4", "offload_optimizer": "nvme"},
    "int8 on the host": {"stage": 0, "moments": "int8", "offload_optimizer": "cpu"},
    "bf16": {"stage": 1, "moments": "bf16"},
    "bf16 masters": {"stage": 3, "precision": "bf16", "master_dtype": "bf16"},
}


def batches(first: int) -> list[Any]:
    """The same on all ranks: sums of 2 or 4 equal gradients, divided by as many, are exact."""
    return [features_of(n, 4, 5) for n in range(first, first + 2)]


def sharded(
    make: Any, recipe: dict[str, Any], folder: Path, seed: int = 0, group: Any = None
) -> Any:
    options = {"nvme": folder} if "nvme" in recipe.values() else {}
    recipe = {"stall_timeout": 20.0, **recipe, **options}
    model = onefold.shard(built(make, seed), onefold.Recipe.zero(**recipe), group=group)
    looks.move_states_in_pieces_of(5120)
    return model


def goes_on(
    make: Any, recipe: dict[str, Any], optimizer: Make, weights: Any, state: Any, folder: Path,
    group: Any = None,
) -> list[float]:  # fmt: skip
    """Losses of two steps of another model with these weights and states, which come out again."""
    model = sharded(make, recipe, folder, seed=1, group=group)
    onefold.load_full_state_dict(model, weights)
    made = optimizer(model.parameters())
    made.load_state_dict(copy.deepcopy(state))
    again = made.state_dict()
    assert dist.get_rank() or differences(leaves(state), leaves(again)) == []
    return train(model, made, batches(2))


@on_ranks(4)
@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    ("name", "optimizer"),
    [
        *((name, row[1]) for name, row in ROWS.items()),
        *(pytest.param("stage 2", other, marks=slow) for other in OTHERS),
    ],
)
def test_states_are_those_of_ddp_and_go_on_under_other_recipes_ranks_and_ddp(
    name: str, optimizer: str, folder: Path
) -> None:
    recipe, _, module = ROWS[name]
    make, rank, number = ELEMENTWISE[optimizer], dist.get_rank(), list(ROWS).index(name)
    plain = ddp(built(module))
    theirs = make(plain.parameters())
    train(plain, theirs, batches(0))
    model = sharded(module, recipe, folder)
    ours = make(model.parameters())
    train(model, ours, batches(0))
    state, expected = copy.deepcopy(ours.state_dict()), copy.deepcopy(theirs.state_dict())
    weights = onefold.full_state_dict(model)
    if rank == 0 or recipe["stage"] == 0:
        assert differences(leaves(expected), leaves(state), 1e-4, 1e-5) == []
    else:
        assert not state["state"]
    losses = train(model, ours, batches(2))

    # What rank 0 alone has, and what every rank has read from a file
    everywhere = [state, weights]
    dist.broadcast_object_list(everywhere)
    other = list(ROWS.values())[(number + 1) % len(ROWS)][0]
    assert goes_on(module, other, make, weights, state, folder) == losses
    pair = first_ranks(2)
    if rank < 2:
        recipe = {"stage": (number + 1) % 4}
        assert goes_on(module, recipe, make, everywhere[1], everywhere[0], folder, pair) == losses
    dist.barrier()
    plain.module.load_state_dict(everywhere[1])
    theirs.load_state_dict(everywhere[0])
    assert train(plain, theirs, batches(2)) == pytest.approx(losses, rel=1e-4)
    # And DDP's, of which rank 0's counts
    ours.load_state_dict({} if rank else expected)
    back = ours.state_dict()
    assert rank or differences(leaves(expected), leaves(back)) == []


@on_ranks(2)
@pytest.mark.parametrize(
    "name", [n if n in ("int8", "bf16 masters") else pytest.param(n, marks=slow) for n in FORMATS]
)
def test_few_bits_and_16_come_out_as_torchs_states_and_go_back_bit_by_bit(
    name: str, folder: Path
) -> None:
    recipe, make = FORMATS[name], ELEMENTWISE["AdamW"]
    model = sharded(mlp, recipe, folder)
    optimizer = make(model.parameters())
    train(model, optimizer, batches(0))
    state, weights = copy.deepcopy(optimizer.state_dict()), onefold.full_state_dict(model)
    dtype = torch.bfloat16 if "masters" in name else torch.float32
    for number, p in enumerate(built(mlp).parameters()) if dist.get_rank() == 0 else ():
        step, *moments = state["state"][number].items()
        assert [step[0], *(name for name, _ in moments)] == ["step", "exp_avg", "exp_avg_sq"]
        assert all((value.shape, value.dtype) == (p.shape, dtype) for _, value in moments)
    losses = train(model, optimizer, batches(2))
    assert goes_on(mlp, recipe, make, weights, state, folder) == losses


@on_ranks(2)
def test_a_state_dict_without_values_is_refused_on_every_rank() -> None:
    model = onefold.shard(built(mlp), onefold.Recipe.zero(1))
    optimizer = ELEMENTWISE["AdamW"](model.parameters())
    train(model, optimizer, batches(0))
    state = optimizer.state_dict()
    for kept in state["state"].values():
        kept |= {k: v.to("meta") for k, v in kept.items() if v.ndim}
    with pytest.raises((ValueError, RuntimeError), match="is on the meta device"):
        optimizer.load_state_dict(state)


@on_ranks(2, fresh=True)
@pytest.mark.parametrize("call", ["state_dict", "load_state_dict"])
def test_a_state_dict_on_rank_0_alone_is_an_error_that_names_the_call(call: str) -> None:
    model = onefold.shard(built(mlp), onefold.Recipe.zero(3, stall_timeout=2.0))
    optimizer = ELEMENTWISE["AdamW"](model.parameters())
    train(model, optimizer, batches(0))
    state = optimizer.state_dict()
    with pytest.raises(onefold.StallError) as caught:
        if dist.get_rank() == 0:
            optimizer.state_dict() if call == "state_dict" else optimizer.load_state_dict(state)
        train(model, optimizer, batches(2))
    assert f"optimizer.{call}()" in str(caught.value)


@on_ranks(2)
@pytest.mark.parametrize("what", ["disk", "step half way"])
def test_what_one_rank_cannot_read_or_write_every_rank_says(what: str, folder: Path) -> None:
    """Before they wait for one another."""
    where = 1
    model = sharded(mlp, {"stage": 3, "offload_optimizer": "nvme"}, folder)
    optimizer, transfers = ELEMENTWISE["AdamW"](model.parameters()), looks.engine(model).transfers
    train(model, optimizer, batches(0))
    whole = copy.deepcopy(optimizer.state_dict())

    def fails(*_: Any) -> None:
        raise OSError("the disk is full")

    words = "the disk is full" if what == "disk" else what
    with pytest.MonkeyPatch.context() as patch:
        if dist.get_rank() == where and what == "disk":
            patch.setattr(transfers, "flush", fails)
        if dist.get_rank() == where and what == "step half way":
            patch.setattr(transfers, "broken", what)
        with pytest.raises(RuntimeError, match=f"rank {where}.*{words}"):
            optimizer.load_state_dict(whole)
        if what == "step half way":
            with pytest.raises(RuntimeError, match=f"rank {where}.*{words}"):
                optimizer.state_dict()


class Counting(torch.optim.SGD):
    """Its state is a number of shape (1,)."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for p in (p for p in self.param_groups[0]["params"] if p.grad is not None):
            p.data.add_(p.grad, alpha=-0.1)
            self.state[p].setdefault("count", torch.zeros(1)).add_(1)


@on_ranks(2)
def test_a_state_of_one_number_is_one_on_ranks_without_elements(folder: Path) -> None:
    model = onefold.shard(
        nn.Sequential(nn.Linear(10, 10), nn.Linear(10, 10)), onefold.Recipe.zero(1)
    )
    optimizer = Counting(model.parameters(), lr=0.1)
    for _ in range(2):
        model(torch.ones(2, 10)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    found = [state["count"] for state in optimizer.state.values()]
    assert [(tuple(count.shape), count.item()) for count in found] == [((1,), 2.0)] * 4
