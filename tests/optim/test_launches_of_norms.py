"""Norms of lists of sharded tensors: the operations that a device would run do not grow with the
number of parameters.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import onefold
from ranks import run_ranks

#: They run nothing on a device.
VIEWS = (
    "empty",
    "view",
    "detach",
    "alias",
    "unbind",
    "slice",
    "select",
    "as_strided",
    "_unsafe_view",
    "t",
)


class Operators(TorchDispatchMode):
    """Counts the operators that compute."""

    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if name not in VIEWS:
            self.found[name] += 1
        return func(*args, **(kwargs or {}))


def operators_of_clipping(depth: int, dtype: str) -> tuple[dict[str, int], list[float]]:
    """(operators of torch's own clipping of a model of `depth` layers, the norms that it finds)"""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(depth)))
    model = onefold.shard(
        model, onefold.Recipe.zero(3, master_dtype=dtype, stall_timeout=30.0), units=(nn.Linear,)
    )
    model(torch.ones(2, 8)).square().mean().backward()
    norms = []
    with Operators() as operators:
        for p in (2.0, 1.0, float("inf")):
            norms.append(nn.utils.clip_grad_norm_(model.parameters(), 0.1, p).item())
    return dict(operators.found), norms


def test_torchs_clipping_computes_no_more_operators_for_more_parameters() -> None:
    few, many = (run_ranks(2, operators_of_clipping, depth, "fp32")[0][0] for depth in (3, 30))
    assert sum(many.values()) == sum(few.values()), f"3 layers: {few}\n30 layers: {many}"


def norms_item_by_item(dtype: str) -> tuple[list[list[float]], list[list[float]]]:
    """(norms of a list, norms of each tensor by itself), of tensors of different sizes and
    dtypes.
    """
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(5, n) for n in (5, 1, 300)), nn.Linear(5, 3).double())
    model = onefold.shard(
        model, onefold.Recipe.zero(3, master_dtype=dtype, stall_timeout=30.0), units=(nn.Linear,)
    )
    tensors = [*(p.data for p in model.parameters()), torch.randn(7), torch.randn(7).double()]
    together, alone = [], []
    for p in (2.0, 1.0, 3.0, 0.0, float("inf")):
        norms = torch._foreach_norm(tensors, p)
        assert [n.dtype for n in norms] == [t.dtype for t in tensors]
        together.append([norm.item() for norm in norms])
        alone.append([torch._foreach_norm([t], p)[0].item() for t in tensors])
    return together, alone


def test_norms_of_a_list_have_the_bits_of_norms_of_its_tensors() -> None:
    for dtype in ("fp32", "bf16"):
        for together, alone in run_ranks(2, norms_item_by_item, dtype):
            assert together == alone
