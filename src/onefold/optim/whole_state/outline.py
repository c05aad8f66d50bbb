"""The parameters of an optimizer as torch's state dict numbers them: by group, tiles combined."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.optim.optimizer import Optimizer

import onefold.quant.moments as moments
from onefold.runtime.engine import Engine
from onefold.runtime.flat import Entry
from onefold.runtime.hooks import engine_of_entry

#: The engines in whose parameters this module looks for those of optimizers.
engines: weakref.WeakSet[Engine] = weakref.WeakSet()
#: Optimizers inside `local_state_dict` or `load_local_state_dict`.
locally: weakref.WeakSet[Optimizer] = weakref.WeakSet()


@dataclass
class Param:
    """A parameter of the whole state dict.

    Attributes:
        numbers: numbers of its objects in the optimizer: one, or one for each tile.
        entries: the entries of these objects; [] for a parameter that is not sharded.
    """

    numbers: list[int]
    entries: list[Entry]
    shape: tuple[int, ...]
    name: str = ""

    @property
    def module(self) -> str:
        return self.name.rpartition(".")[0]


@dataclass
class Outline:
    """See this module.

    Attributes:
        groups: [[parameter, ...], ...].
        objects: the optimizer's parameters, by number.
        engines: the engines of these parameters.
        divided: whether any parameter is divided among ranks.
        special: whether this rank's state dict would differ from torch's for the unsharded model.
    """

    groups: list[list[Param]] = field(default_factory=list)
    objects: list[torch.Tensor] = field(default_factory=list)
    engines: list[Engine] = field(default_factory=list)
    divided: bool = False
    special: bool = False

    @classmethod
    def of(cls, optimizer: Optimizer) -> Outline:
        """Return the outline of `optimizer`. Raises: ValueError: its models are divided among
        different ranks.
        """
        known = {id(e.param): e for engine in engines for e in engine.entries}
        out, found = cls(), dict[int, Engine]()
        tiled: dict[tuple[int, str], Param] = {}
        for group in optimizer.param_groups:
            params: list[Param] = []
            for p in group["params"]:
                number = len(out.objects)
                out.objects.append(p)
                entry = known.get(id(p))
                engine = engine_of_entry(entry) if entry is not None else None
                if entry is None or engine is None:
                    params.append(Param([number], [], tuple(p.shape)))
                    continue
                found[id(engine)] = engine
                param = Param([number], [entry], tuple(entry.part.shape), entry.part.names[0])
                if entry.part.numel == entry.slot.numel:
                    params.append(param)
                    continue
                first = tiled.setdefault((id(engine), param.name), param)
                if first is not param:
                    first.numbers.append(number)
                    first.entries.append(entry)
                    continue
                # A tiled module lists its weight after its bias, the original module before it
                at = len(params)
                while at and params[at - 1].entries and params[at - 1].module == param.module:
                    at -= 1
                params.insert(at, param)
            out.groups.append(params)
        out.engines = list(found.values())
        entries = [e for param in out.params for e in param.entries]
        out.divided = any(e.flat.divided for e in entries)
        out.special = out.divided or any(
            e.flat.storage.on_disk or e.flat.tiled or moment_policy(optimizer, e) is not None
            for e in entries
        )
        if len({tuple(sorted(engine.group.ranks)) for engine in out.engines}) > 1:
            raise ValueError(
                f"this {type(optimizer).__name__} steps parameters of models that are divided among"
                " different ranks, so that its state cannot be put together. Give each model an"
                " optimizer of its own, or use onefold.save and onefold.load."
            )
        return out

    @property
    def params(self) -> list[Param]:
        return [param for group in self.groups for param in group]

    @property
    def engine(self) -> Engine | None:
        """One of the engines, which represents all; None if no parameter is sharded."""
        return self.engines[0] if self.engines else None


def in_another_format(engine: Engine) -> bool:
    return engine.recipe.moments is not None or engine.recipe.stochastic_rounding


def moment_policy(optimizer: Optimizer, entry: Entry) -> moments.MomentPolicy | None:
    """Return how the moments of `entry` are stored; None: as the optimizer makes them."""
    engine = engine_of(entry)
    if not in_another_format(engine) and moments.torchao_format(optimizer) is None:
        return None
    return moments.moment_policy(optimizer, engine.recipe, entry.flat)


def engine_of(entry: Entry) -> Engine:
    engine = engine_of_entry(entry)
    assert engine is not None
    return engine


def refuse_moment(engine: Engine, call: str) -> None:
    """Raise RuntimeError inside a forward pass."""
    if engine.stack:
        raise RuntimeError(
            f"optimizer.{call}() of a sharded model was called inside a forward pass: call it"
            " between steps."
        )


def first_of(errors: Iterable[str | None]) -> str | None:
    """Return the first error of the ranks, with the number of its rank."""
    return next((f"rank {rank}: {told}" for rank, told in enumerate(errors) if told), None)


def numbers_of(state_dict: Any) -> list[Any]:
    """Return the numbers of all parameters in a state dict, group after group."""
    return [number for group in state_dict["param_groups"] for number in group["params"]]
