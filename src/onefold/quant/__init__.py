"""Codecs of the wire: flat intervals of floats as fewer bytes. Pure functions of tensors; no
modules, groups or engine.

| name  | bits an element, scales included | an element is off by at most              | meant for               |
|-------|----------------------------------|-------------------------------------------|-------------------------|
| plain | 32 or 16                         | its dtype's rounding                      | anything                |
| int8  | 8.06 (block 256)                 | half a step, 1/254 of the block's largest | gathers, stored weights |
| fp8   | 8.06 (block 256)                 | 1/16 of itself                            | blocks of mixed sizes   |
| int4  | 4.25 (block 64)                  | half a step, 1/14 of the block's largest  | reductions              |
| nf4   | 4.25 (block 64)                  | 0.152 of the block's largest              | stored weights          |

A block's largest magnitude is kept in bf16, which changes steps by one part in 256 at most.
`Codec.bound` and `reduction_bound` say how far a value and a sum may be off; what was decoded
encodes to the same bytes again (scales.py).

A new codec needs, in this order:

| what                                                    | where                               |
|---------------------------------------------------------|-------------------------------------|
| a subclass of `Codec`, `Blockwise` if it has blocks     | a file here, like integers.py       |
| its name                                                | `CODECS` in registry.py             |
| a recipe's word for it (the wire, frozen weights, both) | `WireCodec`, `FrozenCodec` in       |
|                                                         | recipe/options.py; `make options`   |
| its bytes on wires and in memory                        | `encoded_bytes` says them: the plan |
|                                                         | and the ledger ask nothing else     |
| a kernel, where torch's products are too slow           | kernels.py, triton_kernels.py       |

The tests of quant and recipe and `onefold doctor` go through these tables.
Moments of optimizers are another thing: their `Format`s stand in recipe/moments.py, `MomentPacking`
here packs them.
"""

from onefold.comm.codec import Codec, Stochastic
from onefold.quant.blockwise import Blockwise
from onefold.quant.bounds import reduction_bound
from onefold.quant.encoded import Encoded
from onefold.quant.registry import CODECS, codec

__all__ = ["CODECS", "Blockwise", "Codec", "Encoded", "Stochastic", "codec", "reduction_bound"]
