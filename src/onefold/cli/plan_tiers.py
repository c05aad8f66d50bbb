"""What `onefold plan` says of tiers: its options in the words of `onefold train`."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

from onefold.plan.hardware import Machine
from onefold.recipe.tiers import bytes_of
from onefold.train.tiers import tier_arguments

#: Bytes below which a budget cannot be meant.
_FEWEST = 1 << 14


def places_asked(**words: Any) -> dict[str, Any]:
    """Arguments of `Recipe.zero` from the options of the command line, by their names; what was not
    given is None, () or False.
    """
    found = tier_arguments(SimpleNamespace(stochastic_rounding=False, **words))  # type: ignore[arg-type]
    _refuse_few_bytes(found, words)
    return {
        name: tuple(value) if isinstance(value, list) else value for name, value in found.items()
    }


def _refuse_few_bytes(found: dict[str, Any], words: dict[str, Any]) -> None:
    """A number without a unit is a number of bytes, and so few of them were meant to be something
    else.
    """
    optimizer = found.get("offload_optimizer")
    amount = optimizer[1] if isinstance(optimizer, tuple) else optimizer
    budgets = {
        "offload_optimizer": amount,
        "offload_activations": found.get("offload_activations"),
        "tile": found.get("tile"),
    }
    for name, value in budgets.items():
        if (
            value is None
            or value == 1
            or (isinstance(value, float) and value < 1)
            or not any(c.isdigit() for c in str(value))
        ):
            continue
        if (nbytes := bytes_of(name, value)) < _FEWEST:
            option = f"--{name.replace('_', '-')} {words[name]}"
            wanted = {
                "offload_optimizer": "give a share of at most 1 such as 0.6, or",
                "tile": "give a tile of",
            }.get(name, "give")
            raise ValueError(
                f"{option} is {nbytes:,} byte{'s' if nbytes > 1 else ''}: {wanted} at least"
                f" {_FEWEST:,}, such as 512MB."
            )


def with_host(machine: Machine, memory: str | None, disk: str | None) -> Machine:
    """The machine with other memory and disk beside its devices. Raises ValueError for what is no
    number of bytes.
    """
    given = {name: float(bytes_of(option, text)) for name, option, text in _host(memory, disk)}
    return replace(machine, host=replace(machine.host, **given)) if given else machine


def _host(memory: str | None, disk: str | None) -> list[tuple[str, str, str]]:
    both = (("memory", "--host-memory", memory), ("nvme", "--disk-space", disk))
    return [(name, option, text) for name, option, text in both if text is not None]
