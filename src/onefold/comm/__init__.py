"""Room `comm`: groups of ranks, the moves between them, the traffic ledger. Knows no modules and no
optimizers.

| question                                       | files, in the order to read them       |
|------------------------------------------------|----------------------------------------|
| Who are the ranks, and which share a node?     | `communicators`                        |
| What do ranks send each other, and how?        | `group`                                |
| How does a rank wait, and give up waiting?     | `pending`, `group`                     |
| How is the ranks' store asked?                 | `pending`                              |
| What was sent?                                 | `ledger`                               |
"""

from onefold.comm.group import Group, alike, as_bytes, both
from onefold.comm.ledger import MOVES, OWNERS, STEP_MOVES, TrafficEvent, TrafficLedger
from onefold.comm.pending import Chain, CollectiveContext, Pending, StallError
