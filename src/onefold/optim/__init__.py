"""Room `optim`: the step of sharded parameters: clipping, loss scaling, and which optimizers may
step intervals. It does not depend on the forward pass.

| question                                                         | files                    |
|------------------------------------------------------------------|--------------------------|
| How are gradients clipped, and losses scaled?                    | `clip`                   |
| How is a step made, and what is put around methods of torch's?  | `steps`                  |
| What does the update of an optimizer look at?                    | `verdict`                |
| Who owns which matrix, and steps it?                             | `whole`                  |
| Where are states, and what do `state_dict()` and `load_state_dict()` do? | `states`                 |
| What does `optimizer.state` show between steps?                  | `faced_states`           |
| How do Muon and AdamW become one optimizer?                      | `muon`                   |

States become wholes, and wholes become states, by the moves of runtime/parts.py.
"""
