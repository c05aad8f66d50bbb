"""What operations cost, fitted to passes, and the counting of what runs."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from onefold.machine.fit import Costs
from onefold.machine.kernels import Kernels, count

RAN = (
    Kernels(10**9, 10, 10**6, 50, 10**5),
    Kernels(10**7, 40, 10**5, 20, 10**6),
    Kernels(10**6, 10, 10**7, 80, 10**5),
    Kernels(0, 0, 0, 200, 10**4),
    Kernels(0, 0, 0, 20, 10**7),
    Kernels(10**8, 60, 10**6, 90, 10**6),
)
cost = st.floats(0.1, 10)


@given(cost, cost, cost, cost, cost)
def test_passes_that_follow_a_price_list_give_it_back(
    a: float, b: float, c: float, d: float, e: float
) -> None:
    true = Costs(a * 1e-11, b * 1e-5, c * 1e-10, d * 1e-6, e * 1e-10)
    found = Costs.of([(k, true.seconds(k)) for k in RAN])
    other = Kernels(5 * 10**8, 30, 2 * 10**6, 70, 10**6)
    assert found.seconds(other) == pytest.approx(true.seconds(other), rel=1e-6)


def test_views_and_fresh_memory_are_no_work_and_writes_are() -> None:
    x = torch.ones(8, 8)
    assert count(lambda: x.view(64)[3:].reshape(-1).t()) == Kernels()
    assert count(lambda: torch.empty(1000)) == Kernels()
    assert count(lambda: x.add_(1)) == Kernels(others=1, other_bytes=2 * 256)


def test_a_backward_pass_is_counted_too() -> None:
    x, w = torch.ones(3, 4, requires_grad=True), torch.ones(5, 4, requires_grad=True)
    found = count(lambda: F.linear(x, w).sum().backward())
    assert (found.flops, found.products) == (3 * 2 * 3 * 4 * 5, 3)
    assert found.others >= 1
