"""Room `comm`: groups of ranks, the moves between them, the traffic ledger. Knows no modules and no
optimizers.

| question                                     | files, in the order to read them       |
|----------------------------------------------|----------------------------------------|
| Who are the ranks, and which share a node?   | `mesh`, `communicators`                |
| How do tensors move, on one level or two?    | `group` ► `moves` ► `wire`             |
| How do ranks exchange a few bytes?           | `peers`                                |
| How does a rank wait, and give up waiting?   | `pending`, `peers`                     |
| How is the ranks' store asked?               | `store`                                |
| How are the parts of a reduction added up?   | `sums`                                 |
| What was sent?                               | `ledger`                               |
"""

from onefold.comm.group import Group, Part
from onefold.comm.ledger import MOVES, OWNERS, STEP_MOVES, Sent, TrafficEvent, TrafficLedger
from onefold.comm.pending import Chain, CollectiveContext, Pending, StallError

__all__ = [
    "MOVES",
    "OWNERS",
    "STEP_MOVES",
    "Chain",
    "CollectiveContext",
    "Group",
    "Part",
    "Pending",
    "Sent",
    "StallError",
    "TrafficEvent",
    "TrafficLedger",
]
