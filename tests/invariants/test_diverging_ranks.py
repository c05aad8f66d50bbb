"""Invariant 5: where ranks diverge the run stays correct, or stops within seconds with an error
that names rank, unit and step on every rank that is alive. It never hangs.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ranks import Outcome, outcomes_of, run_ranks
from trials import (
    STAGES,
    Case,
    Curve,
    MLPCase,
    assert_trains_as_ddp,
    compare_case,
    differences,
    fresh,
    train_reference,
    train_sharded,
)
from zoo import ResidualBlock, TinyMLP, features_of

# Seconds, of the recipe: no rank that runs is so late, however busy the machine is
STALL_TIMEOUT = 5.0
#: Seconds in which every rank must have given up: its own timeout, the one of a rank that waits for
#: it, the notes' grace, and what a busy machine adds. A collective that nobody watches over would
#: take `HANG`, the timeout of the process group.
PATIENCE, HANG = 60.0, 120.0


class DropsBlocks(nn.Module):
    """LayerDrop: every rank skips blocks at random, by a generator of its own."""

    def __init__(self, depth: int = 6) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(ResidualBlock(7) for _ in range(depth))
        self.leave = nn.Linear(7, 7)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            if torch.rand(()) > 0.5:
                x = block(x)
        return self.leave(x)


class LayerDrop(MLPCase):
    steps = 6
    units = (ResidualBlock,)

    def build(self) -> nn.Module:
        return DropsBlocks()


class ChosenByNobody(MLPCase):
    """Three experts: ranks choose different ones, one of them is chosen by nobody and never gets a
    gradient.
    """

    units = (ResidualBlock,)

    class Model(DropsBlocks):
        def forward(self, x: Tensor) -> Tensor:
            return self.blocks[dist.get_rank() % 2](x) * 2

    def build(self) -> nn.Module:
        return self.Model(3)


@pytest.mark.parametrize("case", [LayerDrop, ChosenByNobody])
@pytest.mark.parametrize("world_size", [2, 3])
def test_ranks_that_take_other_branches_train_as_in_ddp(case: type[Case], world_size: int) -> None:
    assert_trains_as_ddp(case, world_size)


class OtherOrder(LayerDrop):
    """Rank 0 applies the blocks forwards, rank 1 backwards; all blocks are of one size, so that
    nothing else tells them apart.
    """

    options = {"stall_timeout": STALL_TIMEOUT}

    class Model(DropsBlocks):
        def forward(self, x: Tensor) -> Tensor:
            for block in list(self.blocks) if dist.get_rank() % 2 == 0 else list(self.blocks)[::-1]:
                x = block(x)
            return self.leave(x)

    def build(self) -> nn.Module:
        return self.Model(4)


class LayerDropInsideACheckpoint(LayerDrop):
    """One checkpoint over all blocks: backward begins by walking the blocks forwards, other ones on
    every rank.
    """

    options = {"stall_timeout": STALL_TIMEOUT}

    class Model(DropsBlocks):
        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(super().forward, x, use_reentrant=False)

    def build(self) -> nn.Module:
        return self.Model()


@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize("case", [OtherOrder, LayerDropInsideACheckpoint])
def test_ranks_that_use_blocks_in_another_order_train_right_or_stop(
    case: type[Case], stage: int
) -> None:
    outcomes = outcomes_of(2, compare_case, case, (stage,), timeout=HANG)
    told = _told(outcomes)
    if any(o.error for o in outcomes):
        for outcome in outcomes:
            assert_stalled(outcome, told, 0)
    else:
        assert [o.value[0] for o in outcomes] == [[], []], told


def train_until(stage: int, event: str, rank: int, step: int, **options: Any) -> None:
    """Four steps of a small model; `event` happens to one rank at one step."""
    import onefold

    torch.manual_seed(0)
    model = TinyMLP()
    onefold.shard(
        model,
        onefold.Recipe.zero(stage, stall_timeout=STALL_TIMEOUT, units=(ResidualBlock,), **options),
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with said_when_given_up():
        four_steps(model, optimizer, event, rank, step)


@contextlib.contextmanager
def said_when_given_up() -> Iterator[None]:
    """Counts the ranks whose wait ended in an error, for `busy_until_others_have_given_up`."""
    try:
        yield
    except BaseException:
        dist.distributed_c10d._get_default_store().add("given up", 1)
        raise


def busy_until_others_have_given_up() -> None:
    """Alive, and not waiting in any collective."""
    store, end = dist.distributed_c10d._get_default_store(), time.monotonic() + PATIENCE
    while store.add("given up", 0) < dist.get_world_size() - 1 and time.monotonic() < end:
        time.sleep(0.05)


def four_steps(
    model: nn.Module, optimizer: torch.optim.Optimizer, event: str, rank: int, step: int
) -> None:
    for index in range(4):
        mine = (dist.get_rank(), index) == (rank, step)
        if mine and event == "runs out of batches":
            busy_until_others_have_given_up()
            return
        if mine and event == "dies":
            model.blocks[1].register_forward_pre_hook(_die)  # in the middle of its forward
        if mine and event == "fails":
            model.blocks[1].register_forward_pre_hook(_fail)
        loss = model(features_of(index, 4, 7)).square().mean()
        if not (mine and event == "skips the backward"):
            loss.backward()
        if mine and event == "has one more batch":
            model(features_of(9, 4, 7)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def _die(module: nn.Module, inputs: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _fail(module: nn.Module, inputs: Any) -> None:
    raise ArithmeticError("an error of the user's own")


def _told(outcomes: list[Outcome]) -> str:
    return "\n".join(
        f"rank {o.rank}: {o.error} after {o.seconds:.1f} s: {o.message}\n{o.trace[-1500:]}"
        for o in outcomes
    )


def assert_stalled(outcome: Outcome, told: str, step: int) -> None:
    assert outcome.error == "StallError", told
    assert outcome.seconds < PATIENCE, (
        f"rank {outcome.rank} took {outcome.seconds:.1f} s of {PATIENCE} s: {told}"
    )
    for word in ("rank 0", "rank 1", "unit", f"step {step}"):
        assert word in outcome.message, f"the error does not name {word!r}: {told}"


@pytest.mark.parametrize("stage", [1, 3])
def test_a_missing_batch_on_one_rank_is_an_error_on_the_one_that_waits(stage: int) -> None:
    outcomes = outcomes_of(2, train_until, stage, "runs out of batches", 1, 2, timeout=HANG)
    told = _told(outcomes)
    assert outcomes[1].error == "", told
    assert_stalled(outcomes[0], told, 2)
    assert "rank 1: not waiting" in outcomes[0].message, (
        f"it should say that rank 1 waits nowhere: {told}"
    )


@pytest.mark.parametrize("event", ["skips the backward", "has one more batch"])
@pytest.mark.parametrize("stage", [1, 3])
def test_a_rank_that_runs_another_number_of_passes_is_an_error_on_all(
    stage: int, event: str
) -> None:
    """Either rank may meet the wall first; a rank whose every pass found its match may end well,
    the other one may not.
    """
    outcomes = outcomes_of(2, train_until, stage, event, 1, 1, timeout=HANG)
    told = _told(outcomes)
    assert "StallError" in {o.error for o in outcomes} <= {"", "StallError"}, told
    assert outcomes[1].error or event == "skips the backward", told
    assert all(o.seconds < PATIENCE for o in outcomes), told


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_a_killed_rank_is_an_error_on_the_others(stage: int) -> None:
    outcomes = outcomes_of(3, train_until, stage, "dies", 1, 2, timeout=HANG)
    told = _told(outcomes)
    assert outcomes[1].exitcode == -signal.SIGKILL, told
    for survivor in (outcomes[0], outcomes[2]):
        assert_stalled(survivor, told, 2)


GROUPS: dict[str, dict[str, Any]] = {
    "HSDP": {"shard_group": 2},
    "everything": {
        "group": 2,
        "second_copy": True,
        "gather_codec": "int8",
        "reduce_codec": "int4",
        "error_feedback": True,
    },
}


@pytest.mark.parametrize(
    ("recipe", "event"), [("HSDP", "dies"), ("everything", "runs out of batches")]
)
def test_over_groups_a_rank_that_stays_away_is_an_error_on_the_others_of_both_groups(
    recipe: str, event: str
) -> None:
    outcomes = outcomes_of(4, train_until, 3, event, 1, 2, timeout=HANG, **GROUPS[recipe])
    told = _told(outcomes)
    for waiting in (outcomes[0], outcomes[2], outcomes[3]):
        assert waiting.error == "StallError" and waiting.seconds < PATIENCE, told
        assert "unit" in waiting.message and "step 2" in waiting.message, told
    # The neighbour waits for the rank itself, and says so; those of the other group may wait for
    # the neighbour.
    assert "rank 1" in outcomes[0].message and "rank 0" in outcomes[0].message, told


@pytest.mark.parametrize("stage", [2, 3])
def test_a_users_error_on_one_rank_is_itself_there_and_a_stall_on_the_others(stage: int) -> None:
    outcomes = outcomes_of(2, train_until, stage, "fails", 1, 2, timeout=HANG)
    told = _told(outcomes)
    assert (outcomes[1].error, outcomes[1].message) == (
        "ArithmeticError",
        "an error of the user's own",
    ), told
    assert_stalled(outcomes[0], told, 2)


LATE = 1.0  # seconds


def slow_but_in_step(stage: int) -> int:
    """Rank 1 is late by less than the timeout at each step: patience, no error."""
    import onefold

    model = onefold.shard(TinyMLP(), onefold.Recipe.zero(stage, stall_timeout=20 * LATE))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        if dist.get_rank() == 1:
            time.sleep(LATE)
        model(features_of(step, 4, 7)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return step


@pytest.mark.parametrize("stage", [0, 3])
def test_a_slow_rank_is_waited_for(stage: int) -> None:
    assert [o.error for o in outcomes_of(2, slow_but_in_step, stage)] == ["", ""]


def shard_different_models(stage: int) -> None:
    import onefold

    model = TinyMLP(depth=3 + dist.get_rank())
    onefold.shard(model, onefold.Recipe.zero(stage, stall_timeout=STALL_TIMEOUT))


@pytest.mark.parametrize("stage", [0, 3])
def test_ranks_that_shard_different_models_are_told_so(stage: int) -> None:
    outcomes = outcomes_of(2, shard_different_models, stage, timeout=HANG)
    told = _told(outcomes)
    assert all(
        o.error in ("ValueError", "StallError") and o.seconds < PATIENCE for o in outcomes
    ), told


def shard_with_different_recipes() -> None:
    import onefold

    onefold.shard(TinyMLP(), onefold.Recipe.zero(2 + dist.get_rank(), stall_timeout=STALL_TIMEOUT))


def test_ranks_with_different_recipes_are_told_so() -> None:
    outcomes = outcomes_of(2, shard_with_different_recipes, timeout=HANG)
    told = _told(outcomes)
    assert all(
        o.error in ("ValueError", "StallError") and o.seconds < PATIENCE for o in outcomes
    ), told


class TwoExits(nn.Module):
    """Returns what comes out behind its first block, and what comes out at its end; both are always
    computed.
    """

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(7, 10)
        self.first = ResidualBlock(10)
        self.early = nn.Linear(10, 5)
        self.tail = nn.ModuleList(ResidualBlock(10) for _ in range(2))
        self.leave = nn.Linear(10, 5)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = self.first(torch.tanh(self.enter(x)))
        early = self.early(x)
        for block in self.tail:
            x = block(x)
        return early, self.leave(x)


class IgnoresTheTail(MLPCase):
    """The loss of one rank looks at the early exit only: two blocks and the head get no gradient
    there. The others' looks at both.
    """

    steps = 4

    def __init__(self, ignoring: int, units: Any) -> None:
        super().__init__()
        self.ignoring, self.units = ignoring, units

    def build(self) -> nn.Module:
        return TwoExits()

    def batch(self, rank: int, step: int) -> Any:
        return rank, features_of(10 * step + rank, 4, 7)

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        rank, x = batch
        early, late = model(x)
        return early.square().mean() + (0 if rank == self.ignoring else (late - 1).square().mean())


def in_one_process(case: IgnoresTheTail) -> Curve:
    """Plain PyTorch on this rank alone: the mean of every rank's loss over every rank's batch, one
    backward, one update.
    """
    model, curve, world = fresh(case), Curve(), dist.get_world_size()
    optimizer = case.optimizer(model)
    for step in range(case.steps):
        optimizer.zero_grad()
        losses = [case.loss(model, case.batch(rank, step)) for rank in range(world)]
        (torch.stack(losses).sum() / world).backward()
        optimizer.step()
        curve.losses.append(losses[dist.get_rank()].item())
    if dist.get_rank() == 0:
        curve.weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    return curve


def ignore_the_tail(units: Any) -> list[str]:
    found = []
    for ignoring in (0, 1):
        expected = in_one_process(IgnoresTheTail(ignoring, units))
        for stage in STAGES:
            actual = train_sharded(IgnoresTheTail(ignoring, units), stage)
            found += differences(
                f"stage {stage}, rank {ignoring} ignores the tail", expected, actual, 1e-5, 1e-6
            )
    return found


@pytest.mark.parametrize("units", [None, (ResidualBlock, "early", "leave")], ids=["found", "named"])
@pytest.mark.parametrize("world_size", [2, 3])
def test_a_loss_that_ignores_the_tail_on_one_rank_trains_as_in_one_process(
    world_size: int, units: Any
) -> None:
    assert run_ranks(world_size, ignore_the_tail, units) == [[]] * world_size


def shard_alone(alone: int) -> None:
    """One rank calls shard(), the others are busy with something else until it has given up."""
    import onefold

    if dist.get_rank() == alone:
        onefold.shard(TinyMLP(), onefold.Recipe.zero(3, stall_timeout=STALL_TIMEOUT))
    else:
        time.sleep(PATIENCE)


OVER_GROUPS: list[tuple[int, dict[str, Any]]] = [
    (3, {"shard_group": 2}), (3, {"shard_group": 2, "optimizer_over": "all"}),
    (3, {"group": 2, "second_copy": True}), (1, {"group": 2}), (3, {"group": 2, "second_copy": True, "reshard_after_forward": False}),
    (3, {"group": 2, "reshard_after_forward": False}),
]  # fmt: skip
#: The rank that ignores the tail, and options of stage 3.
IGNORING: list[tuple[int, dict[str, Any]]] = [
    (0, {"group": 2, "in_flight": 0, "prefetch": 2}), (0, {"group": 2, "overlap": False}), (3, {"group": 2}), (3, {"shard_group": 2}),
]  # fmt: skip


def other_branches_over_groups(
    over: list[tuple[int, dict[str, Any]]], schedules: list[tuple[int, dict[str, Any]]]
) -> list[str]:
    """Ranks of one group and of two go different ways: they join each other's gathers and
    reductions, both hops of them.
    """
    found = []
    for case, others in ((LayerDrop, over), (ChosenByNobody, OVER_GROUPS[2:3])):
        expected, first = train_reference(case()), train_sharded(case(), 3, group=2)
        found += differences(f"{case.__name__} in groups against DDP", expected, first, 1e-5, 1e-6)
        for stage, options in others:
            found += differences(
                f"{case.__name__}, stage {stage}, {options}",
                first,
                train_sharded(case(), stage, **options),
                0.0,
                0.0,
            )
    for ignoring, options in schedules:
        alone, actual = (
            in_one_process(IgnoresTheTail(ignoring, None)),
            train_sharded(IgnoresTheTail(ignoring, None), 3, **options),
        )
        found += differences(
            f"rank {ignoring} ignores the tail, {options}", alone, actual, 1e-5, 1e-6
        )
    codecs = GROUPS["everything"]
    some = train_sharded(LayerDrop(), 3, **codecs)
    return found + differences(
        "with codecs, without overlap",
        some,
        train_sharded(LayerDrop(), 3, **codecs, overlap=False),
        0.0,
        0.0,
    )


def test_ranks_that_take_other_branches_over_groups_train_as_in_ddp(sample: Any) -> None:
    cases = sample(OVER_GROUPS, 3), sample(IGNORING, 2)
    assert run_ranks(4, other_branches_over_groups, *cases) == [[]] * 4


@pytest.mark.parametrize("alone", [0, 1])
def test_a_rank_that_shards_alone_is_told_for_whom_it_waited(alone: int) -> None:
    outcomes = outcomes_of(2, shard_alone, alone, timeout=HANG, grace=0.0)
    told = _told(outcomes)
    assert (
        outcomes[alone].error == "StallError"
        and STALL_TIMEOUT <= outcomes[alone].seconds < PATIENCE
    ), told
    for word in (f"rank {alone} waited", "shard()", "[0, 1]"):
        assert word in outcomes[alone].message, f"the error does not name {word!r}: {told}"
    waited = re.search(r"waited (\d+) s", outcomes[alone].message)
    assert waited is not None and STALL_TIMEOUT <= int(waited[1]) < PATIENCE, told


def shard_over_two_of_three(stage: int) -> list[float] | str:
    """All three ranks call shard() with a group of the first two."""
    import onefold

    group = dist.new_group([0, 1])
    torch.manual_seed(0)
    losses: list[float] = []
    try:
        model = onefold.shard(
            TinyMLP(), onefold.Recipe.zero(stage, stall_timeout=30.0), group=group
        )
    except ValueError as error:
        return str(error)
    else:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(3):
            loss = model(features_of(step, 4, 7)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        return losses
    finally:
        dist.barrier()  # a rank that ends early may take the others' rendezvous along


@pytest.mark.parametrize("stage", [0, 3])
def test_a_rank_outside_the_group_is_told_so_and_the_members_train(stage: int) -> None:
    inside, also_inside, outside = run_ranks(3, shard_over_two_of_three, stage)
    assert inside == also_inside and len(set(inside)) == 3, (inside, also_inside)
    # new_group tells rank 2 no more than that
    for word in ("rank 2", "not in the given group", "only its members"):
        assert isinstance(outside, str) and word in outside, outside
