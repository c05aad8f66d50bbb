"""torchrun's rendezvous for a run on one machine. torch's own listens on every interface, this one
on loopback alone.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from torch.distributed import PrefixStore, TCPStore
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousStoreInfo,
    rendezvous_handler_registry,
)

from onefold.processes.host import ALONE, LOOPBACK, local_store
from onefold.processes.signals import FAILED, TRAINING


class RunOver(Exception):
    """The ranks are not started again: the same error would occur, or the run was asked to stop."""


class _Alone(RendezvousHandler):
    """The rendezvous of one agent, which never waits for another. Its store lives as long as the
    agent, over all starts of the ranks.
    """

    def __init__(self, control: Path, over: Callable[[], bool]) -> None:
        self._store: TCPStore = local_store()
        self._control, self._over = control, over

    @property
    def use_agent_store(self) -> bool:
        return True

    def get_backend(self) -> str:
        return ALONE

    def get_run_id(self) -> str:
        return ALONE

    def next_rendezvous(self) -> RendezvousInfo:
        if self._over():
            raise RunOver
        for of_an_earlier_start in (FAILED, TRAINING):
            (self._control / of_an_earlier_start).unlink(missing_ok=True)
        where = RendezvousStoreInfo(LOOPBACK, self._store.port)
        return RendezvousInfo(PrefixStore(ALONE, self._store), 0, 1, where)

    def is_closed(self) -> bool:
        return False

    def set_closed(self) -> None: ...

    def num_nodes_waiting(self) -> int:
        return 0

    def shutdown(self) -> bool:
        return True


def register(control: Path, over: Callable[[], bool]) -> None:
    """Let torchrun know it by the name `ALONE`.

    Args:
        control: the folder that the command shares with its ranks.
        over: whether the ranks are not to be started again.
    """
    rendezvous_handler_registry.register(ALONE, lambda parameters: _Alone(control, over))
