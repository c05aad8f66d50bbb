"""A backward pass that raises takes the gradients that were kept under no_sync along, and leaves nothing
else behind.
"""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from onefold.memory.pool import GATHERED, IDLE, REDUCTION
from ranks import run_ranks
from trials import (
    MLPCase,
    differences,
    fresh,
    train_sharded,
)
from unreduced import MODES, no_sync
from zoo import ResidualBlock, TinyMLP


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
