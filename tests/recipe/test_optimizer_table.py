"""The table of known optimizers: what it says of a class is what the class does."""

from __future__ import annotations

import importlib.util
import inspect
import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import nn

from onefold.recipe.optimizers import KNOWN, PLANNED, KnownOptimizer

HERE = {
    name: row
    for name, row in KNOWN.items()
    if row.module and importlib.util.find_spec(row.module) is not None
}


def after_a_step(
    row: KnownOptimizer, package: bool, shape: tuple[int, ...]
) -> tuple[nn.Parameter, dict[str, Any]]:
    param = nn.Parameter(torch.arange(24.0).view(shape))
    optimizer = row.load(package)([param], lr=0.1, **row.arguments)
    param.grad = torch.linspace(-1, 2, 24).view(shape)
    optimizer.step()
    return param, optimizer.state[param]


@pytest.mark.parametrize("name", [name for name in PLANNED if name in HERE])
@pytest.mark.parametrize("package", [True, False])
@pytest.mark.parametrize("shape", [(4, 6), (24,), (2, 3, 4)])
def test_an_optimizer_keeps_the_states_that_the_plan_counts(
    name: str, package: bool, shape: tuple[int, ...]
) -> None:
    row = PLANNED[name]
    if row.matrices and len(shape) != 2:
        return  # another row steps it
    param, state = after_a_step(row, package, shape)
    kept = {key: value for key, value in state.items() if isinstance(value, torch.Tensor)}
    assert {each.key for each in row.states if each.numel(shape)} == kept.keys()
    for each in row.states:
        if each.key in kept:
            assert kept[each.key].numel() == each.numel(shape), each
            assert kept[each.key].dtype == torch.float32, each
    nbytes = sum(value.nbytes for value in kept.values())
    assert nbytes == row.tensor_bytes(shape, 4) + row.number_bytes
    elementwise = [v for v in kept.values() if v.shape == param.shape]
    assert row.elementwise_states in (len(elementwise), 0)


@pytest.mark.parametrize("name", [name for name in HERE if KNOWN[name].builtin])
def test_a_built_in_class_steps_as_the_package_does(name: str) -> None:
    row = KNOWN[name]
    same = {"lr": 0.1, "betas": (0.9, 0.99), "weight_decay": 0.0}
    found = []
    for package in (True, False):
        param = nn.Parameter(torch.arange(12.0).view(3, 4))
        optimizer = row.load(package)([param], **same)
        for step in range(3):
            param.grad = torch.linspace(-1, 2, 12).view(3, 4) * (1 - step)
            optimizer.step()
        found.append(param.detach())
    assert torch.equal(*found)


def test_fused_kernels_are_named_where_the_class_has_them() -> None:
    for name, row in HERE.items():
        has = "fused" in inspect.signature(row.load()).parameters
        assert bool(row.fused) == has, name
        assert row.can_fuse("cpu") == has, name
        assert row.can_fuse("cuda") == (row.fused == "any"), name


def test_what_is_offered_by_no_front_end_says_why() -> None:
    for name, row in KNOWN.items():
        offered = row.trained or row.simulated or row.deepspeed or bool(row.planned)
        assert offered != bool(row.refused), name
        assert row.planned in ("", *PLANNED), name


def test_the_table_needs_no_torch() -> None:
    code = "import sys, onefold.recipe.optimizers; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
