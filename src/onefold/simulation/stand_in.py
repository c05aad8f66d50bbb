"""Make a stand-in for a shape: a module with the same parameters.

    ModelShape   (root) | embed | layer 0 | layer 1 | head
    stand-in     one module per unit, in this order and as they lie in each other; parameters in their order
    forward      x ─► reads all parameters ─► x    backward     reads them again, gives each a gradient

With a stand-in the engine gathers, reduces and steps exactly what it would with the model. The
stand-in itself computes nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from onefold.offload.nvme import PAGE, Region, Transfer
from onefold.plan.shapes import UnitShape


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

    def __init__(self, unit: UnitShape) -> None:
        super().__init__()
        for at, p in enumerate(unit.parameters):
            empty = torch.empty(p.shape, dtype=p.dtype, device="meta")
            self.register_parameter(f"own_{at}", nn.Parameter(empty, requires_grad=p.trainable))
        self.names = [*self._parameters]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        own, inner = [getattr(self, name) for name in self.names], [*self.children()]
        if own and inner:
            x = _Read.apply(x, own[0])
        row = torch.zeros(1, dtype=torch.long, device="cpu")  # any row of an embedding would do
        for module in inner:
            looks_up = type(module) is nn.Embedding
            x = x + module(row).sum() if looks_up else module(x)
        return _Read.apply(x, *own) if own else x


def stand_in(units: Sequence[UnitShape]) -> list[nn.Module]:
    """Make a module with the parameters of `units` on the meta device. Returns the module of each unit;
    the first is the root, which the others lie in.

    The root takes a tensor [1] that requires no gradient, and returns a tensor [1].
    """
    placed: dict[str, nn.Module] = {}
    for unit in units:
        module: nn.Module = _Block(unit)
        if unit.looks_up_only and len(unit.parameters) == 1 and len(unit.parameters[0].shape) == 2:
            only = unit.parameters[0]
            module = nn.Embedding(only.shape[0], only.shape[1], device="meta", dtype=only.dtype)
            module.weight.requires_grad_(only.trainable)
        around = unit.name
        while around and around not in placed:
            around = around.rpartition(".")[0]
        if placed:  # inside the innermost unit around it
            placed[around].add_module(unit.name.replace(".", "_"), module)
        placed[unit.name if placed else ""] = module
    return [*placed.values()]


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
