"""Room `runtime`: units bound to modules; gather, release, reduce. Knows no checkpoints and no
commands.

| question                                       | files, in the order to read them                       |
|------------------------------------------------|--------------------------------------------------------|
| Which blocks are units, and what are they?     | `units`, `flat`                                        |
| What do other axes leave of a parameter?       | `boxes`                                                |
| What happens in a step?                        | `engine`, `hooks`, `passes`                            |
| How does the whole of a unit come together?    | `gather`                                               |
| How do gradients become this rank's sums?      | `reduce` (when), `hops` (how)                          |
| What do ranks tell each other after a pass?    | `agree`                                                |
| Where is a shard stored, and who steps it?     | `storage`, `stepper`                                   |
| How do parts become wholes, and wholes parts?  | `parts`                                                |
| Which copies are out of date?                  | `passes`                                               |
| What does autograd keep of a forward pass?     | `saved`                                                |
| What do autograd and the compiler do?          | `differentiate`                                        |
| What else is checked and kept?                 | `buffers`, `uninitialized`                             |

Two subpackages: `parameters` is what a user's code sees of a parameter, `state` reads and writes
the values of a whole model between passes.
"""

from onefold.runtime.engine import Engine
from onefold.runtime.parameters.parameter import ShardedParameter, ShardedParameterError, ShardInfo

__all__ = ["Engine", "ShardInfo", "ShardedParameter", "ShardedParameterError"]
