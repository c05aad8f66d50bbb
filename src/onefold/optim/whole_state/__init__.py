"""Whole state dicts of optimizers over sharded parameters: `state_dict()` and `load_state_dict()`.

    state_dict()        parts of all ranks ──► rank 0's host, one state at a time      the other ranks: the same groups, an empty state
    load_state_dict()   the same whole dict on every rank: each takes its part on its own host, without traffic
                        whole on rank 0, empty elsewhere: rank 0 sends each rank its part

| a rank holds                        | the whole dict holds                                                      |
|-------------------------------------|---------------------------------------------------------------------------|
| its interval                        | the whole, in the parameter's shape                                       |
| a tile of a parameter               | the parameter, at its place in the model without tiles                    |
| a placeholder for a state on NVMe   | the state                                                                 |
| codes and scales, or bf16 moments   | the values they represent, in fp32 or the master weights' dtype           |
| a number (`step`)                   | the number of a rank that has some of the parameter's elements            |

Both calls are collective if there is more than one rank and a state is divided. At stage 0 every
rank holds whole states: `state_dict()` is torch's own and communicates nothing.

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
