"""Invariant 1: in fp32, on the same ranks and data, losses and final weights are bit-equal at
stages 0, 1, 2 and 3, whatever the schedule; and equal to DDP's and to one process on the whole
batch within fp32 rounding.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ranks import run_ranks
from trials import STAGES, Curve, GPTCase, differences, fresh, train, train_reference, train_sharded
from zoo import Checkpointing, TinyGPT

MICRO_BATCHES = 3


@dataclass
class Run(GPTCase):
    """A GPT with one optimizer, with or without clipping, checkpointing and accumulation."""

    kind: str = "adamw"
    max_norm: float | None = None
    checkpointing: Checkpointing = "none"
    micro_batches: int = 1
    steps: int = 4

    def __post_init__(self) -> None:
        super().__init__()
        self.rtol, self.atol = 2e-5, 2e-6
        if self.checkpointing == "reentrant":
            self.ddp_options = {}

    def build(self) -> nn.Module:
        return TinyGPT(checkpointing=self.checkpointing)

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        if self.kind == "sgd":
            return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01)
        # eps well above rounding noise: Adam would otherwise turn the last bit of a gradient near
        # zero into a whole step.
        fused = True if self.kind == "fused adamw" else None
        return torch.optim.AdamW(
            model.parameters(), lr=0.01, weight_decay=0.1, eps=1e-4, fused=fused
        )

    def clip(self, model: nn.Module) -> None:
        if self.max_norm is None:
            return
        import onefold

        if isinstance(model, TinyGPT) and is_sharded(model):
            onefold.clip_grad_norm_(model, self.max_norm)
        else:
            nn.utils.clip_grad_norm_(model.parameters(), self.max_norm)

    def step(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, rank: int, step: int
    ) -> float:
        optimizer.zero_grad()
        total = 0.0
        for micro in range(self.micro_batches):
            last = micro == self.micro_batches - 1
            with contextlib.nullcontext() if last else no_sync(model):
                loss = (
                    self.loss(model, self.batch(rank, step * self.micro_batches + micro))
                    / self.micro_batches
                )
                loss.backward()
            total += loss.item()
        self.before_update(model)
        self.clip(model)
        optimizer.step()
        return total


def is_sharded(model: nn.Module) -> bool:
    import onefold

    try:
        onefold.engine_of(model)
    except Exception:
        return False
    return True


def no_sync(model: nn.Module) -> Any:
    import onefold

    if isinstance(model, DistributedDataParallel):
        return model.no_sync()
    return onefold.no_sync(model) if is_sharded(model) else contextlib.nullcontext()


def whole_batch(run: Run) -> Curve:
    """One process, all ranks' batches in one: the mean over the whole batch is the mean of the
    ranks' means.
    """
    model = fresh(run)
    run_batch, world = run.batch, dist.get_world_size()
    run.batch = lambda rank, step: torch.cat([run_batch(r, step) for r in range(world)])  # type: ignore[method-assign]
    run.before_update = lambda model: None
    curve = train(run, model, model, model.state_dict)
    del run.batch
    return curve


Options = dict[str, Any]
Bits = list[tuple[str, int, Options]]  # name, stage, options of the recipe
PLAIN: Bits = [(f"stage {s}", s, {}) for s in STAGES]


def compare(run: Run, bit_equal: Bits, rounded: Bits = ()) -> list[str]:  # type: ignore[assignment]
    """On one rank: the others of `bit_equal` against the first; DDP, one process and `rounded` are
    near it.
    """
    name, stage, options = bit_equal[0]
    first = train_sharded(run, stage, **options)
    found = []
    for other, stage, options in bit_equal[1:]:
        curve = train_sharded(run, stage, **options)
        found += differences(f"{other} against {name}, bit by bit", first, curve, 0.0, 0.0)
    for other, stage, options in rounded:
        curve = train_sharded(run, stage, **options)
        found += differences(f"{other} against {name}", first, curve, run.rtol, run.atol)
    found += differences(f"{name} against DDP", train_reference(run), first, run.rtol, run.atol)
    alone = whole_batch(run)
    total = torch.tensor(first.losses, dtype=torch.float64)
    dist.all_reduce(total)
    first.losses = (total / dist.get_world_size()).tolist()
    if dist.get_rank() == 0:  # the others hold no whole weights
        found += differences(f"{name} against one process", alone, first, run.rtol, run.atol)
    return found


def assert_same(world_size: int, run: Run, bit_equal: Bits, rounded: Bits = ()) -> None:  # type: ignore[assignment]
    found = run_ranks(world_size, compare, run, bit_equal, rounded)
    problems = [
        f"rank {rank}: {sentence}" for rank, sentences in enumerate(found) for sentence in sentences
    ]
    assert not problems, "\n".join(problems)


@pytest.mark.parametrize("max_norm", [None, 0.5], ids=["unclipped", "clipped"])
@pytest.mark.parametrize("kind", ["adamw", "fused adamw", "sgd"])
def test_stages_are_bit_equal_with_every_optimizer(kind: str, max_norm: float | None) -> None:
    assert_same(2, Run(kind=kind, max_norm=max_norm), PLAIN)


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [1, 3, 4, 5, 8])
def test_stages_are_bit_equal_on_any_number_of_ranks(world_size: int) -> None:
    assert_same(world_size, Run(max_norm=0.5, steps=3), PLAIN)


SCHEDULES: list[Options] = [
    {"prefetch": 0},
    {"prefetch": 3},
    {"in_flight": 0},
    {"in_flight": 5},
    {"prefetch": 0, "in_flight": 0},
    {"overlap": False},
    {"reshard_after_forward": False},
]


@pytest.mark.slow
@pytest.mark.parametrize("stage", [2, 3])
def test_the_schedule_changes_no_bit(stage: int) -> None:
    schedules = [
        o for o in SCHEDULES if stage == 3 or not {"prefetch", "reshard_after_forward"} & set(o)
    ]
    assert_same(
        3, Run(), [PLAIN[0], PLAIN[stage], *((f"stage {stage} {o}", stage, o) for o in schedules)]
    )


@pytest.mark.parametrize(
    "units", [None, (), ("blocks.0", "head")], ids=["found", "root only", "named"]
)
def test_the_choice_of_units_changes_no_bit(units: tuple[str, ...] | None) -> None:
    options = {} if units is None else {"units": units}
    assert_same(
        2, Run(kind="sgd"), [PLAIN[0], *((f"stage {s} {units}", s, options) for s in STAGES)]
    )


@pytest.mark.parametrize("checkpointing", ["reentrant", "non-reentrant"])
def test_activation_checkpointing_changes_no_bit(checkpointing: Checkpointing) -> None:
    assert_same(2, Run(checkpointing=checkpointing), PLAIN)


def with_and_without_checkpoints() -> list[str]:
    plain = train_sharded(Run(), 0)
    found = []
    for checkpointing in ("reentrant", "non-reentrant"):
        curve = train_sharded(Run(checkpointing=checkpointing), 3)  # type: ignore[arg-type]
        found += differences(
            f"stage 3, {checkpointing}, against stage 0 without", plain, curve, 0.0, 0.0
        )
    return found


def test_recomputing_activations_gives_the_bits_of_keeping_them() -> None:
    assert run_ranks(2, with_and_without_checkpoints) == [[], []]


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [2, 3])
def test_accumulation_is_bit_equal_where_gradients_are_reduced_at_the_boundary(
    world_size: int,
) -> None:
    boundary: Bits = [(f"stage {s} at the boundary", s, {"reduce_at": "boundary"}) for s in (2, 3)]
    by_default: Bits = [(f"stage {s} every micro-batch", s, {}) for s in (2, 3)]
    run = Run(micro_batches=MICRO_BATCHES, max_norm=0.5, steps=3)
    assert_same(world_size, run, [PLAIN[0], PLAIN[1], *boundary], by_default)


def accumulate_without_no_sync(stage: int) -> list[str]:
    """Two backward passes before one step, nobody says no_sync: gradients add up as in DDP."""

    class Twice(GPTCase):
        def step(
            self, model: nn.Module, optimizer: torch.optim.Optimizer, rank: int, step: int
        ) -> float:
            optimizer.zero_grad()
            losses: list[Tensor] = []
            for micro in range(2):
                losses.append(self.loss(model, self.batch(rank, 2 * step + micro)))
                losses[-1].backward()
            optimizer.step()
            return sum(loss.item() for loss in losses)

    return differences(
        f"stage {stage}", train_reference(Twice()), train_sharded(Twice(), stage), 2e-5, 2e-6
    )


@pytest.mark.parametrize("stage", STAGES)
def test_backward_passes_without_no_sync_add_up(stage: int) -> None:
    assert run_ranks(2, accumulate_without_no_sync, stage) == [[], []]


def two_runs_of_one_seed(stage: int) -> list[str]:
    return differences("again", train_sharded(Run(), stage), train_sharded(Run(), stage), 0.0, 0.0)


@pytest.mark.parametrize("stage", STAGES)
def test_a_run_repeats_itself_bit_by_bit(stage: int) -> None:
    assert run_ranks(3, two_runs_of_one_seed, stage) == [[]] * 3
