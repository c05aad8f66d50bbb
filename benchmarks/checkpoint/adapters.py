"""How each peer saves, saves behind the training, and loads; trainers are `benchmarks.peers`'."""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist

Ways = tuple[str, ...]


@dataclass
class Pending:
    """A save that goes on behind the training.

    Attributes:
        ended: whether it has, on this rank. wait: until it has; raises what went wrong. whole_at:
            when it was whole, as perf_counter tells time; to be called after `wait`.
    """

    ended: Callable[[], bool]
    wait: Callable[[], Any]
    whole_at: Callable[[], float]


class Onefold:
    """`onefold.save`, `save_async` and `load`."""

    behind: Ways = ("default",)

    def __init__(self, trainer: Any) -> None:
        self.onefold: Any = importlib.import_module("onefold")
        self.parts = {"model": trainer.model, "optimizer": trainer.optimizer}

    def save(self, path: Path) -> None:
        self.onefold.save(path, **self.parts)

    def save_async(self, path: Path, way: str) -> Pending:
        begun = time.perf_counter()
        saving = self.onefold.save_async(path, **self.parts)
        return Pending(lambda: saving.done, saving.wait, lambda: begun + saving.seconds)

    def load(self, path: Path) -> None:
        self.onefold.load(path, **self.parts, rng=False)

    def close(self) -> None:
        """Nothing is kept beside the model."""


class Distributed:
    """torch.distributed.checkpoint of an FSDP2 model."""

    behind: Ways = ("default", "kept")

    def __init__(self, trainer: Any) -> None:
        self.dcp: Any = importlib.import_module("torch.distributed.checkpoint")
        self.state: Any = importlib.import_module("torch.distributed.checkpoint.state_dict")
        self.staging: Any = importlib.import_module("torch.distributed.checkpoint.staging")
        self.model, self.optimizer = trainer.model, trainer.optimizer
        # The training's would be used by two threads at once
        self.group = dist.new_group(backend="gloo")
        self.stager: Any = None

    def _states(self) -> dict[str, Any]:
        model, optimizer = self.state.get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer}

    def save(self, path: Path) -> None:
        self.dcp.save(self._states(), checkpoint_id=path)

    def save_async(self, path: Path, way: str) -> Pending:
        kept: dict[str, Any] = {}
        if way == "kept":
            if self.stager is None:
                # The rest of them needs CUDA
                options = self.staging.StagingOptions(False, False, False, False)
                self.stager = self.staging.DefaultStager(options)
            kept["async_stager"] = self.stager
        future = self.dcp.async_save(
            self._states(), checkpoint_id=path, process_group=self.group, **kept
        )
        ended: list[float] = []
        future.add_done_callback(lambda _: ended.append(time.perf_counter()))
        return Pending(lambda: bool(ended), future.result, lambda: ended[0])

    def load(self, path: Path) -> None:
        states = self._states()
        self.dcp.load(states, checkpoint_id=path)
        self.state.set_state_dict(
            self.model,
            self.optimizer,
            model_state_dict=states["model"],
            optim_state_dict=states["optimizer"],
        )

    def close(self) -> None:
        if self.stager is not None:
            self.stager.close()


class DeepSpeed:
    """`save_checkpoint` and `load_checkpoint` of the engine."""

    behind: Ways = ()

    def __init__(self, trainer: Any) -> None:
        self.engine = trainer.engine

    def save(self, path: Path) -> None:
        self.engine.save_checkpoint(str(path), tag="saved")

    def save_async(self, path: Path, way: str) -> Pending:
        raise ValueError("DeepSpeed's default writer saves while the training waits.")

    def load(self, path: Path) -> None:
        found, _ = self.engine.load_checkpoint(str(path), tag="saved")
        if found is None:
            raise RuntimeError(f"DeepSpeed found no checkpoint in {path}")

    def close(self) -> None:
        """Nothing is kept beside the engine."""


Keeper = Onefold | Distributed | DeepSpeed


def keeper(peer: str, trainer: Any) -> Keeper:
    """What saves and loads a trainer that `peers.adapters.build` has made. Collective."""
    family = peer.partition("-")[0]
    kinds: dict[str, type[Keeper]] = {
        "onefold": Onefold,
        "fsdp2": Distributed,
        "deepspeed": DeepSpeed,
    }
    if family not in kinds:
        raise ValueError(
            f"There is no way to save {peer!r}; peers are those of {', '.join(kinds)}."
        )
    return kinds[family](trainer)
