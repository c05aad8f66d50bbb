"""Invariant 3: bytes at rest equal the formula within 1 MiB, and the peak stays under its
closed-form bound.

With P bytes of parameters in fp32 (padding included), N ranks and AdamW (two states), between
steps, gradients dropped:

    stage 0       P + 2P           parameters are their own masters
    stages 1, 2   P + 2P/N         a rank's master interval is a slice of the replicated parameters
    stage 3       P/N + 2P/N
    16-bit        P/2 + (P + 2P)/N at stages 1 and 2, (P + 2P)/N at stage 3: the masters are a copy, sharded with the states
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from memory_probe import (
    MIB,
    give_memory_back_at_once,
    living_bytes,
    peak_resident_bytes,
    reset_peak,
    resident_bytes,
)
from torch import nn

import states
from onefold.runtime.parameters.interval import local_part
from ranks import run_ranks
from zoo import TinyMLP, features_of

WIDTH, DEPTH = 384, 8  # 8 blocks of 1.2 MB x 2 in fp32: 18.9 MB


def model_of(width: int = WIDTH, depth: int = DEPTH) -> nn.Module:
    torch.manual_seed(0)
    return TinyMLP(16, width, depth, 16)


def one_step(model: nn.Module, optimizer: torch.optim.Optimizer, seed: int = 0) -> None:
    model(features_of(seed + dist.get_rank(), 2, 16)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def at_rest(stage: int, precision: str) -> dict[str, Any]:
    import onefold

    before = living_bytes()
    whole = model_of()
    content = sum(p.numel() for p in whole.parameters())
    model = onefold.shard(
        whole, onefold.Recipe.zero(stage, precision=precision, stall_timeout=30.0)
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for seed in range(3):
        one_step(model, optimizer, seed)
    engine = onefold.engine_of(model)
    numel = sum(unit.numel for unit in engine.units)
    return {
        "living": living_bytes() - before,
        "ledger": dict(engine.memory.now()),
        "states": sum(
            local_part(t).numel() * 4 for t in states.held(optimizer) if local_part(t).numel() > 1
        ),
        "numel": numel,
        "content": content,
    }


def at_rest_in_turn(cases: list[tuple[int, str]]) -> dict[tuple[int, str], dict[str, Any]]:
    return {(stage, precision): at_rest(stage, precision) for stage, precision in cases}


def expected_at_rest(
    stage: int, precision: str, numel: int, world_size: int
) -> tuple[float, float]:
    """(bytes of parameters and masters, bytes of optimizer states) by the table of this module."""
    p, share = 4 * numel, 1 if stage == 0 else 1 / world_size
    states = 2 * p * share
    if precision == "fp32":
        return (p * share if stage == 3 else p), states
    return (0 if stage == 3 else p / 2) + p * share, states


@pytest.mark.parametrize("world_size", [2, 3])
def test_bytes_at_rest_equal_the_formula(world_size: int, sample: Any) -> None:
    # Every other one has all stages and both precisions
    every = [(0, "fp32"), (0, "bf16"), (1, "bf16"), (1, "fp32")]
    every += [(stage + 2, precision) for stage, precision in every]
    cases = sample(every, 2)
    found = [
        (rank, *case, seen)
        for rank, by_case in enumerate(run_ranks(world_size, at_rest_in_turn, cases))
        for case, seen in by_case.items()
    ]
    assert len(found) == len(cases) * world_size
    for rank, stage, precision, seen in found:
        parameters, states = expected_at_rest(stage, precision, seen["numel"], world_size)
        told = (
            f"rank {rank} of {world_size}, stage {stage}, {precision}: {seen}, expected"
            f" {parameters} + {states} bytes"
        )
        assert seen["numel"] <= 1.01 * seen["content"] + 64 * 60, f"padding is over 1 %: {told}"
        assert abs(seen["living"] - parameters - states) < MIB, (
            f"living tensors differ from the formula: {told}"
        )
        assert abs(sum(seen["ledger"].values()) - parameters) < MIB, (
            f"the ledger differs from the formula: {told}"
        )


def with_gradients(stage: int) -> dict[str, Any]:
    """Between backward and step."""
    import onefold

    before = living_bytes()
    model = onefold.shard(model_of(), onefold.Recipe.zero(stage, stall_timeout=30.0))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    for seed in range(2):
        one_step(model, optimizer, seed)
    model(features_of(dist.get_rank(), 2, 16)).square().mean().backward()
    numel = sum(unit.numel for unit in onefold.engine_of(model).units)
    return {
        "living": living_bytes() - before,
        "numel": numel,
        "ledger": dict(onefold.engine_of(model).memory.now()),
    }


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_after_backward_gradients_are_where_the_recipe_says(stage: int) -> None:
    """Stage 0 holds whole gradients, every other stage one shard of them once they are reduced."""
    for rank, seen in enumerate(run_ranks(2, with_gradients, stage)):
        p = 4 * seen["numel"]
        expected = (p / 2 if stage == 3 else p) + (p if stage == 0 else p / 2)
        told = f"rank {rank}, stage {stage}: {seen}, expected {expected} bytes"
        assert abs(seen["living"] - expected) < MIB, told
        assert abs(sum(seen["ledger"].values()) - expected) < MIB, told


def between_micro_batches(stage: int, reduce_at: str | None) -> dict[str, Any]:
    """Under no_sync, after a backward that is not the last."""
    import onefold

    before = living_bytes()
    recipe = onefold.Recipe.zero(stage, reduce_at=reduce_at, stall_timeout=30.0)
    model = onefold.shard(model_of(), recipe)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    one_step(model, optimizer)
    with onefold.no_sync(model):
        for seed in range(2):
            model(features_of(seed + dist.get_rank(), 2, 16)).square().mean().backward()
    return {
        "living": living_bytes() - before,
        "numel": sum(unit.numel for unit in onefold.engine_of(model).units),
    }


@pytest.mark.parametrize(
    ("stage", "reduce_at"),
    [(0, None), (1, None), (2, None), (3, None), (2, "boundary"), (3, "boundary")],
)
def test_between_micro_batches_stages_2_and_3_hold_shards_of_gradients(
    stage: int, reduce_at: str | None
) -> None:
    for rank, seen in enumerate(run_ranks(2, between_micro_batches, stage, reduce_at)):
        p = 4 * seen["numel"]
        whole_gradients = stage < 2 or reduce_at == "boundary"
        expected = (p / 2 if stage == 3 else p) + (p if whole_gradients else p / 2)
        assert abs(seen["living"] - expected) < MIB, (
            f"rank {rank}, stage {stage}, {reduce_at}: {seen}, expected {expected}"
        )


def peak_of(stage: int, prefetch: int, in_flight: int) -> dict[str, Any]:
    import onefold

    give_memory_back_at_once()
    recipe = onefold.Recipe.zero(stage, prefetch=prefetch, in_flight=in_flight, stall_timeout=30.0)
    model = onefold.shard(model_of(WIDTH, 16), recipe)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    for seed in range(2):
        one_step(model, optimizer, seed)
    engine = onefold.engine_of(model)
    engine.memory.reset_peak()
    reset_peak()
    start = resident_bytes()
    base = peak_resident_bytes()
    one_step(model, optimizer, 2)
    sizes = sorted((4 * unit.numel for unit in engine.units), reverse=True)
    return {
        "ledger": dict(engine.memory.peak()),
        "grown": peak_resident_bytes() - base,
        "start": start,
        "largest": sizes[0],
        "all": sum(sizes),
    }


def peak_bound(
    stage: int, world_size: int, prefetch: int, in_flight: int, largest: int, everything: int
) -> float:
    """The most bytes the engine may hold within a step (fp32, reduced every micro-batch where the
    stage can).

    masters or replicated parameters + reduced gradients + units gathered at once (in use, the one
    before it not yet given back, prefetched) + gradients of units not yet reduced (being filled, in
    flight), each with what it receives.
    """
    share = 1 / world_size
    parameters = everything * (share if stage == 3 else 1)
    gathered = 0 if stage < 3 else (2 + prefetch) * largest
    if stage < 2:
        return (
            parameters
            + everything
            + gathered
            + (1 + in_flight) * 2 * largest
            + (everything * share if stage == 1 else 0)
        )
    return parameters + everything * share + gathered + (1 + in_flight) * 2 * largest


@pytest.mark.parametrize(("prefetch", "in_flight"), [(0, 0), (1, 2)])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_the_peak_stays_under_its_bound(stage: int, prefetch: int, in_flight: int) -> None:
    for rank, seen in enumerate(run_ranks(2, peak_of, stage, prefetch, in_flight)):
        bound = peak_bound(stage, 2, prefetch, in_flight, seen["largest"], seen["all"])
        told = (
            f"rank {rank}, stage {stage}, prefetch {prefetch}, in flight {in_flight}: bound"
            f" {bound / MIB:.1f} MiB, {seen}"
        )
        assert sum(seen["ledger"].values()) <= bound + MIB, (
            f"the ledger's peak is over its bound: {told}"
        )
        resting = seen["all"] * (0.5 if stage == 3 else 1)
        # Resident memory from outside: what the step added to what it found, with room for
        # activations and the allocator.
        assert seen["grown"] <= bound - resting + 8 * MIB, (
            f"resident memory grew past the bound: {told}"
        )


def ledger_against_tensors(stage: int) -> dict[str, Any]:
    """In the middle of a forward pass the ledger and the living tensors tell the same story."""
    import onefold

    before = living_bytes()
    model = onefold.shard(model_of(), onefold.Recipe.zero(stage, prefetch=0, stall_timeout=30.0))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    one_step(model, optimizer)
    seen: dict[str, Any] = {}
    engine = onefold.engine_of(model)

    def look(module: nn.Module, inputs: Any, output: Any) -> None:
        seen.update(
            living=living_bytes() - before,
            ledger=sum(engine.memory.now().values()),
            categories=engine.memory.now(),
        )

    model.blocks[4].down.register_forward_hook(look)  # type: ignore[index, union-attr]
    with torch.no_grad():
        model(features_of(0, 2, 16))
    return seen


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_the_ledger_agrees_with_the_living_tensors_within_a_pass(stage: int) -> None:
    for rank, seen in enumerate(run_ranks(2, ledger_against_tensors, stage)):
        assert abs(seen["living"] - seen["ledger"]) < MIB, f"rank {rank}, stage {stage}: {seen}"
