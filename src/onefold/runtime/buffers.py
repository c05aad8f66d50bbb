"""Buffers of the model follow rank 0's, by the rule of DistributedDataParallel.

| pass over the model                                | rank 0's buffers become everybody's before it |
|----------------------------------------------------|-----------------------------------------------|
| the first                                          | yes                                           |
| after a pass with gradients, outside `no_sync`     | yes, in evaluation too                        |
| after a pass without gradients, or under `no_sync` | no                                            |

All of them travel in one message, as bytes: buffers of any dtype, 0-dimensional ones, those that
are not in the state dict, and those that a module has put in place of others since. Constants
travel too, as under DDP: without a further message, no rank can know whether another rank has
written to a buffer (writes through `.data` change no version counter).
"""

from __future__ import annotations

import zlib
from typing import TYPE_CHECKING

import torch
from torch import nn

from onefold.comm import CollectiveContext
from onefold.memory import STAGING
from onefold.recipe import Recipe
from onefold.runtime.parameters.interval import ShardedParameterError, spec_of

if TYPE_CHECKING:
    from onefold.runtime.progress import Resources


class Buffers:
    """The buffers of one engine's model that follow rank 0's. Holds the modules' tables of buffers,
    not the modules.

    Attributes:
        due: the next pass over the model begins with a copy of rank 0's buffers.
    """

    def __init__(self, recipe: Recipe) -> None:
        self._wanted = recipe.sync_buffers
        self._tables: list[dict[str, torch.Tensor | None]] = []
        self.due = True

    def find(self, module: nn.Module) -> None:
        """Follow the buffers of `module` that the recipe names."""
        if self._wanted is False:
            return
        norms = nn.modules.batchnorm._NormBase
        self._tables = [
            m._buffers for m in module.modules() if self._wanted is True or isinstance(m, norms)
        ]

    def close(self) -> None:
        self._tables = []

    def tensors(self) -> list[torch.Tensor]:
        """Return the buffers as they are now, each once."""
        found = {
            id(b): (name, b)
            for table in self._tables
            if table
            for name, b in table.items()
            if b is not None
        }
        return [refuse_parts(name, b) for name, b in found.values()]

    @property
    def nbytes(self) -> int:
        """Bytes of one message: what rank 0 sends to each other rank."""
        return sum(map(_nbytes, self.tensors()))

    def before_pass(self, resources: Resources) -> None:
        """Called when a pass over the model begins: send rank 0's buffers, if that is due."""
        if not self.due or resources.group.size == 1:
            return
        tensors = self.tensors()
        nbytes = sum(map(_nbytes, tensors))
        if not nbytes:
            return
        memory = resources.memory
        memory.add(STAGING, nbytes, "buffers")
        from_rank_0(resources, tensors, "forward")
        memory.add(STAGING, -nbytes, "buffers")

    def after_pass(self, synchronized: bool) -> None:
        """Called after a pass over the model. `synchronized`: it recorded gradients that the ranks
        will share.
        """
        self.due = synchronized


@torch.no_grad()
def from_rank_0(resources: Resources, tensors: list[torch.Tensor], phase: str) -> None:
    """Copy rank 0's values into `tensors` on every rank, in one message. Collective; waits."""
    group, device, sizes = resources.group, resources.device, list(map(_nbytes, tensors))
    if group.size == 1 or not sum(sizes):
        return
    # A number made of shapes and dtypes: messages of ranks whose buffers differ in these, or in
    # number, do not match.
    number = zlib.crc32(repr([(tuple(t.shape), t.dtype) for t in tensors]).encode()) & 0x7FFF
    if group.rank == 0:
        message = torch.cat([_as_bytes(_once(t)).to(device) for t in tensors])
    else:
        message = torch.empty(sum(sizes), dtype=torch.uint8, device=device)
    group.from_first(
        message, CollectiveContext("state", "buffers", resources.progress.step_count, phase), number
    ).wait()
    if group.rank == 0 or group.fake:
        return
    for buffer, size, part in zip(tensors, sizes, message.split(sizes), strict=True):
        # Autograd may have saved a constant for a backward pass that is still to come. On the host
        # equal buffers are not written to. On a device the host would have to wait to know, so they
        # are written to without a sign for autograd (`data` has a version counter of its own).
        on_host = buffer.device.type == "cpu"
        mine = _once(buffer.detach() if on_host else buffer.data)
        if size and not (on_host and torch.equal(_as_bytes(mine), part)):
            mine.copy_(part.clone().view(mine.dtype).view(mine.shape))


def refuse_parts(name: str, buffer: torch.Tensor) -> torch.Tensor:
    """Return `buffer` unless it was made of a shard.

    Raises:
        ShardedParameterError: it is this rank's part of a parameter, such as
            `self.register_buffer("old", p.data.clone())` makes.
    """
    spec = spec_of(buffer)
    if spec is not None:
        raise ShardedParameterError(
            f"buffer {name!r} was made of parameter {spec.name!r} after shard(): it holds this"
            " rank's part of it, and buffers are rank 0's everywhere. Make it (a pruning mask, an"
            " average) before shard() or inside `with onefold.unsharded(model):`, or register a"
            " whole copy, `parameter.onefold.gather()` (on every rank)."
        )
    return buffer


def _once(buffer: torch.Tensor) -> torch.Tensor:
    """Return a view of the buffer with each element of its memory once, that is, without expanded
    dimensions.
    """
    for dim, (size, stride) in enumerate(zip(buffer.shape, buffer.stride(), strict=True)):
        if stride == 0 and size > 1:
            buffer = buffer.narrow(dim, 0, 1)
    return buffer


def _as_bytes(buffer: torch.Tensor) -> torch.Tensor:
    return buffer.detach().reshape(-1).view(torch.uint8)


def _nbytes(buffer: torch.Tensor) -> int:
    once = _once(buffer)
    return once.numel() * once.element_size()
