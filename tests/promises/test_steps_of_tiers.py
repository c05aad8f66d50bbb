"""Steps of states that are off the device, in other ways than a plain loop's: the bits of the device,
or a sentence. Norms, threads and copies are those of a device with streams (tests/virtual).
"""

from __future__ import annotations

import contextlib
import copy
import math
import pickle
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import looks
import onefold
import virtual
from on_ranks import on_ranks, slow
from reference import built, differences, weights
from zoo import Block, TinyGPT, TinyMLP, features_of, tokens_of

Loop = Callable[[Any], Any]


class Tempered(nn.Module):
    """With a number without a dimension among its parameters, as CLIP has its temperature."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.scale = TinyMLP(), nn.Parameter(torch.tensor(1.5))

    def forward(self, x: Tensor) -> Tensor:
        return (self.body(x) * self.scale).square().mean()


def after(loop: Loop, folder: Path, **options: Any) -> dict[str, Tensor]:
    model = sharded(folder, **options)
    loop(model)
    return weights(model)


def sharded(folder: Path, **options: Any) -> nn.Module:
    disk = {"nvme": str(folder)} if "nvme" in str(options) else {}
    return onefold.shard(built(Tempered), onefold.Recipe.zero(3, **options, **disk))


def adamw(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=1e-2)


def plain(model: Any, steps: int = 3) -> torch.optim.Optimizer:
    optimizer = adamw(model.parameters())
    for step in range(steps):
        model(features_of(step, 3, 7)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return optimizer


def two_of_a_kind(model: Any) -> None:
    """The first step of one comes when the other has moments already, in the same units."""
    params = list(model.parameters())
    often, seldom = adamw(params[::2]), adamw(params[1::2])
    for step in range(4):
        model(features_of(step, 3, 7)).backward()
        for optimizer in (often, seldom) if step % 2 else (often,):
            optimizer.step()
            optimizer.zero_grad()


def two_kinds(model: Any) -> None:
    params = list(model.parameters())
    optimizers = adamw(params[::2]), torch.optim.SGD(params[1::2], lr=0.1, momentum=0.9)
    for step in range(3):
        model(features_of(step, 3, 7)).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


def halved_by_a_hook(model: Any) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def halve(o: Any, args: Any, kwargs: Any) -> None:
        o.param_groups[0]["lr"] /= 2

    optimizer.register_step_pre_hook(halve)
    for step in range(3):
        model(features_of(step, 3, 7)).backward()
        optimizer.step()
        optimizer.zero_grad()


def by_a_closure(model: Any) -> None:
    optimizer = adamw(model.parameters())
    for step in range(3):

        def again(number: int = step) -> Tensor:
            optimizer.zero_grad()
            loss = model(features_of(number, 3, 7))
            loss.backward()
            return loss

        optimizer.step(again)
    optimizer.zero_grad()


@on_ranks(2)
@pytest.mark.parametrize("loop", [plain, two_of_a_kind, two_kinds, halved_by_a_hook, by_a_closure])
@pytest.mark.parametrize("tier", ["cpu", "nvme"])
def test_odd_steps_change_no_bit(tier: str, loop: Loop, folder: Path) -> None:
    expected = after(loop, folder)
    assert differences(expected, after(loop, folder, offload_optimizer=tier)) == []
    if loop is two_kinds:
        behind = {"offload_optimizer": tier, "step_in_backward": True}
        assert differences(expected, after(loop, folder, **behind)) == []


# -- stepped behind the backward pass --------------------------------------------------------------

BEHIND = {"offload_optimizer": "cpu", "step_in_backward": True}


@on_ranks(2)
def test_gradients_are_gone_behind_the_backward_pass_that_steps_them(folder: Path) -> None:
    model = sharded(folder, **BEHIND)
    optimizer, there = adamw(model.parameters()), []
    for step in range(2):
        model(features_of(step, 3, 7)).backward()
        there.append([p.grad is not None for p in model.parameters() if p.numel()])
        optimizer.step()
        optimizer.zero_grad()
    assert all(there[0]) and not any(there[1])
    with pytest.raises(ValueError, match="step_in_backward"):
        onefold.clip_grad_norm_(model, 1.0)


class Breaking(torch.optim.SGD):
    """Its step fails once `breaks` is True; then `broken` is set."""

    breaks, broken = False, threading.Event()

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        if self.breaks:
            self.broken.set()
            raise ZeroDivisionError
        for p in (p for p in self.param_groups[0]["params"] if p.grad is not None):
            p.data.add_(p.grad, alpha=-0.1)


@on_ranks(2)
def test_a_step_behind_the_backward_pass_that_fails_on_one_rank_is_raised_on_every_rank(
    folder: Path,
) -> None:
    model: Any = sharded(folder, **BEHIND, in_flight=0)
    fails = dist.get_rank() == 1
    optimizer = Breaking(model.parameters(), lr=0.1)
    model(features_of(0, 3, 7)).backward()
    optimizer.step()
    optimizer.zero_grad()
    Breaking.breaks = fails
    if fails:  # before the end of the backward pass
        last = model.body.enter.weight
        last.register_hook(lambda grad: grad * Breaking.broken.wait(60.0))
    model(features_of(1, 3, 7)).backward()
    with pytest.raises(RuntimeError, match="half way" if fails else "another rank"):
        optimizer.step()


@virtual.alone
def test_a_few_units_at_a_time_wait_for_their_step_on_the_device_of_the_rank() -> None:
    done, ahead = list[int](), list[int]()

    class Slow(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            time.sleep(0.1)
            done.append(torch.accelerator.current_device_index())

    layers = nn.Sequential(*(nn.Linear(8, 8) for _ in range(8)))
    recipe = onefold.Recipe.zero(0, **BEHIND, in_flight=0)
    model = onefold.shard(layers, recipe, device="virtual:1", units=(nn.Linear,))
    optimizer = Slow(model.parameters(), lr=0.1)
    for p in model.parameters():
        p.register_hook(lambda _: ahead.append(len(done)))
    for _ in range(2):
        done.clear()
        model(torch.ones(2, 8, device="virtual:1")).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert done[:8] == [1] * 8 and ahead[-1] > 3


def test_a_unit_stepped_twice_or_with_another_rate_is_refused(tmp_path: Path) -> None:
    """On the device the gradients would have been added up, or dropped."""
    model = sharded(tmp_path, **BEHIND)
    optimizer = plain(model)
    model(features_of(5, 3, 7)).backward()
    optimizer.zero_grad()
    with pytest.raises(RuntimeError, match="a second backward pass came without AdamW"):
        model(features_of(6, 3, 7)).backward()
    model = sharded(tmp_path, **BEHIND)
    optimizer = plain(model)
    model(features_of(5, 3, 7)).backward()
    optimizer.param_groups[0]["lr"] = 0.5
    with pytest.raises(ValueError, match="'lr' of a parameter group was"):
        optimizer.step()
    model = sharded(tmp_path, **BEHIND)
    optimizer = plain(model)
    model(features_of(5, 3, 7)).backward()
    with pytest.raises(RuntimeError, match="drop every reference"):
        adamw(model.parameters()).step()


def test_states_on_nvme_are_not_pickled_or_copied_as_nothing(tmp_path: Path) -> None:
    optimizer = plain(sharded(tmp_path, offload_optimizer="nvme"))
    saved = list(optimizer.state.values())
    for lose in (pickle.dumps, copy.deepcopy):
        with pytest.raises(RuntimeError, match=r"stored on NVMe.*onefold\.save"):
            lose(saved)


def test_gradients_on_nvme_are_not_written_to_through_data(tmp_path: Path) -> None:
    model = sharded(tmp_path, offload_optimizer="nvme")
    model(features_of(0, 3, 7)).backward()
    for p in model.parameters():
        for write in (
            lambda grad: grad.mul_(2.0),
            lambda grad: grad.data.mul_(2.0),
            lambda grad: grad.detach().mul_(2.0),
        ):
            with pytest.raises(RuntimeError, match="stored on NVMe"):
                write(p.grad)


def test_a_budget_too_small_for_any_unit_is_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    sharded(tmp_path, offload_optimizer="cpu", offload_amount="1KB")
    assert "1,000 bytes a rank are too few for the states of any unit" in caplog.text


# -- on a device with streams ----------------------------------------------------------------------

TIERS: dict[str, dict[str, Any]] = {
    "host": {"offload_optimizer": "cpu"},
    "half of it on the host": {"offload_optimizer": "cpu", "offload_amount": 0.5},
    "NVMe": {"offload_optimizer": "nvme", "chunk": 65536},
    "NVMe, gradients on the host": {"offload_optimizer": "nvme", "offload_gradients": "cpu"},
}


@torch.no_grad()
def _through_data(model: Any) -> None:
    for p in model.parameters():
        p.grad.data.mul_(2.0)


@torch.no_grad()
def _assigned(model: Any) -> None:
    for p in model.parameters():
        p.grad = p.grad * 2.0


def clipped(
    stage: int, tiers: dict[str, Any], folder: Path, p: float, micro_batches: int, touch: Any
) -> tuple[list[float], dict[str, Tensor]]:
    """(norms, weights) of three clipped steps on the virtual device."""
    disk = {"nvme": str(folder)} if "nvme" in str(tiers) else {}
    recipe = onefold.Recipe.zero(stage, precision="fp32", **tiers, **disk)
    model: Any = onefold.shard(built(TinyGPT), recipe, device="virtual")
    optimizer, norms = adamw(model.parameters()), []
    for step in range(3):
        for micro in range(micro_batches):
            last = micro + 1 == micro_batches
            with contextlib.nullcontext() if last else onefold.no_sync(model):
                model(tokens_of(10 * step + micro).to("virtual")).backward()
        if touch is not None:
            touch(model)
        norms.append(float(onefold.clip_grad_norm_(model, 0.05, p)))
        norms.append(float(onefold.clip_grad_norm_(model, math.inf, p)))  # of what is scaled
        optimizer.step()
        optimizer.zero_grad()
    return norms, {n: t.cpu() for n, t in weights(model).items()}


@virtual.alone
@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    ("p", "micro_batches", "touch"),
    [(2.0, 1, None), (2.0, 3, None), (3.0, 1, None), (2.0, 1, _through_data), (2.0, 1, _assigned)],
)
def test_norms_of_gradients_on_the_host_are_the_devices(
    p: float, micro_batches: int, touch: Any, tmp_path: Path
) -> None:
    for stage in (2, 3):
        norms, expected = clipped(stage, {}, tmp_path, p, micro_batches, touch)
        for name, tiers in TIERS.items() if touch is None else [("host", TIERS["host"])]:
            got, found = clipped(stage, tiers, tmp_path, p, micro_batches, touch)
            assert got == norms and differences(expected, found) == [], (stage, name)


@virtual.alone
def test_steps_on_the_host_have_the_same_bits_at_any_number_of_threads() -> None:
    before, found = torch.get_num_threads(), []
    options = {"offload_optimizer": "cpu", "offload_param": "cpu", "precision": "bf16"}
    for threads in (1, 2, 4):
        recipe = onefold.Recipe.zero(3, **options)
        model = onefold.shard(built(lambda: Block(300, 2)), recipe, device="virtual")
        looks.step_on_the_host_with(model, threads)
        optimizer, norms = adamw(model.parameters()), []
        for step in range(3):
            x = torch.linspace(-1, 1 + step, 600).reshape(1, 2, 300)
            model(x.to("virtual").bfloat16()).float().square().sum().backward()
            norms.append(float(onefold.clip_grad_norm_(model, 0.5)))
            optimizer.step()
            optimizer.zero_grad()
        found.append((norms, weights(model)))
    assert torch.get_num_threads() == before
    for norms, after_them in found[1:]:
        assert norms == found[0][0] and differences(found[0][1], after_them) == []


@virtual.alone
@pytest.mark.parametrize(
    ("stage", "micro_batches", "tiers"),
    [
        (2, 1, {"offload_optimizer": "cpu"}),
        (1, 2, {"offload_optimizer": "cpu", "precision": "bf16"}),
        (3, 3, {"offload_optimizer": "cpu", "offload_param": "cpu", "precision": "bf16"}),
        pytest.param(3, 2, {"offload_optimizer": "cpu", "offload_amount": 0.5}, marks=slow),
        (3, 2, {"precision": "bf16", **BEHIND}),
        pytest.param(2, 1, BEHIND, marks=slow),
        (2, 1, {"offload_optimizer": "nvme", "offload_gradients": "cpu", "precision": "bf16"}),
        (3, 2, {"offload_optimizer": "nvme", "offload_param": "nvme"}),
    ],
)
def test_the_ledgers_of_a_device_with_streams_have_all_memory_and_the_plan_says_how_much(
    stage: int, micro_batches: int, tiers: dict[str, Any], tmp_path: Path
) -> None:
    disk = {"nvme": str(tmp_path)} if "nvme" in str(tiers) else {}
    recipe, made = onefold.Recipe.zero(stage, **tiers, **disk), TinyGPT(width=192, depth=4)
    planned = looks.planned(made, recipe, 1, 0, micro_batches, streams=True)
    del made
    before = looks.living(("cpu", "virtual"))
    model = onefold.shard(TinyGPT(width=192, depth=4), recipe, device="virtual")
    optimizer = adamw(model.parameters())
    for step in range(5):
        looks.watch(model)
        for micro in range(micro_batches):
            last = micro + 1 == micro_batches
            with contextlib.nullcontext() if last else onefold.no_sync(model):
                model(tokens_of(10 * step + micro).to("virtual")).float().backward()
        optimizer.step()
        optimizer.zero_grad()
        held = looks.held(model, optimizer)
        assert sum(looks.host_peak(model).values()) <= planned.host_bound
        if "precision" not in tiers:  # else casts are on their way up, as long as copies lag behind
            assert looks.spare(model) <= planned.spare
    assert looks.moved(model) == planned.moved
    assert sum(looks.peak(model).values()) <= 1.05 * planned.peak
    assert "gradients on their way" not in held.get("device", {})
    assert held == planned.rest
    if not disk:  # pinned for direct reads, a buffer begins on a page within larger memory
        rests = sum(n for tier in ("device", "host") for n in held.get(tier, {}).values())
        living = looks.living(("cpu", "virtual")) - before - looks.spare(model)
        assert abs(living - rests) < 16 << 10
