"""How far a reduction of encoded gradients may be from the exact sum: the proof, and the number.

Let e(m) be what a codec may be off by on an interval of magnitudes m (`Codec.bound`: half a step of
each block's scale for integers, a whole one where rounding is stochastic). Blocks are counted from
where a rank's interval begins, so none lies on two ranks. g(r) is what rank r has, S the exact
sums, S' those that are made. The own part of a rank is added as it is; sums are fp32.

    hop inside group k      rank i owns a shard of it        S'(k) = g(i) + the others' decoded
                            |S'(k) − S(k)|  ≤  d(k)  =  Σ e(|g(r)|) over the other ranks r of the group,  + f
    hop across              rank p of group k owns an        T' = S'(k) + the other groups' S', decoded
                            interval of that shard           |T' − T|  ≤  Σ d(l) over all groups  +  Σ e(|S(l)| + d(l)) over l ≠ k,  + f

The second hop encodes partial sums, whose scales are those of |S| + d at most: e only grows with
what it is given. With one group, or groups of one rank, there is one hop over all ranks, the first
line. f is what n fp32 additions lose: (n − 1) · 2⁻²⁴ of the sum of the magnitudes. A mean is off by
as much divided by the number of ranks.

What is not in it: rounding before anything travels (to 16 bits, if the recipe has gradients so; of
the mean's factor, where the number of ranks is no power of two), and what error feedback adds: the
bound then holds for gradient plus what was lost before.
"""

from __future__ import annotations

import torch

from onefold.comm.codec import Codec
from onefold.layout import Topology

_ADDITION = 2.0**-24


def reduction_bound(
    codec: Codec, parts: torch.Tensor, topology: Topology, *, stochastic: bool = False
) -> torch.Tensor:
    """How far the sum of `parts` may be off once it is reduced over `topology`, their parts encoded
    by `codec`.

    Args:
        parts: what the ranks have, finite, [ranks, numel], by their positions in the topology;
            numel is a multiple of their number.
        stochastic: rounding is.

    Returns:
        fp64, [numel]: no element of the sum is further from the exact one.

    Raises:
        ValueError: `parts` are not one for each rank, or do not divide among them.
    """
    ranks, numel = parts.shape
    if ranks != topology.size or numel % ranks:
        raise ValueError(
            f"parts of shape {tuple(parts.shape)} were given, expected one for each of"
            f" {topology.size} ranks, of a length they divide"
        )
    parts, each = parts.double(), numel // ranks
    two = topology.inner > 1 and topology.outer > 1
    width = each * topology.outer if two else each  # of what a rank owns behind the first hop
    bound = torch.zeros(numel, dtype=torch.float64, device=parts.device)
    for first in range(0, numel, width):
        # A position in the first group, as those beside it in the others
        span, owner = slice(first, first + width), first // each
        groups = (
            [topology.intra_group(owner + k) for k in range(topology.outer)]
            if two
            else [list(range(ranks))]
        )
        sums = torch.stack([parts[group, span].sum(0) for group in groups])
        sizes = torch.stack([parts[group, span].abs().sum(0) for group in groups])
        inside = torch.stack(
            [
                _hop(codec, parts[group, span].abs(), group.index(owner + k), sizes[k], stochastic)
                for k, group in enumerate(groups)
            ]
        )
        bound[span] = inside[0]
        for k in range(topology.outer) if two else ():
            own = slice(k * each, (k + 1) * each)
            sent = sums[:, own].abs() + inside[:, own]
            bound[span][own] = inside[:, own].sum(0) + _hop(codec, sent, k, sent.sum(0), stochastic)
    return bound


def _hop(
    codec: Codec, magnitudes: torch.Tensor, own: int, sizes: torch.Tensor, stochastic: bool
) -> torch.Tensor:
    """What one hop adds: `magnitudes` of each rank's part of one interval, [ranks, numel], of which
    `own` stays; `sizes`: their sums.
    """
    off = [
        codec.bound(part, stochastic=stochastic) for r, part in enumerate(magnitudes) if r != own
    ]
    lost = torch.stack(off).sum(0) if off else torch.zeros_like(sizes)
    return lost + (sizes + lost) * (_ADDITION * len(off))
