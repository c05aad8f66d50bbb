"""The interface of everything to load from: an Onefold checkpoint, a Hugging Face folder or another
library's checkpoint.

| kind      | name                         | state            | shape                                    |
|-----------|------------------------------|------------------|------------------------------------------|
| parameter | its name in the model        |                  | logical                                  |
| buffer    | its name in the model        | whose, if ranks have values of their own: "tp: 1 of 2" | its own |
| state     | the parameter's name         | such as exp_avg  | the parameter's, or the state's own      |
| rng       | the rank it was saved on     |                  | [bytes]                                  |
| extra     | a number                     |                  | its own                                  |
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn

from onefold.checkpoint.errors import CheckpointError
from onefold.checkpoint.tensorfile import numel_of
from onefold.layout import overlap
from onefold.layout.holders import BoxInterval, common, whole_region

KINDS = ("parameter", "buffer", "state", "rng", "extra")


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
    """The dtype and shape of a stored tensor."""

    dtype: torch.dtype
    shape: tuple[int, ...]


#: Bytes read at a time of a tensor that is stored in other boxes than it is wanted in.
BOX_BLOCK = 1 << 20

SourceT = TypeVar("SourceT", bound="Source")


class Source:
    """Something to load from. A subclass implements `describe`, `items`, and `read` or `read_box`, and
    whatever else it has. All methods may raise CheckpointError.

    Attributes:
        form: the format, for messages. folder: the folder it is read from.
        created: ISO date and time, UTC; "" if it is not known.
        step, extra, saved_by: see `Loaded`.
        missing, unexpected: of a source that was fitted to a model: what of the model it was to have
            and lacks (None: all that it lacks), and its tensors without a place there.
        rules: transformers' rules by which names were converted, if any.
    """

    form: str = "Hugging Face"
    folder: Path | None = None
    created: str = ""
    step: int | None = None
    extra: Any = None
    saved_by: Mapping[str, Any] = {}
    missing: Sequence[str] | None = None
    unexpected: Sequence[str] = ()
    rules: Any = None

    @property
    def describe(self) -> str:
        """How messages call it."""
        raise NotImplementedError

    def items(self) -> Mapping[Item, Stored]:
        """Return every stored tensor."""
        raise NotImplementedError

    def refuse_own(self) -> None:
        """Raise CheckpointError if ranks had values of their own of a buffer, of which what is to be
        written has one.
        """
        if own := next((i for i in self.items() if i.kind == "buffer" and i.state), None):
            raise CheckpointError(
                f"{self.describe} has other values of buffer {own.name!r} for ranks with other parts"
                f" of the model ({own.state} among them), and what is to be written has one. Load it on"
                " a mesh with the same axes beside data, and save the buffer in another way."
            )

    def stored(self, item: Item) -> Stored:
        return self.items()[item]

    def read(self, item: Item, start: int, stop: int, out: torch.Tensor) -> None:
        """Read elements `[start, stop)` of the flattened tensor into `out` ([stop - start],
        contiguous, on the host), converted to out's dtype.
        """
        whole = whole_region(self.stored(item).shape)
        self.read_box(item, BoxInterval(whole, start, stop), out)

    def read_box(self, item: Item, wanted: BoxInterval, out: torch.Tensor) -> None:
        """Read elements of a box of the tensor into `out`, as `read` does."""
        stored = self.stored(item)
        there = BoxInterval(whole_region(stored.shape), 0, numel_of(stored.shape))
        read_common(wanted, there, out, stored.dtype, partial(self.read, item))

    def whole(self, item: Item) -> torch.Tensor:
        """Return a whole tensor, on the host."""
        stored = self.stored(item)
        out = torch.empty(stored.shape, dtype=stored.dtype, device="cpu")
        self.read(item, 0, out.numel(), out.reshape(-1))
        return out

    def aliases(self) -> Mapping[str, str]:
        """Return {another name of a tied parameter: the name under which it is stored}."""
        return {}

    def other_names(self) -> dict[str, list[str]]:
        """Return {name of a stored parameter: its other names} for tied parameters."""
        out: dict[str, list[str]] = {}
        for alias, name in self.aliases().items():
            out.setdefault(name, []).append(alias)
        return out

    def stored_name(self, name: str) -> str:
        """Return the name under which parameter `name` would be stored."""
        return self.aliases().get(name, name)

    def parameter(self, names: Iterable[str]) -> Item | None:
        """Return the item of the parameter that has one of `names`, if there is one."""
        items = self.items()
        for name in names:
            for stored in (name, self.stored_name(name)):
                if (item := Item("parameter", stored)) in items:
                    return item
        return None

    def scalars(self, name: str) -> Mapping[str, Any]:
        """Return the optimizer's scalars for parameter `name`, such as {"step": tensor(3.)}."""
        return {}

    def groups(self) -> list[list[dict[str, Any]]] | None:
        """Return the parameter groups of each optimizer, with names as "params". None if there is
        no optimizer.
        """
        return None

    def fitted(self, module: nn.Module) -> Source:
        """Return this source under the names of `module`. A source with those names is returned
        itself.
        """
        return self

    def value(self, name: str) -> Any:
        """Return the stored state of "scheduler" or "scaler"; None if there is none."""
        return getattr(self, name, None)

    def close(self) -> None:
        """Close the files."""


def read_common(
    wanted: BoxInterval,
    stored: BoxInterval,
    out: torch.Tensor,
    dtype: torch.dtype,
    read: Callable[[int, int, torch.Tensor], object],
) -> None:
    """Read the elements that `wanted` and `stored` have in common into `out`, [wanted.numel]. Of
    intervals of different boxes, rows of `stored` with a common element are read whole, `BOX_BLOCK`
    bytes at a time.

    Args:
        out: contiguous, on the host.
        dtype: of `stored`.
        read: reads elements [a, b) of `stored`, counted from its first, into a tensor.
    """
    if wanted.region == stored.region:
        a, b = overlap((wanted.start, wanted.stop), (stored.start, stored.stop))
        if a < b:
            first = wanted.start
            read(a - stored.start, b - stored.start, out[a - first : b - first])
        return
    found = common(wanted, stored)
    if not found:
        return
    step = max(1, BOX_BLOCK // dtype.itemsize)
    first, last = min(block.there for block in found), max(block.ends_there for block in found)
    buffer = torch.empty(min(step, stored.numel), dtype=dtype, device="cpu")
    for a in range(first // step * step, last, step):
        b = min(a + step, stored.numel)
        blocks = common(wanted, stored.part(a, b))
        if not blocks:
            continue
        read(a, b, buffer[: b - a])
        for block in blocks:
            into = out.as_strided(block.shape, block.strides, out.storage_offset() + block.at)
            into.copy_(buffer.as_strided(block.shape, block.strides_there, block.there))


@contextlib.contextmanager
def closed_on_error(source: SourceT) -> Iterator[SourceT]:
    """Close `source` if the block fails; otherwise leave it open for its new owner."""
    try:
        yield source
    except BaseException:
        source.close()
        raise


def read_by_another(path: Path) -> Source | None:
    """Open the checkpoint of another library at `path`, with one of the package's `READERS`."""
    import onefold  # it lists the readers; this package does not know other formats

    for name in onefold.READERS:
        reader: Any = importlib.import_module(name)
        if reader.recognizes(path):
            source: Source = reader.open_source(path)
            return source
    return None
