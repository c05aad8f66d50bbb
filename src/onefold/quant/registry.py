"""Codecs by name, as recipes name them."""

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
