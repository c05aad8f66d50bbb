"""Where numbers first went bad, found after the fact by doing the step once more.

Nothing is watched while all is well: that would cost a pass over every output of every step, and a
synchronization with a GPU. When loss or gradients come out non-finite, the weights have not been
touched yet and the random generators' states from before the step are kept, so the same step is run
again, bit for bit, with hooks that look at each unit:

    forward    the first unit in forward order whose output is bad while its input was not; between units it is the root's code
    backward   the first unit in backward order that passes a bad gradient on while the one it received was not; failing that, the
               last unit in forward order with a bad gradient of its own parameters

In the backward pass the order must be the backward one: from the culprit on every earlier unit has
bad gradients too, so the first in forward order would always be the embedding. The price is one
step's time for each bad step.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import nn

import onefold
from onefold.device import rng_state, set_rng_state
from onefold.runtime.engine import Engine, in_autograd
from onefold.runtime.gather import tensors_in
from onefold.runtime.parameter import disable_torch_function
from onefold.train.prepare import Run


@dataclass(frozen=True, order=True)
class Place:
    """Where a number first was not finite. The order is that of time.

    Attributes:
        micro_batch: from 0. backward: in the backward pass. turn: how many units' inputs and
            outputs were looked at before.
        what: "the output", "its gradient", ...
    """

    micro_batch: int
    backward: bool
    turn: int
    rank: int
    unit: str
    what: str

    def __str__(self) -> str:
        return (
            f"{self.what} of unit {self.unit!r}, on rank {self.rank} in micro-batch"
            f" {self.micro_batch + 1}"
        )


@dataclass(frozen=True)
class Generators:
    """The states of the random generators that a step may draw from."""

    host: torch.Tensor
    device: torch.Tensor | None
    python: Any
    arrays: Any

    @classmethod
    def of(cls, device: torch.device) -> Generators:
        return cls(
            torch.get_rng_state(), rng_state(device), random.getstate(), np.random.get_state()
        )

    def restore(self, device: torch.device) -> None:
        torch.set_rng_state(self.host)
        if self.device is not None:
            set_rng_state(self.device, device)
        random.setstate(self.python)
        np.random.set_state(self.arrays)


@dataclass
class Looking:
    """Hooks on the units' modules; a context manager. The first bad place of this rank is
    `found`.
    """

    engine: Engine
    rank: int
    found: Place | None = None
    micro_batch: int = 0
    turn: int = 0
    _received_bad: set[str] = field(default_factory=set)
    _handles: list[Any] = field(default_factory=list)

    def __enter__(self) -> Looking:
        for unit in self.engine.units:
            module = unit.module()
            if module is not None:
                self._handles.append(
                    module.register_forward_pre_hook(self._before(unit.name), with_kwargs=True)
                )
                self._handles.append(module.register_forward_hook(self._after(unit.name)))
        return self

    def __exit__(self, *_: object) -> None:
        while self._handles:
            self._handles.pop().remove()

    def next_micro_batch(self) -> None:
        self.micro_batch += 1
        self._received_bad.clear()

    def _bad(self, unit: str, what: str, backward: bool) -> None:
        if self.found is None:
            self.found = Place(self.micro_batch, backward, self.turn, self.rank, unit, what)

    def _before(self, name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, kwargs: Any) -> None:
            if in_autograd():
                return  # a recomputation: it was looked at the first time
            self.turn += 1
            for t in _numbers((args, kwargs)):
                if not t.requires_grad:
                    continue  # a mask may hold infinities
                if not _finite(t):
                    self._bad("(root)", f"the code before {name!r},", backward=False)
                t.register_hook(lambda g: self._passed_on(name, g))

        return hook

    def _after(self, name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            if in_autograd():
                return
            self.turn += 1
            for t in _numbers(output):
                if not _finite(t):
                    self._bad(name, "the output", backward=False)
                if t.requires_grad:
                    t.register_hook(lambda g: self._received(name, g))

        return hook

    def _received(self, name: str, gradient: torch.Tensor) -> None:
        if not _finite(gradient):
            self._received_bad.add(name)

    def _passed_on(self, name: str, gradient: torch.Tensor) -> None:
        self.turn += 1
        if not _finite(gradient):
            culprit = "(root)" if name in self._received_bad else name
            self._bad(culprit, "a gradient in the backward pass", backward=True)


def _numbers(value: Any) -> list[torch.Tensor]:
    return [t for t in tensors_in(value) if t.is_floating_point()]


def _finite(t: torch.Tensor) -> bool:
    return bool(torch.isfinite(t.detach()).all())


def bad_parameters(engine: Engine, gradients: bool) -> list[str]:
    """Units with a non-finite number in this rank's part of their weights (or of the weights'
    gradients), in forward order.
    """
    out = []
    with disable_torch_function(), torch.no_grad():
        for unit in engine.units:
            tensors = [e.param.grad if gradients else e.param for e in unit.entries]
            if not all(_finite(t) for t in tensors if t is not None and t.is_floating_point()):
                out.append(unit.name)
    return out


def locate(run: Run, repeat: Callable[[Callable[[], None]], object], before: Generators) -> str:
    """Run the step again and say where its numbers first went bad. Collective; gradients are
    dropped, weights stay.

    Args:
        repeat: computes the step's forward and backward passes; calls what it is given after each
            micro-batch.
        before: the generators' states at the step's beginning. They end as they are now.
    """
    engine, ranks = onefold.engine_of(run.model), run.ranks
    after = Generators.of(ranks.device)
    weights = bad_parameters(engine, gradients=False)
    run.optimizer.zero_grad()
    before.restore(ranks.device)
    with Looking(engine, ranks.rank) as looking:
        repeat(looking.next_micro_batch)
    gradients = bad_parameters(engine, gradients=True)
    run.optimizer.zero_grad()
    after.restore(ranks.device)
    said = ranks.gather((looking.found, weights, gradients))
    return _worded(
        [found for found, *_ in said if found], _union(said, 1, engine), _union(said, 2, engine)
    )


def _union(said: list[Any], column: int, engine: Engine) -> list[str]:
    named = {name for row in said for name in row[column]}
    return [unit.name for unit in engine.units if unit.name in named]


def _worded(places: list[Place], weights: list[str], gradients: list[str]) -> str:
    if weights:
        return (
            f"weights of unit {weights[0]!r} are not finite themselves (of {len(weights)} units in"
            " all): an earlier update broke them"
        )
    if places:
        return f"the first that was not finite: {min(places)}"
    if gradients:
        return (
            f"the first that was not finite: the gradient of a parameter of unit {gradients[-1]!r}"
            " (summed over the ranks)"
        )
    return (
        "run once more, the same step was finite everywhere: this computation is not repeatable, or"
        " a device or its memory is faulty"
    )
