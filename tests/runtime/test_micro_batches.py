"""Gradients kept under no_sync are the user's to drop, not to change; a backward pass that fails
takes them along.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from models import ResidualBlock, TinyGPT, TinyMLP
from onefold.memory.pool import GATHERED, IDLE, REDUCTION
from ranks import run_ranks
from trials import (
    Case,
    GPTCase,
    MeanOverRanks,
    MLPCase,
    differences,
    fresh,
    train_reference,
    train_sharded,
)

#: Stages by name, with the options of the recipe: whole gradients until the boundary at "at the
#: boundary" and stages 0 and 1.
MODES: dict[str, tuple[int, dict[str, Any]]] = {
    "stage 0": (0, {}),
    "stage 1": (1, {}),
    "stage 2": (2, {}),
    "stage 2 at the boundary": (2, {"reduce_at": "boundary"}),
    "stage 3": (3, {}),
    "stage 3 at the boundary": (3, {"reduce_at": "boundary"}),
}
# Those that keep gradients whole under no_sync
KEEPING = [name for name in MODES if name not in ("stage 2", "stage 3")]


def no_sync(model: nn.Module) -> Any:
    import onefold

    return model.no_sync() if isinstance(model, DistributedDataParallel) else onefold.no_sync(model)


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


class Broken(Exception):
    pass


class BreaksInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        raise Broken("a backward that fails")


class BreaksBehindBlock1(TinyMLP):
    """Backward reaches the tail and the last block, then raises: some units are reduced, some are
    not.
    """

    broken = False

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks[1](self.blocks[0](torch.tanh(self.enter(x))))
        if self.broken:
            x = BreaksInBackward.apply(x)
        return self.leave(self.blocks[2](x))


class Accumulates(MLPCase):
    """Two micro-batches a step. With `breaking`, step 1 first tries a pass under no_sync and one
    that raises in backward.
    """

    steps = 4
    units = (ResidualBlock, "leave")

    def __init__(self, breaking: bool, under_no_sync: bool) -> None:
        super().__init__()
        self.breaking, self.under_no_sync = breaking, under_no_sync

    def build(self) -> nn.Module:
        return BreaksBehindBlock1()

    def step(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, rank: int, step: int
    ) -> float:
        if self.breaking and step == 1:
            self.fail(model, rank)
        optimizer.zero_grad()
        losses = []
        for micro in range(2):
            with no_sync(model) if micro == 0 else contextlib.nullcontext():
                losses.append(self.loss(model, self.batch(rank, 2 * step + micro)))
                losses[-1].backward()
        optimizer.step()
        return sum(loss.item() for loss in losses)

    def fail(self, model: nn.Module, rank: int) -> None:
        assert isinstance(model, BreaksBehindBlock1)
        with no_sync(model):
            self.loss(model, self.batch(rank, 50)).backward()
        model.broken = True
        with (
            no_sync(model) if self.under_no_sync else contextlib.nullcontext(),
            pytest.raises(Broken),
        ):
            self.loss(model, self.batch(rank, 51)).backward()
        model.broken = False


def compare_with_a_broken_pass(mode: str) -> list[str]:
    stage, options = MODES[mode]
    untouched = train_sharded(Accumulates(False, False), stage, **options)
    found = []
    for under_no_sync in (False, True):
        broken = train_sharded(Accumulates(True, under_no_sync), stage, **options)
        found += differences(
            f"after a backward that raised (under no_sync: {under_no_sync})",
            untouched,
            broken,
            0.0,
            0.0,
        )
    return found


@pytest.mark.parametrize("mode", MODES)
def test_a_backward_that_raised_after_an_unreduced_one_leaves_no_trace_in_the_numbers(
    mode: str,
) -> None:
    assert run_ranks(2, compare_with_a_broken_pass, mode) == [[], []]


def break_then_start_afresh(stage: int, options: dict[str, Any]) -> list[str]:
    """Two steps, a kept pass, a pass that raises, two steps; the last two as by a model made of the
    weights after the first two.
    """
    import onefold

    case = Accumulates(False, False)

    def two(model: nn.Module, first: int) -> list[float]:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        return [
            case.step(model, optimizer, torch.distributed.get_rank(), step)
            for step in (first, first + 1)
        ]

    model = onefold.shard(
        fresh(case), onefold.Recipe.zero(stage, stall_timeout=60.0, **options), units=case.units
    )
    two(model, 0)
    weights = onefold.full_state_dict(model)
    case.fail(model, torch.distributed.get_rank())
    continued = two(model, 2)
    again = onefold.shard(
        case.build(), onefold.Recipe.zero(stage, stall_timeout=60.0, **options), units=case.units
    )
    onefold.load_full_state_dict(again, weights or None)
    started = two(again, 2)
    found = [] if continued == started else [f"losses {continued}, of a fresh start {started}"]
    expected, actual = onefold.full_state_dict(again), onefold.full_state_dict(model)
    return found + [
        f"{name} differs" for name in expected if not torch.equal(expected[name], actual[name])
    ]


@pytest.mark.parametrize("mode", ["stage 0", "stage 3", "stage 3 at the boundary"])
def test_after_a_backward_that_raised_training_goes_on_as_from_a_fresh_start(mode: str) -> None:
    assert run_ranks(2, break_then_start_afresh, *MODES[mode]) == [[], []]


#: (on the stand-in for NCCL, stage, options)
WAYS: list[tuple[bool, int, dict[str, Any]]] = [
    (native, stage, options)
    for native in (False, True)
    for stage, options in [
        *MODES.values(), (3, {"group": 2}), (3, {"shard_group": 2}), (2, {"reduce_codec": "int4"}), (2, {"precision": "bf16"}),
        (0, {"reduce": "native"}), (3, {"reduce": "native"}), (3, {"group": 2, "precision": "bf16", "wire": "fp32"}),
    ]
    if native or "reduce" not in options
]  # fmt: skip


def ledgers_around_a_broken_pass(ways: list[tuple[bool, int, dict[str, Any]]]) -> list[str]:
    """Where the device's ledger says something else after passes that raised than before them."""
    import onefold
    import standin

    case, rank, found = Accumulates(False, False), torch.distributed.get_rank(), []
    for native, stage, options in ways:
        recipe = onefold.Recipe.zero(stage, stall_timeout=60.0, in_flight=3, **options)
        model = onefold.shard(
            fresh(case), recipe, units=case.units, group=standin.new_group() if native else None
        )
        memory, said = onefold.engine_of(model).memory, []
        for _ in range(3):
            case.fail(model, rank)
            case.loss(model, case.batch(rank, 0)).backward()
            model.zero_grad()
            said.append(memory.now())
        if said[0] != said[-1] or any(name in said[-1] for name in (REDUCTION, GATHERED, IDLE)):
            found.append(f"stage {stage}, {options}{', native' if native else ''}: {said}")
    return found


def test_a_backward_that_raised_leaves_nothing_in_the_ledger(sample: Any) -> None:
    assert run_ranks(4, ledgers_around_a_broken_pass, sample(WAYS, 4)) == [[]] * 4


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


class Headless(TinyMLP):
    """Without its head in the passes that say so."""

    short = False

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.enter(x))
        for block in self.blocks:
            x = block(x)
        return x if self.short else self.leave(x)


class Freezes(MLPCase):
    """Three micro-batches a step; between them parameters are frozen. What is frozen keeps the
    gradient that it has, and is stepped, as in plain PyTorch.

    DDP would not reduce it, so the mean over the ranks is made by hand. Rank 1 leaves the head out
    of the first micro-batch: the same must travel on all ranks.
    """

    units = (ResidualBlock, "leave")
    reference = "mean"
    frozen: ClassVar[tuple[tuple[str, ...], ...]] = (
        (),
        ("blocks.0.up.weight", "blocks.1", "enter.bias", "leave"),
        ("blocks.0.up.bias", "blocks.1"),
    )
    short: ClassVar[tuple[tuple[int, int], ...]] = ((1, 0),)  # rank, micro-batch

    def build(self) -> nn.Module:
        self.built = Headless()
        return self.built

    def step(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, rank: int, step: int
    ) -> float:
        optimizer.zero_grad()
        total = 0.0
        for micro, frozen in enumerate(self.frozen):
            for name, param in self.built.named_parameters():
                param.requires_grad_(not name.startswith(frozen))
            self.built.short = (rank, micro) in self.short
            with self.unsynced(model) if micro < 2 else contextlib.nullcontext():
                loss = self.loss(model, self.batch(rank, 3 * step + micro))
                loss.backward()
            total += loss.item()
        self.before_update(model)
        optimizer.step()
        return total

    def unsynced(self, model: nn.Module) -> Any:
        return contextlib.nullcontext() if isinstance(model, MeanOverRanks) else no_sync(model)


class LeavesOutAtTheEnd(Freezes):
    """Nothing is frozen; the last micro-batch uses the head on no rank, the first on one alone."""

    frozen = ((), (), ())
    short: ClassVar[tuple[tuple[int, int], ...]] = ((1, 0), (0, 2), (1, 2), (2, 2), (3, 2))


class Thaws(Freezes):
    """Others are trained again, which joins ranges that were apart."""

    frozen = (("blocks.0.down", "blocks.2.up.weight", "leave"), ("blocks.1.up",), ())


class FreezesAtTheEnd(Freezes):
    """Whole units are frozen when the boundary comes."""

    frozen = ((), (), ("blocks", "leave"))


FROZEN_BETWEEN: dict[str, tuple[int, dict[str, Any]]] = {
    **MODES,
    "groups": (3, {"shard_group": 2}),
    "groups of one": (3, {"shard_group": 1}),
    "stepped in the backward pass": (
        1,
        {"offload_optimizer": "cpu", "overlap": False, "step_in_backward": True},
    ),
    "groups, optimizer over all": (3, {"shard_group": 2, "optimizer_over": "all"}),
}


def compare_frozen_between(case_class: type[Case]) -> list[str]:
    reference = train_reference(case_class())
    found = []
    for name, (stage, options) in FROZEN_BETWEEN.items():
        found += differences(
            name, reference, train_sharded(case_class(), stage, **options), 1e-5, 1e-6
        )
    return found


@pytest.mark.parametrize(
    "case", [Freezes, LeavesOutAtTheEnd, Thaws, FreezesAtTheEnd], ids=lambda case: case.__name__
)
def test_what_is_frozen_or_left_out_between_micro_batches_keeps_its_gradient(
    case: type[Case],
) -> None:
    assert run_ranks(4, compare_frozen_between, case) == [[]] * 4
