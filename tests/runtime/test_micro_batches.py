"""Gradients kept under no_sync are the user's to drop, not to change."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn

from ranks import run_ranks
from trials import (
    Case,
    GPTCase,
    MLPCase,
    differences,
    fresh,
    train_reference,
    train_sharded,
)
from zoo import ResidualBlock, TinyGPT


class DropsOneMicroBatch(MLPCase):
    """Three micro-batches a step, the first or the second of which is dropped: its gradients, and
    those before it.
    """

    units = (ResidualBlock,)
    micro_batches = 3
    dropped_after: ClassVar[int] = 0

    def drop(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        optimizer.zero_grad()

    def step(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, rank: int, step: int
    ) -> float:
        optimizer.zero_grad()
        total = 0.0
        for micro in range(self.micro_batches):
            last = micro == self.micro_batches - 1
            with contextlib.nullcontext() if last else no_sync(model):
                loss = self.loss(model, self.batch(rank, step * self.micro_batches + micro))
                loss.backward()
            total += loss.item()
            if micro == self.dropped_after:
                self.drop(model, optimizer)
        optimizer.step()
        return total


from unreduced import KEEPING, MODES, no_sync


class DropsTwoMicroBatches(DropsOneMicroBatch):
    dropped_after = 1


class DropsByFillingWithZeros(DropsOneMicroBatch):
    def drop(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        optimizer.zero_grad(set_to_none=False)


class DropsByTheModel(DropsOneMicroBatch):
    def drop(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        model.zero_grad()


class DropsOneBlock(DropsOneMicroBatch):
    """One block's gradients are dropped, what the other parameters have stays."""

    def drop(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        next(m for m in model.modules() if isinstance(m, ResidualBlock)).zero_grad()


class DropsOneParameter(DropsOneMicroBatch):
    """One bias of a unit is dropped by hand; its neighbours in the same flat buffer stay."""

    def drop(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        block = next(m for m in model.modules() if isinstance(m, ResidualBlock))
        block.up.bias.grad = None


DROPS = [
    DropsOneMicroBatch,
    DropsTwoMicroBatches,
    DropsByFillingWithZeros,
    DropsByTheModel,
    DropsOneBlock,
    DropsOneParameter,
]


def compare_drops(case_class: type[Case], modes: list[str]) -> list[str]:
    reference = train_reference(case_class())
    found = []
    for name in modes:
        stage, options = MODES[name]
        found += differences(
            name, reference, train_sharded(case_class(), stage, **options), 1e-5, 1e-6
        )
    return found


@pytest.mark.parametrize("case", DROPS, ids=lambda case: case.__name__)
def test_gradients_dropped_between_micro_batches_are_gone_as_in_ddp(case: type[Case]) -> None:
    assert run_ranks(2, compare_drops, case, list(MODES)) == [[], []]


def drops_in_groups_of_one() -> list[str]:
    reference = train_reference(DropsOneMicroBatch())
    return differences(
        "groups of one",
        reference,
        train_sharded(DropsOneMicroBatch(), 3, shard_group=1),
        1e-5,
        1e-6,
    )


def test_groups_of_one_rank_hold_no_sums_that_dropping_would_miss() -> None:
    assert run_ranks(2, drops_in_groups_of_one) == [[], []]


def dropping_matters() -> bool:
    """Whether the case tells a dropped micro-batch from a kept one: DDP's own curves differ."""

    class DropsNothing(DropsOneMicroBatch):
        dropped_after = -1

    return bool(
        differences(
            "", train_reference(DropsNothing()), train_reference(DropsOneMicroBatch()), 1e-5, 1e-6
        )
    )


def test_the_curve_of_these_cases_shows_a_micro_batch_that_was_not_dropped() -> None:
    assert run_ranks(2, dropping_matters) == [True, True]


def held(parameter: Any) -> int:
    """How many of its elements this rank holds."""
    start, stop = parameter.onefold.interval
    return stop - start


CHANGES: dict[str, Callable[[nn.Parameter], Any]] = {
    "in place": lambda p: p.grad.mul_(2),  # type: ignore[union-attr]
    "by adding": lambda p: p.grad.add_(1.0),  # type: ignore[union-attr]
    "through data": lambda p: p.grad.copy_(torch.ones_like(p.grad)),  # type: ignore[union-attr, arg-type]
    "by another": lambda p: setattr(p, "grad", torch.ones_like(p)),
}


def change_unreduced_gradients(mode: str) -> dict[str, str]:
    """What a rank is told that changed a gradient of its own under no_sync, in each way, before a
    micro-batch and before a step.
    """
    import onefold

    stage, options = MODES[mode]
    said = {}
    for how, change in CHANGES.items():
        for then in ("a micro-batch", "a step"):
            case = GPTCase()
            model = onefold.shard(
                fresh(case), onefold.Recipe.zero(stage, stall_timeout=60.0, units=(), **options)
            )
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            with onefold.no_sync(model):
                case.loss(model, case.batch(0, 0)).backward()
            # A parameter that lies across the cut between the ranks: either holds a part of its
            # gradient.
            name, parameter = next(
                (n, p) for n, p in model.named_parameters() if stage == 0 or 0 < held(p) < p.numel()
            )
            try:
                change(parameter)
                if then == "a micro-batch":
                    case.loss(model, case.batch(0, 1)).backward()
                else:
                    optimizer.step()
                said[f"{how}, then {then}"] = "nothing"
            except RuntimeError as error:
                text = str(error)
                # Where it is made
                at_once = (
                    "change them, after the last micro-batch" in text and "by another" not in how
                )
                told = (
                    repr(name) in text and ("was changed" in text or at_once) and "no_sync" in text
                )
                said[f"{how}, then {then}"] = "" if told else text
    return said


@pytest.mark.parametrize("mode", KEEPING)
def test_an_unreduced_gradient_that_was_changed_is_an_error_with_the_parameters_name(
    mode: str,
) -> None:
    for said in run_ranks(2, change_unreduced_gradients, mode):
        assert len(said) == 2 * len(CHANGES) and not any(said.values()), said


class Rows(nn.Module):
    """An embedding of which a rank's batch touches few rows, and a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.Embedding(128, 32)
        self.leave = nn.Linear(32, 1)

    def forward(self, ids: Tensor) -> Tensor:
        return self.leave(self.rows(ids)).sum()


ON_ROWS: dict[str, Callable[[nn.Module, torch.optim.Optimizer], Any]] = {
    "scaled": lambda model, optimizer: model.rows.weight.grad.mul_(0.5),  # type: ignore[union-attr, operator]
    "clipped": lambda model, optimizer: nn.utils.clip_grad_value_([model.rows.weight], 1e-3),  # type: ignore[list-item]
    "nothing": lambda model, optimizer: None,
    "all zeroed": lambda model, optimizer: optimizer.zero_grad(set_to_none=False),
    "one dropped": lambda model, optimizer: setattr(model.rows.weight, "grad", None),
}


def change_rows_of_others(mode: str, how: str) -> tuple[str, float]:
    """Each rank's batch touches rows that lie in the other's interval. What is said, and the sum of
    this rank's reduced gradient.
    """
    import onefold

    stage, options = MODES[mode]
    torch.manual_seed(0)
    model = onefold.shard(
        Rows(), onefold.Recipe.zero(stage, stall_timeout=60.0, units=(), **options)
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ids = torch.arange(100, 104) if torch.distributed.get_rank() == 0 else torch.arange(0, 4)
    with onefold.no_sync(model):
        model(ids).backward()
    try:
        ON_ROWS[how](model, optimizer)
        model(ids + 4).backward()
    except RuntimeError as error:
        return str(error), 0.0
    return "", model.rows.weight.grad.abs().sum().item()  # type: ignore[union-attr, operator]


@pytest.mark.parametrize("mode", KEEPING)
def test_a_changed_gradient_whose_part_here_is_all_zero_is_not_taken_for_a_dropped_one(
    mode: str,
) -> None:
    for how in ("scaled", "clipped"):
        for said, _ in run_ranks(2, change_rows_of_others, mode, how):
            assert "'rows.weight'" in said and (
                "was changed" in said or "change them, after the last" in said
            ), (how, said)


@pytest.mark.parametrize("mode", KEEPING)
def test_dropping_such_a_gradient_halves_what_two_micro_batches_bring(mode: str) -> None:
    whole = [total for _, total in run_ranks(2, change_rows_of_others, mode, "nothing")]
    for how in ("all zeroed", "one dropped"):
        results = run_ranks(2, change_rows_of_others, mode, how)
        assert [said for said, _ in results] == ["", ""]
        assert [total for _, total in results] == pytest.approx(
            [total / 2 for total in whole]
        ) and min(whole) > 0


def step_on_unreduced_gradients(mode: str) -> tuple[str, list[str]]:
    """A step taken under no_sync is refused; the micro-batch that was missing puts it right."""
    import onefold

    stage, options = MODES[mode]

    def steps(mistaken: bool) -> tuple[str, Any]:
        case, said = MLPCase(), ""
        model = onefold.shard(
            fresh(case), onefold.Recipe.zero(stage, stall_timeout=60.0, **options)
        )
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with onefold.no_sync(model):
            case.loss(model, case.batch(0, 0)).backward()
        if mistaken:
            try:
                optimizer.step()
            except RuntimeError as error:
                said = str(error)
        case.loss(model, case.batch(0, 1)).backward()
        optimizer.step()
        return said, onefold.full_state_dict(model)

    said, weights = steps(True)
    _, expected = steps(False)
    return said, [name for name in expected if not torch.equal(expected[name], weights[name])]


@pytest.mark.parametrize("mode", KEEPING)
def test_a_step_on_unreduced_gradients_is_refused_and_the_boundary_puts_it_right(mode: str) -> None:
    for said, changed in run_ranks(2, step_on_unreduced_gradients, mode):
        assert "no_sync" in said and "reduced" in said, said
        assert changed == []


def half_a_step_of_one_process(mode: str) -> list[str]:
    """A lone process drops and keeps like any other, in 16 bits, where its parameters are copies of
    the masters.
    """
    import onefold

    stage, options = MODES[mode]
    found = []
    grads = []
    for dropping in (True, False):
        torch.manual_seed(0)
        model = onefold.shard(TinyGPT(), onefold.Recipe.zero(stage, precision="bf16", **options))
        case = GPTCase()
        if dropping:
            with onefold.no_sync(model):
                case.loss(model, case.batch(0, 0)).backward()
            model.zero_grad()
        case.loss(model, case.batch(0, 1)).backward()
        grads.append({n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None})
    found += [name for name in grads[1] if not torch.equal(grads[0][name], grads[1][name])]
    return (
        found
        if grads[0].keys() == grads[1].keys() and grads[1]
        else [*found, "not the same parameters have gradients"]
    )


@pytest.mark.parametrize("mode", MODES)
def test_one_process_in_sixteen_bits_drops_unreduced_gradients_too(mode: str) -> None:
    assert half_a_step_of_one_process(mode) == []
