"""The check of torch's collectives against sums on the host. Every rank can generate every other
rank's numbers, so each computes the expected result.
"""

from __future__ import annotations

from itertools import product

import torch
import torch.distributed as dist

from onefold.doctor.model import Here, assert_close, assert_nowhere

#: Numbers that each rank makes on the host, at most: those of all ranks, for every rank.
MADE = 1 << 25
#: Elements that each rank moves. The last is large enough for the algorithms for large data.
NUMELS = {"gloo": (1, 1000, 1 << 16), "nccl": (1, 1000, 1 << 22)}


def collectives(here: Here) -> str:
    """Check each collective that Onefold uses, on gloo and on the device's own backend."""
    devices = dict.fromkeys([torch.device("cpu"), here.device])
    for device in devices:
        backend = "gloo" if device.type == "cpu" else here.backend
        for numel, dtype in product(NUMELS[backend], (torch.float32, torch.bfloat16)):
            _check_moves(here, backend, device, min(numel, MADE // here.world_size**2), dtype)
    return f"all results equal what arithmetic says, on {' and '.join(d.type for d in devices)}"


def _values(numel: int, rank: int, dtype: torch.dtype) -> torch.Tensor:
    """Return a rank's contribution, [numel]. Its values have many magnitudes."""
    draw = torch.Generator().manual_seed(1 + 7919 * rank)
    found = torch.randn(numel, generator=draw, device="cpu")
    return (found * torch.exp2(torch.randint(-8, 8, (numel,), generator=draw, device="cpu"))).to(
        dtype
    )


def _check_moves(
    here: Here, backend: str, device: torch.device, numel: int, dtype: torch.dtype
) -> None:
    n, rank = here.world_size, here.rank
    every = [_values(numel * n, r, dtype) for r in range(n)]  # rank r's values, a part per rank
    mine, part = every[rank].to(device), slice(numel * rank, numel * (rank + 1))
    first, own = [values[:numel] for values in every], [values[part] for values in every]
    of = f"of {numel:,} {str(dtype).removeprefix('torch.')} on {backend} brings wrong numbers"

    def room(size: int) -> torch.Tensor:
        return torch.empty(size, dtype=dtype, device=device)

    whole = room(n * numel)
    dist.all_gather_single(whole, mine[:numel].contiguous())
    assert_close(here, f"all-gather {of}", whole.cpu(), torch.cat(first))

    received = room(n * numel)
    dist.all_to_all_single(received, mine)
    assert_close(here, f"all-to-all {of}", received.cpu(), torch.cat(own))

    if device.type == "cpu":  # gloo ends the process that sends from a GPU; the engine does not
        after, before = room(numel), (rank - 1) % n
        moves = [(dist.irecv, after, before), (dist.isend, mine[:numel], (rank + 1) % n)]
        works = dist.batch_isend_irecv([dist.P2POp(op, tensor, peer) for op, tensor, peer in moves])
        for work in works:
            work.wait()
        assert_close(here, f"send and receive {of}", after, first[before])

    sums = room(numel)
    dist.reduce_scatter_single(sums, mine.clone())
    _assert_sum(here, f"reduce-scatter {of}", sums, own)

    total = mine.clone()
    dist.all_reduce(total)
    _assert_sum(here, f"all-reduce {of}", total, every)

    sent = mine.clone()
    dist.broadcast(sent, 0)
    assert_close(here, f"broadcast {of}", sent.cpu(), every[0])


def _assert_sum(here: Here, what: str, found: torch.Tensor, parts: list[torch.Tensor]) -> None:
    """Raise AssertionError on every rank unless `found` is the sum of `parts`, within the rounding of any order."""
    wide = torch.stack([part.double() for part in parts])
    room = len(parts) * torch.finfo(found.dtype).eps * wide.abs().sum(0)
    off = (found.cpu().double() - wide.sum(0)).abs()
    near = bool((off <= room).all())
    assert_nowhere(
        here, "" if near else f"{what}: they differ from their sum by more than rounding"
    )
