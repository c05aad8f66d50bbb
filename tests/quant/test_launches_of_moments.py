"""A step of moments in fewer bits on a device: what it launches, and that the host sends nothing."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import onefold
from needed import skip_without
from onefold.quant import bf16_rounding, moment_packing

virtual = pytest.importorskip("virtual")
skip_without("torchao", "the formats are torchao's: pip install onefold[lowbit]")
SERVER = "libraries"
LAYERS = 4


def stepped(**recipe: Any) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A model on the virtual device that has done two steps, as rank 0 of 4."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.destroy_process_group()
    dist.init_process_group("cpu:fake,virtual:fake", store=FakeStore(), rank=0, world_size=4)
    torch.manual_seed(0)
    layers = nn.Sequential(*(nn.Linear(128, 128, bias=False) for _ in range(LAYERS)))
    model = onefold.shard(
        layers, onefold.Recipe.zero(3, **recipe), device="virtual", units=(nn.Linear,)
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for _ in range(2):
        passes(model)
        optimizer.step()
    passes(model)
    return model, optimizer


def passes(model: nn.Module) -> None:
    model.zero_grad()
    model(torch.ones(2, 128).to("virtual")).square().mean().backward()


@virtual.alone
def steps_without_a_copy(recipe: dict[str, Any]) -> None:
    _, optimizer = stepped(**recipe)
    with virtual.no_synchronization():
        optimizer.step()


@pytest.mark.parametrize(
    "recipe",
    [
        {"moments": "int8"},
        {"moments": "bf16", "stochastic_rounding": True},
        {"moments": "bf16", "stochastic_rounding": True, "master_dtype": "bf16"},
    ],
    ids=str,
)
def test_a_step_sends_no_count_of_steps_to_the_device(recipe: dict[str, Any]) -> None:
    steps_without_a_copy(recipe)


# -- launches --------------------------------------------------------------------------------------


class Operators(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        tensors = [t for t in torch.utils._pytree.tree_leaves(args) if isinstance(t, torch.Tensor)]
        name = func.overloadpacket.__name__
        if any(t.device.type == "virtual" for t in tensors) and name not in (
            "detach",
            "view",
            "slice",
            "_has_compatible_shallow_copy_type",
        ):
            self.found[name] += 1
        return func(*args, **(kwargs or {}))


@virtual.alone
def launches_of_a_step(recipe: dict[str, Any], kernels: dict[str, int]) -> None:
    """Count kernels and operators of a step where kernels serve the virtual device."""
    from onefold.quant import triton_moments

    _, optimizer = stepped(**recipe)
    launched: Counter[str] = Counter()
    for name in ("unpack", "pack", "round_by_chance"):
        setattr(triton_moments, name, lambda *_, name=name: launched.update([name]))
    for room in (moment_packing, bf16_rounding):
        room.served = lambda like: like.device.type == "virtual"  # type: ignore[attr-defined]
    with Operators() as operators:
        optimizer.step()
    assert launched == {name: count * LAYERS for name, count in kernels.items()}, launched
    # Adam's operators are over lists: one for all parameters
    apart = {name: n for name, n in operators.found.items() if not name.startswith("_foreach")}
    assert sum(apart.values()) <= 4 * LAYERS, apart


@pytest.mark.parametrize(
    ("recipe", "kernels"),
    [
        ({"moments": "int8"}, {"unpack": 2, "pack": 2}),
        ({"moments": "bf16", "stochastic_rounding": True}, {"round_by_chance": 2}),
        (
            {"moments": "bf16", "stochastic_rounding": True, "master_dtype": "bf16"},
            {"round_by_chance": 3},
        ),
    ],
    ids=str,
)
def test_a_step_launches_a_kernel_for_each_conversion(
    recipe: dict[str, Any], kernels: dict[str, int]
) -> None:
    launches_of_a_step(recipe, kernels)


def test_a_step_on_the_host_has_the_hash_of_a_step_on_a_device() -> None:
    for step in (1.0, 7.0, 123456.0):
        for key in (0, 5, -(1 << 63), (1 << 63) - 1):
            there = bf16_rounding._mixed(
                torch.tensor([int(step)]).mul_(bf16_rounding._GAMMA).add_(key)
            )
            assert bf16_rounding.hash_of(torch.tensor(step), key) == there.item()
