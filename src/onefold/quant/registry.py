"""Codecs by name, as recipes name them.

| name  | bits an element, scales included | largest error of an element               | meant for               |
|-------|----------------------------------|-------------------------------------------|-------------------------|
| plain | 32 or 16                         | its dtype's rounding                      | anything                |
| int8  | 8.06 (block 256)                 | half a step, 1/254 of the block's largest | gathers, stored weights |
| fp8   | 8.06 (block 256)                 | 1/16 of itself                            | blocks of mixed sizes   |
| int4  | 4.25 (block 64)                  | half a step, 1/14 of the block's largest  | reductions              |
| nf4   | 4.25 (block 64)                  | 0.152 of the block's largest              | stored weights          |

A block's largest magnitude is stored in bf16, which changes steps by at most one part in 256.
`Codec.bound` and `reduction_bound` return the largest errors of a value and of a sum. Decoded
values encode to the same bytes again (scales.py).
"""

from __future__ import annotations

from difflib import get_close_matches
from typing import Any

from onefold.comm.codec import Codec
from onefold.quant.fp8 import Fp8
from onefold.quant.integers import Int4, Int8
from onefold.quant.nf4 import Nf4
from onefold.quant.plain import Plain

CODECS: dict[str, type[Codec]] = {kind.name: kind for kind in (Plain, Int8, Int4, Fp8, Nf4)}


def codec(name: str, **fields: Any) -> Codec:
    """Return the codec of that name in `CODECS`. `fields` are its options: block, slab; dtype for
    'plain'.

    Raises:
        ValueError: no codec has this name or field.
    """
    if name not in CODECS:
        near = get_close_matches(str(name), CODECS, 1)
        hint = f": did you mean {near[0]!r}?" if near else ""
        raise ValueError(
            f"there is no codec {name!r}, expected one of {', '.join(map(repr, CODECS))}{hint}"
        )
    kind = CODECS[name]
    if unknown := sorted(set(fields) - set(kind.__dataclass_fields__)):
        raise ValueError(
            f"codec {name!r} has no {', '.join(unknown)}, expected some of"
            f" {', '.join(kind.__dataclass_fields__)}"
        )
    return kind(**fields)
