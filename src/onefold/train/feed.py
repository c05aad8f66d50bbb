"""Micro-batches on their way to the device, one ahead of the one that is computed.

    computing      micro-batch 0          micro-batch 1          micro-batch 2
    copies         [1]                    [2]                    [first of the next step]

On a stream of its own: the engine's copies up are waited for by the host before each step of an optimizer. A device without streams is
sent nothing ahead.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from onefold.device import CopyStream, HostBuffers
from onefold.train.data import Batch, Indices, Samples


@dataclass
class _Sent:
    """A batch on the device, and when it is whole there."""

    indices: Indices
    batch: Batch
    tickets: list[Any]


class Feed:
    """Batches of `samples` for one device."""

    def __init__(self, samples: Samples, device: torch.device) -> None:
        self.samples, self.device = samples, device
        self._copies = CopyStream(device, name="batches")
        self._pinned = HostBuffers(device)
        self._ahead: _Sent | None = None

    @property
    def is_ahead(self) -> bool:
        """Whether `send_ahead` sends anything."""
        return self._copies.behind

    def take(self, indices: Indices) -> Batch:
        """The batch of these samples: on the device, behind its copy, where that has streams; else on the host."""
        if not self._copies.behind:
            return self.samples.batch(indices)
        ahead = self._landed()
        if ahead is None or not np.array_equal(ahead.indices, indices):  # the run has gone back, or looks at a step again
            self._ahead = self._send(indices)
            ahead = self._landed()
        assert ahead is not None
        return ahead.batch

    def send_ahead(self, indices: Indices) -> None:
        """Begin to copy what `take` will be asked for next."""
        if self._copies.behind:
            self._landed()
            self._ahead = self._send(indices)

    def close(self) -> None:
        """Nothing more will be taken."""
        self._landed()

    def _landed(self) -> _Sent | None:
        """What was sent ahead, which the computing stream waits for: also where nobody wants it, for its memory may be handed on then."""
        ahead, self._ahead = self._ahead, None
        for ticket in ahead.tickets if ahead is not None else ():
            self._copies.order(ticket)
        return ahead

    def _send(self, indices: Indices) -> _Sent:
        there: Batch = {}
        tickets = []
        for name, tensor in self.samples.batch(indices).items():
            host = self._pinned.empty(tensor.numel(), tensor.dtype)
            host.copy_(tensor.reshape(-1))
            there[name] = torch.empty(tensor.shape, dtype=tensor.dtype, device=self.device)
            tickets.append(self._copies.copy(there[name].view(-1), host))
        return _Sent(indices, there, tickets)
