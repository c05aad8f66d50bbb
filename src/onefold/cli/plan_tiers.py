"""What `onefold plan` says of tiers: its options in the words of `onefold train`, and the table of where everything is."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

from rich.table import Table

from onefold.cli.plan_words import gib, in_seconds
from onefold.plan.evaluate import Candidate
from onefold.plan.hardware import Machine
from onefold.plan.schema import CATEGORIES, MOVED, TIER_SECONDS
from onefold.recipe.tiers import bytes_of
from onefold.train.tiers import tier_arguments

#: Bytes below which a budget cannot be meant.
_FEWEST = 1 << 14
_COLUMNS = ("device", "host", "nvme")
_TITLES = {"device": "device", "host": "host", "nvme": "NVMe"}


def places_asked(**words: Any) -> dict[str, Any]:
    """Arguments of `Recipe.zero` from the options of the command line, by their names; what was not given is None, () or False."""
    found = tier_arguments(SimpleNamespace(stochastic_rounding=False, **words))  # type: ignore[arg-type]
    _refuse_few_bytes(found, words)
    return {name: tuple(value) if isinstance(value, list) else value for name, value in found.items()}


def _refuse_few_bytes(found: dict[str, Any], words: dict[str, Any]) -> None:
    """A number without a unit is a number of bytes, and so few of them were meant to be something else."""
    optimizer = found.get("offload_optimizer")
    amount = optimizer[1] if isinstance(optimizer, tuple) else optimizer
    budgets = {"offload_optimizer": amount, "offload_activations": found.get("offload_activations"), "tile": found.get("tile")}
    for name, value in budgets.items():
        if value is None or value == 1 or (isinstance(value, float) and value < 1) or not any(c.isdigit() for c in str(value)):
            continue
        if (nbytes := bytes_of(name, value)) < _FEWEST:
            option = f"--{name.replace('_', '-')} {words[name]}"
            wanted = {"offload_optimizer": "give a share of at most 1 such as 0.6, or", "tile": "give a tile of"}.get(name, "give")
            raise ValueError(f"{option} is {nbytes:,} byte{'s' if nbytes > 1 else ''}: {wanted} at least {_FEWEST:,}, such as 512MB.")


def with_host(machine: Machine, memory: str | None, disk: str | None) -> Machine:
    """The machine with other memory and disk beside its devices. Raises ValueError for what is no number of bytes."""
    given = {name: float(bytes_of(option, text)) for name, option, text in _host(memory, disk)}
    return replace(machine, host=replace(machine.host, **given)) if given else machine


def _host(memory: str | None, disk: str | None) -> list[tuple[str, str, str]]:
    both = (("memory", "--host-memory", memory), ("nvme", "--disk-space", disk))
    return [(name, option, text) for name, option, text in both if text is not None]


def tiers_table(found: Candidate) -> Table | None:
    """Where one rank's bytes are at peak, by category and tier, and what a step moves; None where all of it is on the device."""
    account = found.account
    if not account.beyond:
        return None
    table = Table(title=f"where it is at peak: {found.scheme}", title_justify="left", box=None, padding=(0, 2))
    table.add_column("", no_wrap=True)
    held = {"device": account.peak, **account.beyond}
    for tier in _COLUMNS:
        table.add_column(_TITLES[tier], justify="right", no_wrap=True)
    others = sorted({c for by in held.values() for c in by} - set(CATEGORIES))
    for category in (*CATEGORIES, *others):
        if any(by.get(category) for by in held.values()):
            table.add_row(f"  {category}", *(gib(held.get(tier, {}).get(category, 0)) for tier in _COLUMNS))
    table.add_row("[bold]all[/bold]", *(gib(sum(held.get(tier, {}).values())) for tier in _COLUMNS))
    return table


def moves_said(found: Candidate) -> str:
    """A sentence on what a step moves between tiers, how long that takes, and what hides how much of it; "" where nothing moves."""
    account = found.account
    if not account.moved:
        return ""
    moved = ", ".join(f"{gib(account.moved[move])} {move}" for move in MOVED if account.moved.get(move))
    text = f"between tiers in a step: {moved}"
    if account.tiers:
        seconds = ", ".join(f"{name} {in_seconds(account.tiers[name])}" for name in TIER_SECONDS if account.tiers.get(name))
        text += f"; {seconds}; {in_seconds(account.seconds.get('io', 0))} exposed"
    return text
