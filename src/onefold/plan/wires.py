"""What a plan may put between nodes, by name: groups of a node, copies inside it, codecs; as
arguments of `Recipe.zero`.

| name         | what it is                                                            | changes numbers          |
|--------------|-----------------------------------------------------------------------|--------------------------|
| (none)       | moves inside nodes and across: each byte enters a node once            |                          |
| flat         | every rank to every other                                              | the order of sums only   |
| hpZ          | a second copy of the parameters in each node (ZeRO++)                  | the order of sums only   |
| HSDP         | state divided in each node, replicated across (FSDP, MiCS)             | the order of sums only   |
| hybrid       | the same, with optimizer states over all ranks                         | the order of sums only   |
| qwZ          | parameters travel in 8 bits (ZeRO++)                                   | rounds weights           |
| qgZ          | gradients travel in 4 bits (ZeRO++)                                    | rounds gradients         |
| ZeRO++       | hpZ, qwZ and qgZ                                                       | rounds both              |

What rounds is lossy: a plan says what it would save and how to ask for it, and never takes it by
itself. Sources: Wang et al. 2023 (ZeRO++, arXiv:2306.10209), Zhang et al. 2022 (MiCS,
arXiv:2205.00119), Zhao et al. 2023 (PyTorch FSDP, section 3.2.2).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from onefold.recipe.options import NODES
from onefold.recipe.options import OPTIONS as TABLE

#: Arguments of `Recipe.zero` about groups, codecs and frozen weights.
OPTIONS = {name for name, option in TABLE.items() if option.panel == NODES} - {"reduce"}


@dataclass(frozen=True)
class Wires:
    """One way.

    Attributes:
        words: for a sentence. lossy: values are rounded on the wire. from_stage: the lowest at
            which it can be.
    """

    words: str
    options: Mapping[str, Any] = field(default_factory=dict)
    lossy: bool = False
    from_stage: int = 3


WIRES: Mapping[str, Wires] = {
    "": Wires("", from_stage=0),
    "flat": Wires("every rank to every other", {"group": "flat"}, from_stage=0),
    "qwZ": Wires("weights in 8 bits", {"gather_codec": "int8"}, lossy=True),
    "hpZ": Wires("a second copy in each node", {"second_copy": True}),
    "qgZ": Wires("gradients in 4 bits", {"reduce_codec": "int4"}, lossy=True, from_stage=1),
    "ZeRO++": Wires(
        "hpZ, qwZ and qgZ",
        {"second_copy": True, "gather_codec": "int8", "reduce_codec": "int4"},
        lossy=True,
    ),
    "HSDP": Wires("divided in each node", {"shard_group": "node"}, from_stage=1),
    "hybrid": Wires(
        "divided in each node, optimizer over all", {"shard_group": "node", "optimizer_over": "all"}
    ),
}


def given(options: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    """Those of `options` that are about groups, codecs and frozen weights, and say something."""
    return {
        name: value
        for name, value in options
        if name in OPTIONS and value not in (None, False, "nearest")
    }


def as_recipe(stage: int, options: Mapping[str, Any]) -> str:
    """The line of Python that asks for a way."""
    return f"Recipe.zero({', '.join([str(stage), *(f'{name}={value!r}' for name, value in options.items())])})"


def as_options(stage: int, options: Mapping[str, Any]) -> str:
    """The same in the words of `onefold train` and `onefold plan`."""
    words = [f"--stage {stage}"]
    for name, value in options.items():
        words.append(f"--{name.replace('_', '-')}" + ("" if value is True else f" {value}"))
    return " ".join(words)
