"""Room `runtime`: units bound to modules; gather, release, reduce. Knows no checkpoints and no
commands.

| question                                    | files, in the order to read them                                    |
|---------------------------------------------|---------------------------------------------------------------------|
| Which blocks are units, and what are they?  | `units`, `unit`, `flat`, `entry`                                    |
| What happens in a step?                     | `engine`, `hooks`, `forward`, `order`, `progress`, `capabilities`   |
| How does the whole of a unit come together? | `gather` (when), `gathers` (how)                                    |
| How do gradients become this rank's sums?   | `reduce` (when), `reductions` and `native_reductions` (how), `hops` |
| What ends a backward pass?                  | `backward`                                                          |
| Where is a shard stored?                    | `storage`, `placement`, `transfers`                                 |
| Who steps it?                               | `steps`, `implementations`                                          |
| Which copies are out of date?               | `stale`, `residuals`                                                |
| Which parameters train, and what waits?     | `trained`, `unreduced`                                              |
| What does a forward pass see and leave?     | `handles`, `autocast`, `nested`, `keep_gathered`                    |
| Which other passes are there?               | `differentiate`, `compiled`                                         |
| Who follows the passes from outside?        | `following`                                                         |
| What else is checked and kept?              | `checks`, `buffers`, `unset`, `registry`                            |

Two subpackages: `parameters` is what a user's code sees of a parameter, `state` reads and writes
the values of a whole model between passes.
"""

from onefold.runtime.engine import Engine
from onefold.runtime.parameters.parameter import ShardedParameter, ShardedParameterError, ShardInfo

__all__ = ["Engine", "ShardInfo", "ShardedParameter", "ShardedParameterError"]
