"""Bytes that are counted outside of Onefold, and the closed forms that they must equal.

Bytes that a rank sends for one step of m micro-batches. P: bytes of all units in the compute dtype,
padding included; W: the same in the wire dtype; T: those at the turn (the last unit that a forward
pass uses and the units around it), which stay gathered until the backward pass.

| recipe            | gathers inside | reductions inside | gathers across | reductions across |
|-------------------|----------------|-------------------|----------------|-------------------|
| stage 0, 1        | P              | W                 | as inside      | as inside         |
| stage 2           | P              | mW                | as inside      | as inside         |
| stage 3           | 2mP - mT       | mW                | as inside      | as inside         |
| sharded in groups | as above       | as above          | -              | 2W                |
| optimizer over all| as above       | as above          | P              | W                 |
| second copy       | as above       | as above          | P              | as inside         |

At stage 0 P is in the wire dtype too. "Inside" is of a group of G ranks, times (G-1)/G;
"across" of its H groups, times (H-1)/HG; without groups G is the number of ranks. At stages 2 and 3
`reduce_at="boundary"` has W for mW; and `reshard_after_forward=False` has mP for 2mP - mT.

Bytes at rest, S being the ranks that a state is divided by: parameters P (stages 0 to 2), P/S
(stage 3); masters P/S beside those in 16 bits, AdamW's moments twice 4/S of an element.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from promises.jobs import Row

#: Everything of torch.distributed that sends. A function that the engine uses and this list lacks
#: would escape the count, which is why the loopback interface is counted too.
SENDERS = ["isend", "send", "broadcast", "all_reduce", "reduce", "all_gather", "all_gather_into_tensor", "all_to_all",
           "all_gather_single", "reduce_scatter", "reduce_scatter_tensor", "reduce_scatter_single", "all_to_all_single",
           "gather", "scatter", "batch_isend_irecv", "all_gather_object", "broadcast_object_list"]  # fmt: skip


# -- counted ---------------------------------------------------------------------------------------


@dataclass
class Sent:
    """Bytes given to isend: payload (`to` the ranks of a group by number) and control (uint8, which
    is also what codecs send); calls of any other sender.
    """

    payload: int = 0
    control: int = 0
    messages: int = 0
    others: list[str] = field(default_factory=list)
    to: Counter[int] = field(default_factory=Counter)


@contextlib.contextmanager
def counted_sends() -> Iterator[Sent]:
    """Count what goes through torch.distributed while the block runs."""
    sent = Sent()
    originals = {name: getattr(dist, name) for name in SENDERS if hasattr(dist, name)}

    def isend(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if tensor.dtype == torch.uint8:
            sent.control += tensor.nbytes
        else:
            sent.payload += tensor.nbytes
            sent.messages += 1
            sent.to[kwargs["group_dst"]] += tensor.nbytes
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


def give_memory_back_at_once() -> None:
    """Let malloc return every freed block of 64 KiB or more, so that resident memory follows what
    is alive. For the rest of this process.
    """
    m_mmap_threshold = -3
    ctypes.CDLL(None).mallopt(m_mmap_threshold, 1 << 16)


def resident() -> int:
    """Bytes of memory of this process that is its own."""
    return _status("RssAnon")


def peak_resident() -> int:
    """The largest resident size since `reset_peak`, all kinds of pages."""
    return _status("VmHWM")


def reset_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")


def _status(key: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(key + ":"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/self/status has no {key}")


# -- closed forms ----------------------------------------------------------------------------------

#: Models of one dtype whose parameters are all trained and whose units are used one after the other.
SIMPLE = ("gpt", "wide gpt", "big gpt", "mlp", "large mlp", "routed")
#: Options that the closed forms know, or that change no byte of them.
OF_WIRE = {"precision", "master_dtype", "wire", "reduce_at", "reshard_after_forward", "prefetch", "in_flight",
           "group", "shard_group", "optimizer_over", "second_copy", "offload_optimizer", "offload_param",
           "offload_gradients", "chunk", "step_in_backward", "units", "moments", "reduce"}  # fmt: skip
OF_REST = OF_WIRE - {
    "offload_optimizer",
    "offload_param",
    "offload_gradients",
    "moments",
    "master_dtype",
    "wire",
}
OF_GRADIENTS = OF_REST - {"precision", "group", "shard_group", "optimizer_over", "second_copy"}

Units = list[tuple[str, int]]


def _known(row: Row, options: set[str]) -> bool:
    frozen = set(row.loop.frozen) - {"blocks.0", "blocks.1"}
    return row.model in SIMPLE and set(row.options) <= options and not frozen


def _groups(row: Row) -> tuple[int, int]:
    """(ranks of a group, groups) that a row's bytes go over."""
    asked = row.options.get("shard_group", row.options.get("group"))
    ranks, node = row.mesh.ranks, row.mesh.per_node or row.mesh.ranks
    size = {"node": node, "flat": ranks, None: node if node > 1 else ranks}.get(asked, asked)
    return size, ranks // size


def node_of(row: Row) -> int:
    """Ranks of a node: what the launcher says, else groups are called nodes."""
    return row.mesh.per_node or _groups(row)[0]


def _elements(row: Row, units: Units) -> tuple[int, int, int]:
    """(trained elements, frozen ones, those at the turn)."""
    path = {name: "" if name == "(root)" else name for name, _ in units}
    last = path[units[-1][0]]
    around = [
        n for name, n in units if path[name] in ("", last) or last.startswith(path[name] + ".")
    ]
    frozen = sum(n for name, n in units if name in row.loop.frozen)
    return sum(n for _, n in units) - frozen, frozen, sum(around)


def sent(row: Row, units: Units) -> dict[str, int] | None:
    """Bytes that a rank sends in a step, by link; None for a row that the table above leaves out."""
    if not _known(row, OF_WIRE):
        return None
    options, m = row.options, row.loop.micro_batches
    compute = 4 if options.get("precision", "fp32") == "fp32" else 2
    wire = {"fp32": 4, "bf16": 2}.get(options.get("wire", ""), compute)
    trained, frozen, turn = _elements(row, units)
    again = options.get("reshard_after_forward", True)
    gathers = (trained + frozen) * compute * m * (2 if again else 1) - again * m * turn * compute
    if row.stage < 3:
        gathers = trained * (compute if row.stage else wire)
    sums = trained * wire * (m if row.stage > 1 and options.get("reduce_at") != "boundary" else 1)
    inside, across = gathers + sums, gathers + sums
    if "shard_group" in options:
        over_all = options.get("optimizer_over") == "all"
        across = trained * (compute + wire) if over_all else 2 * trained * wire
    elif options.get("second_copy"):
        across = trained * compute + sums
    group, groups = _groups(row)
    in_group = inside * (group - 1) // group
    to_others = across * (groups - 1) // (groups * group)
    node = node_of(row)
    if node == row.mesh.ranks:
        return {"inside": in_group, "between": 0}
    if groups == 1:
        near = in_group * (node - 1) // (group - 1)
        return {"inside": near, "between": in_group - near}
    return {"inside": in_group, "between": to_others} if group == node else None


def evaluated(row: Row, units: Units) -> int | None:
    """Bytes that a rank sends in a forward pass without gradients, behind a step."""
    if not _known(row, OF_GRADIENTS) or row.mesh.per_node:
        return None
    trained, frozen, _ = _elements(row, units)
    return (trained + frozen) * 4 * (row.mesh.ranks - 1) // row.mesh.ranks if row.stage == 3 else 0


def at_rest(row: Row, units: Units) -> tuple[int, int, int] | None:
    """(bytes of parameters and masters, the least and the most bytes of AdamW's moments: nobody
    steps padding, and each parameter has a count of steps).
    """
    if not _known(row, OF_REST) or row.loop.frozen or row.mesh.ranks == 1:
        return None  # one rank holds no padding
    if "adamw" not in row.loop.optimizer:
        return None
    options, (group, _) = row.options, _groups(row)
    elements, _, _ = _elements(row, units)
    compute = 4 if options.get("precision", "fp32") == "fp32" else 2
    divided = (
        group if "shard_group" in options and "optimizer_over" not in options else row.mesh.ranks
    )
    masters = elements * 4 // (divided if row.stage else 1)
    copies = elements * compute
    if row.stage == 3:
        copies = copies // group if {"second_copy", "optimizer_over"} & set(options) else 0
    held = masters + copies
    if row.stage < 3 and compute == 4:
        held = copies  # masters are a part of them
    content = sum(p.numel() for p in row.module().parameters())
    padding, counts = elements - content, 4 * len(list(row.module().parameters()))
    return held, 2 * (masters - 4 * padding), 2 * masters + counts


def gradients(row: Row, units: Units) -> list[int] | None:
    """Bytes of gradients behind each backward pass of a step."""
    if not _known(row, OF_GRADIENTS) or row.loop.frozen or row.mesh.ranks == 1 or row.mesh.per_node:
        return None
    if row.model == "mlp":
        return None  # a rank's share may be padding alone, of which there is no gradient
    whole, m = 4 * _elements(row, units)[0], row.loop.micro_batches
    share = whole // row.mesh.ranks
    kept = row.stage < 2 or row.options.get("reduce_at") == "boundary"
    return [whole if kept else share] * (m - 1) + [whole if row.stage == 0 else share]


def peak_bound(row: Row, units: Units) -> int | None:
    """The most bytes of the engine in a step: parameters, sums, units gathered at once (in use, the
    one before, those ahead), and gradients that are not reduced yet, each with what it receives.
    """
    large = row.model in ("large mlp", "big gpt")  # small reductions may be in flight beside others
    if (
        not _known(row, OF_GRADIENTS)
        or row.mesh.per_node
        or row.loop.micro_batches > 1
        or not large
    ):
        return None
    elements, frozen, _ = _elements(row, units)
    whole, largest = 4 * (elements + frozen), 4 * max(n for _, n in units)
    share = whole // row.mesh.ranks
    recipe = row.recipe(Path())
    reductions = (1 + recipe.in_flight) * 2 * largest
    if row.options.get("reduce_at") == "boundary":
        return None
    held = share if row.stage == 3 else whole
    if row.stage < 2:
        return held + whole + reductions + (share if row.stage == 1 else 0)
    gathered = (2 + recipe.prefetch) * largest if row.stage == 3 else 0
    if row.stage == 3 and row.options.get("reshard_after_forward") is False:
        gathered = whole + 2 * largest
    return held + share + gathered + reductions
