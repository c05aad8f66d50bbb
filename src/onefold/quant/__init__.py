"""Codecs of the wire: encode flat intervals of floats as fewer bytes. Codecs are pure functions of
tensors, without modules, groups or engine.
 registry.py has a table of them.

A new codec needs, in this order:

| what                                                    | where                               |
|---------------------------------------------------------|-------------------------------------|
| a subclass of `Codec`, `Blockwise` if it has blocks     | a file here, like integers.py       |
| its name, and a line of the table                       | registry.py                         |
| its name in recipes (the wire, frozen weights, or both) | `WireCodec`, `FrozenCodec` in       |
|                                                         | recipe/options.py; `make options`   |
| its error, bits and loss                                | tests/stores/test_codecs.py         |

Everything else follows. The plan and the ledger count `encoded_bytes`. The tests of tests/stores and
tests/recipe/test_options.py run over `CODECS` and over these two types. docs/slow-links.md says
what a codec is for, and a recipe in tests/runtime/test_wire_codecs.py trains with it.
Moments of optimizers are separate: recipe/moments.py has their `Format`s, and `MomentPacking` here
packs them.
"""

from onefold.comm.codec import Codec
from onefold.quant.blockwise import Blockwise
from onefold.quant.bounds import reduction_bound
from onefold.quant.encoded import Encoded
from onefold.quant.registry import CODECS, codec

__all__ = ["CODECS", "Blockwise", "Codec", "Encoded", "codec", "reduction_bound"]
