"""What the plan says of tiers is what engines do: bytes at rest on each of them, bytes moved in a
step, peaks under their bounds.
"""

from __future__ import annotations

import contextlib
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import onefold
import virtual
from onefold.device.copies import WINDOW
from onefold.memory import LEAVING, MOMENTS
from onefold.observe.memory import moments_by_tier
from onefold.offload import preflight
from onefold.offload.activations import NEAR
from onefold.plan.activity import Activity
from onefold.plan.modules import model_shape
from onefold.plan.offloaded import moved_by, offloaded_bytes, on_host
from onefold.plan.replay import Replay
from onefold.plan.shapes import architecture
from onefold.plan.states import at_rest, bound_of, units_of
from onefold.plan.subject import in_tiles
from onefold.plan.wire import wire
from onefold.recipe import Recipe
from onefold.tracing.trace import trace
from ranks import run_ranks
from zoo import TinyGPT, tokens_of

#: Options of Recipe.zero by name.
STATES: dict[str, dict[str, Any]] = {
    "optimizer on the host": {"offload_optimizer": "cpu"},
    "a share of it": {"offload_optimizer": 0.6},
    "a budget": {"offload_optimizer": 9_000_000},
    "optimizer on NVMe": {"offload_optimizer": "nvme", "chunk": 65536},
    "a share of it on NVMe, gradients on the host": {
        "offload_optimizer": "nvme:0.6",
        "offload_gradients": "cpu",
    },
    "half of it on the host, moments in bf16": {"offload_optimizer": 0.5, "moments": "bf16"},
    "stepped in backward": {"offload_optimizer": "nvme", "step_in_backward": True},
}
if find_spec("torchao") is not None:
    STATES["optimizer on NVMe, moments in 8 bits"] = {
        "offload_optimizer": "nvme",
        "moments": "int8",
        "chunk": 262144,
    }
AT_STAGE_3: dict[str, dict[str, Any]] = {
    "parameters on the host": {"offload_optimizer": "cpu", "offload_param": "cpu"},
    "parameters on the host, optimizer on NVMe": {
        "offload_optimizer": "nvme",
        "offload_param": "cpu",
    },
    "all on NVMe": {"offload_optimizer": "nvme", "offload_param": "nvme"},
    "all on the host, in tiles": {
        "offload_optimizer": "cpu",
        "offload_param": "cpu",
        "tile": 100_000,
    },
    "in tiles": {"tile": 100_000},
    "half of all on NVMe, further ahead": {
        "offload_optimizer": "nvme:0.5",
        "offload_param": "nvme",
        "prefetch": 2,
    },
}


def model() -> nn.Module:
    torch.manual_seed(0)
    made = TinyGPT(width=192, depth=4)
    made.blocks[0].requires_grad_(False)
    return made


def observed(recipe: Recipe, micro_batches: int) -> dict[str, Any]:
    """What the ledgers say of a step in the steady state."""
    # A rank of its own: the disk's speed is of no interest here
    preflight.measure = lambda *_, **__: []
    module = onefold.shard(model(), recipe)
    optimizer = torch.optim.AdamW([p for p in module.parameters() if p.requires_grad], lr=1e-3)
    engine = onefold.engine_of(module)
    # From the first step on, which may take more than the others
    engine.transfers.host.reset_peak()
    for step in range(3):
        if step == 2:
            engine.memory.reset_peak()
            engine.transfers.moved.reset()
            engine.traffic.reset()
        for k in range(micro_batches):
            with contextlib.nullcontext() if k + 1 == micro_batches else onefold.no_sync(module):
                module(tokens_of(10 * step + k)).float().backward()
        optimizer.step()
        optimizer.zero_grad()
    moments = moments_by_tier(optimizer, engine)
    on_host = engine.transfers.host.now() | {MOMENTS: moments.get("host", 0)}
    return {
        "device": {
            k: v
            for k, v in (engine.memory.now() | {MOMENTS: moments.get("device", 0)}).items()
            if v
        },
        "host": {k: v for k, v in on_host.items() if v},
        "nvme": engine.transfers.disk.now(),
        "moved": engine.transfers.moved.by_move(),
        "wire": engine.traffic.by_move(),
        "peak": sum(engine.memory.peak().values()),
        "host peak": sum(engine.transfers.host.peak().values()) + moments.get("host", 0),
    }


def differing(
    stage: int, precision: str, which: dict[str, dict[str, Any]], folder: str, micro_batches: int
) -> list[str]:
    """What a plan says otherwise than an engine."""
    ranks, rank = (dist.get_world_size(), dist.get_rank()) if dist.is_initialized() else (1, 0)
    wrong = []
    for name, tiers in which.items():
        recipe = Recipe.zero(
            stage,
            precision=precision,
            **tiers,
            **({"nvme": folder} if "nvme" in str(tiers) else {}),
        )
        seen = observed(recipe, micro_batches)
        made = model()
        with in_tiles(made, recipe):
            units = units_of(model_shape(made), recipe, ranks, rank)
        offloaded, replay = (
            offloaded_bytes(units, recipe, micro_batches),
            Replay(units, recipe).run(micro_batches),
        )
        bounds = {"peak": bound_of(units, recipe, micro_batches), "host peak": offloaded.host}
        told = {
            "device": at_rest(units),
            **offloaded.rest,
            "moved": offloaded.moved,
            "wire": wire(units, recipe, micro_batches),
        }
        wrong += [
            f"{name}: {key} {seen[key]}, planned {value}"
            for key, value in told.items()
            if seen[key] != value
        ]
        if recipe.tile is None and seen["peak"] != sum(replay.peak.values()):
            wrong.append(f"{name}: {seen['peak']} on the device at its peak, planned {replay.peak}")
        wrong += [
            f"{name}: {key} {seen[key]} above {bound}"
            for key, bound in bounds.items()
            if seen[key] > bound
        ]
        if seen["host peak"] < 0.5 * offloaded.host:
            wrong.append(f"{name}: {offloaded.host} planned on the host, {seen['host peak']} taken")
    return wrong


Case = tuple[int, str, int, str]  # stage, precision, micro-batches, name


def cases_of(ranks: int) -> list[Case]:
    """Each combination at one stage at least; one rank divides nothing, so that less can differ."""
    names, at_3 = list(STATES), list(AT_STAGE_3)
    asked = [
        (0, "fp32", 1, [names[1], names[3]]),
        (2, "bf16", 2, names),
        (3, "fp32", 1, [names[3], *at_3[2:]]),
        (3, "bf16", 2, at_3),
    ]
    return [
        (stage, precision, micro_batches, name)
        for stage, precision, micro_batches, chosen in (asked[::3] if ranks == 1 else asked)
        for name in chosen
    ]


def all_differing(folder: str, cases: list[Case]) -> list[str]:
    wrong = []
    for stage, precision, micro_batches, name in cases:
        which = {name: (STATES | AT_STAGE_3)[name]}
        found = differing(stage, precision, which, folder, micro_batches)
        wrong += [
            f"stage {stage}, {precision}, {micro_batches} micro-batches, {one}" for one in found
        ]
    return wrong


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_plan_of_tiers_in_integers_equals_the_ledgers(
    ranks: int, tmp_path: Path, sample: Any
) -> None:
    for wrong in run_ranks(ranks, all_differing, str(tmp_path), sample(cases_of(ranks), 5)):
        assert wrong == [], "\n".join(wrong)


@pytest.mark.parametrize(
    ("checkpointing", "budget"), [("none", 1 << 62), ("none", 40 << 20), ("non-reentrant", 1 << 62)]
)
def test_activations_that_are_planned_to_go_to_the_host_do(checkpointing: Any, budget: int) -> None:
    """Bytes that go down and come up in a step, to a few of a tensor's: which of them are large
    enough is the trace's.
    """
    batch = torch.randint(0, 61, (64, 64), generator=torch.Generator().manual_seed(0))

    def made() -> nn.Module:
        torch.manual_seed(0)
        return TinyGPT(width=128, depth=4, length=64, checkpointing=checkpointing)

    planned = on_host(Activity.from_trace(trace(made(), batch)), budget, shared=True)
    module = onefold.shard(made(), Recipe.zero(3, offload_activations=budget))
    offloaded = onefold.engine_of(module).transfers
    for _ in range(2):
        offloaded.moved.reset()
        module(batch).backward()
    moved, told = offloaded.moved.by_move(), moved_by(planned.carried(1))
    assert set(moved) == set(told) == {"up", "down"}
    for move in told:
        assert moved[move] == pytest.approx(told[move], abs=4 << 20), (moved, told)
    assert sum(offloaded.host.peak().values()) == pytest.approx(planned.nbytes, abs=4 << 20), (
        offloaded.host.peak(),
        planned.nbytes,
    )


def test_activations_on_the_host_leave_the_device_what_runs_and_what_is_on_its_way() -> None:
    shape = architecture("llama-3-8b")
    assert shape.transformer is not None
    whole = Activity.from_dims(shape, shape.transformer, 1, 2048, 2, "none", "llama")
    peaks = {
        budget: max(s.peak for s in on_host(whole, budget, shared=False).activity.slots)
        for budget in (1 << 32, 1 << 62)
    }
    kept = max(s.peak for s in whole.slots)
    assert kept - (1 << 32) <= peaks[1 << 32] <= kept - (1 << 32) + 2 * NEAR, (kept, peaks)
    one = whole.saved // shape.transformer.layers
    assert peaks[1 << 62] < kept / 2 and peaks[1 << 62] >= one


#: What runs on a device with streams: (stage, precision, micro-batches, options).
ON_STREAMS: list[tuple[int, str, int, dict[str, Any]]] = [
    (0, "bf16", 2, {"offload_optimizer": "cpu"}),
    (2, "fp32", 1, {"offload_optimizer": "cpu"}),
    (2, "bf16", 3, {"offload_optimizer": "cpu"}),
    (3, "bf16", 3, {"offload_optimizer": "cpu", "offload_param": "cpu"}),
    (3, "fp32", 2, {"offload_optimizer": 0.5}),
    (3, "bf16", 2, {"offload_optimizer": "cpu", "step_in_backward": True}),
]


@virtual.alone
@pytest.mark.parametrize("case", range(len(ON_STREAMS)))
def test_a_plan_of_a_device_with_streams_bounds_what_it_holds(case: int) -> None:
    stage, precision, micro_batches, tiers = ON_STREAMS[case]
    recipe = Recipe.zero(stage, precision=precision, **tiers)
    made = model()
    units = units_of(model_shape(made), recipe, 1, 0)
    module = onefold.shard(made, recipe, device="virtual")
    optimizer = torch.optim.AdamW([p for p in module.parameters() if p.requires_grad], lr=1e-3)
    engine = onefold.engine_of(module)
    for step in range(3):
        engine.memory.reset_peak()
        engine.transfers.moved.reset()
        for k in range(micro_batches):
            with contextlib.nullcontext() if k + 1 == micro_batches else onefold.no_sync(module):
                module(tokens_of(10 * step + k).to("virtual")).float().backward()
        optimizer.step()
        optimizer.zero_grad()
    planned = offloaded_bytes(units, recipe, micro_batches, streams=True)
    assert engine.transfers.moved.by_move() == planned.moved
    assert LEAVING not in engine.memory.now()
    peak, bound = engine.memory.peak(), bound_of(units, recipe, micro_batches, WINDOW)
    assert sum(peak.values()) <= bound, (peak, bound)
    replayed = Replay(units, recipe, WINDOW).run(micro_batches).peak
    assert sum(replayed.values()) <= bound, (replayed, bound)
    assert peak.get(LEAVING, 0) <= replayed.get(LEAVING, 0), (peak, replayed)


def test_copies_larger_than_the_window_are_planned_two_at_a_time() -> None:
    recipe = Recipe.zero(2, precision="fp32", offload_optimizer="cpu")
    units = units_of(model_shape(model()), recipe, 1, 0)
    own = sorted(f.own * 4 for u in units for f in u.flats if f.trainable)
    held = {
        window: max(m.held.get(LEAVING, 0) for m in Replay(units, recipe, window).run(1).moments)
        for window in (1, 1 << 40)
    }
    assert held == {1: 2 * own[-1], 1 << 40: 3 * own[-1]}, own


def test_large_activations_on_their_way_are_planned_two_at_a_time() -> None:
    shape = architecture("llama-3-8b")
    assert shape.transformer is not None
    whole = Activity.from_dims(shape, shape.transformer, 8, 8192, 2, "none", "llama")
    piece = 8 * 8192 * shape.transformer.ffn * 2
    assert piece > NEAR and max(whole.largest[u] for u in whole.largest if u != "(root)") == piece
    at_once = on_host(whole, 1 << 62, shared=True).activity
    late = on_host(whole, 1 << 62, shared=False).activity
    more = [
        b.peak - a.peak
        for a, b in zip(at_once.slots, late.slots, strict=True)
        if a.phase == "forward" and a.unit != "(root)"
    ]
    assert max(more) == 2 * piece, (max(more), piece)
