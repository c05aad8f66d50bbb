"""Adam's moments in 8 and 4 bits: codes of a map of numbers, and a scale for each block.

    values ─► ÷ the block's greatest magnitude ─► nearest value of the map ─► codes, scales           encode
    codes, scales ─► map[code] × scale ─► values                                                      decode

Every map holds 1, and a signed one is symmetric. So the greatest element of a block decodes to the
scale itself, and values that were decoded are encoded to the same codes and scales again: states
may be decoded, saved as numbers and loaded without a loss.
"""

from __future__ import annotations

from functools import cache

import torch

from onefold.quant.codecs import nearest, nearest_tables
from onefold.recipe.moments import Format


@cache
def values_of(bits: int, signed: bool) -> torch.Tensor:
    """Return the numbers of a map, ascending, fp32; at most 2^bits.

    They are the dynamic map of Dettmers et al. 2022 (8-bit optimizers, section 1.3): decades of
    equal steps, each ten times as large as the one before and with twice the steps. With 4 bits and
    no sign they are sixteen equal steps without zero (Li et al. 2023, section 4.1): a second moment
    that is rounded to zero would make the update of its element very large.
    """
    if bits == 4 and not signed:
        return torch.linspace(0, 1, 17, device="cpu")[1:]
    found = []
    for decade in range(bits - 1):
        steps = 2**decade if signed else 2 ** (decade + 1)
        edges = torch.linspace(0.1, 1.0, steps + 1, dtype=torch.float64, device="cpu")
        found.append((edges[1:] + edges[:-1]) / 2 * 10.0 ** (decade - (bits - 2)))
    zero = torch.zeros(1, dtype=torch.float64, device="cpu")
    above = torch.cat([*found, zero + 1])[int(signed) :]
    return torch.cat([-above.flip(0), zero, above] if signed else [zero, above]).float()


@cache
def _tables(
    bits: int, signed: bool, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the map, and the tables to find its nearest values."""
    lower, border = nearest_tables(values_of(bits, signed))
    return values_of(bits, signed).to(device), lower.to(device), border.to(device)


def decode(
    format: Format, codes: torch.Tensor, scales: torch.Tensor, numel: int, signed: bool
) -> torch.Tensor:
    """Return the fp32 values, [numel], of codes and scales that start at a block."""
    if format.grain == 2:
        codes = torch.stack([codes >> 4, codes & 0b1111], dim=-1).view(-1)
    values, _, _ = _tables(8 // format.grain, signed, codes.device)
    out = torch.zeros(scales.numel() * format.block, dtype=torch.float32, device=codes.device)
    torch.index_select(values, 0, codes[:numel].int(), out=out[:numel])
    out.view(-1, format.block).mul_(scales.view(-1, 1))
    return out[:numel]


def encode(format: Format, values: torch.Tensor, signed: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the codes and scales of fp32 `values`, [n], which start at a block."""
    # The last block of a parameter may be shorter; zeros do not change its scale
    rows = torch.nn.functional.pad(values, (0, -values.numel() % format.block))
    rows = rows.view(-1, format.block)
    scales = rows.abs().amax(1).clamp_(min=1e-12)
    _, *tables = _tables(8 // format.grain, signed, values.device)
    codes = nearest((rows / scales[:, None]).view(-1), *tables)
    if format.grain == 2:
        codes = (codes[::2] << 4) | codes[1::2]
    return codes[: -(-values.numel() // format.grain)], scales
