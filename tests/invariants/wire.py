"""Bytes on the wire seen from outside of Onefold, and what the formulas say they are.

Formulas, in bytes a rank sends for one optimizer step of m micro-batches (P: bytes of all units in
the wire dtype, padding included; T: those of the last units, the last that a forward pass
uses and the units around it, which stay gathered until the backward pass; N ranks; every term times
(N-1)/N):

    | placement                              | gathers of parameters | reductions of gradients |
    |----------------------------------------|-----------------------|-------------------------|
    | stage 0                                | P (half an all-reduce)| P (the other half)      |
    | stage 1                                | P                     | P                       |
    | stage 2                                | P                     | mP                      |
    | stage 3                                | 2mP - mT              | mP                      |
    | stage 2, reduced at the boundary       | P                     | P                       |
    | stage 3, reduced at the boundary       | 2mP - mT              | P                       |
    | stage 3, kept from forward to backward | mP                    | mP                      |
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

#: Everything of torch.distributed that sends: a function the engine uses and this list lacks would
#: escape the count, which is why the loopback test counts without any of it.
SENDERS = ["isend", "send", "broadcast", "all_reduce", "reduce", "all_gather", "all_gather_into_tensor", "all_to_all",
           "all_gather_single", "reduce_scatter", "reduce_scatter_tensor", "reduce_scatter_single", "all_to_all_single",
           "gather", "scatter", "batch_isend_irecv", "all_gather_object", "broadcast_object_list"]  # fmt: skip


@dataclass
class Sent:
    """Bytes given to isend: payload (floating point; `to` the ranks of a group by number) and
    control (bytes, uint8); and calls of any other sender.
    """

    payload: int = 0
    control: int = 0
    messages: int = 0

    def __post_init__(self) -> None:
        self.others: list[str] = []
        self.to: Counter[int] = Counter()


@contextlib.contextmanager
def counted_sends() -> Iterator[Sent]:
    """Count what goes through torch.distributed while the block runs."""
    sent = Sent()
    originals = {name: getattr(dist, name) for name in SENDERS if hasattr(dist, name)}

    def isend(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        nbytes = tensor.numel() * tensor.element_size()
        if tensor.dtype == torch.uint8:
            sent.control += nbytes
        else:
            sent.payload += nbytes
            sent.messages += 1
            sent.to[kwargs["group_dst"]] += nbytes
        return originals["isend"](tensor, *args, **kwargs)

    def other(name: str) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            sent.others.append(name)
            return originals[name](*args, **kwargs)

        return call

    for name in originals:
        setattr(dist, name, isend if name == "isend" else other(name))
    try:
        yield sent
    finally:
        for name, original in originals.items():
            setattr(dist, name, original)


def elements_of(units: Any) -> tuple[int, int]:
    """(elements of all units, elements of those at the turn), padding included, of units in the
    order of their use.
    """
    last = units[-1]
    around = [u for u in units if u is last or u.path == "" or last.path.startswith(u.path + ".")]
    return sum(u.numel for u in units), sum(u.numel for u in around)


def formula(
    stage: int, numel: int, world_size: int, micro_batches: int = 1, *, turn: int, **options: Any
) -> int:
    """Payload bytes that a rank sends for one optimizer step, by the table of this module. `numel`,
    and `turn` of them, count padding.
    """
    m = micro_batches
    compute = torch.float32 if options.get("precision", "fp32") == "fp32" else torch.bfloat16
    gather_bytes = compute.itemsize
    wire = {"fp32": torch.float32, "bf16": torch.bfloat16}.get(options.get("wire", ""), compute)
    reduce_bytes = wire.itemsize
    reductions = 1 if stage < 2 or options.get("reduce_at") == "boundary" else m
    gathered = (
        numel
        if stage < 3
        else m * (2 * numel - turn if options.get("reshard_after_forward", True) else numel)
    )
    total = (gathered * gather_bytes + numel * reductions * reduce_bytes) * (world_size - 1)
    assert total % world_size == 0, "a unit's padded length is a multiple of the number of ranks"
    return total // world_size


def formula_over_nodes(
    stage: int,
    numel: int,
    node: int,
    nodes: int,
    micro_batches: int = 1,
    *,
    turn: int,
    **options: Any,
) -> dict[str, int]:
    """The same over `nodes` nodes of `node` ranks, by link: each of its terms inside a node over
    the node's ranks, (G-1)/G, and between nodes a rank's share of what the node exchanges with the
    others, (H-1)/HG.
    """
    inside = formula(stage, numel, node, micro_batches, turn=turn, **options)
    between = formula(stage, numel, nodes, micro_batches, turn=turn, **options)
    assert between % node == 0, "a unit's padded length is a multiple of the number of ranks"
    return {"inside": inside, "between": between // node}


def train_steps(model: nn.Module, optimizer: Any, batches: list[Any], micro_batches: int) -> None:
    """Optimizer steps of `micro_batches` each over the batches, with no_sync between."""
    import onefold

    for index, batch in enumerate(batches):
        last = (index + 1) % micro_batches == 0
        with contextlib.nullcontext() if last else onefold.no_sync(model):
            model(batch).square().mean().backward()
        if last:
            optimizer.step()
            optimizer.zero_grad()
