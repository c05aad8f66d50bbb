"""Who steps a parameter is decided for each parameter group, by what its update looks at."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Optimizer

import onefold
from onefold.optim.verdict import verdict_of
from onefold.recipe.optimizers import ELEMENTWISE, KNOWN, REFUSED, WHOLE
from onefold.runtime.flat import Entry, Flat
from onefold.runtime.stepper import GroupVerdict, Stepper, Steppers
from ranks import run_ranks


class Looking(torch.optim.SGD):
    """SGD that divides each gradient by a norm: of nothing, of its parameter, or of all parameters."""

    def __init__(self, params: Any, lr: float = 0.1, looks_at: str = "element") -> None:
        super().__init__(params, lr=lr)
        self.defaults["looks_at"] = looks_at
        for group in self.param_groups:
            group.setdefault("looks_at", looks_at)

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = None if closure is None else torch.enable_grad()(closure)()
        every = [p for g in self.param_groups for p in g["params"] if p.grad is not None]
        norms = {p: p.grad.norm() for p in every}
        total = sum(norms.values(), torch.zeros(()))
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None and group["looks_at"] != "element":
                    p.grad = p.grad / (norms[p] if group["looks_at"] == "parameter" else total)
        super().step()
        return loss


UPDATES = {"element": ELEMENTWISE, "parameter": WHOLE, "all": REFUSED}


def matrix() -> nn.Parameter:
    return nn.Parameter(torch.ones(4, 4))


def test_each_group_of_an_optimizer_has_a_verdict_of_its_own() -> None:
    for default in ("element", "parameter"):
        groups = [{"params": [matrix()], "looks_at": name} for name in ("parameter", "element")]
        optimizer = Looking([*groups, {"params": [matrix()]}], looks_at=default)
        found = [verdict_of(optimizer, number).update for number in range(3)]
        assert found == [WHOLE, ELEMENTWISE, UPDATES[default]], default


def test_a_group_that_looks_at_the_others_refuses_them_all_also_when_it_comes_later() -> None:
    optimizer = Looking([{"params": [matrix()]}, {"params": [matrix()], "looks_at": "parameter"}])
    assert [verdict_of(optimizer, number).update for number in (0, 1)] == [ELEMENTWISE, WHOLE]
    optimizer.add_param_group({"params": [matrix()], "looks_at": "all"})
    assert {verdict_of(optimizer, number).update for number in range(3)} == {REFUSED}


class Reducing(Looking):
    """It adds the gradients of all ranks up by itself."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for p in group["params"]:
                torch.distributed.all_reduce(p.grad)
        return super().step(closure)


def reduces_in_its_step() -> tuple[str, str]:
    verdict = verdict_of(Reducing([matrix()], looks_at="parameter"), 0)
    return verdict.update, verdict.reason


def test_a_step_that_communicates_is_refused_and_sends_nothing_in_its_trial() -> None:
    for update, reason in run_ranks(2, reduces_in_its_step):
        assert update == REFUSED and "communicates by itself" in reason


class Drawing(torch.optim.SGD):
    """SGD in a direction that it draws for each matrix in its first step."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if "direction" not in state:
                    state["direction"] = torch.randn(p.shape[-1])
                state["direction"] = p.grad @ state["direction"] @ p.grad
                p.sub_(state["direction"], alpha=1e-6)
        return None


def test_random_numbers_of_an_update_do_not_make_matrices_look_at_one_another() -> None:
    before = torch.random.get_rng_state()
    verdict = verdict_of(Drawing([matrix()]), 0)
    assert verdict.update == WHOLE, verdict
    assert torch.equal(torch.random.get_rng_state(), before)


def compiled_step() -> tuple[list[str], list[float]]:
    """Verdicts and losses of an optimizer whose updates are compiled as one graph each, which is an
    error where the compiler passes them over.
    """

    @torch.compile(fullgraph=True, backend="aot_eager")
    def normed(p: torch.Tensor, grad: torch.Tensor) -> None:
        p.sub_(grad / grad.norm(), alpha=0.01)

    @torch.compile(fullgraph=True, backend="aot_eager")
    def plain(p: torch.Tensor, grad: torch.Tensor) -> None:
        p.sub_(grad, alpha=0.01)

    class Compiled(torch.optim.SGD):
        @torch.no_grad()
        def step(self, closure: Any = None) -> Any:
            for group in self.param_groups:
                for p in group["params"]:
                    if p.grad is not None:
                        (normed if group["nesterov"] else plain)(p, p.grad)
            return None

    torch.manual_seed(0)
    model = onefold.shard(nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 1)), onefold.Recipe.zero(3))
    first, last = ([*model[n].parameters()] for n in (0, 1))
    groups = [{"params": first, "nesterov": True, "momentum": 0.9}, {"params": last}]
    optimizer, losses = Compiled(groups, lr=0.1), []
    for _ in range(3):
        loss = model(torch.ones(2, 6)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss))
    return [verdict_of(optimizer, number).update for number in range(2)], losses


@pytest.mark.slow
def test_compiled_updates_are_tried_and_stay_compiled() -> None:
    for updates, losses in run_ranks(2, compiled_step):
        assert updates == [WHOLE, ELEMENTWISE]
        assert losses == sorted(losses, reverse=True) and losses[-1] < losses[0]


@pytest.mark.parametrize(
    "name",
    [n for n, row in KNOWN.items() if row.module and importlib.util.find_spec(row.module)],
)
def test_the_table_of_optimizers_says_what_a_trial_finds(name: str) -> None:
    row = KNOWN[name]
    for package in {True, not row.builtin}:
        optimizer = row.load(package)([matrix()], lr=0.1, **row.arguments)
        assert verdict_of(optimizer, 0).update == row.update


class TakesWhole(Stepper):
    """Counts the parameters whose update needs them whole, and steps none."""

    def __init__(self) -> None:
        self.given: list[str] = []

    def accepts(
        self, optimizer: Optimizer, flat: Flat, verdict: Callable[[], GroupVerdict]
    ) -> bool:
        return verdict().update == WHOLE

    def step(self, optimizer: Optimizer, entries: Sequence[Entry]) -> None:
        self.given += [entry.part.names[0] for entry in entries]


def sharded(stage: int) -> tuple[nn.Module, list[nn.Parameter], list[nn.Parameter]]:
    torch.manual_seed(0)
    inner = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    model = onefold.shard(inner, onefold.Recipe.zero(stage, stall_timeout=20.0))
    params = list(model.parameters())
    return model, [p for p in params if p.dim() == 2], [p for p in params if p.dim() == 1]


def two_groups(stage: int) -> dict[str, Any]:
    """What a stepper of whole parameters is given, and what moves, in two steps."""
    model, matrices, vectors = sharded(stage)
    engine, whole = onefold.engine_of(model), TakesWhole()
    engine.stepper = Steppers([whole, *engine.stepper.apart])
    optimizer = Looking([{"params": matrices, "looks_at": "parameter"}, {"params": vectors}])
    before = onefold.full_state_dict(model)
    for _ in range(2):
        model(torch.ones(2, 8)).square().sum().backward()
        optimizer.step()
        graded = all(p.grad is not None for p in matrices)
        optimizer.zero_grad()
    after = onefold.full_state_dict(model)
    moved = sorted(k for k in before if not torch.equal(before[k], after[k]))
    return {"given": sorted(whole.given), "moved": moved, "graded": graded}


@pytest.mark.parametrize("stage", [1, 3])
def test_two_groups_of_one_optimizer_may_have_two_steppers(stage: int) -> None:
    first, second = run_ranks(2, two_groups, stage)
    weights, biases = ["0.weight", "1.weight"], ["0.bias", "1.bias"]
    assert first == {"given": sorted(weights * 2), "moved": biases, "graded": True}
    assert second["given"] == sorted(weights * 2)


def refused_before_anything(stage: int) -> tuple[str, int, bool]:
    """An optimizer whose second group nobody can step, with a closure."""
    model, matrices, vectors = sharded(stage)
    optimizer = Looking([{"params": vectors}, {"params": matrices, "looks_at": "all"}])
    before, calls = [p.detach().clone() for p in model.parameters()], []

    def closure() -> torch.Tensor:
        calls.append(1)
        loss = model(torch.ones(2, 8)).square().sum()
        loss.backward()
        return loss

    closure()
    message = ""
    try:
        optimizer.step(closure)
    except ValueError as error:
        message = str(error)
    same = all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    return message, len(calls), same


@pytest.mark.parametrize("stage", [1, 3])
def test_an_optimizer_with_a_group_that_nobody_steps_is_refused_before_its_closure(
    stage: int,
) -> None:
    for message, calls, same in run_ranks(2, refused_before_anything, stage):
        assert "Looking cannot step sharded parameters" in message
        assert "with a group's looks_at='all'" in message
        assert (calls, same) == (1, True)


def low_bit_beside_offloaded(offload: str) -> list[str]:
    """Which steppers step which parameters, by the name of their class."""
    torch.manual_seed(0)
    inner = nn.Sequential(*(nn.Linear(64, 64) for _ in range(4)))
    recipe = onefold.Recipe.zero(
        1, moments="int8", units=("Linear",), offload_optimizer=offload, stall_timeout=20.0
    )
    model = onefold.shard(inner, recipe)
    engine = onefold.engine_of(model)
    optimizer = torch.optim.AdamW(model.parameters())
    chosen = engine.stepper.choose(optimizer, engine.entries, verdict_of)
    return [
        f"{type(stepper).__name__} {entry.part.names[0]}"
        for stepper, entries in chosen.items()
        for entry in entries
    ]


def test_offloaded_shards_are_stepped_first_and_low_bit_moments_on_the_device_after() -> None:
    for found in run_ranks(2, low_bit_beside_offloaded, "cpu:0.5"):
        steppers = [line.split()[0] for line in found]
        assert set(steppers) == {"OffloadStepper", "LowBitStepper"}, found
        assert steppers == sorted(steppers, reverse=True), found
