"""`RepeatingLoader`, and functions over tensors in nested containers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch


class RepeatingLoader:
    """A data loader that starts again when it ends."""

    def __init__(self, loader: Any) -> None:
        self.loader = loader
        self._items = iter(loader)

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        try:
            return next(self._items)
        except StopIteration:
            self._items = iter(self.loader)
            return next(self._items)


def move_to_device(item: Any, device: Any, criterion_func: Any = lambda _: True) -> Any:
    """Move the tensors in lists, tuples and dicts to a device.

    A tensor for which `criterion_func` is false stays where it is.
    """
    if isinstance(item, torch.Tensor):
        return item.to(device) if criterion_func(item) else item
    if isinstance(item, (list, tuple)):
        return type(item)(move_to_device(x, device, criterion_func) for x in item)
    if isinstance(item, Mapping):
        return {k: move_to_device(v, device, criterion_func) for k, v in item.items()}
    return item


def clone_tensors_for_torch_save(item: Any, device: Any = "cpu") -> Any:
    """Copy the tensors in lists, tuples and dicts to memory of their own.

    A tensor that occurs twice (tied weights) is copied once, so that it stays tied.
    """
    copies: dict[int, torch.Tensor] = {}

    def copied(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            if id(value) not in copies:
                copies[id(value)] = value.detach().clone().to(device)
            return copies[id(value)]
        if isinstance(value, (list, tuple)):
            return type(value)(copied(x) for x in value)
        if isinstance(value, Mapping):
            return {k: copied(v) for k, v in value.items()}
        return value

    return copied(item)
