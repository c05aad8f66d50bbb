"""Operations on an interval (runtime/parameters/interval.py), or on a sharded parameter outside a
forward pass without gradients.

| operation                                            | result                                                            | traffic       |
|------------------------------------------------------|-------------------------------------------------------------------|---------------|
| shape, numel, dtype and the like                     | the whole's                                                       | none          |
| element-wise, in place or not: add_, clamp, copy_    | on this rank's elements; other tensors are sliced to match        | none          |
| the same on lists: _foreach_lerp_                    | the same                                                          | none          |
| zeros_like; randn_like, normal_, nn.init             | this rank's slice of a whole tensor made or drawn locally         | none          |
| view(-1), flatten, [i], [a:b] on the first dimension | an interval: the elements keep their order                        | none          |
| norm, sum, mean, max, any without a dimension        | the whole's, from one number of every rank                        | 8 bytes       |
| other reads: matmul, sum(dim), [mask], tolist        | on the gathered whole; the result is an ordinary tensor           | the parameter |
| other writes in place: w[:, 3] = 0, tril_            | on the gathered whole, of which this rank keeps its slice         | the parameter |
| views in another order: t(), [:, 3], chunk(2, 1)     | `ShardedParameterError`: writes to a copy would be lost           |               |
| changes of its memory: set_, resize_, DLPack         | `ShardedParameterError`                                           |               |

| file     | holds                                                                                   |
|----------|-----------------------------------------------------------------------------------------|
| dispatch | which rule handles an operation                                                         |
| names    | torch's operators by kind, questions that need no elements, error messages              |
| rules    | work on this rank's elements, views, reductions to one number, work on the gathered whole |

An operation with traffic is a collective: every rank must run it. A name that is in none of the
tables is looked up in torch's schemas: it counts as a read if it writes to nothing and returns no
view, else it is refused.
"""

from onefold.runtime.parameters.operators.dispatch import (
    compute,
    is_about_itself,
    name_of,
    writes_in_place,
)
from onefold.runtime.parameters.operators.names import META, METADATA, OF_ANOTHERS_KIND, words
from onefold.runtime.parameters.operators.rules import Stepping, norms_of, slice_of

__all__ = [
    "META",
    "METADATA",
    "OF_ANOTHERS_KIND",
    "Stepping",
    "compute",
    "is_about_itself",
    "name_of",
    "norms_of",
    "slice_of",
    "words",
    "writes_in_place",
]
