"""`optimizer.state_dict()` and `load_state_dict()` of an optimizer over sharded parameters: whole
states, as torch itself has them.

    state_dict()        parts of all ranks ──► rank 0's host, one state at a time      the other ranks: the same groups, an empty state
    load_state_dict()   the same whole dict on every rank: each takes its part on its own host, nothing travels
                        whole on rank 0, empty elsewhere: each is sent its part

| what a part is                      | what stands in the dict                                                   |
|-------------------------------------|---------------------------------------------------------------------------|
| this rank's interval                | the whole, in the parameter's shape                                       |
| a tile of a parameter               | the parameter, where it would stand without tiles                         |
| a place for a state on NVMe         | the state                                                                 |
| codes and scales, or bf16 moments   | what they stand for, in fp32 or the master weights' dtype                 |
| a number (`step`)                   | the number of a rank that has some of the parameter's elements            |

Both are collective wherever there is more than one rank and something is divided. At stage 0 states
are whole on every rank: `state_dict()` is torch's own there and moves nothing.

| to read about                                     | file       |
|---------------------------------------------------|------------|
| which optimizers, and the hooks on them           | following  |
| their parameters, group by group                  | outline    |
| `state_dict()`                                    | bringing   |
| `load_state_dict()`                               | landing    |
| this rank's part alone                            | local      |
"""

from onefold.optim.whole_state.following import (
    follow,
    held_elsewhere,
    meet_at_step,
    show_states,
)
from onefold.optim.whole_state.local import load_local_state_dict, local_state_dict

__all__ = [
    "follow", "held_elsewhere", "load_local_state_dict", "local_state_dict", "meet_at_step", "show_states",
]  # fmt: skip
