"""Measure a run's memory, traffic and time, in the schema of the plan.

rest        the engine's ledger of the device between steps, plus the optimizer's states there
peak        the recorded window's peak; without one, the ledger's own peak plus the optimizer's states
offloaded   the same peaks of the host and of NVMe
wire        bytes per step: the window's moves, divided by its steps
links       the same by link, inside and between the nodes that the ledger knows
seconds     per step: the window's compute, waits (for other ranks, for NVMe) and optimizer; `step` as given, or the window's length
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import nn

from onefold.comm import STEP_MOVES
from onefold.observe.memory import (
    DEVICE,
    HOST,
    NVME,
    Reconciliation,
    ledgers_of,
    moments_by_tier,
    reconcile,
)
from onefold.observe.trace import Recording
from onefold.plan.schema import CATEGORIES, ENGINE, FRAGMENTATION, MOMENTS, Account
from onefold.runtime.hooks import engine_of


def measured(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    recording: Recording | None = None,
    *,
    step_seconds: float | None = None,
    tokens_per_s: float = 0.0,
    mfu: float | None = None,
    steps: int | None = None,
    ranks_per_node: int | None = None,
) -> Account:
    """Return the account of this rank. Call it between steps, after at least one.
    Local, no synchronization.

    Args:
        model: what `onefold.shard` returned.
        recording: a recording of whole steps (`record`). Without it, `step_seconds` is the only
            time, and the peak has no activations.
        step_seconds, tokens_per_s, mfu: measured over the run, see `Meter`.
        steps: optimizer steps since the traffic ledger was reset; its bytes are divided by them.
            Only used without a recording.
        ranks_per_node: assume nodes of this size instead of the launcher's. None takes the
            launcher's, as the ledger does.

    Raises:
        ValueError: the model was not sharded, the recording holds no whole step, or
            `ranks_per_node` is given for a recipe with groups.
    """
    engine = engine_of(model)
    if ranks_per_node is not None and engine.group.topology.outer > 1:
        raise ValueError(
            f"ranks_per_node={ranks_per_node} with group={engine.recipe.inner!r}: what moves inside"
            " groups and across them depends on where they are, and is known from the ledger only;"
            " leave ranks_per_node out."
        )
    if recording is not None and recording.steps < 1:
        raise ValueError(
            "the recording holds no whole step: run at least one step, the optimizer's included,"
            " inside record()."
        )
    moments = moments_by_tier(optimizer, engine) if optimizer is not None else {}
    rest = {**engine.memory.now(), MOMENTS: moments.get(DEVICE, 0)}
    peak = (
        recording.peak()
        if recording is not None
        else {**engine.memory.peak(), MOMENTS: moments.get(DEVICE, 0)}
    )
    offloaded = {}
    for tier, ledger in ledgers_of(engine).items():
        own = ledger.peak()
        own[MOMENTS] = own.get(MOMENTS, 0) + moments.get(tier, 0)
        offloaded[tier] = _ordered(recording.peak(tier=tier) if recording is not None else own)
    full = recording.sent() if recording is not None else engine.traffic.by_move_in_full()
    over = recording.steps if recording is not None else steps
    wire = (
        {
            move: sent.nbytes // over
            for move, sent in full.items()
            if move in STEP_MOVES and sent.nbytes
        }
        if over
        else {}
    )
    # Bytes between the recipe's groups are not bytes between nodes
    of_nodes = engine.group.borders.endswith("nodes")
    between = (
        sum(sent.between for move, sent in full.items() if move in STEP_MOVES) // over
        if over and of_nodes
        else 0
    )
    total = sum(wire.values())
    links = (
        _by_link(total, between)
        if ranks_per_node is None
        else _links(total, engine.world_size, ranks_per_node)
    )
    account = Account(
        rest=_ordered(rest),
        peak=_ordered(peak),
        ledger=_ordered(recording.peak(ENGINE) if recording is not None else engine.memory.peak()),
        host=sum(offloaded.get(HOST, {}).values()),
        nvme=sum(offloaded.get(NVME, {}).values()),
        offloaded={tier: held for tier, held in offloaded.items() if held},
        moved=(
            {move: n // recording.steps for move, n in recording.moved().items()}
            if recording is not None
            else {}
        ),
        wire=wire,
        links=links,
        seconds=_seconds(recording, step_seconds),
        tokens_per_s=tokens_per_s,
        mfu=mfu,
    )
    found = reconciled(model, account)
    if found.device == "cuda":
        account = replace(account, peak={**account.peak, FRAGMENTATION: found.fragmentation})
    return account


def reconciled(model: nn.Module, account: Account) -> Reconciliation:
    """Compare `account` with the allocator (CUDA) or the process (CPU)."""
    ledger_peak = sum(n for category, n in account.peak.items() if category != FRAGMENTATION)
    return reconcile(engine_of(model).device, account.rest_bytes, ledger_peak)


def _ordered(table: Mapping[str, int]) -> dict[str, int]:
    """Order the categories as in the schema, then any others. Leaves out empty ones."""
    names = [c for c in CATEGORIES if c in table] + [c for c in table if c not in CATEGORIES]
    return {c: table[c] for c in names if table[c]}


def _by_link(wire: int, between: int) -> dict[str, int]:
    return {link: n for link, n in (("inside", wire - between), ("between", between)) if n}


def _links(wire: int, ranks: int, per_node: int) -> dict[str, int]:
    """Return the `wire` bytes by link. Without groups a move sends equal parts to all peers, so a
    link's share of the bytes is its share of the peers.
    """
    near = min(ranks, per_node)
    return _by_link(wire, wire - wire * (near - 1) // max(1, ranks - 1))


def _seconds(recording: Recording | None, step_seconds: float | None) -> dict[str, float]:
    out: dict[str, float] = {}
    if recording is not None:
        n = recording.steps
        out = {
            "compute": recording.compute / n,
            "exposed communication": recording.exposed / n,
            "optimizer": recording.optimizer / n,
            "step": recording.seconds / n,
        }
        if recording.moved():
            out["io"] = recording.io / n
    if step_seconds is not None:
        out["step"] = step_seconds
    return out
