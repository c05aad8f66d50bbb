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
from on_ranks import on_ranks
from ranks import outcomes_of
from zoo import features_of


@on_ranks(3)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int32])
def test_it_moves_what_nccl_moves(dtype: torch.dtype) -> None:
    group, me, n = standin.new_group(), dist.get_rank(), 3

    def of(rank: int, numel: int) -> torch.Tensor:
        return (features_of(rank, numel) * 4).to(dtype)

    def near(found: torch.Tensor, expected: torch.Tensor) -> None:
        torch.testing.assert_close(found.float(), expected, rtol=0.05, atol=0.05)

    parts, whole = ([of(r, numel) for r in range(n)] for numel in (6, 4 * n))
    total = torch.stack([w.float() for w in whole]).sum(0)
    out = torch.zeros(6 * n, dtype=dtype)
    out[6 * me : 6 * me + 6] = parts[me]
    dist.all_gather_single(out, out[6 * me : 6 * me + 6], group=group)
    assert torch.equal(out, torch.cat(parts))
    dist.all_to_all_single(out := torch.empty(4 * n, dtype=dtype), whole[me], group=group)
    assert torch.equal(out, torch.cat([w[4 * me : 4 * me + 4] for w in whole]))
    # Rank a sends (a + 2b) % 3 elements to rank b
    sizes = [[(a + 2 * b) % 3 for b in range(n)] for a in range(n)]
    uneven, gets = [of(r, sum(sizes[r])) for r in range(n)], [sizes[r][me] for r in range(n)]
    expected = torch.cat([uneven[r].split(sizes[r])[me] for r in range(n)])
    out = torch.empty(sum(gets), dtype=dtype)
    dist.all_to_all_single(out, uneven[me], gets, sizes[me], group=group)
    outs = [torch.empty(size, dtype=dtype) for size in gets]
    dist.all_to_all(outs, list(uneven[me].split(sizes[me])), group=group)
    assert torch.equal(out, expected) and torch.equal(torch.cat(outs), expected)
    dist.reduce_scatter_single(out := torch.empty(4, dtype=dtype), whole[me], group=group)
    near(out, total[4 * me : 4 * me + 4])
    dist.all_reduce(out := whole[me].clone(), group=group)
    near(out, total)
    if dtype.is_floating_point:
        dist.all_reduce(out := whole[me].clone(), op=dist.ReduceOp.AVG, group=group)
        near(out, total / n)
    dist.all_reduce(out := whole[me].clone(), op=dist.ReduceOp.MAX, group=group)
    assert torch.equal(out, torch.stack(whole).max(0).values)
    dist.broadcast(out := parts[me].clone(), group=group, group_src=n - 1)
    assert torch.equal(out, parts[-1])
    out = torch.empty(6, dtype=dtype)
    to = dist.P2POp(dist.isend, parts[me], group_peer=(me + 1) % n, group=group)
    of_ = dist.P2POp(dist.irecv, out, group_peer=(me - 1) % n, group=group)
    for work in dist.batch_isend_irecv([to, of_]):
        work.wait()
    assert torch.equal(out, parts[me - 1])
    dist.barrier(group=group)


@on_ranks(2)
def test_reading_early_and_overwriting_early_show() -> None:
    group, me = standin.new_group(), dist.get_rank()

    def gathered(mine: torch.Tensor) -> tuple[Any, torch.Tensor]:
        out = torch.zeros(8)
        return dist.all_gather_single(out, mine, group=group, async_op=True), out

    work, out = gathered(torch.full((4,), me + 1.0))
    time.sleep(10 * standin.LATE)  # it is on its way for long: still nobody has waited
    assert out.isnan().all() and not work.is_completed()
    work.wait()
    assert out.tolist() == [1.0] * 4 + [2.0] * 4
    work, out = gathered(mine := torch.ones(4))
    mine.zero_()
    work.wait()
    assert not out.any(), "what is overwritten before the wait is sent as it is then"
    first, early = gathered(torch.ones(4))
    gathered(torch.ones(4))[0].wait()
    assert not early.isnan().any(), "a wait is one for all operations before"
    first.wait()


@on_ranks(2, fresh=True)
def test_another_order_on_one_rank_is_an_error_that_names_both_operations() -> None:
    group = standin.new_group()
    acts = [
        lambda: dist.all_reduce(torch.ones(3), group=group, async_op=True),
        lambda: dist.all_gather_single(torch.ones(8), torch.ones(4), group=group, async_op=True),
    ]
    works = [act() for act in acts[:: 1 if dist.get_rank() else -1]]
    with pytest.raises(
        RuntimeError, match=r"(?s)all_reduce of 3.*all_gather of 4|all_gather of 4.*"
    ):
        for work in works:
            work.wait()


def gone_or_late(late: bool) -> None:
    group = standin.new_group(timeout=1 if late else 60)
    if dist.get_rank() == 0:
        dist.all_reduce(torch.ones(3), group=group)
    elif not late:
        raise ArithmeticError("gone")
    time.sleep(1.5)


@pytest.mark.parametrize(
    ("late", "said"), [(False, "is gone"), (True, "Timed out after 1.0 s in all_reduce of 3")]
)
def test_a_rank_that_ends_or_does_not_come_is_an_error_on_the_others(late: bool, said: str) -> None:
    waiting, _ = outcomes_of(2, gone_or_late, late, timeout=60)
    assert waiting.error == "RuntimeError" and said in waiting.message and waiting.seconds < 30
