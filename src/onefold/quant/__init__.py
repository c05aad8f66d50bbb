"""Codecs of the wire: encode flat intervals of floats as fewer bytes. Codecs are pure functions of
tensors, without modules, groups or engine.

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

A new codec needs, in this order:

| what                                                    | where                               |
|---------------------------------------------------------|-------------------------------------|
| a subclass of `Codec`, `Blockwise` if it has blocks     | a file here, like integers.py       |
| its name                                                | `CODECS` in registry.py             |
| its name in recipes (the wire, frozen weights, or both) | `WireCodec`, `FrozenCodec` in       |
|                                                         | recipe/options.py; `make options`   |
| its bytes on the wire and in memory                     | `encoded_bytes`: the plan and the   |
|                                                         | ledger use only that                |
| a kernel, if torch's operations are too slow            | kernels.py, triton_kernels.py       |
| its bound, bits and finest step                         | tests/quant/test_codecs.py          |

The tests of tests/quant (codec_intervals.py) and tests/recipe/test_options.py run over `CODECS` and
over these two types; `onefold doctor` compares kernels with torch, for codecs that have one. docs/slow-links.md
says what it is for, and a recipe in tests/runtime/test_wire_codecs.py trains with it.
Moments of optimizers are separate: recipe/moments.py has their `Format`s, and `MomentPacking` here
packs them.
"""

from onefold.comm.codec import Codec, Stochastic
from onefold.quant.blockwise import Blockwise
from onefold.quant.bounds import reduction_bound
from onefold.quant.encoded import Encoded
from onefold.quant.registry import CODECS, codec

__all__ = ["CODECS", "Blockwise", "Codec", "Encoded", "Stochastic", "codec", "reduction_bound"]
