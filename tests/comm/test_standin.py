"""The stand-in for NCCL: what it moves, what it refuses, and what goes wrong on it as it would on a
GPU.
"""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
import torch.distributed as dist

import standin
from ranks import outcomes_of, run_ranks
from zoo import features_of


def by(rank: int, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return features_of(rank, *shape).to(dtype)


def every_collective(dtype: torch.dtype) -> list[str]:
    """Names of the collectives that gave other numbers than expected."""
    group, me, n = standin.new_group(), dist.get_rank(), dist.get_world_size()
    wrong: list[str] = []

    def expect(name: str, found: torch.Tensor, expected: torch.Tensor, exact: bool = True) -> None:
        close = (
            torch.equal(found, expected)
            if exact
            else torch.allclose(found.float(), expected.float(), rtol=0.05, atol=0.05)
        )
        wrong.extend([] if close else [f"{name}: {found} for {expected}"])

    parts = [by(r, 6, dtype=dtype) for r in range(n)]
    out = torch.empty(6 * n, dtype=dtype)
    dist.all_gather_single(out, parts[me], group=group)
    expect("all_gather", out, torch.cat(parts))
    out = torch.zeros(6 * n, dtype=dtype)
    out[6 * me : 6 * me + 6] = parts[me]
    dist.all_gather_single(out, out[6 * me : 6 * me + 6], group=group)
    expect("all_gather in place", out, torch.cat(parts))
    whole = [by(r, 4 * n, dtype=dtype) for r in range(n)]
    out = torch.empty(4 * n, dtype=dtype)
    dist.all_to_all_single(out, whole[me], group=group)
    expect("all_to_all_single", out, torch.cat([w[4 * me : 4 * me + 4] for w in whole]))
    sizes = [(a + 2 * b) % 3 for a in range(n) for b in range(n)]  # rank a sends so many to rank b
    uneven = [by(r, sum(sizes[r * n : r * n + n]), dtype=dtype) for r in range(n)]
    gets = [sizes[r * n + me] for r in range(n)]
    out = torch.empty(sum(gets), dtype=dtype)
    dist.all_to_all_single(out, uneven[me], gets, sizes[me * n : me * n + n], group=group)
    expected = torch.cat([uneven[r].split(sizes[r * n : r * n + n])[me] for r in range(n)])
    expect("all_to_all_single in parts", out, expected)
    outs = [torch.empty(g, dtype=dtype) for g in gets]
    dist.all_to_all(outs, list(uneven[me].split(sizes[me * n : me * n + n])), group=group)
    expect("all_to_all", torch.cat(outs), expected)
    total, out = torch.stack([w.float() for w in whole]).sum(0), torch.empty(4, dtype=dtype)
    dist.reduce_scatter_single(out, whole[me], group=group)
    expect("reduce_scatter", out, total[4 * me : 4 * me + 4], exact=False)
    out = whole[me].clone()
    dist.all_reduce(out, group=group)
    expect("all_reduce", out, total, exact=False)
    if dtype.is_floating_point:
        dist.all_reduce(out := whole[me].clone(), op=dist.ReduceOp.AVG, group=group)
        expect("all_reduce, mean", out, total / n, exact=False)
    dist.all_reduce(out := whole[me].clone(), op=dist.ReduceOp.MAX, group=group)
    expect("all_reduce, max", out, torch.stack(whole).max(0).values)
    dist.broadcast(out := parts[me].clone(), group=group, group_src=n - 1)
    expect("broadcast", out, parts[-1])
    ops = [dist.P2POp(dist.isend, parts[me], group_peer=(me + 1) % n, group=group)]
    ops.append(
        dist.P2POp(
            dist.irecv, out := torch.empty(6, dtype=dtype), group_peer=(me - 1) % n, group=group
        )
    )
    for work in dist.batch_isend_irecv(ops):
        work.wait()
    expect("send and recv", out, parts[me - 1])
    dist.barrier(group=group)
    dist.destroy_process_group(group)
    return wrong


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int32])
@pytest.mark.parametrize("world_size", [2, 3])
def test_the_stand_in_moves_what_nccl_moves(world_size: int, dtype: torch.dtype) -> None:
    assert run_ranks(world_size, every_collective, dtype) == [[]] * world_size


def sums_of_three() -> list[float]:
    """fp32 numbers whose sum depends on the order: what a reduce-scatter and an all-reduce make of
    them.
    """
    group, me = standin.new_group(), dist.get_rank()
    mine = torch.full((3,), [1e8, 1.0, -1e8][me])
    out = torch.empty(1)
    dist.reduce_scatter_single(out, mine, group=group)
    dist.all_reduce(mine, group=group)
    return [out.item(), *mine.tolist()]


def test_sums_go_round_the_ring_and_not_by_rank() -> None:
    # By rank every sum is (1e8 + 1) - 1e8 = 0. Rank 1's part begins with rank 2: (-1e8 + 1e8) + 1.
    found = run_ranks(3, sums_of_three)
    assert [f[0] for f in found] == [0.0, 1.0, 0.0] and all(
        f[1:] == [0.0, 1.0, 0.0] for f in found
    ), found


def misuse() -> dict[str, bool]:
    """What a program sees that reads an output, or writes to an input, before it has waited."""
    group, me = standin.new_group(), dist.get_rank()
    seen = {}
    out, mine = torch.zeros(8), by(me, 4)
    work = dist.all_gather_single(out, mine, group=group, async_op=True)
    time.sleep(10 * standin.LATE)  # it is on its way for long: still nobody has waited
    seen["an output that nobody waited for is poison"] = (
        bool(out.isnan().all()) and not work.is_completed()
    )
    work.wait()
    seen["it is there behind the wait"] = torch.equal(out, torch.cat([by(0, 4), by(1, 4)]))
    work = dist.all_gather_single(out, mine, group=group, async_op=True)
    mine.zero_()
    work.wait()
    seen["an input that is overwritten before the wait is sent as it is then"] = torch.equal(
        out, torch.zeros(8)
    )
    whole = by(me, 8)
    work = dist.all_reduce(whole, group=group, async_op=True)
    time.sleep(10 * standin.LATE)
    seen["what is reduced in place is poison"] = bool(whole.isnan().all())
    work.wait()
    first = dist.all_gather_single(early := torch.zeros(8), by(me, 4), group=group, async_op=True)
    dist.all_gather_single(torch.zeros(8), by(me, 4), group=group, async_op=True).wait()
    seen["a wait is one for all operations before"] = not early.isnan().any()
    first.wait()
    return seen


def test_reading_early_and_overwriting_early_show() -> None:
    for seen in run_ranks(2, misuse):
        assert all(seen.values()), seen


def refusals() -> list[str]:
    group, said = standin.new_group(), []
    wrong: list[Any] = [
        lambda: dist.isend(torch.ones(2), group=group, group_dst=1 - dist.get_rank(), tag=3),
        lambda: dist.irecv(torch.ones(2), group=group, group_src=1 - dist.get_rank(), tag=3),
        lambda: dist.irecv(torch.ones(2), group=group),
        lambda: dist.all_reduce(torch.ones(4, 4).t()[:2], group=group),
        lambda: dist.all_gather_single(torch.ones(5), torch.ones(2), group=group),
        lambda: dist.reduce_scatter_single(torch.ones(2), torch.ones(5), group=group),
        lambda: dist.all_reduce(
            torch.ones(2, dtype=torch.int32), op=dist.ReduceOp.BOR, group=group
        ),
    ]
    for each in wrong:
        try:
            each()
        except (RuntimeError, ValueError) as error:
            said.append(str(error))
        else:
            said.append("nothing")
    return said


def test_what_nccl_has_not_is_refused() -> None:
    words = [
        "no tags",
        "no tags",
        "named",
        "contiguous",
        "expected 2 times",
        "expected 2 times",
        "has no",
    ]
    for said in run_ranks(2, refusals):
        assert all(word in sentence for word, sentence in zip(words, said, strict=True)), said


def another_order() -> None:
    group, me = standin.new_group(), dist.get_rank()
    works = [dist.all_reduce(torch.ones(3), group=group, async_op=True), dist.all_gather_single(
        torch.ones(8), torch.ones(4), group=group, async_op=True)] if me == 0 else [dist.all_gather_single(
        torch.ones(8), torch.ones(4), group=group, async_op=True), dist.all_reduce(torch.ones(3), group=group, async_op=True)]  # fmt: skip
    for work in works:
        work.wait()


def test_another_order_on_one_rank_is_an_error_that_names_both_operations() -> None:
    for outcome in outcomes_of(2, another_order, timeout=60):
        assert outcome.error == "RuntimeError", outcome
        assert "all_reduce of 3" in outcome.message and "all_gather of 4" in outcome.message, (
            outcome.message
        )


def gone() -> None:
    group = standin.new_group(timeout=60)
    if dist.get_rank() == 1:
        raise ArithmeticError("gone")
    dist.all_reduce(torch.ones(3), group=group)


def test_a_rank_that_ends_is_an_error_on_the_others_at_once() -> None:
    waiting, _ = outcomes_of(2, gone, timeout=60)
    assert (
        waiting.error == "RuntimeError" and "is gone" in waiting.message and waiting.seconds < 30
    ), waiting


def late() -> None:
    group = standin.new_group(timeout=1)
    if dist.get_rank() == 0:
        dist.all_reduce(torch.ones(3), group=group)
    time.sleep(3)


def test_a_rank_that_does_not_come_is_an_error_when_the_time_is_up() -> None:
    waiting, other = outcomes_of(2, late, timeout=60)
    assert (
        waiting.error == "RuntimeError"
        and "Timed out after 1.0 s in all_reduce of 3" in waiting.message
    ), waiting
    assert other.error == "", other


def halves() -> list[float]:
    """A communicator of each half of four ranks, split from that of all, then the sum over it."""
    whole, me = standin.new_group(), dist.get_rank()
    half = whole.split_group([0, 1] if me < 2 else [2, 3])
    nobody = whole.split_group([0])
    half.allreduce([mine := torch.tensor([float(me)])]).wait()
    return [mine.item(), half.size(), nobody is None]


def test_communicators_are_made_by_splitting() -> None:
    assert run_ranks(4, halves) == [[1.0, 2, False], [1.0, 2, True], [5.0, 2, True], [5.0, 2, True]]
