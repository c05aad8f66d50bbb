"""Gradients on their way: dropped or changed before they are reduced, added up without `no_sync`,
fed back where a codec lost of them, and not finite on one rank.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import onefold
from on_ranks import on_ranks, slow
from reference import NEAR, built, ddp, differences, sgd, weights
from zoo import TinyGPT, TinyMLP, features_of, tokens_of

#: Whole gradients are kept until the boundary at all but stages 2 and 3 by default.
MODES: dict[str, tuple[int, dict[str, Any]]] = {
    "0": (0, {}), "1": (1, {}), "2": (2, {}), "3": (3, {}), "2, late": (2, {"reduce_at": "boundary"}),
    "3, late": (3, {"reduce_at": "boundary"}), "groups of one": (3, {"shard_group": 1}),
}  # fmt: skip
KEEPING = ["0", "1", "2, late", "3, late"]


def in_ci(names: Iterable[str], *few: str) -> list[Any]:
    """All of them, of which `make test` takes a few."""
    return [pytest.param(name, marks=() if name in few else slow) for name in names]


@on_ranks(4)
@pytest.mark.parametrize(("stage", "options"), [(1, {}), (2, {"shard_group": 2})])
def test_what_waits_is_divided_where_it_is_whole_and_where_a_group_has_summed_it(
    stage: int, options: dict[str, Any]
) -> None:
    norms = []
    for divisor in (1.0, 4.0):
        recipe = onefold.Recipe.zero(stage, stall_timeout=60.0, **options)
        model = onefold.shard(built(TinyMLP), recipe)
        with onefold.no_sync(model):
            for seed in range(2):
                model(features_of(seed, 4, 7)).square().sum().backward()
            if divisor != 1:  # a pass that accumulates nothing, and raises
                (x := features_of(0, 4, 7).requires_grad_()).register_hook(lambda _: 1 / 0)
                with pytest.raises(ZeroDivisionError):
                    torch.autograd.grad(model(x).sum(), x)
        onefold.parallel.reduce_grad(model, divisor)
        norms.append(float(onefold.clip_grad_norm_(model, math.inf)))
    assert norms[0] == pytest.approx(4 * norms[1], rel=1e-5)


@on_ranks(4)
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_the_parts_of_a_gradient_are_added_in_the_order_of_the_ranks(stage: int) -> None:
    """So their bits do not depend on which rank adds them. A step of SGD makes of weights 0 the
    gradient with its sign changed.
    """

    def parts(rank: int) -> tuple[torch.Tensor, torch.Tensor]:
        return features_of(rank, 5, 37), features_of(100 + rank, 5, 11)

    linear = nn.Linear(37, 11, bias=False)
    nn.init.zeros_(linear.weight)
    model: Any = onefold.shard(linear, onefold.Recipe.zero(stage, stall_timeout=60.0))
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    x, y = parts(dist.get_rank())
    (model(x) * y).sum().backward()
    optimizer.step()
    each = [y.T @ x / 4 for x, y in map(parts, range(4))]
    orders = [each[i:] + each[:i] for i in range(4)]
    in_order, *others = (((a + b) + c) + d for a, b, c, d in orders)
    assert not any(torch.equal(in_order, other) for other in others)
    assert torch.equal(-model.weight.onefold.gather(), in_order)


def no_sync(model: nn.Module) -> Any:
    plain = model if isinstance(model, nn.parallel.DistributedDataParallel) else None
    return plain.no_sync() if plain is not None else onefold.no_sync(model)


def sharded(mode: str, make: Callable[[], nn.Module] = TinyMLP, **more: Any) -> nn.Module:
    stage, options = MODES[mode]
    recipe = onefold.Recipe.zero(stage, stall_timeout=60.0, **options, **more)
    return onefold.shard(built(make), recipe)


def backward(model: nn.Module, number: int) -> None:
    model(features_of(10 * number + dist.get_rank(), 4, 7)).square().mean().backward()


# -- dropped ---------------------------------------------------------------------------------------


def _one_block(model: Any, optimizer: torch.optim.Optimizer) -> None:
    model.blocks[1].zero_grad()


def _one_parameter(model: Any, optimizer: torch.optim.Optimizer) -> None:
    model.blocks[1].up.bias.grad = None


#: How gradients of a micro-batch are dropped: of a model without its wrapper.
DROPS: dict[str, Callable[[Any, torch.optim.Optimizer], Any]] = {
    "all": lambda model, optimizer: optimizer.zero_grad(),
    "filled with zeros": lambda model, optimizer: optimizer.zero_grad(set_to_none=False),
    "by the model": lambda model, optimizer: model.zero_grad(),
    "of one block": _one_block,
    "of one parameter": _one_parameter,
}


def dropping(model: nn.Module, inner: nn.Module, drop: Any, after: int) -> dict[str, Any]:
    """Three steps of three micro-batches, with what stands behind `after` of them dropped."""
    optimizer = sgd(inner)
    for step in range(3):
        for micro in range(3):
            with contextlib.nullcontext() if micro == 2 else no_sync(model):
                backward(model, 3 * step + micro)
            if micro == after:
                drop(inner, optimizer)
        optimizer.step()
        optimizer.zero_grad()
    return weights(inner)


@on_ranks(2)
@pytest.mark.parametrize("how", DROPS)
@pytest.mark.parametrize("mode", in_ci(MODES, "2, late"))
def test_gradients_dropped_between_micro_batches_are_gone_as_in_ddp(mode: str, how: str) -> None:
    for after in (0, 1):
        plain, model = built(TinyMLP), sharded(mode)
        expected = dropping(ddp(plain, find_unused_parameters=False), plain, DROPS[how], after)
        assert differences(expected, dropping(model, model, DROPS[how], after), **NEAR) == []


@pytest.mark.parametrize("mode", MODES)
def test_one_process_in_16_bits_drops_them_too(mode: str) -> None:
    found = []
    for first in (True, False):
        model = sharded(mode, precision="bf16")
        if first:
            with onefold.no_sync(model):
                model(features_of(0, 4, 7)).square().mean().backward()
            model.zero_grad()
        model(features_of(1, 4, 7)).square().mean().backward()
        found.append({n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None})
    assert found[0] and differences(*found) == []


# -- changed ---------------------------------------------------------------------------------------

CHANGES: dict[str, Callable[[Any], Any]] = {
    "in place": lambda p: p.grad.mul_(2),
    "by adding": lambda p: p.grad.add_(1.0),
    "to others": lambda p: p.grad.copy_(torch.ones_like(p.grad)),
    "by another": lambda p: setattr(p, "grad", torch.ones_like(p)),
    "clipped": lambda p: nn.utils.clip_grad_value_([p], 1e-6),
}


@on_ranks(2)
@pytest.mark.parametrize("how", CHANGES)
@pytest.mark.parametrize("mode", in_ci(KEEPING, "1"))
def test_an_unreduced_gradient_that_was_changed_is_an_error_with_its_name(
    mode: str, how: str
) -> None:
    """On all ranks, before a micro-batch and before a step; whoever holds which part of it."""
    for then in ("micro-batch", "step"):
        model = sharded(mode, units=())
        optimizer = sgd(model)
        with onefold.no_sync(model):
            backward(model, 0)
        # If there is one, a parameter of which a part is on either rank
        named = list(model.named_parameters())
        divided = [(n, p) for n, p in named if mode != "0" and part_of(p)]
        name, p = (divided or named)[0]
        if not divided and how == "by another":
            pytest.skip("whoever holds none of it learns of it by waiting")
        with pytest.raises(RuntimeError, match=r"no_sync|after the last micro-batch") as told:
            CHANGES[how](p)
            backward(model, 1) if then == "micro-batch" else optimizer.step()
        assert repr(name) in str(told.value), told.value


def part_of(p: Any) -> bool:
    start, stop = p.onefold.interval
    return 0 < stop - start < p.numel()


class Rows(nn.Module):
    """An embedding of which a batch touches few rows, and a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.rows, self.leave = nn.Embedding(128, 32), nn.Linear(32, 1)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.leave(self.rows(ids)).sum()


@on_ranks(2)
@pytest.mark.parametrize("mode", in_ci(KEEPING, "3, late"))
def test_a_gradient_whose_part_here_is_zero_is_told_from_a_dropped_one(mode: str) -> None:
    """Each rank's batch touches rows that the other rank holds."""
    ids, total = torch.arange(4) + (100 if dist.get_rank() == 0 else 0), []
    for drop in (None, 0.0):
        model: Any = sharded(mode, Rows, units=())
        with onefold.no_sync(model):
            model(ids).backward()
        if drop is not None:
            held, model.rows.weight.grad = model.rows.weight.grad, None
            held.requires_grad, held.grad = False, None  # as zero_grad() may do; autograd's alone
            with pytest.raises(RuntimeError, match="doesn't require gradient"):
                held.register_hook(print)
        model(ids + 4).backward()
        total.append(model.rows.weight.grad.abs().sum().item())
    assert total[1] == pytest.approx(total[0] / 2) and total[0] > 0
    model = sharded(mode, Rows, units=())
    with onefold.no_sync(model):
        model(ids).backward()
    with pytest.raises(RuntimeError, match=r"'rows\.weight'"):
        model.rows.weight.grad.mul_(0.5)
        model(ids + 4).backward()


@on_ranks(2)
@pytest.mark.parametrize("mode", in_ci(KEEPING, "3, late"))
def test_a_step_on_unreduced_gradients_is_refused_and_the_boundary_puts_it_right(mode: str) -> None:
    found = []
    for mistaken in (True, False):
        model = sharded(mode)
        optimizer = sgd(model)
        with onefold.no_sync(model):
            backward(model, 0)
        if mistaken:
            with pytest.raises(RuntimeError, match="no_sync"):
                optimizer.step()
        backward(model, 1)
        optimizer.step()
        found.append(weights(model))
    assert differences(*found) == []


@on_ranks(2)
@pytest.mark.parametrize("mode", in_ci(KEEPING, "3, late"))
def test_a_hook_sees_the_gradient_of_its_own_micro_batch(mode: str) -> None:
    found = []
    for batches in ((0, 1), (1,)):
        model, seen = sharded(mode), []
        model.leave.weight.register_post_accumulate_grad_hook(
            lambda p, s=seen: s.append(p.grad.clone())
        )
        for micro in batches:
            with contextlib.nullcontext() if micro else no_sync(model):
                backward(model, micro)
        found.append(seen[-1])
    assert torch.equal(*found)


# -- added up --------------------------------------------------------------------------------------


@on_ranks(2)
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_backward_passes_without_no_sync_add_up(stage: int) -> None:
    found, plain = [], built(TinyMLP)
    model = sharded(str(stage))
    for one, inner in ((ddp(plain, find_unused_parameters=False), plain), (model, model)):
        optimizer = sgd(inner)
        for step in range(3):
            backward(one, 2 * step)
            backward(one, 2 * step + 1)
            optimizer.step()
            optimizer.zero_grad()
        found.append(weights(inner))
    assert differences(*found, **NEAR) == []


# -- encoded ---------------------------------------------------------------------------------------


@on_ranks(4)
@pytest.mark.parametrize("codec", in_ci(["int8", "int4"], "int4"))
@pytest.mark.parametrize("what", [math.inf, math.nan])
def test_what_is_not_finite_on_one_rank_skips_the_step(codec: str, what: float) -> None:
    recipe = onefold.Recipe.zero(3, group=2, reduce_codec=codec)
    model = onefold.shard(built(TinyGPT), recipe)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler, found = onefold.GradScaler(model, init_scale=64.0), []
    for step in range(3):
        before = weights(model)
        loss = model(tokens_of(step)) * (what if (step, dist.get_rank()) == (1, 3) else 1)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        norm = onefold.clip_grad_norm_(model, 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        moved = bool(differences(before, weights(model)))
        found.append((bool(torch.isfinite(norm)), scaler.get_scale(), moved))
    assert found == [(True, 64.0, True), (False, 32.0, False), (True, 32.0, True)], found


@on_ranks(2)
def test_a_rank_adds_its_own_part_of_an_encoded_gradient_as_it_is() -> None:
    mine = features_of(7, 64, 64) * (dist.get_rank() == 0)
    model = built(lambda: nn.Linear(64, 64, bias=False))
    model = onefold.shard(model, onefold.Recipe.zero(2, reduce_codec="int4", stall_timeout=20.0))
    before = onefold.full_state_dict(model)
    (model(torch.eye(64)).t() * mine).sum().backward()
    torch.optim.SGD(model.parameters(), lr=1.0).step()
    after = onefold.full_state_dict(model)
    for weight, now in zip(before.values(), after.values(), strict=True):
        exact = now == weight - mine / 2  # of rank 0, whose rows are the first half
        assert exact[:32].all() and not exact[32:].all()
