"""What is gathered when, as far as a training script can notice."""

from __future__ import annotations

import contextlib
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import looks
import onefold
from on_ranks import on_ranks
from reference import adamw, built, differences, sgd, train
from zoo import ResidualBlock, TinyGPT, TinyMLP, features_of, tokens_of


def sharded(stage: int = 3, make: Any = TinyMLP, **options: Any) -> Any:
    recipe = onefold.Recipe.zero(stage, **{"stall_timeout": 20.0, **options})
    units = (ResidualBlock,) if make is TinyMLP else None
    return onefold.shard(built(make), recipe, units=units)


def batches(count: int) -> list[Tensor]:
    return [features_of(10 * step + dist.get_rank(), 4, 7) for step in range(count)]


def evaluate(model: Any, mode: Any = torch.no_grad) -> Tensor:
    with mode():
        return model(features_of(5, 4, 7)).clone()


def kept(model: Any) -> int:
    """Bytes of gathered units."""
    return looks.held(model)["device"].get("gathered units", 0)


def sent(model: Any) -> int:
    """Bytes of gathers since it was last asked."""
    total = looks.sent(model).get("all-gather", 0)
    looks.watch(model)
    return total


# -- keep_gathered ---------------------------------------------------------------------------------


@on_ranks(2)
def test_units_stay_gathered_between_passes_and_are_let_go_when_they_change() -> None:
    model = sharded()
    whole = 4 * sum(numel for _, numel in looks.units(model))
    train(model, sgd(model), batches(1))
    sent(model)
    before = evaluate(model)
    assert sent(model) == whole // 2
    for mode in (torch.no_grad, torch.inference_mode):
        with onefold.keep_gathered(model):
            assert kept(model) == whole and sent(model) == whole // 2
            assert all(evaluate(model, mode).equal(before) for _ in range(3))
            assert kept(model) == whole and sent(model) == 0
        assert kept(model) == 0
    with onefold.keep_gathered(model):
        train(model, sgd(model), batches(1))
        assert kept(model) == 0
        seen = [before, evaluate(model, torch.inference_mode)]
        train(model, sgd(model), batches(1))  # buffers of inference_mode are of no use here
        with torch.no_grad():
            for p in model.parameters():
                p.mul_(0.5)
        seen.append(evaluate(model))
        state = built(TinyMLP, 1).state_dict()
        onefold.load_full_state_dict(model, state if dist.get_rank() == 0 else None)
        seen.append(evaluate(model))
    assert torch.allclose(seen[-1], built(TinyMLP, 1)(features_of(5, 4, 7)), atol=1e-6)
    assert len({t.sum().item() for t in seen}) == 4
    train(model, sgd(model), batches(1))
    assert kept(model) == 0


@on_ranks(2)
@pytest.mark.parametrize(
    "options",
    [{"offload_param": "cpu"}, {"gather_codec": "int8"}, {"limit": "3KB"}, {"limit": None}],
    ids=str,
)
def test_training_and_evaluating_in_turns_has_the_same_bits_inside(options: Any) -> None:
    options = {"precision": "bf16", **options}
    limit = options.pop("limit", None)
    found = []
    for inside in (False, True):
        model = sharded(**options)
        optimizer = adamw(model)
        found.append([])
        with onefold.keep_gathered(model, limit) if inside else contextlib.nullcontext():
            for step, batch in enumerate(batches(4)):
                loss = model(batch).float().square().mean()
                if step % 2:  # between forward and backward too
                    found[-1].append(evaluate(model))
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                found[-1] += [loss.detach(), evaluate(model)]
    assert all(map(torch.equal, *found))


@on_ranks(2)
def test_what_does_not_fit_under_the_limit_is_gathered_in_each_pass() -> None:
    model = sharded()
    (_, root), (_, block), *_ = looks.units(model)
    with onefold.keep_gathered(model, 4 * (root + 2 * block) + 100):
        evaluate(model)
        looks.watch(model)
        evaluate(model)
        assert looks.peak(model)["gathered units"] == 4 * (root + 3 * block)
        assert kept(model) == 4 * (root + 2 * block) and sent(model) == 2 * block


@on_ranks(2)
def test_ranks_may_make_different_numbers_of_passes_when_all_units_stay() -> None:
    model = sharded()
    with onefold.keep_gathered(model):
        for _ in range(7 if dist.get_rank() == 0 else 2):
            evaluate(model)
    train(model, sgd(model), batches(1))


@on_ranks(2, fresh=True)
def test_under_a_limit_they_may_not_and_are_told() -> None:
    model = sharded(stall_timeout=2.0)
    with pytest.raises(onefold.StallError), onefold.keep_gathered(model, 4000):
        for _ in range(7 if dist.get_rank() == 0 else 2):
            evaluate(model)
        model(batches(1)[0]).sum().backward()


@on_ranks(2)
def test_a_limit_that_is_none_and_a_context_inside_itself_are_refused() -> None:
    model = sharded()
    for limit in ("8 gigs", -1, True):
        with pytest.raises(ValueError, match="limit="), onefold.keep_gathered(model, limit):
            pass
    with (
        pytest.raises(RuntimeError, match="inside keep_gathered"),
        onefold.keep_gathered(model),
        onefold.keep_gathered(model, "1GB"),
    ):
        pass
    onefold.parallel.unshard(model)
    with pytest.raises(RuntimeError, match="inside onefold"), onefold.keep_gathered(model):
        pass
    assert kept(model) == 4 * sum(numel for _, numel in looks.units(model))
    onefold.parallel.reshard(model)
    for stage in (0, 1, 2):  # nothing is gathered for a pass there
        with onefold.keep_gathered(other := sharded(stage), "1KB"):
            evaluate(other)


# -- between and ahead of passes -------------------------------------------------------------------


@on_ranks(2)
def test_between_the_passes_only_the_last_units_are_gathered_and_between_steps_none() -> None:
    model = sharded(prefetch=1)
    optimizer = sgd(model)
    with pytest.raises(RuntimeError):
        model.enter.weight @ torch.ones(3, 3)
    assert looks.gathered(model) == []
    for batch in batches(3):
        looks.watch(model)
        loss = model(batch).square().mean()
        assert set(looks.gathered(model)) <= {"(root)", "blocks.2"}
        loss.backward()
        assert looks.gathered(model) == [] and kept(model) == 0
        model(batch)  # its gradients are not asked for
        optimizer.step()
        optimizer.zero_grad()
        assert looks.gathered(model) == [] and kept(model) == 0
        evaluate(model)
        assert kept(model) == 0


class Skips(TinyMLP):
    """Ranks skip different blocks, of which the first are frozen: in the first step, too."""

    def __init__(self) -> None:
        super().__init__(depth=5)
        self.step = 0
        self.blocks[:2].requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.enter(x))
        skipped = (self.step + 2 * dist.get_rank()) % 5
        self.step += 1
        for number, block in enumerate(self.blocks):
            x = x if number == skipped else block(x)
        return self.leave(x)


@on_ranks(2)
def test_units_that_were_gathered_ahead_and_skipped_are_dropped() -> None:
    curves = []
    for stage, options in ((0, {}), (3, {}), (3, {"prefetch": 0, "in_flight": 0})):
        model = sharded(stage, Skips, **options)
        looks.watch(model)
        curves.append(train(model, sgd(model), batches(6)))
        if stage == 3:  # what a rank skips does not stay with the rest of the pass
            most = max(numel for _, numel in looks.units(model)[1:])
            root = looks.units(model)[0][1]
            peak = looks.peak(model)["gathered units"]
            assert kept(model) == 0 and peak < 4 * (root + most), (peak, root, most)
    assert curves[0] == curves[1] == curves[2]


@on_ranks(2)
@pytest.mark.parametrize("options", [{"stage": 0, "in_flight": 0}, {"stage": 2, "in_flight": 5}])
def test_sums_that_come_after_their_pass_was_dropped_are_taken_for_no_later_ones(
    options: dict[str, Any],
) -> None:
    """A pass raises on both ranks; rank 1 is slow with what rank 0 is waiting for."""

    def refuse(_: Tensor) -> None:
        raise ValueError("on purpose")

    def slow(_: Tensor) -> None:
        time.sleep(0.2 * dist.get_rank())

    found = []
    for raising in (False, True):
        model = sharded(make=TinyGPT, **options)
        optimizer = sgd(model)
        for step in range(3):
            batch = tokens_of(10 * step + dist.get_rank())
            if raising and step == 1:
                handles = [
                    model.blocks[at].mlp[0].weight.register_hook(hook)
                    for at, hook in ((0, refuse), (2, slow))
                ]
                with pytest.raises(ValueError):
                    model(batch).backward()
                for handle in handles:
                    handle.remove()
            train(model, optimizer, [batch])
        found.append(onefold.full_state_dict(model))
    assert not differences(*found)


# -- threads ---------------------------------------------------------------------------------------
