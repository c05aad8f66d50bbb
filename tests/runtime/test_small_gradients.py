"""Small gradients go into their unit's buffer together, small units are gathered ahead, small
reductions stay under way: same bits.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import onefold
from invariants.wire import counted_sends
from onefold.memory import GATHERED
from onefold.runtime import reduce, refresh, schedule
from ranks import run_ranks


class Odd(nn.Module):
    """Small and large parameters, one without elements, one that is not used, one that is used
    twice.
    """

    def __init__(self) -> None:
        super().__init__()
        self.small, self.large = nn.Linear(24, 160), nn.Linear(160, 24)
        self.scale, self.empty = nn.Parameter(torch.ones(24)), nn.Parameter(torch.empty(0, 3))
        self.unused = nn.Linear(24, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.large(self.small(x).tanh()) * self.scale
        return x + y * self.scale + self.empty.sum()


class Model(nn.Module):
    def __init__(self, again: bool) -> None:
        super().__init__()
        self.blocks, self.again = nn.ModuleList(Odd() for _ in range(5)), again

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=True) if self.again else block(x)
        return x


def trained(
    stage: int,
    micro_batches: int,
    again: bool,
    small: int,
    aside: int,
    traffic: int,
    precision: str,
) -> Any:
    """Losses and whole weights."""
    reduce.SMALL = refresh.SMALL = small
    reduce.ASIDE = aside
    schedule.SMALL_TRAFFIC = refresh.SMALL_TRAFFIC = traffic
    torch.manual_seed(0)
    model = onefold.shard(
        Model(again), onefold.Recipe.zero(stage, precision=precision), units=(Odd,)
    )
    engine = onefold.engine_of(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for step in range(3):
        for k in range(micro_batches):
            torch.manual_seed(100 * step + 10 * k + torch.distributed.get_rank())
            engine.progress.synced = k + 1 == micro_batches
            x = torch.randn(3, 24, requires_grad=again)
            loss = model(x).float().square().mean()
            loss.backward()
            losses.append(loss.item())
        unused = [name for name, p in model.named_parameters() if p.grad is None]
        assert all("unused" in name for name in unused) and unused, unused
        optimizer.step()
        optimizer.zero_grad()
        assert all(p.grad is None for p in model.parameters())
    with onefold.full_params(model):
        weights = [p.detach().clone() for p in model.parameters()]
    return losses, weights


@pytest.mark.parametrize(
    ("stage", "micro_batches", "again", "precision"),
    [
        (0, 1, False, "fp32"),
        (1, 3, False, "fp32"),
        (2, 2, False, "bf16"),
        (3, 1, False, "fp32"),
        (3, 3, True, "fp32"),
        (3, 2, False, "bf16"),
    ],
)
def test_together_is_one_by_one_to_the_bit(
    stage: int, micro_batches: int, again: bool, precision: str
) -> None:
    one_by_one = run_ranks(2, trained, stage, micro_batches, again, 0, 0, 0, precision)
    for options in ((64 << 10, 1 << 20, 256 << 10), (4096, 3000, 256 << 10)):
        for alone, together in zip(
            one_by_one,
            run_ranks(2, trained, stage, micro_batches, again, *options, precision),
            strict=True,
        ):
            assert together[0] == alone[0], (together[0], alone[0])
            assert all(torch.equal(a, b) for a, b in zip(together[1], alone[1], strict=True))


def most_at_once(traffic: int, in_flight: int, prefetch: int) -> tuple[int, int]:
    """The most reductions under way, and units gathered, at once in a step of nine small blocks."""
    schedule.SMALL_TRAFFIC = refresh.SMALL_TRAFFIC = traffic
    torch.manual_seed(0)
    recipe = onefold.Recipe.zero(3, in_flight=in_flight, prefetch=prefetch)
    model = onefold.shard(
        nn.Sequential(*(nn.Linear(24, 24) for _ in range(9))), recipe, units=(nn.Linear,)
    )
    engine = onefold.engine_of(model)
    flying, gathered = [0], [0]
    send, launch = engine.reduce._send, engine.gather.launch

    def counted_send(r: Any) -> None:
        send(r)
        flying.append(len(engine.reduce.under_way))

    def counted_launch(unit: Any) -> None:
        launch(unit)
        gathered.append(len(engine.gather.gathered))

    for _ in range(3):
        engine.reduce._send, engine.gather.launch = counted_send, counted_launch
        model(torch.randn(3, 24)).square().mean().backward()
        model.zero_grad()
    return max(flying), max(gathered)


@pytest.mark.parametrize(
    ("traffic", "in_flight", "prefetch", "expected"),
    [
        (0, 2, 1, (3, 3)),
        (256 << 10, 2, 1, (9, 9)),
        (256 << 10, 0, 0, (1, 2)),
        (4 * (24 * 24 + 64) * 4, 1, 1, (5, 6)),
    ],
)
def test_small_units_do_not_count_up_to_some_bytes(
    traffic: int, in_flight: int, prefetch: int, expected: tuple[int, int]
) -> None:
    for flying, gathered in run_ranks(2, most_at_once, traffic, in_flight, prefetch):
        assert flying <= expected[0] and gathered <= expected[1], (flying, gathered)
        assert (
            traffic in (0, 4 * (24 * 24 + 64) * 4)
            or not in_flight
            or (flying, gathered) == expected
        ), (flying, gathered)


class Side(nn.Module):
    """Layers beside one another, of any widths."""

    def __init__(self, widths: list[int]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for width in widths)

    def forward(self, x: torch.Tensor) -> Any:
        return sum(layer(x[:, : layer.in_features]).square().mean() for layer in self.layers)


def refreshed(overlap: bool, traffic: int) -> dict[str, Any]:
    """The last of three forward passes at stage 1: its messages, and what the ledgers say of it."""
    schedule.SMALL_TRAFFIC = refresh.SMALL_TRAFFIC = traffic
    torch.manual_seed(0)
    recipe = onefold.Recipe.zero(1, overlap=overlap)
    model = onefold.shard(Side([24] * 9 + [200] + [32] * 3), recipe, units=(nn.Linear,))
    engine, x = onefold.engine_of(model), torch.ones(3, 200)
    engine.memory.record = True  # and with it the ledger of traffic its events
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        engine.traffic.reset()
        engine.memory.timeline.clear()
        with counted_sends() as sent:
            loss = model(x)
        events = [event for event in engine.traffic.events if event.move == "all-gather"]
        gathers = [change for _, kind, _, change in engine.memory.timeline if kind == GATHERED]
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return {
        "messages": sent.messages,
        "payload": sent.payload,
        "bytes": {event.unit: event.nbytes for event in events},
        "landed": all(event.landed is not None for event in events),
        "twice": max(gathers, default=0),
        "left": engine.memory.held(GATHERED),
        "loss": loss.item(),
    }


@pytest.mark.parametrize(("ranks", "traffic"), [(2, 256 << 10), (3, 256 << 10), (2, 4 << 10)])
def test_small_resident_copies_are_refreshed_in_one_message(ranks: int, traffic: int) -> None:
    for alone, together in zip(
        run_ranks(ranks, refreshed, False, traffic),
        run_ranks(ranks, refreshed, True, traffic),
        strict=True,
    ):
        peers, each = ranks - 1, 24 * 25 * 4
        assert alone["messages"] == 13 * peers and alone["twice"] == 0, alone
        # All but the wide one; or as many as may have their bytes in memory twice
        joined = 12 if traffic > 12 << 10 else 4
        assert together["messages"] == (13 - joined + 1) * peers, together
        assert 4 * each < together["twice"] < 3 * traffic + each and not together["left"], together
        for same in ("payload", "bytes", "loss"):
            assert together[same] == alone[same], (same, together, alone)
        assert together["landed"] and sum(together["bytes"].values()) == together["payload"]
