"""Room `comm`: groups, moves, the traffic ledger. Knows no modules and no optimizers."""

from onefold.comm.group import Group, Pending
from onefold.comm.ledger import TrafficEvent, TrafficLedger
from onefold.comm.stall import Place, StallError

__all__ = ["Group", "Pending", "Place", "StallError", "TrafficEvent", "TrafficLedger"]
