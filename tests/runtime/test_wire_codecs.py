"""Parameters and gradients that travel encoded: what stays equal, how far results may be, and what each link carries."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import onefold
from models import TinyGPT, tokens_of
from onefold.comm.codecs import codec
from onefold.memory import RESIDUALS
from ranks import run_ranks
from trials import GPTCase, differences, train_sharded

CODECS: dict[str, dict[str, Any]] = {
    "gather": {"gather_codec": "int8"},
    "gather, second copy": {"gather_codec": "int8", "second_copy": True},
    "gather, HSDP": {"gather_codec": "int8", "shard_group": 2},
    "reduce": {"reduce_codec": "int4"},
    "reduce, HSDP": {"reduce_codec": "int8", "shard_group": 2},
    "all": {"gather_codec": "int8", "reduce_codec": "int4", "second_copy": True},
    "all, fp8, with feedback": {"gather_codec": "fp8", "reduce_codec": "int8", "error_feedback": True},
    "all, stochastic": {"gather_codec": "int8", "reduce_codec": "int4", "wire_rounding": "stochastic"},
}


class Run(GPTCase):
    steps = 3

    def optimizer(self, model: torch.nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW(model.parameters(), lr=0.01, eps=1e-4)


def every_codec() -> dict[str, Any]:
    """On one rank: what each recipe with codecs gives, twice, and without overlap."""
    plain = train_sharded(Run(), 3)
    found: list[str] = []
    far: dict[str, float] = {}
    for name, options in CODECS.items():
        options = options if "shard_group" in options else {**options, "group": 2}
        first = train_sharded(Run(), 3, **options)
        for other, more in (("again", {}), ("without overlap", {"overlap": False}), ("far ahead", {"prefetch": 3, "in_flight": 4})):
            found += differences(f"{name}, {other}", first, train_sharded(Run(), 3, **options, **more), 0.0, 0.0)
        far[name] = max(abs(a - b) for a, b in zip(plain.losses, first.losses, strict=True))
    return {"found": found, "far": far}


def test_results_are_the_same_each_time_and_with_any_schedule_and_near_those_without_codecs() -> None:
    for said in run_ranks(4, every_codec):
        assert said["found"] == []
        assert set(said["far"]) == set(CODECS)
        assert all(0 < far < 0.05 for far in said["far"].values()), said["far"]


def exact_values() -> list[str]:
    """Where encoding loses nothing: weights that are whole steps of their blocks' scales."""

    class Exact(Run):
        steps = 1

        def build(self) -> torch.nn.Module:
            model = TinyGPT()
            with torch.no_grad():
                for p in model.parameters():
                    flat = torch.randint(-127, 128, (p.numel(),)).float()
                    flat[::64] = 127.0  # the largest of each block, so that a step is a power of two
                    p.copy_(flat.view_as(p) / 1024)
            return model

    plain = train_sharded(Exact(), 3, group=2)
    return [
        sentence
        for name in ("gather", "gather, second copy", "gather, HSDP")
        for sentence in differences(
            name, plain, train_sharded(Exact(), 3, **{**({} if "shard_group" in CODECS[name] else {"group": 2}), **CODECS[name]}), 0.0, 0.0
        )
    ]


def test_gathers_that_encoding_loses_nothing_of_change_no_bit() -> None:
    assert run_ranks(4, exact_values) == [[]] * 4


def bytes_by_link(options: dict[str, Any]) -> tuple[dict[str, int], int, int]:
    """(bytes that this rank sent in the second step by link, elements of the flat buffers, encoded bytes of one interval of each)"""
    import os

    os.environ |= {"LOCAL_WORLD_SIZE": "2", "WORLD_SIZE": "4"}
    torch.manual_seed(0)
    model = onefold.shard(TinyGPT(), onefold.Recipe.zero(3, precision="bf16", **options))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    engine = onefold.engine_of(model)
    for step in range(2):
        engine.traffic.reset()
        model(tokens_of(step)).backward()
        optimizer.step()
        optimizer.zero_grad()
    name = options.get("gather_codec", "plain")
    flats = [flat for unit in engine.units for flat in unit.flats]
    each = sum(codec(name).encoded_bytes(flat.layout.shard_numel) for flat in flats) if name != "plain" else 0
    return engine.traffic.by_link(), sum(flat.layout.numel for flat in flats), each


@pytest.mark.parametrize(
    ("options", "inside", "between"),
    [
        ({}, 3 * 2 / 4, 3 * 2 * 2 / 4),  # each rank sends a quarter to one rank beside it and to two on the other node, three times
        ({"group": 2}, 3 * 2 / 2, 3 * 2 / 4),  # half a unit inside, a quarter across
        ({"shard_group": "node"}, 3 * 2 / 2, 2 * 2 / 4),
        ({"shard_group": "node", "optimizer_over": "all"}, 3 * 2 / 2, 2 * 2 / 4),
        ({"second_copy": True}, 3 * 2 / 2, 2 * 2 / 4),
    ],
    ids=str,
)
def test_each_link_carries_the_bytes_of_the_formula(options: dict[str, Any], inside: float, between: float) -> None:
    for links, numel, _ in run_ranks(4, bytes_by_link, options):
        assert links == {"inside": inside * numel, "between": between * numel}


def test_encoded_moves_carry_a_half_and_a_quarter_between_nodes() -> None:
    for links, numel, each in run_ranks(4, bytes_by_link, {"second_copy": True, "gather_codec": "int8", "reduce_codec": "int4"}):
        plain = 2 * numel / 4  # one pass in 16 bits, sent across by a rank
        assert 0.5 * plain < each <= 0.53 * plain
        quarter = links["between"] - each
        assert 0.25 * plain < quarter <= 0.28 * plain


def feedback(options: dict[str, Any]) -> tuple[int, Tensor]:
    """(bytes of what encoding lost, the sum over 30 steps of reduced gradients of a constant)"""
    torch.manual_seed(0)
    module = torch.nn.Linear(64, 64, bias=False)
    model = onefold.shard(module, onefold.Recipe.zero(3, reduce_codec="int4", group=2, **options))
    rank = torch.distributed.get_rank()
    x = torch.linspace(0.01, 1.0, 64).repeat(2, 1) * (1 + rank)
    total = torch.zeros_like(model.weight)
    for _ in range(30):
        model(x).sum().backward()
        total += model.weight.grad
        model.weight.grad = None
    held = onefold.engine_of(model).memory.now().get(RESIDUALS, 0)
    return held, total.detach().clone()


def test_what_encoding_lost_is_fed_back() -> None:
    exact = run_ranks(4, feedback_without_codec)
    lost, fed = run_ranks(4, feedback, {}), run_ranks(4, feedback, {"error_feedback": True})
    for (_, without), (nbytes, with_it), want in zip(lost, fed, exact, strict=True):
        assert nbytes == 4 * (64 * 64 + 64 * 64 // 2)  # fp32: of the whole on the first hop, of the shard on the second
        far, near = (without - want).abs().max().item(), (with_it - want).abs().max().item()
        assert near < far / 5, (near, far)


def feedback_without_codec() -> Tensor:
    torch.manual_seed(0)
    model = onefold.shard(torch.nn.Linear(64, 64, bias=False), onefold.Recipe.zero(3, group=2))
    x = torch.linspace(0.01, 1.0, 64).repeat(2, 1) * (1 + torch.distributed.get_rank())
    total = torch.zeros_like(model.weight)
    for _ in range(30):
        model(x).sum().backward()
        total += model.weight.grad
        model.weight.grad = None
    return total.detach().clone()


def not_finite(what: float) -> list[bool]:
    """Whether an infinite or undefined gradient of one rank is seen on every rank, for each codec."""
    seen = []
    for name in ("int8", "int4", "fp8"):
        torch.manual_seed(0)
        model = onefold.shard(TinyGPT(), onefold.Recipe.zero(3, group=2, reduce_codec=name, error_feedback=True))
        loss = model(tokens_of(0))
        if torch.distributed.get_rank() == 3:
            loss = loss * what
        loss.backward()
        seen.append(not bool(torch.isfinite(onefold.clip_grad_norm_(model, 1.0))))
    return seen


@pytest.mark.parametrize("what", [float("inf"), float("nan")])
def test_what_is_not_finite_is_passed_on(what: float) -> None:
    assert run_ranks(4, not_finite, what) == [[True] * 3] * 4


