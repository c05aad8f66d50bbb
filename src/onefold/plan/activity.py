"""What a micro-batch keeps and computes where there is no code to trace (tracing/trace.py), and what
of it a rank of a mesh and a device with a host beside it have.

Activations that are on the host between the forward and the backward pass leave the device and come
back, as in offload/activations.py: of the storages that autograd saves the large ones
(`UnitActivity.movable`), the first saved first.

    unit        0       1       2       loss    2       1       0
    kept        a       a b     a b c   a b c   a b c   a b     a
    on the host         a       a b     a b c   a b     a                 as far as the budget allows
    device      a       b       c       ·       c       b       a         + copies on their way, + what is fetched ahead
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace

from onefold.offload.activations import NEAR, SLAB, SMALLEST
from onefold.plan.degrees import Degrees, dims_of
from onefold.plan.rank import Stage, handed_on
from onefold.plan.shapes import ModelShape, Transformer
from onefold.tracing.trace import Activity
from onefold.tracing.watch import Pass, UnitActivity

# -- from dimensions -------------------------------------------------------------------------------


def of_dims(
    model: ModelShape,
    dims: Transformer,
    micro_batch: int,
    seq: int,
    element: int,
    checkpointing: str,
) -> Activity:
    """Count with fused kernels, as papers do (`block_bytes`), where there is no code to trace.

    A block uses (f + h)·e bytes a token beyond those that it keeps while it runs, and in the backward
    pass the gradient of its largest parameter. The loss casts the logits to fp32 and keeps their
    log-probabilities; in the backward pass the gradients of both are beside them: 12 bytes an entry.
    The gradient of a head that is tied to the embedding waits for the embedding's.

    Args:
        element: bytes of an element of the compute dtype.
    """
    tokens = micro_batch * seq
    # With the statistics of two norms
    whole = block_bytes(dims, tokens, element) + 4 * tokens * element
    in_hand = tokens * (dims.ffn + dims.hidden) * element
    wide, entries = tokens * dims.hidden * element, tokens * dims.vocab
    shared = dims.vocab * dims.hidden * element if dims.tied else 0
    moves = wide >= SMALLEST  # smaller tensors are not moved to the host
    rows = [UnitActivity("(root)", kept=16 * tokens)]  # token ids and labels
    for index, unit in enumerate(model.blocks):
        stays = checkpointing == "none" or (checkpointing == "selective" and index % 2 == 1)
        kept, again = (whole, 0) if stays else (wide, whole)
        own = max(p.numel for p in unit.parameters) * element + shared
        flops = tokens * 2.0 * (unit.numel + 2 * dims.q * seq)
        # torch ends a recomputed block when backward has everything: before the last product
        twice = 0.0 if stays else max(0.0, flops - tokens * 2.0 * dims.ffn * dims.hidden)
        backward = Pass(kept + again + in_hand + own, 0, own, 2 * flops + twice)
        largest = min(kept, tokens * max(dims.hidden, dims.ffn) * element)
        large = (kept, largest) if moves else ()
        forward = Pass(whole + in_hand, flops=flops)
        rows.append(UnitActivity(unit.name, kept, forward, backward, 0, *large))
    behind, logits = tokens * 16 + 2 * wide, 4 * entries
    first = 2 * logits + (entries * element if element < 4 else 0)  # the model's own in 16 bits
    forward, backward = Pass(behind + first, first), Pass(behind + 3 * logits, 3 * logits)
    moved = logits if moves else 0
    rows.append(UnitActivity("(root)", behind + logits, forward, backward, logits, moved, moved))
    return Activity(rows)


def block_bytes(dims: Transformer, tokens: int, element: int) -> int:
    """Return the bytes that one block of `dims` keeps for its backward pass, with fused kernels. With
    GPT's dimensions in 16 bits they are the 34·s·b·h of Korthikanti et al. 2022 without masks of
    dropout.

    Elements of a token, with width h and the feed-forward f:

    - the inputs of two norms, 2h, and of the projections, h;
    - queries, keys and values, 3h, and the input of the output projection, h;
    - the feed-forward's input, h, and its hidden values, 2f: input and output of the activation.

    Other code keeps more: in bf16 transformers' Llama 1.23 times as much (its norms keep an fp32 copy
    and the normalized values), its GPT-2 1.82 times (its GELU is a chain of kernels). Trace the code
    where there is some.

    Args:
        element: bytes of an element of the compute dtype.
    """
    elements = 8 * dims.hidden + 2 * dims.ffn
    return tokens * (elements * element + 4 * dims.heads)  # the log-sum-exp of each row, fp32


def assumed_dims(model: ModelShape) -> Transformer:
    """Return the dimensions of a decoder with this many parameters, 12·L·h²: heads of 128, and a
    feed-forward four times as wide.
    """
    layers = max(len(model.blocks), 1)
    hidden = max(64, round(math.sqrt(model.numel / (12 * layers)) / 64) * 64)
    return Transformer(layers, hidden, max(1, hidden // 128), 4 * hidden, 50_304)


# -- a part of each block, on a mesh -----------------------------------------------------------------


def divided(
    activity: Activity,
    model: ModelShape,
    stage: Stage,
    degrees: Degrees,
    micro_batch: int,
    seq: int,
    element: int,
    micro_batches: int,
) -> Activity:
    """Return what a rank of a mesh keeps and computes, at its fullest of the micro-batches in flight,
    while one of them runs.

    Without sequence parallelism tensors as wide as the model stay whole: of a block inputs of norms
    and of projections (Korthikanti et al. 2022, section 4.2), and the fp32 copies of norms. While it
    runs, a block uses more because of the axes: its whole input under sequence parallelism, keys and
    values of a whole sample, tokens on their way to and from experts.

    Args:
        element: bytes of an element of the compute dtype.
    """
    dims, t, cp = dims_of(model), degrees.tp, degrees.cp
    tokens = micro_batch * seq // cp
    wide = 0 if degrees.sequence_divided else tokens * dims.hidden * (4 * element + 8)
    handed = math.prod(handed_on(model, degrees, micro_batch, seq)) * element
    extra = tokens * dims.hidden * element - handed
    extra += tokens * (cp - 1) * (dims.k + dims.v) // t * element
    extra += handed * dims.active if degrees.ep > 1 else 0
    experts = degrees.ep * t  # a gradient in hand is one of a matrix

    def part(nbytes: float) -> int:
        nbytes /= cp
        return round(min(nbytes, wide) + max(0.0, nbytes - wide) / t)

    def mine(whole: Pass, inside: bool) -> Pass:
        logits = round(whole.logits / cp / t)
        gradients = round(whole.gradients / (experts if inside and dims.experts > 1 else t))
        rest = part(whole.nbytes - whole.logits - whole.gradients) + (extra if inside else 0)
        return Pass(rest + logits + gradients, logits, gradients, whole.flops / cp / t)

    parts, rows, ahead, begun = len(stage.chunks), [], 0, False
    for row in activity.rows:
        unit = model.block_of[row.unit]
        begun = begun or bool(unit)
        if unit not in stage.names if unit else not (stage.last if begun else stage.first):
            continue
        logits = round(row.logits / cp / t)
        kept = part(row.kept - row.logits) // (parts if unit else 1) + logits
        ahead += kept if unit or not begun else 0
        forward, backward = (mine(one, bool(unit)) for one in (row.forward, row.backward))
        rows.append(UnitActivity(row.unit, kept, forward, backward, logits))
    # What earlier stages hand over; the rows of the first stage have it
    handed = 0 if stage.first and parts == 1 else handed
    beside = (in_flight(degrees, stage.index, micro_batches) - 1) * (ahead + handed) + handed
    return Activity(rows, activity.notes, beside)


def in_flight(degrees: Degrees, index: int, micro_batches: int) -> int:
    """Return how many forward passes of a chunk stage `index` holds at most, before their backward
    passes: of interleaved stages Korthikanti et al. 2022, section 4.2.3.
    """
    p, v = degrees.pp, degrees.chunks
    held = p - index if v == 1 else 2 * (p - index - 1) + (v - 1) * p + 1
    return min(held, micro_batches * v)


# -- on the host -----------------------------------------------------------------------------------


def on_host(activity: Activity, budget: int, shared: bool) -> Activity:
    """Move up to `budget` bytes of an activity to the host.

    Args:
        shared: the device is a CPU: copies to the host finish at once.
    """
    near = down = min(NEAR, budget // 8)
    gone, moved, rows = 0, Counter[str](), []
    ahead = near
    for row in activity.rows:
        leaves = min(row.movable, budget - gone)
        # Copies in flight hold `near` bytes, or twice the largest of them
        large = min(row.largest, leaves)
        down = max(down, min(2 * large, down + large))
        waits = min(gone, 0 if shared else down), min(gone, ahead)
        forward, backward = row.forward.above(waits[0]), row.backward.above(waits[1])
        rows.append(row._replace(kept=row.kept - leaves, forward=forward, backward=backward))
        gone, moved[row.unit] = gone + leaves, moved[row.unit] + leaves
        ahead = max(near, row.largest)  # what is fetched ahead: `near` bytes, or one copy
    slabs = min(budget, -(-gone // SLAB) * SLAB)
    return replace(activity, rows=rows, away=tuple(moved.items()), on_host=slabs)
