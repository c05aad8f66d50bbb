"""The largest error of a reduction of encoded gradients: the proof, and the number.

Let e(m) be the codec's largest error on an interval of magnitudes m (`Codec.bound`: half a step of
each block's scale for integers). Blocks are counted from
the begin of a rank's interval, so no block spans two ranks. g(r) is the gradient of rank r, S the
exact sum, S' the computed sum. A rank adds its own part unencoded; sums are fp32.

    intra-group hop    rank i owns a shard of      S'(k) = g(i) + the other ranks' parts, decoded
    in group k         the flat buffer             |S'(k) − S(k)|  ≤  d(k)  =  Σ e(|g(r)|) over the other ranks r of the group,  + f
    inter-group hop    rank p of group k owns an   T' = S'(k) + the other groups' S', decoded
                       interval of that shard      |T' − T|  ≤  Σ d(l) over all groups  +  Σ e(|S(l)| + d(l)) over l ≠ k,  + f

The second hop encodes partial sums of magnitude at most |S| + d, and e grows with its argument.
With one group, or with groups of one rank, there is one hop over all ranks: the first formula. f is
the error of n fp32 additions: (n − 1) · 2⁻²⁴ of the sum of the magnitudes. The error of a mean is
that of the sum divided by the number of ranks.

Not included:
- Rounding before the transfer: to 16 bits, if the recipe's gradients have them, and of the mean's
  factor, if the number of ranks is no power of two.
"""

from __future__ import annotations

import torch

from onefold.comm.codec import Codec
from onefold.layout import Topology

_ADDITION = 2.0**-24


def reduction_bound(codec: Codec, parts: torch.Tensor, topology: Topology) -> torch.Tensor:
    """Return the largest error of the sum of `parts`, reduced over `topology` with `codec`.

    Args:
        parts: the ranks' values, finite, [ranks, numel], by position in the topology; numel is a
            multiple of the number of ranks.

    Returns:
        fp64, [numel]: the largest possible error of each element.

    Raises:
        ValueError: `parts` does not have one row for each rank, or its rows do not divide evenly.
    """
    ranks, numel = parts.shape
    if ranks != topology.size or numel % ranks:
        raise ValueError(
            f"parts of shape {tuple(parts.shape)} were given, expected one for each of"
            f" {topology.size} ranks, of a length they divide"
        )
    parts, each = parts.double(), numel // ranks
    two = topology.inner > 1 and topology.outer > 1
    width = each * topology.outer if two else each  # elements that a rank owns after the first hop
    bound = torch.zeros(numel, dtype=torch.float64, device=parts.device)
    for first in range(0, numel, width):
        # Owned by one position of the first group, and the same position of the other groups
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
                _hop(codec, parts[group, span].abs(), group.index(owner + k), sizes[k])
                for k, group in enumerate(groups)
            ]
        )
        bound[span] = inside[0]
        for k in range(topology.outer) if two else ():
            own = slice(k * each, (k + 1) * each)
            sent = sums[:, own].abs() + inside[:, own]
            bound[span][own] = inside[:, own].sum(0) + _hop(codec, sent, k, sent.sum(0))
    return bound


def _hop(codec: Codec, magnitudes: torch.Tensor, own: int, sizes: torch.Tensor) -> torch.Tensor:
    """Return the error that one hop adds.

    `magnitudes`: of each rank's part of one interval, [ranks, numel]; the part `own` is not
    encoded. `sizes`: their sums over the ranks.
    """
    off = [codec.bound(part) for r, part in enumerate(magnitudes) if r != own]
    lost = torch.stack(off).sum(0) if off else torch.zeros_like(sizes)
    return lost + (sizes + lost) * (_ADDITION * len(off))
