"""Optimizers of whole matrices as people misuse and stretch them: states and counts kept in odd
places, groups that change, steps that some ranks make otherwise. Each is equal to one process, or a
sentence.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

import onefold
from ranks import run_ranks
from whole_optimizers import Lamb, PerTensor


class Layers(nn.Module):
    """Matrices of several sizes, one after the other."""

    sizes = (12, 12, 40, 12, 24, 12)

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        sizes = self.sizes
        self.layers = nn.ModuleList(
            nn.Linear(a, b, bias=False) for a, b in zip(sizes, sizes[1:], strict=False)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x

    def weights(self, numbers: tuple[int, ...]) -> list[nn.Parameter]:
        return [self.layers[n].weight for n in numbers]


Make = Callable[[Layers], Optimizer]


class Pair:
    """A sharded model beside a plain one on every rank, which is given the same gradients."""

    def __init__(self, make: Make, **options: Any) -> None:
        self.model = onefold.shard(Layers(), onefold.Recipe.zero(**options, stall_timeout=60.0))
        self.plain = Layers()
        self.both = [(self.model, make(self.model)), (self.plain, make(self.plain))]
        self.optimizer = self.both[0][1]
        self.steps = 0

    def backward(self) -> None:
        generator = torch.Generator().manual_seed(100 * self.steps + dist.get_rank())
        x = torch.randn(4, 12, generator=generator, device="cpu")
        self.model(x).square().mean().backward()
        self.steps += 1
        given = dict(self.model.named_parameters())
        for name, p in self.plain.named_parameters():
            grad = given[name].grad
            p.grad = None if grad is None else torch.tensor(grad.tolist())

    def step(self) -> None:
        self.backward()
        for _, optimizer in self.both:
            optimizer.step()
            optimizer.zero_grad()

    def differences(self) -> list[str]:
        """The weights and momenta that differ, on the first rank."""
        weights, states = onefold.full_state_dict(self.model), self.optimizer.state_dict()["state"]
        if dist.get_rank():
            return []
        bad = [n for n, v in self.plain.state_dict().items() if not torch.equal(weights[n], v)]
        for number, state in self.both[1][1].state_dict()["state"].items():
            for key, value in state.items() if isinstance(number, int) else ():
                if not torch.equal(states[number][key], value):
                    bad.append(f"{key} of {number}")
        return bad


# -- what optimizers count with --------------------------------------------------------------------


class Decaying(PerTensor):
    """Scales by a norm, at a rate of the number of its steps, which `count` counts."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        count = self.count()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(p.grad / p.grad.norm() / count, alpha=group["lr"])

    def count(self) -> Any:
        raise NotImplementedError


class InAState(Decaying):
    def count(self) -> int:
        state = self.state["all"]
        state["steps"] = state.get("steps", 0) + 1
        return int(state["steps"])


class InATensor(Decaying):
    def __init__(self, params: Any, **options: Any) -> None:
        super().__init__(params, **options)
        self.steps = torch.zeros(())

    def count(self) -> torch.Tensor:
        self.steps += 1
        return self.steps


class InATensorOfAGroup(Decaying):
    def __init__(self, params: Any, **options: Any) -> None:
        super().__init__(params, **options)
        self.param_groups[0]["steps"] = torch.zeros(())

    def count(self) -> torch.Tensor:
        for group in self.param_groups:
            group["steps"] += 1
        return self.param_groups[0]["steps"] if self.param_groups else torch.ones(())


class InADict(Decaying):
    def __init__(self, params: Any, **options: Any) -> None:
        super().__init__(params, **options)
        self.counts = {"steps": 0}

    def count(self) -> int:
        self.counts["steps"] += 1
        return self.counts["steps"]


class InAListOfAGroup(Decaying):
    def __init__(self, params: Any, **options: Any) -> None:
        super().__init__(params, **options)
        self.param_groups[0]["past"] = []

    def count(self) -> int:
        for group in self.param_groups:
            group["past"].append(0.0)
        return len(self.param_groups[0]["past"]) if self.param_groups else 1


class MadeInTheStep(Decaying):
    def count(self) -> int:
        self.steps = getattr(self, "steps", 0) + 1
        return self.steps


COUNTING: tuple[type[Decaying], ...] = (
    InAState,
    InATensor,
    InATensorOfAGroup,
    InADict,
    InAListOfAGroup,
    MadeInTheStep,
)


def counted() -> list[str]:
    out = []
    for kind in COUNTING:
        pair = Pair(lambda model, kind=kind: kind(model.parameters()), stage=3)  # type: ignore[misc]
        for _ in range(3):
            pair.step()
        out += [f"{kind.__name__}: {each}" for each in pair.differences()]
    return out


def test_what_an_optimizer_counts_is_counted_once_wherever_it_keeps_it() -> None:
    assert run_ranks(2, counted) == [[]] * 2


class Momentum(PerTensor):
    """Momentum, scaled by a norm. `momentum_of` says where it is kept."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        number = 0
        for group in self.param_groups:
            for p in group["params"]:
                number += 1
                momentum = self.momentum_of(p, number).mul_(0.9).add_(p.grad)
                p.sub_(momentum / momentum.norm(), alpha=group["lr"])

    def momentum_of(self, p: torch.Tensor, number: int) -> torch.Tensor:
        return self.state[p].setdefault("momentum", torch.zeros_like(p))  # type: ignore[no-any-return]


# -- groups that change ----------------------------------------------------------------------------


def given_others(how: str) -> list[str]:
    pair = Pair(lambda model: Lamb(model.weights((0, 1))), stage=3)
    pair.step()
    for model, optimizer in pair.both:
        if how == "another list":
            optimizer.param_groups[0]["params"] = model.weights((2, 3))
        elif how == "the same list":
            optimizer.param_groups[0]["params"][:] = model.weights((2, 3))
        else:
            optimizer.param_groups.clear()
            optimizer.add_param_group({"params": model.weights((2, 3))})
        for p in model.weights((0, 1)):
            optimizer.state.pop(p)
    for _ in range(2):
        pair.step()
    names = [f"layers.{n}.weight" for n in range(5)]
    return [name for name in pair.differences() if name in names]


@pytest.mark.parametrize("how", ["another list", "the same list", "a group anew"])
def test_parameters_put_in_the_place_of_others_are_stepped(how: str) -> None:
    assert run_ranks(2, given_others, how) == [[]] * 2


def grown(optimizer: Optimizer, model: Layers, groups: tuple[tuple[int, ...], ...]) -> None:
    for numbers in groups:
        optimizer.add_param_group({"params": model.weights(numbers)})


# -- steps -----------------------------------------------------------------------------------------


class Scaled(PerTensor):
    @torch.no_grad()
    def step(self, closure: Any = None, scale: float = 1.0) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                p.sub_(p.grad / p.grad.norm(), alpha=group["lr"] * scale)


# -- switches --------------------------------------------------------------------------------------


class Switched(PerTensor):
    """Momentum, and scaled by a norm where a group says so."""

    def __init__(self, params: Any, normed: bool = False) -> None:
        super().__init__(params, normed=normed)

    def update(self, p: torch.Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        momentum = state.setdefault("momentum", torch.zeros_like(p)).mul_(0.9).add_(p.grad)
        scale = momentum.norm() if group["normed"] else 1.0
        p.sub_(momentum / scale, alpha=group["lr"])


def switched(how: str) -> tuple[str, list[str]]:
    pair = Pair(lambda model: Switched(model.parameters()), stage=3)
    pair.step()
    for _, optimizer in pair.both:
        if how == "loaded":
            state = pair.both[1][1].state_dict()
            groups = [{**group, "normed": True} for group in state["param_groups"]]
            optimizer.load_state_dict({**state, "param_groups": groups})
        optimizer.param_groups[0]["normed"] = True
        if how == "cleared":
            optimizer.state.clear()
    try:
        for _ in range(2):
            pair.step()
    except ValueError as error:
        return str(error), []
    return "", pair.differences()
