"""Room `comm`: groups, moves, the traffic ledger. Knows no modules and no optimizers.

| question                                     | files, in the order to read them       |
|----------------------------------------------|----------------------------------------|
| Who are the ranks, and who is near whom?     | `members`, `topology`, `communicators` |
| What do they move, on one level or two?      | `group` ► `moves` ► `wire`, `pending`  |
| What do they tell each other in a few bytes? | `messages`                             |
| How do they wait, and what if nobody comes?  | `standing`, `stall`                    |
| How are parts added up?                      | `sums`, `triton_sums`, `triton_floats` |
| How is a kernel of Triton's launched?        | `launching`                            |
| What does a codec promise?                   | `codec`                                |
| What was sent?                               | `ledger`                               |
"""

from onefold.comm.group import Group
from onefold.comm.ledger import MOVES, Sent, TrafficEvent, TrafficLedger
from onefold.comm.pending import Chain, Pending
from onefold.comm.stall import CollectiveContext, StallError

__all__ = [
    "MOVES",
    "Chain",
    "CollectiveContext",
    "Group",
    "Pending",
    "Sent",
    "StallError",
    "TrafficEvent",
    "TrafficLedger",
]
