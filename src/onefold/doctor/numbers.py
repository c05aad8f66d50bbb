"""The check of torch's collectives against sums on the host. Every rank can generate every other
rank's numbers, so each computes the expected result. They are whole numbers so small that their sums
are exact in bf16 and in any order.
"""

from __future__ import annotations

from itertools import product

import torch
import torch.distributed as dist

from onefold.doctor.model import Here, assert_close

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


def _values(numel: int, rank: int, dtype: torch.dtype, most: int) -> torch.Tensor:
    """Return a rank's contribution, [numel]: whole numbers up to `most`."""
    draw = torch.Generator().manual_seed(1 + 7919 * rank)
    found = torch.randint(-most, most + 1, (numel,), generator=draw, device="cpu")
    return found.to(dtype)


def _check_moves(
    here: Here, backend: str, device: torch.device, numel: int, dtype: torch.dtype
) -> None:
    n, rank = here.world_size, here.rank
    # Of rank r a part per rank; bf16 has each whole number up to 256
    every = [_values(numel * n, r, dtype, max(1, 256 // n)) for r in range(n)]
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
    assert_close(here, f"reduce-scatter {of}", sums.cpu(), sum(own))

    total = mine.clone()
    dist.all_reduce(total)
    assert_close(here, f"all-reduce {of}", total.cpu(), sum(every))

    sent = mine.clone()
    dist.broadcast(sent, 0)
    assert_close(here, f"broadcast {of}", sent.cpu(), every[0])
