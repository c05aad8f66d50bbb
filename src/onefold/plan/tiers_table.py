"""Where everything of a plan is, tier by tier, and what moves between tiers: as a table and a
sentence for people.
"""

from __future__ import annotations

from rich.table import Table

from onefold.plan.evaluate import Candidate
from onefold.plan.figures import gib, in_seconds
from onefold.plan.schema import CATEGORIES, MOVED, TIER_SECONDS

_COLUMNS = ("device", "host", "nvme")
_TITLES = {"device": "device", "host": "host", "nvme": "NVMe"}


def tiers_table(found: Candidate) -> Table | None:
    """Where one rank's bytes are at peak, by category and tier, and what a step moves; None where
    all of it is on the device.
    """
    account = found.account
    if not account.beyond:
        return None
    table = Table(
        title=f"where it is at peak: {found.scheme}", title_justify="left", box=None, padding=(0, 2)
    )
    table.add_column("", no_wrap=True)
    held = {"device": account.peak, **account.beyond}
    for tier in _COLUMNS:
        table.add_column(_TITLES[tier], justify="right", no_wrap=True)
    others = sorted({c for by in held.values() for c in by} - set(CATEGORIES))
    for category in (*CATEGORIES, *others):
        if any(by.get(category) for by in held.values()):
            table.add_row(
                f"  {category}", *(gib(held.get(tier, {}).get(category, 0)) for tier in _COLUMNS)
            )
    table.add_row("[bold]all[/bold]", *(gib(sum(held.get(tier, {}).values())) for tier in _COLUMNS))
    return table


def moves_said(found: Candidate) -> str:
    """A sentence on what a step moves between tiers, how long that takes, and what hides how much
    of it; "" where nothing moves.
    """
    account = found.account
    if not account.moved:
        return ""
    moved = ", ".join(
        f"{gib(account.moved[move])} {move}" for move in MOVED if account.moved.get(move)
    )
    text = f"between tiers in a step: {moved}"
    if account.tiers:
        seconds = ", ".join(
            f"{name} {in_seconds(account.tiers[name])}"
            for name in TIER_SECONDS
            if account.tiers.get(name)
        )
        text += f"; {seconds}; {in_seconds(account.seconds.get('io', 0))} exposed"
    return text
