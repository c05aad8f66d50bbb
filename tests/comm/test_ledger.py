"""What the traffic ledger counts as between nodes, and as what would have been sent without
codecs.
"""

from __future__ import annotations

import pytest

from onefold.comm import Sent, TrafficLedger
from onefold.comm.communicators import sides_of
from onefold.layout import Topology


def test_what_was_encoded_counts_as_it_was_sent_and_as_it_would_have_been() -> None:
    ledger = TrafficLedger()
    ledger.record("all-gather", "a", 100, between=60, plain=400, plain_between=240)
    ledger.record("all-gather", "b", 10, between=4)
    ledger.record("reduce-scatter", "a", 50)
    assert ledger.by_move_in_full() == {
        "all-gather": Sent(110, 64, 410, 244),
        "reduce-scatter": Sent(50, 0, 50, 0),
    }
    assert ledger.by_link() == {"inside": 96, "between": 64} and ledger.between_by_move() == {
        "all-gather": 64
    }
    assert (ledger.total(), ledger.plain()) == (160, 460)
    assert [sent.encoded for sent in ledger.by_move_in_full().values()] == [True, False]
    ledger.reset()
    assert ledger.plain() == 0 and ledger.by_move_in_full() == {}


@pytest.mark.parametrize(
    ("per_node", "group", "nodes", "borders"),
    [
        (None, None, [0, 0, 0, 0], ""),
        (4, None, [0, 0, 0, 0], ""),
        (2, None, [0, 0, 1, 1], "2 nodes"),
        (None, "node", [0, 0, 0, 0], ""),  # nobody has told of nodes
        (4, 4, [0, 0, 0, 0], ""),
        (4, 2, [0, 1, 0, 1], "2 groups"),  # by position: ranks 0, 2, 1, 3
        (None, 1, [0, 1, 2, 3], "4 groups"),
        (2, 1, [0, 0, 1, 1], "2 nodes"),  # where there are nodes, smaller groups are no borders
        (1, 2, [0, 2, 1, 3], "4 nodes"),
    ],
)
def test_nodes_are_the_launchers_and_where_there_is_one_the_recipes_groups(
    per_node: int | None, group: int | str | None, nodes: list[int], borders: str
) -> None:
    topology = Topology(4, group if isinstance(group, int) else 4)
    assert sides_of(topology.order, per_node, group, topology) == (nodes, borders)
