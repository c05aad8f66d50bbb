"""Steps off the device that come in another order than usual: the same bits as on the device, or a
sentence.
"""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import onefold
from zoo import TinyMLP, features_of

Loop = Callable[[nn.Module], None]


class Tempered(nn.Module):
    """A model with a number without a dimension among its parameters, as CLIP has its
    temperature.
    """

    def __init__(self) -> None:
        super().__init__()
        self.body, self.scale = TinyMLP(), nn.Parameter(torch.tensor(1.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.body(x) * self.scale
        return out.square().mean()


def after(loop: Loop, **options: Any) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    torch.manual_seed(0)
    model = onefold.shard(Tempered(), onefold.Recipe.zero(3, **options))
    loop(model)
    return model, onefold.full_state_dict(model)


def differing(loop: Loop, **options: Any) -> list[str]:
    """Parameters that are not bit-equal to the same loop's on the device."""
    expected, got = after(loop)[1], after(loop, **options)[1]
    return [name for name in expected if not torch.equal(expected[name], got[name])]


def plain(model: nn.Module, steps: int = 3) -> torch.optim.Optimizer:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(steps):
        model(features_of(step, 3, 7)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return optimizer


def two_of_a_kind(model: nn.Module) -> None:
    """The first step of one comes when the other has moments already, in the same units."""
    params = list(model.parameters())
    often, seldom = (
        torch.optim.AdamW(params[::2], lr=1e-2),
        torch.optim.AdamW(params[1::2], lr=1e-2),
    )
    for step in range(4):
        model(features_of(step, 3, 7)).backward()
        for optimizer in (often, seldom) if step % 2 else (often,):
            optimizer.step()
            optimizer.zero_grad()


def halved_by_a_hook(model: nn.Module) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.register_step_pre_hook(
        lambda o, args, kwargs: o.param_groups[0].update(lr=o.param_groups[0]["lr"] / 2)
    )
    for step in range(3):
        model(features_of(step, 3, 7)).backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("loop", [plain, two_of_a_kind, halved_by_a_hook])
@pytest.mark.parametrize("tier", ["cpu", "nvme"])
def test_odd_steps_change_no_bit(loop: Loop, tier: str, tmp_path: Path) -> None:
    nvme = {"nvme": str(tmp_path)} if tier == "nvme" else {}
    assert differing(loop, offload_optimizer=tier, **nvme) == []


def test_moments_in_fewer_bits_are_not_lost_to_another_optimizer_of_the_kind(
    tmp_path: Path,
) -> None:
    expected = after(two_of_a_kind, moments="bf16")[1]
    got = after(two_of_a_kind, moments="bf16", offload_optimizer="nvme", nvme=str(tmp_path))[1]
    assert [name for name in expected if not torch.equal(expected[name], got[name])] == []


def test_a_number_without_a_dimension_comes_back_from_a_checkpoint(tmp_path: Path) -> None:
    tiers = {"offload_optimizer": "nvme", "nvme": str(tmp_path)}

    def resumed(model: nn.Module) -> None:
        onefold.save(tmp_path / "here", model=model, optimizer=plain(model, 2), step=2)
        optimizer = plain(model, 1)
        onefold.load(tmp_path / "here", model=model, optimizer=optimizer)
        model(features_of(2, 3, 7)).backward()
        optimizer.step()

    expected, got = after(plain)[1], after(resumed, **tiers)[1]
    assert [name for name in expected if not torch.equal(expected[name], got[name])] == []


def test_a_unit_stepped_twice_before_step_is_refused() -> None:
    """Accumulated without no_sync, or a step left out: on the device the gradients would have been
    added up, or dropped.
    """
    model, _ = after(lambda model: None, offload_optimizer="cpu", step_in_backward=True)
    optimizer = plain(model)
    model(features_of(5, 3, 7)).backward()
    optimizer.zero_grad()
    with pytest.raises(RuntimeError, match="a second backward pass came without AdamW"):
        model(features_of(6, 3, 7)).backward()


def test_a_learning_rate_changed_after_the_step_behind_it_is_refused() -> None:
    model, _ = after(lambda model: None, offload_optimizer="cpu", step_in_backward=True)
    optimizer = plain(model)
    model(features_of(5, 3, 7)).backward()
    optimizer.param_groups[0]["lr"] = 0.5
    with pytest.raises(ValueError, match="'lr' of a parameter group was"):
        optimizer.step()


def test_states_on_nvme_are_not_pickled_or_copied_as_nothing(tmp_path: Path) -> None:
    model, _ = after(lambda model: None, offload_optimizer="nvme", nvme=str(tmp_path))
    optimizer = plain(model)
    saved = onefold.optim.local_state_dict(optimizer)
    for lose in (
        lambda: pickle.dumps(saved),
        lambda: copy.deepcopy(saved),
        lambda: onefold.optim.load_local_state_dict(optimizer, saved),
    ):
        with pytest.raises(
            RuntimeError, match=r"is stored on NVMe.*optimizer\.state_dict\(\).*onefold\.save"
        ):
            lose()


def test_a_budget_too_small_for_any_unit_is_said(caplog: pytest.LogCaptureFixture) -> None:
    after(lambda model: None, offload_optimizer="1KB")
    assert "1,000 bytes a rank are too few for the states of any unit" in caplog.text
