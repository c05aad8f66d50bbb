"""This rank's bytes of a source, read into host memory ahead of their use."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from onefold.checkpoint.pieces import shares
from onefold.checkpoint.source import Item, Source, Stored
from onefold.runtime.engine import Engine


class Prefetched:
    """A source in front of another: what this rank will ask for lies in memory, the rest is passed
    on.

    Args:
        source: with the model's own names.
        states: the optimizer's too.

    Attributes:
        rules, unexpected: the source's, if it was cut to fit; see `Fitted`.
    """

    def __init__(self, engine: Engine, source: Source, states: bool) -> None:
        self._source = source
        self.rules, self.unexpected = (
            getattr(source, "rules", None),
            getattr(source, "unexpected", ()),
        )
        self._held: dict[tuple[Item, int, int], torch.Tensor] = {}
        items, aliases = source.items(), source.aliases()
        by_name: dict[str, list[Item]] = {}
        for item in items:
            if item.kind == "parameter" or (item.kind == "state" and states):
                by_name.setdefault(item.name, []).append(item)
        self._wanted: list[tuple[Item, int, int]] = []
        for share in shares(engine):
            names = [
                n
                for name in share.entry.part.names
                for n in (name, aliases.get(name))
                if n in by_name
            ]
            for item in by_name[names[0]] if names and share.stop > share.start else ():
                if items[item].shape == share.entry.part.shape:
                    self._wanted.append((item, *share.interval))

    @property
    def describe(self) -> str:
        return self._source.describe

    def read_all(self) -> None:
        items = self._source.items()
        for item, start, stop in self._wanted:
            tensor = torch.empty(stop - start, dtype=items[item].dtype, device="cpu")
            self._source.read(item, start, stop, tensor)
            self._held[item, start, stop] = tensor

    def read(self, item: Item, start: int, stop: int, out: torch.Tensor) -> None:
        held = self._held.pop((item, start, stop), None)
        if held is not None:
            out.copy_(held)
        else:
            self._source.read(item, start, stop, out)

    def items(self) -> Mapping[Item, Stored]:
        return self._source.items()

    def aliases(self) -> Mapping[str, str]:
        return self._source.aliases()

    def scalars(self, name: str) -> Mapping[str, Any]:
        return self._source.scalars(name)

    def groups(self) -> list[list[dict[str, Any]]] | None:
        return self._source.groups()

    def close(self) -> None:
        self._source.close()
