"""What a rank sends on each link, from the legs of a plan: what the traffic ledger says of a run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from onefold.layout import Level, Topology
from onefold.plan.wire import Leg, elsewhere


def by_link(
    legs: Iterable[Leg], topology: Topology, per_node: int | None, rank: int
) -> dict[str, int]:
    """Bytes "inside" the rank's node and "between" nodes, as `TrafficLedger.by_link` counts."""
    sent = Counter[Level]()
    for leg in legs:
        sent[leg.level] += leg.nbytes
    between = 0
    for level, nbytes in sent.items():
        peers, far = elsewhere(topology, per_node, rank, level)
        between += nbytes * far // peers if peers else 0
    return {"inside": sum(sent.values()) - between, "between": between}
