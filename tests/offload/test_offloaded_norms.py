"""The norm of gradients on the host has the bits of gradients on the device, at any number of the
host's threads: the device measures them.
"""

from __future__ import annotations

import math
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import onefold
import onefold.offload.step
import virtual
from zoo import TinyGPT, tokens_of

TIERS: dict[str, dict[str, Any]] = {
    "host": {"offload_optimizer": "cpu"},
    "half of it on the host": {"offload_optimizer": 0.5},
    "NVMe": {"offload_optimizer": "nvme", "chunk": 65536},
    "NVMe, gradients on the host": {"offload_optimizer": "nvme", "offload_gradients": "cpu"},
}


class Measured:
    """Notes where norms are computed, and of how many bytes."""

    def __init__(self) -> None:
        self.places: list[str] = []
        self._norm = torch._foreach_norm
        torch._foreach_norm = self  # type: ignore[assignment] # this process has the test alone

    def __call__(self, tensors: Any, *rest: Any, **named: Any) -> Any:
        self.places += [t.device.type for t in tensors]
        return self._norm(tensors, *rest, **named)


def clipped(
    stage: int, tiers: dict[str, Any], p: float = 2.0, accumulate: int = 1, touch: Any = None
) -> tuple[list[float], dict[str, Tensor]]:
    """(norms, weights) of a few steps, each clipped."""
    torch.manual_seed(0)
    recipe = onefold.Recipe.zero(stage, precision="fp32", **tiers)
    model: Any = onefold.shard(TinyGPT(), recipe, device="virtual")
    onefold.engine_of(model).transfers.sums.chunk = 4096
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    norms = []
    for step in range(3):
        for micro in range(accumulate):
            with onefold.no_sync(model) if micro + 1 < accumulate else nullcontext():
                model(tokens_of(10 * step + micro).to("virtual")).backward()
        if touch is not None:
            touch(model)
        norms.append(float(onefold.clip_grad_norm_(model, 0.05, p)))
        if step == 1:
            norms.append(float(onefold.clip_grad_norm_(model, math.inf, p)))  # of what is scaled
        optimizer.step()
        optimizer.zero_grad()
    return norms, {n: t.cpu() for n, t in onefold.full_state_dict(model).items()}


def differing(folder: Path, **loop: Any) -> list[str]:
    """What a tier computes otherwise than the device."""
    found = []
    for stage in (2, 3):
        norms, weights = clipped(stage, {}, **loop)
        for name, tiers in TIERS.items():
            on_disk = {"nvme": str(folder)} if "nvme" in str(tiers) else {}
            got, after = clipped(stage, {**tiers, **on_disk}, **loop)
            off = [n for n in weights if not torch.equal(weights[n], after[n])]
            if got != norms or off:
                found.append(f"stage {stage}, {name}: {got} instead of {norms}, {off[:2]}")
    return found


@virtual.alone
def test_tiers_have_the_norm_of_the_device(tmp_path: Path) -> None:
    assert differing(tmp_path) == []


@virtual.alone
def test_tiers_have_the_norm_of_the_device_of_accumulated_gradients(tmp_path: Path) -> None:
    assert differing(tmp_path, accumulate=3) == []


@virtual.alone
def test_tiers_have_the_devices_norms_of_other_orders(tmp_path: Path) -> None:
    assert differing(tmp_path, p=3.0) == []


@torch.no_grad()
def through_data(model: Any) -> None:
    for parameter in model.parameters():
        parameter.grad.data.mul_(2.0)


@torch.no_grad()
def in_place(model: Any) -> None:
    for parameter in model.parameters():
        parameter.grad.mul_(2.0)


@torch.no_grad()
def put_in_place(model: Any) -> None:
    for parameter in model.parameters():
        parameter.grad = parameter.grad * 2.0


@virtual.alone
def test_gradients_that_the_user_writes_to_are_measured_as_they_are(tmp_path: Path) -> None:
    for touch in (through_data, in_place, put_in_place):
        norms, weights = clipped(3, {}, touch=touch)
        got, after = clipped(3, TIERS["host"], touch=touch)
        assert got == norms and all(torch.equal(weights[n], after[n]) for n in weights), touch


@virtual.alone
def test_gradients_on_the_host_are_measured_by_the_device_before_they_leave_it(
    tmp_path: Path,
) -> None:
    measured = Measured()
    brought: list[int] = []
    from onefold.offload.storage import OffloadStorage

    on_device = OffloadStorage.norm_on_device

    def noted(self: Any, part: Tensor, p: float) -> Tensor:
        brought.append(part.numel())
        return on_device(self, part, p)

    OffloadStorage.norm_on_device = noted  # type: ignore[method-assign]
    torch.manual_seed(0)
    for tiers in (TIERS["host"], {**TIERS["NVMe"], "nvme": str(tmp_path)}):
        model: Any = onefold.shard(TinyGPT(), onefold.Recipe.zero(3, **tiers), device="virtual")
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        again = []
        for step in range(3):
            for micro in range(2):
                with onefold.no_sync(model) if micro == 0 and step < 2 else nullcontext():
                    model(tokens_of(step).to("virtual")).backward()
                if step == 2:
                    break
            brought.clear()
            onefold.clip_grad_norm_(model, 1.0)
            again.append(len(brought))
            optimizer.step()
            optimizer.zero_grad()
        assert again[0] > 0, "the first clipping comes as a surprise"
        on_disk = "nvme" in tiers
        assert again[2] == 0 and (on_disk or again[1] == 0), again
    assert set(measured.places) == {"virtual"}, "the host has measured gradients"


def stepped_with(threads: int) -> tuple[dict[str, Tensor], list[float], set[int]]:
    torch.manual_seed(0)
    blocks: Any = nn.Sequential(*(nn.Linear(300, 300) for _ in range(3)))
    recipe = onefold.Recipe.zero(3, precision="bf16", offload_optimizer="cpu", offload_param="cpu")
    model = onefold.shard(blocks, recipe, device="virtual")
    engine = onefold.engine_of(model)
    engine.transfers.threads = threads
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    norms, inside = [], set()
    optimizer.register_step_post_hook(lambda *_: inside.add(torch.get_num_threads()))
    step_flat = onefold.offload.step.step_flat

    def noted(*given: Any) -> None:
        inside.add(-torch.get_num_threads())
        step_flat(*given)

    onefold.offload.step.step_flat = noted
    for step in range(3):
        for _ in range(2):
            x = torch.linspace(-1, 1 + step, 600, device="virtual").reshape(2, 300).bfloat16()
            model(x).float().square().sum().backward()
        norms.append(float(onefold.clip_grad_norm_(model, 0.5)))
        optimizer.step()
        optimizer.zero_grad()
    onefold.offload.step.step_flat = step_flat
    return onefold.full_state_dict(model), norms, inside


@virtual.alone
def test_steps_on_the_host_have_the_same_bits_at_any_number_of_threads() -> None:
    before = torch.get_num_threads()
    weights, norms, inside = stepped_with(1)
    for threads in (2, 4):
        after, got, used = stepped_with(threads)
        assert used == {-threads, before}, "the optimizer's step did not use them, or kept them"
        assert got == norms and all(torch.equal(weights[n], after[n]) for n in weights)
    assert inside == {-1, before} and torch.get_num_threads() == before
