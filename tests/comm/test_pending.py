"""A move after a move on a device with streams: what waits for the first, and what does not."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

import virtual
from onefold.comm import Chain
from onefold.device import current_stream, new_stream


class Move:
    """A move that notes on which stream it is waited for."""

    context = event = None

    def __init__(self, device: torch.device) -> None:
        self.device: torch.device = device
        self.waited_on: list[Any] = []

    def wait(self) -> None:
        self.waited_on.append(current_stream(self.device))


@virtual.alone
def test_the_stream_that_computes_waits_for_the_second_move_only() -> None:
    device = torch.device("virtual:0")
    computing, group = (
        current_stream(device),
        SimpleNamespace(relay=new_stream(device, "relay"), device=device, broken=None),
    )
    first, second, begun_on = Move(device), Move(device), []

    def then() -> Any:
        begun_on.append(current_stream(device))
        return second

    held = SimpleNamespace(relay=lambda _: None, held=torch.no_grad)
    group.chains = held
    chain = Chain(group, first, then)  # type: ignore[arg-type]
    assert first.waited_on == begun_on == [group.relay] and second.waited_on == []
    assert current_stream(device) == computing
    chain.wait()
    assert first.waited_on == [group.relay] and second.waited_on == [computing]
