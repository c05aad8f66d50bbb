"""Make a stand-in for a shape: a module with the same parameters.

    ModelShape   (root) | embed | layer 0 | layer 1 | head
    stand-in     one module per unit, in this order, under the same path; parameters in their order
    forward      x ─► reads all parameters ─► x    backward     reads them again, gives each a gradient

With a stand-in the engine gathers, reduces and steps exactly what it would with the model. The
stand-in itself computes nothing.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from onefold.offload.nvme import PAGE, Region, Transfer
from onefold.plan.shapes import ModelShape, UnitShape


class _Read(torch.autograd.Function):
    """Returns x unchanged, but needs `parameters` in both passes."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, *parameters: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(*parameters)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        wanted = zip(ctx.saved_tensors, ctx.needs_input_grad[1:], strict=True)
        return grads[0], *(torch.zeros_like(p) if needed else None for p, needed in wanted)


class _Block(nn.Module):
    """A unit's parameters, with the units inside it as children.

    A unit around other units reads its first parameter (an embedding table) before them, and all
    its parameters (a last norm, a tied head) after them.
    """

    def __init__(self, unit: UnitShape | None) -> None:
        super().__init__()
        self.names: list[str] = []
        self.inner: list[str] = []
        for at, p in enumerate(unit.parameters if unit is not None else ()):
            self.names.append(f"own_{at}")
            empty = torch.empty(p.shape, dtype=p.dtype, device="meta")
            self.register_parameter(self.names[-1], nn.Parameter(empty, requires_grad=p.trainable))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        own = [getattr(self, name) for name in self.names]
        if own and self.inner:
            x = _Read.apply(x, own[0])
        row = torch.zeros(1, dtype=torch.long, device="cpu")  # any row of an embedding would do
        for path in self.inner:
            module = self.get_submodule(path)
            looks_up = type(module) is nn.Embedding
            x = x + module(row).sum() if looks_up else module(x)
        return _Read.apply(x, *own) if own else x


def stand_in(shape: ModelShape) -> tuple[nn.Module, list[str]]:
    """Make a module with the parameters of `shape` on the meta device. Returns it and the names of
    its units, for `onefold.shard(units=...)`.

    The module takes a tensor [1] that requires no gradient, and returns a tensor [1].
    """
    around = next((u for u in shape.units if u.name == "(root)"), None)
    root = _Block(around)
    placed: dict[str, _Block] = {"": root}
    for unit in shape.units:
        if unit is around:
            continue
        module: nn.Module = _Block(unit)
        if unit.looks_up_only and len(unit.parameters) == 1 and len(unit.parameters[0].shape) == 2:
            only = unit.parameters[0]
            module = nn.Embedding(only.shape[0], only.shape[1], device="meta", dtype=only.dtype)
            module.weight.requires_grad_(only.trainable)
        owner, path = _owner(placed, unit.name)
        _put(owner, path, module)
        owner.inner.append(path)
        if isinstance(module, _Block):
            placed[unit.name] = module
    return root, [u.name for u in shape.units if u is not around]


def _owner(placed: dict[str, _Block], name: str) -> tuple[_Block, str]:
    """Return the innermost unit around `name`, and the path from that unit."""
    parts = name.split(".")
    at = next(n for n in range(len(parts) - 1, -1, -1) if ".".join(parts[:n]) in placed)
    return placed[".".join(parts[:at])], ".".join(parts[at:])


def _put(owner: nn.Module, path: str, module: nn.Module) -> None:
    *folders, last = path.split(".")
    for folder in folders:
        if folder not in owner._modules:
            owner.add_module(folder, nn.Module())
        inside = owner._modules[folder]
        assert inside is not None
        owner = inside
    owner.add_module(last, module)


# -- a disk ----------------------------------------------------------------------------------------


class Disk:
    """NVMe without a disk: regions by the rules of the real store (offload/nvme.py), whose bytes are
    nowhere. Reads and writes are done at once.
    """

    def region(self, name: str, numel: int, dtype: torch.dtype) -> Region:
        return _Region(self, name, numel, dtype)

    def close(self) -> None:
        pass

    def allocate(self, name: str, nbytes: int) -> tuple[None, int]:
        return None, 0

    def start(self, *_: Any) -> Transfer:
        return Transfer()


class _Region(Region):
    """A region whose tensors have no memory, and so no addresses."""

    def fits(self, tensor: torch.Tensor) -> bool:
        return False

    def _memory(self, start: int, tensor: torch.Tensor) -> int:
        return -(-tensor.nbytes // PAGE) * PAGE
