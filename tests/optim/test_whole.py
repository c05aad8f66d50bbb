"""Optimizers that look at whole matrices: equal to the bit to one process that is given the same
gradients, on any number of ranks, at any stage, and with a resume on others in between.
"""

from __future__ import annotations

import contextlib
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.optim._muon as of_torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.optim import Optimizer

import looks
import onefold
from on_ranks import on_ranks, slow
from optim.optimizers import WHOLE, Beside, Own, by_rows, muon, sgd
from promises.jobs import first_ranks
from reference import built, differences, leaves, on_each_rank
from zoo import TinyGPT, tokens_of


def gpt() -> nn.Module:
    """Matrices of unequal sizes, two of them frozen, and a tie."""
    made = TinyGPT(depth=2, tied=True)
    made.blocks[0].attention.requires_grad_(False)  # type: ignore[union-attr]
    return made


def large() -> nn.Module:
    return TinyGPT(depth=1, width=132)


def trainable(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    return [(name, p) for name, p in model.named_parameters() if p.requires_grad]


def made(name: str, model: nn.Module) -> list[Optimizer]:
    """In one optimizer or, as Muon is used most, in two."""
    warnings.simplefilter("ignore")  # of packages, about torch's newer names
    params = [p for _, p in trainable(model)]
    if name != "Muon and AdamW":
        return [WHOLE[name](params)]
    rest = [p for p in params if p.dim() != 2]
    return [muon([p for p in params if p.dim() == 2]), torch.optim.AdamW(rest, lr=0.01)]


def backward(model: nn.Module, number: int, micro_batches: int = 1) -> None:
    for micro in range(micro_batches):
        last = micro + 1 == micro_batches
        with contextlib.nullcontext() if last else onefold.no_sync(model):
            loss = model(tokens_of(100 * number + 10 * micro + dist.get_rank()))
            (loss / micro_batches).backward()


class OneProcess:
    """The plain model on rank 0, which is given a sharded one's gradients."""

    def __init__(self, name: str, make: Any = gpt) -> None:
        self.model = built(make)
        self.optimizers = made(name, self.model)

    def given(self, sharded: nn.Module) -> None:
        """Collective."""
        params = dict(trainable(self.model))
        for name, p in trainable(sharded):
            params[name].grad = torch.tensor(p.grad.tolist())

    def step(self) -> None:
        for optimizer in self.optimizers:
            optimizer.step()

    def differences(self, model: nn.Module, optimizers: list[Optimizer]) -> list[str]:
        """In weights, states and groups, on rank 0. Collective."""
        found = onefold.full_state_dict(model), [o.state_dict() for o in optimizers]
        expected = self.model.state_dict(), [o.state_dict() for o in self.optimizers]
        return differences(leaves(expected), leaves(found)) if dist.get_rank() == 0 else []


def stepped(optimizers: list[Optimizer]) -> None:
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()


#: (ranks, recipe) of the parts of a run.
RUN: tuple[tuple[int, dict[str, Any]], ...] = (
    (2, {"stage": 1}),
    (3, {"stage": 3}),
    (4, {"stage": 3, "shard_group": 2}),
    (2, {"stage": 2, "offload_optimizer": "cpu"}),
)
IN_CI = {
    "Muon and AdamW", "Adafactor", "a norm from the second step on", "rates kept by parameters",
}  # fmt: skip
#: Onefold knows these by the names of their classes; of others the recipe says whole=True.
KNOWN = {"Muon and AdamW", "Adafactor", *(name for name in WHOLE if "pytorch-optimizer" in name)}
#: They keep something where no checkpoint has it.
NOT_RESUMED = {"Muon inside another", "steps counted everywhere", "rates kept by parameters"}


@on_ranks(4)
@pytest.mark.parametrize(
    "name", [n if n in IN_CI else pytest.param(n, marks=slow) for n in ("Muon and AdamW", *WHOLE)]
)
def test_a_run_over_other_ranks_and_stages_equals_one_process_to_the_bit(
    name: str, folder: Path
) -> None:
    if "pytorch-optimizer" in name:
        pytest.importorskip("pytorch_optimizer")
    make = large if "large" in name else gpt
    for number, (ranks, recipe) in enumerate(RUN):
        group = first_ranks(ranks)
        resumed = number > 0 and name not in NOT_RESUMED
        if not resumed:
            plain = OneProcess(name, make)
        if dist.get_rank() < ranks:
            said = onefold.Recipe.zero(**recipe, whole=None if name in KNOWN else True)
            model = onefold.shard(built(make), said, group=group)
            optimizers = made(name, model)
            if resumed:
                onefold.load(folder / "saved", model=model, optimizer=optimizers)
            for micro_batches in (1, 2):
                backward(model, number, micro_batches)
                plain.given(model)
                plain.step()
                stepped(optimizers)
            assert plain.differences(model, optimizers) == [], recipe
            if name not in NOT_RESUMED:
                onefold.save(folder / "saved", model=model, optimizer=optimizers, overwrite=True)
        dist.barrier()


@on_ranks(2)
def test_scaling_and_clipping_come_before_the_whole_step() -> None:
    """One overflow, which all ranks skip."""
    plain, model = OneProcess("Muon and AdamW"), onefold.shard(built(gpt), onefold.Recipe.zero(3))
    optimizers = made("Muon and AdamW", model)
    scaler = onefold.GradScaler(model, init_scale=2.0**10)
    for number in range(3):
        scaler.scale(model(tokens_of(10 * number + dist.get_rank()))).backward()
        if number == 1:
            for _, p in trainable(model):
                p.grad.mul_(float("inf"))
        for optimizer in optimizers:
            scaler.unscale_(optimizer)
        onefold.clip_grad_norm_(model, 0.1)
        plain.given(model)
        for optimizer in optimizers:
            scaler.step(optimizer)
            optimizer.zero_grad()
        scaler.update()
        if number != 1:
            plain.step()
    assert plain.differences(model, optimizers) == []


@on_ranks(2)
@pytest.mark.parametrize("name", ["Muon and AdamW", "Muon inside another"])
def test_each_matrix_is_orthogonalized_by_one_rank(name: str) -> None:
    calls = [0]

    def counted(*args: Any, own: Any = of_torch._zeropower_via_newtonschulz) -> Any:
        calls[0] += 1
        return own(*args)

    for recipe in ({"stage": 1}, {"stage": 3}, {"stage": 3, "offload_optimizer": "cpu"}):
        said = onefold.Recipe.zero(**recipe, whole=None if name in KNOWN else True)
        model = onefold.shard(built(gpt), said)
        optimizers = made(name, model)
        for number in range(2):
            backward(model, number, 2)
            with pytest.MonkeyPatch.context() as patch:
                if number:  # the trial of the first step does not count
                    patch.setattr(of_torch, "_zeropower_via_newtonschulz", counted)
                stepped(optimizers)
        total = torch.tensor(calls.pop())
        dist.all_reduce(total)
        assert total == sum(p.dim() == 2 for _, p in trainable(model)), recipe
        calls.append(0)


# -- what the recipe says, and what cannot be ------------------------------------------------------


@on_ranks(2)
def test_the_recipe_says_which_groups_are_stepped_whole() -> None:
    every = {name for name, _ in trainable(built(gpt))}
    up = "blocks.1.mlp.0.weight"
    for options, make, expected in (
        ({"whole": True}, lambda p: Own(p, by_rows), every),
        ({"whole": False}, lambda p: Own(p, by_rows), set()),
        ({"whole": ["*.1.mlp.0.weight"]}, sgd, {up}),
    ):
        model = onefold.shard(built(gpt), onefold.Recipe.zero(3, **options))
        params = dict(trainable(model))
        optimizer = make([params.pop(up)])
        optimizer.add_param_group({"params": list(params.values())})
        backward(model, 0)
        optimizer.step()
        assert looks.stepped_whole(model, optimizer) == expected


class Raising(Own):
    """`raises`: for one matrix."""

    raises = False

    def __init__(self, params: Any) -> None:
        super().__init__(params, by_rows)

    def updated(self, p: Any, grad: Any, state: Any) -> Any:
        if self.raises and p.shape == (60, 20):
            raise FloatingPointError("no convergence")
        return super().updated(p, grad, state)


@on_ranks(2)
@pytest.mark.parametrize(
    ("event", "words"),
    [
        ("step in backward", "step_in_backward=True"),
        ("states on a disk", "NVMe"),
        ("failure", "Raising.step() failed on"),
        ("held", "also calls that of AdamW"),
        ("divergence", "gradients of different parameters"),
    ],
)
def test_what_cannot_be_stepped_whole_is_told_on_every_rank(
    event: str, words: str, folder: Path
) -> None:
    options: dict[str, Any] = {
        "step in backward": {"offload_optimizer": "cpu", "step_in_backward": True},
        "states on a disk": {"offload_optimizer": "nvme", "nvme": folder},
    }.get(event, {})
    recipe = onefold.Recipe.zero(3, stall_timeout=20.0, whole=True, **options)
    model = onefold.shard(built(gpt), recipe)
    params = [p for _, p in trainable(model)]
    optimizer: Any = Beside(params) if event == "held" else Raising(params)
    before = onefold.full_state_dict(model)
    backward(model, 0)
    if event == "failure":
        stepped([optimizer])
        backward(model, 1)
        optimizer.raises = True
    if event == "divergence" and dist.get_rank() == 1:
        optimizer.zero_grad()
    with pytest.raises((ValueError, RuntimeError)) as caught:
        optimizer.step()
    if event in ("failure", "held"):  # it happened on one rank
        assert "failed on" in str(caught.value)
        assert any(words in each for each in on_each_rank(str(caught.value)))
    else:
        assert words in str(caught.value)
        assert differences(before, onefold.full_state_dict(model)) == []


@on_ranks(2)
def test_a_group_that_was_empty_is_tried_when_it_gets_parameters() -> None:
    model = onefold.shard(built(gpt), onefold.Recipe.zero(3))
    params = dict(trainable(model))
    optimizer = torch.optim.Adafactor(
        [{"params": [params["norm.weight"]]}, {"params": []}], lr=0.01
    )
    for number in range(2):
        backward(model, number)
        optimizer.step()
        optimizer.zero_grad()
        if not number:
            optimizer.param_groups[1]["params"].append(params["blocks.1.mlp.0.weight"])
    assert "blocks.1.mlp.0.weight" in looks.stepped_whole(model, optimizer)


class Routed(nn.Module):
    """A dense matrix behind those of experts, which ranks of `mesh` divide unevenly: the last has none."""

    def __init__(self, mesh: Any = None, number: int = 6) -> None:
        super().__init__()
        experts = torch.arange(number * 8 * 4.0).view(number, 8, 4) / 100
        if mesh is not None:
            experts = distribute_tensor(experts, mesh, [Shard(0)], src_data_rank=None)
        self.experts = nn.Parameter(experts)
        self.dense = nn.Parameter(torch.arange(8 * 12.0).view(8, 12) / 10)

    def forward(self, x: Any) -> Any:
        given = self.experts
        local = given.to_local() if isinstance(given, DTensor) else given
        return local.square().sum() + (x @ self.dense).square().sum()


def by_matrix(p: Any, grad: torch.Tensor, state: Any) -> torch.Tensor:
    return grad / (1 + grad.norm(dim=(-2, -1), keepdim=True))


@on_ranks(4)
def test_ranks_without_experts_take_part_in_the_steps_of_the_others() -> None:
    mesh = init_device_mesh("cpu", (1, 4), mesh_dim_names=("dp", "ep"))
    recipe = onefold.Recipe.zero(3, whole=True, stall_timeout=20.0)
    models: list[Any] = [
        onefold.shard(Routed(mesh["ep"]), recipe, mesh=mesh, data=("dp", "ep")),
        Routed(),
    ]
    for model in models:
        optimizer = Own([{"params": []}, {"params": [*model.parameters()]}], by_matrix)
        for _ in range(2):
            model(torch.ones(2, 8)).backward()
            if model is models[1]:
                model.experts.grad /= 4
            optimizer.step()
            optimizer.zero_grad()
    found = onefold.full_state_dict(models[0])
    wrong = differences(models[1].state_dict(), found, 1e-5, 1e-6) if found else []
    assert not wrong, wrong


def with_momentum(p: Any, grad: torch.Tensor, state: Any) -> torch.Tensor:
    momentum = state.setdefault("momentum", torch.zeros_like(grad)).mul_(0.9).add_(grad)
    return by_matrix(p, momentum, state)


@on_ranks(4)
def test_ranks_without_experts_load_what_the_others_step_whole(folder: Path) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "ep"))
    recipe, weights = onefold.Recipe.zero(0, whole=True, stall_timeout=20.0), []
    for loads in (False, True):
        model: Any = onefold.shard(Routed(mesh["ep"], 1), recipe, mesh=mesh, data=("dp", "ep"))
        optimizer = Own([*model.parameters()], with_momentum)
        if loads:
            onefold.load(folder / "saved", model=model, optimizer=optimizer)
        for step in range(1 if loads else 2):
            if step == 1:
                onefold.save(folder / "saved", model=model, optimizer=optimizer)
            model(torch.ones(2, 8)).backward()
            optimizer.step()
            optimizer.zero_grad()
        weights.append(onefold.full_state_dict(model))
    assert not (wrong := differences(*weights)), wrong
