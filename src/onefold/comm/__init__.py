"""Room `comm`: groups, moves, the traffic ledger. Knows no modules and no optimizers."""

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
