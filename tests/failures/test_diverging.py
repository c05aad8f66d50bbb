"""Invariant 5: where ranks diverge the run stays correct, or stops within seconds with an error that
names rank, unit and step on every rank that is alive. It never hangs.

Ranks that die or stand still cannot say how a test ended: a row of `EVENTS` has a start of its own,
and what became of each rank is looked at from outside.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import onefold
import standin
from on_ranks import on_ranks
from ranks import Outcome, outcomes_of
from reference import NEAR, ddp, differences, sgd, train, weights
from zoo import (
    ChosenByRank,
    DropsBlocks,
    DropsBlocksRecomputed,
    OtherOrder,
    ResidualBlock,
    TinyMLP,
    TwoExits,
    features_of,
)

sys.path.insert(0, str(Path(__file__).parents[1] / "parallel"))

#: Seconds of the recipe, of `dist`'s own patience, and in which every rank must have given up: its
#: own timeout, that of a rank that waits for it, and what a busy machine adds.
STALL_TIMEOUT, HANG, PATIENCE = 4.0, 120.0, 60.0
CODECS: dict[str, Any] = {
    "group": 2, "second_copy": True, "gather_codec": "int8", "reduce_codec": "int4",
}  # fmt: skip


# -- other branches: right -------------------------------------------------------------------------


def batches(count: int = 4) -> list[Tensor]:
    return [features_of(10 * step + dist.get_rank(), 4, 7) for step in range(count)]


def trained(
    make: Callable[[], nn.Module],
    stage: int | None,
    over: Any = None,
    loss: Any = None,
    **options: Any,
) -> tuple[list[float], dict[str, Tensor]]:
    """Losses and weights by DDP if `stage` is None."""
    torch.manual_seed(0)
    model = make()
    if stage is None:
        model = ddp(model)
    else:
        recipe = onefold.Recipe.zero(stage, stall_timeout=STALL_TIMEOUT, **options)
        model = onefold.shard(model, recipe, units=(ResidualBlock,), group=over)
    torch.manual_seed(100 + dist.get_rank())  # the same blocks are skipped in every run
    return train(model, sgd(model), batches(), loss), weights(model)


def same(expected: Any, found: Any, **near: float) -> None:
    assert found[0] == pytest.approx(expected[0], rel=near.get("rtol", 0), abs=0)
    assert differences(expected[1], found[1], **near) == []


KINDS = {"drops blocks": DropsBlocks, "one for nobody": lambda: ChosenByRank(3)}


@on_ranks(3)
@pytest.mark.parametrize("kind", KINDS)
def test_ranks_that_take_other_branches_train_as_in_ddp(kind: str) -> None:
    first = trained(KINDS[kind], 0)
    same(trained(KINDS[kind], None), first, **NEAR)
    for stage in (1, 2, 3):
        same(first, trained(KINDS[kind], stage))
        same(first, trained(KINDS[kind], stage, standin.new_group()))


@on_ranks(4)
@pytest.mark.one_in(2)
@pytest.mark.parametrize("kind", KINDS)
def test_ranks_of_groups_that_take_other_branches_train_as_in_ddp(kind: str) -> None:
    first = trained(KINDS[kind], 3, shard_group=2)
    same(trained(KINDS[kind], None), first, **NEAR)
    for stage, options in [
        (3, {"group": 2}), (3, {"shard_group": 2, "optimizer_over": "all"}), (1, {"group": 2}),
        (3, {"group": 2, "second_copy": True, "reshard_after_forward": False}),
    ]:  # fmt: skip
        same(first, trained(KINDS[kind], stage, **options))
        same(first, trained(KINDS[kind], stage, standin.new_group(), **options))
    same(
        trained(KINDS[kind], 3, **CODECS),
        trained(KINDS[kind], 3, **CODECS, prefetch=0, in_flight=0),
    )


@on_ranks(3)
@pytest.mark.parametrize("ignoring", [0, 1])
def test_a_loss_that_ignores_the_tail_on_one_rank_trains_as_in_one_process(ignoring: int) -> None:
    def of(rank: int) -> Any:
        def loss(model: nn.Module, x: Tensor) -> Tensor:
            early, late = model(x)
            tail = 0 if rank == ignoring else (late - 1).square().mean()
            return early.square().mean() + tail

        return loss

    torch.manual_seed(0)
    plain, world = TwoExits(), dist.get_world_size()
    optimizer = sgd(plain)
    for step in range(4):
        losses = [of(r)(plain, features_of(10 * step + r, 4, 7)) for r in range(world)]
        (torch.stack(losses).sum() / world).backward()
        optimizer.step()
        optimizer.zero_grad()
    for stage, options in [*((s, {}) for s in range(4)), (3, {"prefetch": 2, "in_flight": 0})]:
        for group in (None, standin.new_group()):
            _, found = trained(TwoExits, stage, group, of(dist.get_rank()), **options)
            assert differences(plain.state_dict(), found, **NEAR) == []


@on_ranks(2)
@pytest.mark.parametrize("stage", [0, 3])
def test_a_slow_rank_is_waited_for(stage: int) -> None:
    model = onefold.shard(TinyMLP(), onefold.Recipe.zero(stage, stall_timeout=20.0))
    if dist.get_rank() == 1:
        model.register_forward_pre_hook(lambda *_: time.sleep(0.5))
    assert len(train(model, sgd(model), batches())) == 4


@on_ranks(3)
@pytest.mark.parametrize("stage", [0, 3])
def test_a_rank_outside_the_group_is_told_so_and_the_members_train(stage: int) -> None:
    group = dist.new_group([0, 1])
    torch.manual_seed(0)
    if dist.get_rank() == 2:
        with pytest.raises(ValueError, match=r"rank 2.*not in the given group.*only its members"):
            onefold.shard(TinyMLP(), onefold.Recipe.zero(stage), group=group)
    else:
        model = onefold.shard(TinyMLP(), onefold.Recipe.zero(stage), group=group)
        assert len(set(train(model, sgd(model), batches()))) == 4
    dist.barrier()


# -- what happens to one rank ----------------------------------------------------------------------


@dataclass
class Training:
    """`go` is a pass of a step, and returns the loss if backward is still to be called."""

    model: nn.Module
    go: Callable[[int], Tensor | None]
    hooked: nn.Module


def over_data(stage: int, native: bool = False, **options: Any) -> Training:
    torch.manual_seed(0)
    recipe = onefold.Recipe.zero(stage, stall_timeout=STALL_TIMEOUT, **options)
    group = standin.new_group() if native else None
    model = onefold.shard(TinyMLP(), recipe, units=(ResidualBlock,), group=group)
    return Training(model, lambda step: mean(model, features_of(step, 4, 7)), model.blocks[1])


def natively(stage: int, **options: Any) -> Training:
    return over_data(stage, native=True, **options)


def beside_tensors(stage: int) -> Training:
    from axes_models import Case, batches_of, mesh_of_case, parallelized

    case = Case(steps=4)
    mesh = mesh_of_case(case)
    recipe = onefold.Recipe.zero(stage, stall_timeout=STALL_TIMEOUT)
    model: Any = onefold.shard(parallelized(case, mesh), recipe, mesh=mesh, data="dp")
    own = list(batches_of(case, mesh.get_local_rank("dp")))
    return Training(model, lambda step: model(own[step]), model.layers[1])


def in_a_pipeline(stage: int) -> Training:
    from pipeline_models import Case, batch_of, built, called

    case = Case("Schedule1F1B")
    pipeline = built(stage, case)
    (module,) = pipeline.modules

    def go(step: int) -> None:
        called(pipeline, batch_of(case, pipeline.mesh.get_local_rank("dp"), step))

    return Training(module, go, next(iter(module.blocks.values())))


def over_two_data_axes(stage: int) -> Training:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "ep"))
    recipe = onefold.Recipe.zero(stage, stall_timeout=STALL_TIMEOUT)
    model = onefold.shard(TinyMLP(), recipe, mesh=mesh, data=("dp", "ep"))
    return Training(model, lambda step: mean(model, features_of(step, 4, 7)), model.blocks[1])


class Local(nn.Module):
    """Computes with its part of a weight, without a collective along tp."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight)

    def forward(self, x: Tensor) -> Tensor:
        weight: Any = self.weight
        return (x @ weight.to_local().t()).square().sum()


def over_a_mesh(stage: int) -> Training:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = Local(distribute_tensor(torch.ones(6, 4), mesh["tp"], [Shard(0)]))
    recipe = onefold.Recipe.zero(stage, stall_timeout=STALL_TIMEOUT)
    model = onefold.shard(model, recipe, mesh=mesh, data="dp")
    return Training(model, lambda step: model(features_of(step, 2, 4)), model)


def mean(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().mean()


def die(*_: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def fail(*_: Any) -> None:
    raise ArithmeticError("an error of the user's own")


STEP = 1  # in which it happens


def happens(
    setup: Callable[..., Training], stage: int, event: str, victim: int, **more: Any
) -> None:
    training = setup(stage, **more)
    optimizer = torch.optim.SGD(training.model.parameters(), lr=0.1)
    with said_when_given_up():
        for step in range(3):
            mine = (dist.get_rank(), step) == (victim, STEP)
            if mine and event == "stays away":
                return busy_until_others_have_given_up()
            if mine and event == "dies between passes":
                die()  # where the others gather in their next pass
            if mine and event in ("dies", "fails"):
                hook = die if event == "dies" else fail
                training.hooked.register_forward_pre_hook(hook)
            if mine and event == "dies in backward":
                next(training.hooked.parameters()).register_hook(die)
            loss = training.go(step)
            if loss is not None and not (mine and event == "skips the backward"):
                loss.backward()
            if mine and event == "has one more batch":
                mean(training.model, features_of(9, 4, 7)).backward()
            optimizer.step()
            optimizer.zero_grad()


@contextlib.contextmanager
def said_when_given_up() -> Iterator[None]:
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


def told(outcomes: list[Outcome]) -> str:
    return "\n".join(
        f"rank {o.rank}: {o.error} after {o.seconds:.1f} s: {o.message}\n{o.trace[-1500:]}"
        for o in outcomes
    )


@dataclass(frozen=True)
class Event:
    """`victim`: to whom it happens. `words`: by rank, of its error; "*" of every other rank's. Where
    torch itself computes along another axis, a rank may wait in a collective of torch's own, whose
    error is torch's: `stalls` are the ranks that must have Onefold's.
    """

    setup: Callable[..., Training]
    stage: int
    name: str
    ranks: int = 2
    victim: int = 1
    words: dict[Any, list[str]] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)
    stalls: tuple[int, ...] | None = None


AWAY = {0: ["rank 0 gave up", "rank 1: not waiting", "unit", f"step {STEP}"]}
OF_MESH = {2: ["rank 2 (dp 1, tp 0)"], "*": ["rank 3 (dp 1, tp 1): not waiting in any collective"]}
GONE: dict[Any, list[str]] = {"*": ["rank 1", "unit", f"step {STEP}"]}
EVENTS = [
    Event(natively, 0, "stays away", words={0: [*AWAY[0], "at the end of step 0"]}),
    Event(over_data, 3, "dies", 3, words=GONE),
    Event(natively, 3, "dies"),
    Event(over_data, 3, "fails", words={0: ["rank 1", "unit", f"step {STEP}"]}),
    Event(beside_tensors, 3, "dies", 4, 3, OF_MESH, stalls=(1,)),
    Event(in_a_pipeline, 3, "dies between passes", 4, 3, {2: ["rank 3: not waiting in any collective"]}, stalls=(2,)),
    Event(over_a_mesh, 3, "stays away", 4, 3, {
        0: ["rank 0 (dp 0, tp 0) gave up", "rank 1 (dp 0, tp 1): waiting in "], 1: ["among ranks 1,3 (along dp)"],
        "*": ["rank 3 (dp 1, tp 1): not waiting in any collective"]}),
]  # fmt: skip
#: With `--all`: the same at other stages, in groups, with codecs and over two data axes.
FURTHER = [
    Event(in_a_pipeline, 1, "dies", 4, 3, {2: ["rank 3: not waiting in any collective"]}, stalls=(2,)),
    Event(over_two_data_axes, 2, "dies", 4, 1, {"*": ["rank 1 (dp 0, ep 1): not waiting in any collective"]}),
    Event(over_data, 3, "stays away", 4, options=CODECS, words={0: ["rank 1"], "*": ["unit", f"step {STEP}"]}),
    Event(over_data, 1, "stays away", words=AWAY), Event(over_data, 3, "stays away", words=AWAY),
    Event(natively, 3, "stays away", words={0: [*AWAY[0], "at the end of step 0"]}),
    Event(over_data, 0, "dies", 3, words=GONE),
    Event(over_data, 3, "dies", 4, options={"shard_group": 2}, words={0: ["rank 1"], "*": ["unit"]}),
    Event(natively, 3, "dies", 4, options={"shard_group": 2}),
    Event(beside_tensors, 1, "dies in backward", 4, 3, OF_MESH, stalls=(1,)),
]  # fmt: skip


@pytest.mark.parametrize(
    "row",
    [*EVENTS, *(pytest.param(e, marks=pytest.mark.slow) for e in FURTHER)],
    ids=lambda e: f"{e.setup.__name__} {e.stage} {e.name} {len(e.options)}",
)
def test_a_rank_that_stops_is_an_error_on_every_other(row: Event) -> None:
    outcomes = outcomes_of(
        row.ranks,
        happens,
        row.setup,
        row.stage,
        row.name,
        row.victim,
        timeout=HANG,
        **row.options,
    )
    said = told(outcomes)
    own = outcomes[row.victim]
    if row.name == "stays away":
        assert own.error == "", said
    elif row.name == "fails":
        assert (own.error, own.message) == ("ArithmeticError", "an error of the user's own"), said
    else:
        assert own.exitcode == -signal.SIGKILL, said
    for other in outcomes:
        if other is own:
            continue
        assert other.seconds < PATIENCE, said
        if row.stalls is None or other.rank in row.stalls:
            assert other.error == "StallError", said
            for word in [*row.words.get(other.rank, []), *row.words.get("*", [])]:
                assert word in other.message, f"rank {other.rank} does not say {word!r}: {said}"
        else:
            assert other.error in ("StallError", "RuntimeError", "DistBackendError"), said


@pytest.mark.parametrize(
    ("stage", "event"),
    [
        pytest.param(1, "skips the backward", marks=pytest.mark.slow),
        (3, "skips the backward"),
        (1, "has one more batch"),
        pytest.param(3, "has one more batch", marks=pytest.mark.slow),
    ],
)
def test_another_number_of_passes_is_an_error(stage: int, event: str) -> None:
    """Either rank may meet the wall first; a rank whose every pass found its match may end well,
    the other one may not.
    """
    outcomes = outcomes_of(2, happens, over_data, stage, event, 1, timeout=HANG)
    said = told(outcomes)
    assert "StallError" in {o.error for o in outcomes} <= {"", "StallError"}, said
    assert outcomes[1].error or event == "skips the backward", said
    assert all(o.seconds < PATIENCE for o in outcomes), said


def in_another_order(make: Callable[[], nn.Module], stage: int, native: bool) -> None:
    same(trained(make, 1), trained(make, stage, standin.new_group() if native else None))


@pytest.mark.parametrize(
    ("make", "stage", "native"),
    [(OtherOrder, 1, False), (OtherOrder, 3, False), (OtherOrder, 3, True), (DropsBlocksRecomputed, 3, False)],
)  # fmt: skip
def test_blocks_in_another_order_on_one_rank_train_right_or_are_told(
    make: Any, stage: int, native: bool
) -> None:
    """A backend without tags takes a unit's bytes for another's where they have one size: the ranks
    say so before anything is stepped.
    """
    outcomes = outcomes_of(2, in_another_order, make, stage, native, timeout=HANG)
    said = told(outcomes)
    if any(o.error for o in outcomes):
        assert {o.error for o in outcomes} == {"StallError"}, said
        assert all(o.seconds < PATIENCE for o in outcomes), said


# -- in shard() ------------------------------------------------------------------------------------


def shard_alone(alone: int) -> None:
    if dist.get_rank() == alone:
        with said_when_given_up():
            onefold.shard(TinyMLP(), onefold.Recipe.zero(3, stall_timeout=STALL_TIMEOUT))
    else:
        busy_until_others_have_given_up()


@pytest.mark.parametrize("alone", [pytest.param(0, marks=pytest.mark.slow), 1])
def test_a_rank_that_shards_alone_is_told_for_whom_it_waited(alone: int) -> None:
    outcomes = outcomes_of(2, shard_alone, alone, timeout=HANG)
    own, said = outcomes[alone], told(outcomes)
    assert own.error == "StallError" and STALL_TIMEOUT <= own.seconds < PATIENCE, said
    for word in (f"rank {alone} waited", "shard()", "[0, 1]"):
        assert word in own.message, f"the error does not name {word!r}: {said}"
    waited = re.search(r"waited (\d+) s", own.message)
    assert waited is not None and STALL_TIMEOUT <= int(waited[1]) < PATIENCE, said


DIFFERENT: dict[str, Callable[[int], tuple[nn.Module, int]]] = {
    "models": lambda rank: (TinyMLP(depth=3 + rank), 3),
    "models at stage 0": lambda rank: (TinyMLP(depth=3 + rank), 0),
    "recipes": lambda rank: (TinyMLP(), 2 + rank),
}


@on_ranks(2, fresh=True)
@pytest.mark.parametrize("what", DIFFERENT)
def test_ranks_that_shard_different_things_are_told_so(what: str) -> None:
    model, stage = DIFFERENT[what](dist.get_rank())
    with pytest.raises((ValueError, onefold.StallError)):
        onefold.shard(model, onefold.Recipe.zero(stage, stall_timeout=STALL_TIMEOUT))
