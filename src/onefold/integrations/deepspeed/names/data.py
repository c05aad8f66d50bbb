"""Loaders, and tensors in nested containers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch


class RepeatingLoader:
    """A loader that begins anew when it ends."""

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
    """Tensors in lists, tuples and dicts, on the device."""
    if isinstance(item, torch.Tensor):
        return item.to(device) if criterion_func(item) else item
    if isinstance(item, (list, tuple)):
        return type(item)(move_to_device(x, device, criterion_func) for x in item)
    if isinstance(item, Mapping):
        return {k: move_to_device(v, device, criterion_func) for k, v in item.items()}
    return item


def clone_tensors_for_torch_save(item: Any, device: Any = "cpu") -> Any:
    """Tensors in lists, tuples and dicts, copied to memory of their own. What is one tensor under
    two names, tied weights for instance, is one copy.
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
