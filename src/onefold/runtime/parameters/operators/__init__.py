"""What an operation does that is given an interval (runtime/parameters/interval.py), or a sharded parameter
outside a forward pass without gradients.

| operation                                            | what happens                                                      | traffic       |
|------------------------------------------------------|-------------------------------------------------------------------|---------------|
| shape, numel, dtype and the like                     | the whole's                                                       | none          |
| element-wise, in place or not: add_, clamp, copy_    | on this rank's elements; of another tensor its slice is taken     | none          |
| the same as lists: _foreach_lerp_                    | the same                                                          | none          |
| zeros_like; randn_like, normal_, nn.init             | this rank's slice of what would be made, or drawn, whole          | none          |
| view(-1), flatten, [i], [a:b] on the first dimension | an interval: the elements keep their order                        | none          |
| norm, sum, mean, max, any without a dimension        | the whole's, from one number of every rank                        | 8 bytes       |
| other reading: matmul, sum(dim), [mask], tolist      | on the gathered whole; the result is an ordinary tensor           | the parameter |
| other writing in place: w[:, 3] = 0, tril_           | on the gathered whole, of which this rank keeps its slice         | the parameter |
| views in another order: t(), [:, 3], chunk(2, 1)     | `ShardedParameterError`: a copy would lose what is written to it  |               |
| memory of its own: set_, resize_, DLPack             | `ShardedParameterError`                                           |               |

| file       | holds                                                    |
|------------|----------------------------------------------------------|
| dispatch   | which of the others is called                            |
| names      | the tables of names                                      |
| metadata   | what is asked without the elements                       |
| local      | element-wise work on this rank's elements, random draws  |
| lists      | torch._foreach_*                                         |
| views      | views and indices                                        |
| reductions | to one number                                            |
| whole      | what gathers                                             |
| refusals   | the sentences                                            |

What has traffic is a collective: every rank must come to it. Names not in these tables are looked
up in torch's own schemas: what writes to nothing and returns no view is reading, and everything
else is refused.
"""

from onefold.runtime.parameters.operators.dispatch import (
    compute,
    is_about_itself,
    name_of,
    writes_in_place,
)
from onefold.runtime.parameters.operators.local import Stepping, slice_of
from onefold.runtime.parameters.operators.metadata import META, METADATA
from onefold.runtime.parameters.operators.names import OF_ANOTHERS_KIND, words
from onefold.runtime.parameters.operators.reductions import norms_of

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
