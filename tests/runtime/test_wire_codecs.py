"""Parameters and gradients that travel encoded: what stays equal, how far results may be, what
overflows, what is fed back.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

import onefold
from invariants.test_same_numbers import Run as Accumulating
from onefold.memory import RESIDUALS
from onefold.quant.integers import Int4
from onefold.runtime.parameters.interval import local_part
from ranks import run_ranks
from trials import GPTCase, differences, train_sharded
from zoo import TinyGPT, tokens_of

CODECS: dict[str, dict[str, Any]] = {
    "gather": {"gather_codec": "int8"},
    "gather, second copy": {"gather_codec": "int8", "second_copy": True},
    "gather, HSDP": {"gather_codec": "int8", "shard_group": 2},
    "reduce": {"reduce_codec": "int4"},
    "reduce, HSDP": {"reduce_codec": "int8", "shard_group": 2},
    "all": {"gather_codec": "int8", "reduce_codec": "int4", "second_copy": True},
    "all, fp8, with feedback": {
        "gather_codec": "fp8",
        "reduce_codec": "int8",
        "error_feedback": True,
    },
    "all, stochastic": {
        "gather_codec": "int8",
        "reduce_codec": "int4",
        "wire_rounding": "stochastic",
    },
}


class Run(GPTCase):
    steps = 3

    def optimizer(self, model: torch.nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW(model.parameters(), lr=0.01, eps=1e-4)


SCHEDULES: dict[str, dict[str, Any]] = {
    "again": {},
    "without overlap": {"overlap": False},
    "far ahead": {"prefetch": 3, "in_flight": 4},
}


class Accumulated(Accumulating):
    """Three micro-batches, clipped."""

    def __init__(self) -> None:
        super().__init__(kind="fused adamw", max_norm=0.5, micro_batches=3, steps=3)


def every_codec(
    size: int, names: list[str], schedules: list[str], case: type[GPTCase]
) -> dict[str, Any]:
    """On one rank: what each recipe with codecs gives over groups of `size`, and again by each
    schedule.
    """
    plain = train_sharded(case(), 3)
    found: list[str] = []
    far: dict[str, float] = {}
    for name in names:
        options = {
            **CODECS[name],
            "shard_group" if "shard_group" in CODECS[name] else "group": size,
        }
        first = train_sharded(case(), 3, **options)
        for other in schedules:
            found += differences(
                f"{name}, {other}",
                first,
                train_sharded(case(), 3, **options, **SCHEDULES[other]),
                0.0,
                0.0,
            )
        far[name] = max(abs(a - b) for a, b in zip(plain.losses, first.losses, strict=True))
    return {"found": found, "far": far}


#: (ranks of a group, recipes, schedules, what trains)
Asked = tuple[int, list[str], list[str], type[GPTCase]]
SOME = ["reduce, HSDP", "all, fp8, with feedback"]
OVER_FOUR: list[Asked] = [
    (2, list(CODECS), ["without overlap"], Run),
    (2, SOME, ["again", "far ahead"], Run),
    (2, SOME, ["without overlap"], Accumulated),
]
OVER_SIX: list[Asked] = [
    (size, ["reduce, HSDP", "all"], ["without overlap"], Run) for size in (2, 3)
]


def each_of(asked: list[Asked]) -> list[dict[str, Any]]:
    return [every_codec(*one) for one in asked]


@pytest.mark.parametrize(("ranks", "asked"), [(4, OVER_FOUR), (6, OVER_SIX)], ids=["4", "6"])
def test_results_repeat_with_any_schedule_and_are_near_those_without_codecs(
    ranks: int, asked: list[Asked], sample: Any
) -> None:
    for said in (one for rank in run_ranks(ranks, each_of, sample(asked, 2)) for one in rank):
        assert said["found"] == []
        assert len(said["far"]) >= 2 and all(0 < far < 0.05 for far in said["far"].values()), said[
            "far"
        ]


class Compiled(Run):
    """The whole model, of one block; what is compiled breaks at the hooks, and a gather is of the
    values of each step all the same.
    """

    fast: Any = None
    steps = 2

    def build(self) -> torch.nn.Module:
        return TinyGPT(depth=1)

    def loss(self, model: torch.nn.Module, batch: Tensor) -> Tensor:
        if self.fast is None:
            self.fast = torch.compile(model, backend="eager")
            with pytest.raises(ValueError, match="around a sharded model"):
                onefold.engine_of(self.fast)
        return self.fast(batch)


class Uncompiled(Compiled):
    def loss(self, model: torch.nn.Module, batch: Tensor) -> Tensor:
        return model(batch)


def compiled_and_not() -> list[str]:
    options = {**CODECS["all"], "group": 1}
    return differences(
        "compiled",
        train_sharded(Uncompiled(), 3, **options),
        train_sharded(Compiled(), 3, **options),
        0.0,
        0.0,
    )


@pytest.mark.slow
def test_a_model_compiled_as_a_whole_gives_the_same_bits() -> None:
    assert run_ranks(2, compiled_and_not) == [[]] * 2


def exact_values() -> list[str]:
    """Where encoding loses nothing: weights that are whole steps of their blocks' scales."""

    class Exact(Run):
        steps = 1

        def build(self) -> torch.nn.Module:
            model = TinyGPT()
            with torch.no_grad():
                for p in model.parameters():
                    flat = torch.randint(-127, 128, (p.numel(),)).float()
                    # The largest of each block, so that a step is a power of two
                    flat[::64] = 127.0
                    p.copy_(flat.view_as(p) / 1024)
            return model

    plain = train_sharded(Exact(), 3, group=2)
    return [
        sentence
        for name in ("gather", "gather, second copy", "gather, HSDP")
        for sentence in differences(
            name,
            plain,
            train_sharded(
                Exact(),
                3,
                **{**({} if "shard_group" in CODECS[name] else {"group": 2}), **CODECS[name]},
            ),
            0.0,
            0.0,
        )
    ]


def test_gathers_that_encoding_loses_nothing_of_change_no_bit() -> None:
    assert run_ranks(4, exact_values) == [[]] * 4


def feedback(options: dict[str, Any]) -> tuple[int, Tensor]:
    """(bytes of what encoding lost, the sum over 30 steps of reduced gradients of a constant)"""
    torch.manual_seed(0)
    model = onefold.shard(
        torch.nn.Linear(64, 64, bias=False), onefold.Recipe.zero(3, group=2, **options)
    )
    x = torch.linspace(0.01, 1.0, 64).repeat(2, 1) * (1 + torch.distributed.get_rank())
    total = torch.zeros_like(model.weight)
    for _ in range(30):
        model(x).sum().backward()
        total += model.weight.grad
        model.weight.grad = None
    held = onefold.engine_of(model).memory.now().get(RESIDUALS, 0)
    return held, local_part(total).clone()


def with_and_without_feedback() -> list[tuple[int, Tensor]]:
    return [
        feedback(options)
        for options in (
            {},
            {"reduce_codec": "int4"},
            {"reduce_codec": "int4", "error_feedback": True},
        )
    ]


def test_what_encoding_lost_is_fed_back() -> None:
    for (_, want), (_, without), (nbytes, with_it) in run_ranks(4, with_and_without_feedback):
        # fp32: of the whole on the first hop, of the shard on the second
        assert nbytes == 4 * (64 * 64 + 64 * 64 // 2)
        far, near = (without - want).abs().max().item(), (with_it - want).abs().max().item()
        assert near < far / 5, (near, far)


class Two(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = torch.nn.Linear(64, 64, bias=False), torch.nn.Linear(64, 64, bias=False)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.a(x).sum() + self.b(y).sum()


def after_a_step_left_out(scales: bool) -> float:
    """The largest gradient after a step in which one rank's was 10,000 times as large in one unit,
    and infinite in the other.
    """
    torch.manual_seed(0)
    model = onefold.shard(
        Two(), onefold.Recipe.zero(3, group=2, reduce_codec="int4", error_feedback=True)
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    scaler = onefold.GradScaler(model, init_scale=4.0, enabled=scales)
    norm = 0.0
    for step in range(3):
        x = y = torch.linspace(0.1, 1.0, 64).repeat(2, 1) * (1 + torch.distributed.get_rank())
        if step == 1 and torch.distributed.get_rank() == 3:
            x, y = x * 1e4, y * math.inf
        scaler.scale(model(x, y)).backward()
        scaler.unscale_(optimizer)
        if not scales or step == 2:
            norm = onefold.clip_grad_norm_(model, math.inf, math.inf).item()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    return norm


def with_a_scaler_and_without() -> list[float]:
    return [after_a_step_left_out(scales) for scales in (True, False)]


def test_what_encoding_lost_of_a_step_that_is_left_out_does_not_reach_the_next_one() -> None:
    for norms in run_ranks(4, with_a_scaler_and_without):
        assert all(4.0 < norm < 6.0 for norm in norms), norms  # 5, and what 4 bits lose


def not_finite(cases: list[tuple[str, float]]) -> dict[tuple[str, float], list[Any]]:
    """An infinite or undefined gradient of one rank, through encoded reductions: what each rank
    sees of it, for each codec.
    """
    seen: dict[tuple[str, float], list[Any]] = {}
    for name, what in cases:
        torch.manual_seed(0)
        model = onefold.shard(
            TinyGPT(), onefold.Recipe.zero(3, group=2, reduce_codec=name, error_feedback=True)
        )
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scaler = onefold.GradScaler(model, init_scale=64.0)
        for step in range(3):
            before = [p.detach().clone() for p in model.parameters()]
            loss = model(tokens_of(step))
            if torch.distributed.get_rank() == 3 and step == 1:
                loss = loss * what
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            norm = onefold.clip_grad_norm_(model, 1.0)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            moved = any(
                not torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True)
            )
            seen.setdefault((name, what), []).append(
                (bool(torch.isfinite(norm)), scaler.get_scale(), moved)
            )
        residuals = onefold.engine_of(model).residuals.kept
        assert residuals and all(torch.isfinite(r).all() for r in residuals.values()), (
            "what is not finite is carried on"
        )
    return seen


def test_what_is_not_finite_is_passed_on_and_the_step_skipped_everywhere(sample: Any) -> None:
    every = [(name, what) for name in ("int8", "int4", "fp8") for what in (math.inf, math.nan)]
    cases = sample(every, 3)
    for said in run_ranks(4, not_finite, cases):
        assert len(said) == len(cases) >= 2
        for case, steps in said.items():
            assert steps == [(True, 64.0, True), (False, 32.0, False), (True, 32.0, True)], (
                case,
                steps,
            )


def test_rounding_that_a_codec_does_not_have_is_refused_before_the_first_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Int4, "stochastic", False)
    recipe = onefold.Recipe.zero(3, reduce_codec="int4", wire_rounding="stochastic")
    with pytest.raises(ValueError, match="reduce_codec='int4': this codec rounds to the nearest"):
        onefold.shard(TinyGPT(), recipe)
