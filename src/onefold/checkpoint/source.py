"""What weights and states can be read from: an Onefold checkpoint, a Hugging Face folder, another
library's checkpoint.

| kind      | name                         | state            | shape                                    |
|-----------|------------------------------|------------------|------------------------------------------|
| parameter | its name in the model        |                  | logical                                  |
| buffer    | its name in the model        |                  | its own                                  |
| state     | the parameter's name         | such as exp_avg  | the parameter's, or the state's own      |
| rng       | the rank it was saved on     |                  | [bytes]                                  |
| extra     | a number                     |                  | its own                                  |
| residual  | the rank it was saved on     | flat.start.hop   | [elements], see residuals.py             |
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

KINDS = ("parameter", "buffer", "state", "rng", "extra", "residual")


@dataclass(frozen=True, order=True)
class Item:
    """The identity of a stored tensor; see the table of this module."""

    kind: str
    name: str
    state: str = ""

    def __str__(self) -> str:
        return f"{self.kind} {self.name!r}" + (f" ({self.state})" if self.state else "")


@dataclass(frozen=True)
class Stored:
    """What a stored tensor is."""

    dtype: torch.dtype
    shape: tuple[int, ...]


class Source(Protocol):
    """Something to load from. `describe` names it in messages. Everything raises
    CheckpointError.
    """

    @property
    def describe(self) -> str: ...

    def items(self) -> Mapping[Item, Stored]:
        """Every tensor there is."""
        ...

    def aliases(self) -> Mapping[str, str]:
        """{another name of a tied parameter: the name it is stored under}."""
        ...

    def read(self, item: Item, start: int, stop: int, out: torch.Tensor) -> None:
        """Elements `[start, stop)` of the flattened tensor into `out` ([stop - start], on the
        host), as out's dtype.
        """
        ...

    def scalars(self, name: str) -> Mapping[str, Any]:
        """The optimizer's state of parameter `name` that is no tensor, or of no dimensions, such as
        {"step": tensor(3.)}.
        """
        ...

    def groups(self) -> list[list[dict[str, Any]]] | None:
        """For each optimizer its parameter groups: the options, and under "params" the names. None:
        there is no optimizer in it.
        """
        ...

    def close(self) -> None: ...


def read_by_another(path: Path) -> Source | None:
    """What another library has left at `path`, by the first of the package's `READERS` that knows
    it.
    """
    import onefold  # the package says who reads what; this room knows nobody else's files

    for name in onefold.READERS:
        reader: Any = importlib.import_module(name)
        if reader.recognizes(path):
            source: Source = reader.open_source(path)
            return source
    return None
