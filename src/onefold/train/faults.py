"""Faults in a step: numbers that are not finite.

    NonFinite.judge      is the step's update applied or skipped?
    locate               in which unit, on which rank did numbers first go bad?

| --on-nonfinite | what happens                                                                     | the run ends               |
|----------------|----------------------------------------------------------------------------------|----------------------------|
| stop           |                                                                                  | at the first bad step      |
| skip           | the step's samples are skipped, the weights stay                                 | at the `limit`-th in a row |

The update of a non-finite step is never applied.

In fp16 the loss scaler handles gradients that overflow: it skips the step and lowers the scale, up
to `SCALER_LIMIT` times in a row. A non-finite loss has nothing to do with the scale, and is handled
as in the table.

[Note: the step is done once more] Hooks that watch every step would cost a pass over every output,
and a synchronization with a GPU. So no hooks are set while all is well. When loss or gradients come
out non-finite, the weights have not been touched yet, and the random generators' states from before
the step are kept. So `locate` runs the same step again, bit for bit, with hooks on each unit, and
names the culprit:

    forward    the first unit in forward order whose output is bad while its input was not; between units it is the root's code
    backward   the first unit in backward order that passes on a bad gradient but received a good one; failing that, the
               last unit in forward order with a bad gradient of its own parameters

The backward pass must be searched in backward order. Every unit before the culprit has bad
gradients too, so the first unit in forward order would always be the embedding.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn

import onefold
from onefold.checkpoint.per_rank import capture, restore
from onefold.runtime.differentiate import in_autograd, tensors_in
from onefold.runtime.engine import Engine
from onefold.runtime.parameters.parameter import disable_torch_function
from onefold.train.prepare import Run
from onefold.wording import TrainError

#: Overflows in a row that end the run. 40 halvings bring a loss scale of 65536 to almost nothing.
SCALER_LIMIT = 40


@dataclass
class NonFinite:
    """Judges each step. All ranks judge alike, because loss and norm are the same on all.
    `total` counts the non-finite steps, `in_a_row` those since the last good step.
    """

    run: Run
    alert: Callable[[str], None]
    total: int = 0
    in_a_row: int = 0
    _scaler_in_a_row: int = 0

    def judge(
        self,
        step: int,
        loss: float,
        norm: float,
        where: Callable[[], str],
        scale: float | None = None,
    ) -> bool:
        """Decide whether the update of a step (from 0) of this loss and gradient norm is applied.
        Collective if they are not finite.

        Args:
            where: returns a sentence that says where the bad numbers came from. Collective.
            scale: the step's loss scale; None if it is still the scaler's current one.

        Raises:
            TrainError: the run ends here.
        """
        run, config = self.run, self.run.config
        fine = math.isfinite(norm) or run.recipe.step_in_backward
        if math.isfinite(loss) and (fine or run.scaler is not None):
            self._scaler_in_a_row = 0 if fine else self._scaler_in_a_row + 1
            if self._scaler_in_a_row >= SCALER_LIMIT:
                scale = run.scaler.get_scale() if scale is None else scale
                raise TrainError(
                    f"the gradients overflowed in fp16 for {SCALER_LIMIT} steps in a row, up to"
                    f" step {step + 1}; the loss scale is {scale:g}. Use --precision bf16 or fp32,"
                    " or a lower --lr."
                )
            if fine:
                self.in_a_row = 0
            return True
        self.total += 1
        self.in_a_row += 1
        what, value = ("gradient norm", norm) if math.isfinite(loss) else ("loss", loss)
        text = f"the {what} at step {step + 1} is {value}; {where()}."
        if config.on_nonfinite == "stop":
            raise TrainError(
                f"{text} Try a lower --lr, a longer --warmup, or --clip; --on-nonfinite skip goes on"
                " without the step."
            )
        if self.in_a_row >= config.nonfinite_limit:
            raise TrainError(
                f"{text} That makes {self.in_a_row} such steps in a row (--nonfinite-limit) with"
                " --on-nonfinite skip. Try a lower --lr, a longer --warmup, or --clip."
            )
        self.alert(f"{text} The step is left out.")
        return False


@dataclass(frozen=True, order=True)
class Location:
    """Where a number first was not finite. Locations sort by time.

    Attributes:
        micro_batch: from 0. backward: in the backward pass. turn: how many units' inputs and outputs
            were checked before.
        what: "the output", "a gradient in the backward pass", ...
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


@dataclass
class NonFiniteHooks:
    """Hooks on the units' modules. `found` is the first bad place on this rank."""

    engine: Engine
    rank: int
    found: Location | None = None
    micro_batch: int = 0
    turn: int = 0
    _received_bad: set[str] = field(default_factory=set)
    _handles: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)

    def __enter__(self) -> NonFiniteHooks:
        for unit in self.engine.units:
            module = unit.module()
            if module is not None:
                before, after = partial(self._before, unit.name), partial(self._after, unit.name)
                for handle in (
                    module.register_forward_pre_hook(before, with_kwargs=True),
                    module.register_forward_hook(after),
                ):
                    self._handles.callback(handle.remove)
        return self

    def __exit__(self, *_: object) -> None:
        self._handles.close()

    def next_micro_batch(self) -> None:
        self.micro_batch += 1
        self._received_bad.clear()

    def _bad(self, unit: str, what: str, backward: bool) -> None:
        if self.found is None:
            self.found = Location(self.micro_batch, backward, self.turn, self.rank, unit, what)

    def _before(self, name: str, module: nn.Module, args: Any, kwargs: Any) -> None:
        if in_autograd():
            return  # a recomputation, whose tensors were checked in the forward pass
        self.turn += 1
        for t in _numbers((args, kwargs)):
            if not t.requires_grad:
                continue  # a mask may hold infinities
            if not _finite(t):
                self._bad("(root)", f"the code before {name!r},", backward=False)
            t.register_hook(partial(self._passed_on, name))

    def _after(self, name: str, module: nn.Module, args: Any, output: Any) -> None:
        if in_autograd():
            return
        self.turn += 1
        for t in _numbers(output):
            if not _finite(t):
                self._bad(name, "the output", backward=False)
            if t.requires_grad:
                t.register_hook(partial(self._received, name))

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
    """Return the units with a non-finite weight or gradient on this rank, in forward order."""
    out = []
    with disable_torch_function(), torch.no_grad():
        for unit in engine.units:
            tensors = [e.param.grad if gradients else e.param for e in unit.entries]
            if not all(_finite(t) for t in tensors if t is not None and t.is_floating_point()):
                out.append(unit.name)
    return out


def locate(run: Run, repeat: Callable[[Callable[[], None]], object], before: dict[str, Any]) -> str:
    """Run the step again and say where its numbers first went bad.
    Collective. Drops the gradients and keeps the weights.

    Args:
        repeat: computes the step's forward and backward passes, and calls its argument after each
            micro-batch.
        before: the random generators' states at the step's beginning. The generators are restored
            to their current states afterwards.
    """
    engine, ranks = onefold.engine_of(run.model), run.ranks
    after = capture()
    weights = bad_parameters(engine, gradients=False)
    run.optimizer.zero_grad()
    restore(before, 0, 1)
    with NonFiniteHooks(engine, ranks.rank) as hooks:
        repeat(hooks.next_micro_batch)
    gradients = bad_parameters(engine, gradients=True)
    run.optimizer.zero_grad()
    restore(after, 0, 1)
    names = [unit.name for unit in engine.units]
    places, units, *bad = zip(*ranks.gather((hooks.found, names, weights, gradients)), strict=True)
    # Units that are bad on any rank, in forward order; those of later stages come on later ranks
    order = dict.fromkeys(name for names in units for name in names)
    weights, gradients = (
        [name for name in order if any(name in names for names in of_ranks)] for of_ranks in bad
    )
    if weights:
        return (
            f"weights of unit {weights[0]!r} are not finite themselves (of {len(weights)} units in"
            " all): an earlier update broke them"
        )
    if any(places):
        return f"the first that was not finite: {min(filter(None, places))}"
    if gradients:
        return (
            f"the first that was not finite: the gradient of a parameter of unit {gradients[-1]!r}"
            " (summed over the ranks)"
        )
    return (
        "run once more, the same step was finite everywhere: this computation is not repeatable, or"
        " a device or its memory is faulty"
    )
