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


@given(st.lists(st.floats(0.5, 2), min_size=6, max_size=6))
def test_no_price_is_negative_whatever_was_measured(noise: list[float]) -> None:
    true = Costs(1e-11, 1e-5, 1e-10, 1e-6, 1e-10)
    found = Costs.of([(k, n * true.seconds(k)) for k, n in zip(RAN, noise, strict=True)])
    assert min(found.flop, found.product, found.product_byte, found.other, found.other_byte) >= 0
    assert all(0.25 < found.seconds(k) / true.seconds(k) < 4 for k in RAN)


@pytest.mark.parametrize("passes", [[], [(RAN[0], 0.0)]])
def test_passes_that_say_nothing_are_refused(passes: list[tuple[Kernels, float]]) -> None:
    with pytest.raises(ValueError, match="expected at least one, each of which took time"):
        Costs.of(passes)


def test_a_product_is_counted_with_its_bytes() -> None:
    x, w = torch.ones(3, 4), torch.ones(5, 4)
    assert count(lambda: F.linear(x, w)) == Kernels(2 * 3 * 4 * 5, 1, 4 * (12 + 20 + 15), 0, 0)


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


def test_picking_rows_reads_only_them() -> None:
    table, rows = torch.ones(1000, 8), torch.tensor([1, 2, 3])
    assert count(lambda: F.embedding(rows, table)) == Kernels(
        others=1, other_bytes=2 * 4 * 24 + 8 * 3
    )


@pytest.mark.skipif(not hasattr(torch, "_grouped_mm"), reason="this torch has no grouped products")
def test_each_group_of_a_grouped_product_is_one() -> None:
    x, w = torch.ones(6, 8, dtype=torch.bfloat16), torch.ones(3, 8, 16, dtype=torch.bfloat16)
    found = count(lambda: torch._grouped_mm(x, w, offs=torch.tensor([2, 4, 6], dtype=torch.int32)))
    assert (found.flops, found.products) == (2 * 6 * 8 * 16, 3)
