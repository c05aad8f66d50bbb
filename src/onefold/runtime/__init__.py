"""Room `runtime`: units bound to modules; gather, release, reduce. Knows no checkpoints and no
commands.

| question                                    | files, in the order to read them                                            |
|---------------------------------------------|-----------------------------------------------------------------------------|
| Which blocks are units, and what are they?  | `units`, `unit`, `flat`, `entry`                                            |
| What happens in a step?                     | `engine`, `hooks`, `forward`, `order`, `progress`, `capabilities`           |
| How does the whole of a unit come together? | `gather` (when), `gathers` (how), `whole`                                   |
| How do gradients become this rank's sums?   | `reduce` (when), `reductions` and `native_reductions` (how), `hops`         |
| What ends a backward pass?                  | `backward`, `agree`                                                         |
| Where does a shard rest?                    | `storage`, `placement`, `transfers`, `on_disk`, `storageless`               |
| Who steps it?                               | `steps`, `stand_ins`, `implementations`                                     |
| Which copies are out of date?               | `stale`, `refresh`, `write_counters`, `forward_writes`, `residuals`         |
| What is a parameter between passes?         | `parameter`, `parameter_values`, `interval`, `operators`, `owning_engine`   |
| What is its gradient to its user?           | `gradient_hooks`, `trained`, `unreduced`                                    |
| What does a forward pass see and leave?     | `handles`, `escaping`, `nested`, `outside`, `functional`, `keep_gathered`   |
| Which other passes are there?               | `recomputation`, `differentiate`                                            |
| How is a model laid out and unsharded?      | `start`, `materialize`, `elsewhere`, `unset`, `state`, `unsharding`, `tile` |
| What are its state dicts?                   | `state_dicts`, `state_contents`, `stream`                                   |
| What else is looked at, told and kept?      | `checks`, `notes`, `buffers`, `spans`, `registry`                           |
"""

from onefold.runtime.engine import Engine
from onefold.runtime.parameter import ShardedParameter, ShardedParameterError, ShardInfo

__all__ = ["Engine", "ShardInfo", "ShardedParameter", "ShardedParameterError"]
