"""What weights and states can be read from: an Onefold checkpoint, a Hugging Face folder, another
library's checkpoint.

| kind      | name                         | state            | shape                                    |
|-----------|------------------------------|------------------|------------------------------------------|
| parameter | its name in the model        |                  | logical                                  |
| buffer    | its name in the model        |                  | its own                                  |
| state     | the parameter's name         | such as exp_avg  | the parameter's, or the state's own      |
| rng       | the rank it was saved on     |                  | [bytes]                                  |
| extra     | a number                     |                  | its own                                  |
| residual  | the rank it was saved on     | flat.start.hop   | [elements], see per_rank.py              |
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn

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


SourceT = TypeVar("SourceT", bound="Source")


class Source:
    """Something to load from. A subclass answers `describe`, `items` and `read`, and what else it
    has. Everything raises CheckpointError.

    Attributes:
        form: whose it is, for people. folder: where it lies. created: ISO date and time, UTC; ""
            if it is not known. step, extra, saved_by: see `Loaded`.
        unexpected: tensors that fit nowhere in the model, of a source that was cut to fit one.
        rules: transformers' rules that its names went through, if any.
    """

    form: str = "Hugging Face"
    folder: Path | None = None
    created: str = ""
    step: int | None = None
    extra: Any = None
    saved_by: Mapping[str, Any] = {}
    unexpected: Sequence[str] = ()
    rules: Any = None

    @property
    def describe(self) -> str:
        """What it is, in messages."""
        raise NotImplementedError

    def items(self) -> Mapping[Item, Stored]:
        """Every tensor there is."""
        raise NotImplementedError

    def stored(self, item: Item) -> Stored:
        return self.items()[item]

    def read(self, item: Item, start: int, stop: int, out: torch.Tensor) -> None:
        """Elements `[start, stop)` of the flattened tensor into `out` ([stop - start], on the
        host), as out's dtype.
        """
        raise NotImplementedError

    def whole(self, item: Item) -> torch.Tensor:
        """A whole tensor, on the host."""
        stored = self.stored(item)
        out = torch.empty(stored.shape, dtype=stored.dtype, device="cpu")
        self.read(item, 0, out.numel(), out.reshape(-1))
        return out

    def blocks(
        self, item: Item, start: int, stop: int, step: int, dtype: torch.dtype | None = None
    ) -> Iterator[tuple[int, torch.Tensor]]:
        """(first element, elements [n] on the host) of elements [start, stop), `step` at a time."""
        for a in range(start, stop, step):
            part = torch.empty(
                min(stop - a, step), dtype=dtype or self.stored(item).dtype, device="cpu"
            )
            self.read(item, a, a + part.numel(), part)
            yield a, part

    def aliases(self) -> Mapping[str, str]:
        """{another name of a tied parameter: the name it is stored under}."""
        return {}

    def other_names(self) -> dict[str, list[str]]:
        """{the name of a stored parameter: its other names}, of tied ones."""
        out: dict[str, list[str]] = {}
        for alias, name in self.aliases().items():
            out.setdefault(name, []).append(alias)
        return out

    def stored_name(self, name: str) -> str:
        """What a parameter that is called `name` is stored under, if it is."""
        return self.aliases().get(name, name)

    def parameter(self, names: Iterable[str]) -> Item | None:
        """The parameter that goes by one of `names`."""
        items = self.items()
        for name in names:
            for stored in (name, self.stored_name(name)):
                if (item := Item("parameter", stored)) in items:
                    return item
        return None

    def scalars(self, name: str) -> Mapping[str, Any]:
        """The optimizer's numbers of parameter `name`, such as {"step": tensor(3.)}."""
        return {}

    def groups(self) -> list[list[dict[str, Any]]] | None:
        """The parameter groups of each optimizer, "params" being names. None: there is none."""
        return None

    def fitted(self, module: nn.Module) -> Source:
        """The same under the names of `module`, for a source that has names of its own."""
        return self

    def value(self, name: str) -> Any:
        """The state of the run's "scheduler" or "scaler"; None: it has none."""
        return getattr(self, name, None)

    def compare(self) -> None:
        """Compare what was read so far with the checksums, where there are any."""

    def close(self) -> None:
        """Let go of the files."""


@contextlib.contextmanager
def closed_on_error(source: SourceT) -> Iterator[SourceT]:
    """Around what opens `source` for somebody else: if that fails, nothing stays open."""
    try:
        yield source
    except BaseException:
        source.close()
        raise


class View(Source):
    """A source in front of another, which answers what this one does not."""

    def __init__(self, source: Source) -> None:
        self.source = source
        self.folder, self.unexpected, self.rules = source.folder, source.unexpected, source.rules

    @property
    def describe(self) -> str:
        return self.source.describe

    def items(self) -> Mapping[Item, Stored]:
        return self.source.items()

    def read(self, item: Item, start: int, stop: int, out: torch.Tensor) -> None:
        self.source.read(item, start, stop, out)

    def aliases(self) -> Mapping[str, str]:
        return self.source.aliases()

    def scalars(self, name: str) -> Mapping[str, Any]:
        return self.source.scalars(name)

    def groups(self) -> list[list[dict[str, Any]]] | None:
        return self.source.groups()

    def close(self) -> None:
        self.source.close()


def read_by_another(path: Path) -> Source | None:
    """What another library has left at `path`, by the package's `READERS`."""
    import onefold  # the package says who reads what; this room knows nobody else's files

    for name in onefold.READERS:
        reader: Any = importlib.import_module(name)
        if reader.recognizes(path):
            source: Source = reader.open_source(path)
            return source
    return None
