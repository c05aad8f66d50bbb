"""Faults in a step: numbers that are not finite, and a slow rank.

    NonFinite.judge      is the step's update applied or skipped, or does the run go back to a checkpoint?
    locate               in which unit, on which rank did numbers first go bad?
    Pace.look            which rank is slower than the others?

| --on-nonfinite | what happens                                                                     | the run ends               |
|----------------|----------------------------------------------------------------------------------|----------------------------|
| stop           |                                                                                  | at the first bad step      |
| skip           | the step's samples are skipped, the weights stay                                 | at the `limit`-th in a row |
| rollback       | the last checkpoint is loaded; the run continues after the bad step's samples    | at the `limit`-th in a row |

The update of a non-finite step is never applied. After a rollback, the run does not read the
samples between the checkpoint and the bad step again. They would repeat the same steps bit for bit,
and lead to the same bad step or the next one. The second bad step in a row goes back to the
checkpoint before, and so on.

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

[Note: an alert does not flap] Every rank's step takes as long as the slowest rank's. `Pace`
therefore compares the time that each rank computes without waiting. Near the limit, noise crosses
the limit again and again, and on a busy machine a different rank is slow each time.

    none named ── above `factor` for a while ──► named ── well below `factor` for WINDOW steps in a row ──► none named

A named rank stays the named one until it keeps up, even if another rank becomes slow. "A while" is
one look for the first alert and WINDOW looks for the second; then it doubles with each alert. A run
of n steps thus has about log n alerts.
"""

from __future__ import annotations

import contextlib
import enum
import math
import statistics
from collections import deque
from collections.abc import Callable, Sequence
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
#: Steps that `Pace` takes the median of, so that one hiccup does not make a slow rank.
WINDOW = 20
#: Seconds of lag per step below which no rank counts as slow.
FLOOR = 0.005


class Verdict(enum.Enum):
    APPLY = "apply"
    SKIP = "skip"
    ROLLBACK = "rollback"


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
    _worst: int = -1

    def judge(
        self,
        step: int,
        loss: float,
        norm: float,
        where: Callable[[], str],
        scale: float | None = None,
    ) -> Verdict:
        """Decide what to do with a step (from 0) of this loss and gradient norm.
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
            if fine and step > self._worst:
                self.in_a_row = 0
            return Verdict.APPLY
        self.total += 1
        self.in_a_row += 1
        self._worst = max(self._worst, step)
        what, value = ("gradient norm", norm) if math.isfinite(loss) else ("loss", loss)
        text = f"the {what} at step {step + 1} is {value}; {where()}."
        if config.on_nonfinite == "stop":
            raise TrainError(
                f"{text} Try a lower --lr, a longer --warmup, or --clip; --on-nonfinite skip or"
                " rollback goes on without the step."
            )
        if self.in_a_row >= config.nonfinite_limit:
            raise TrainError(
                f"{text} That makes {self.in_a_row} such steps in a row (--nonfinite-limit) with"
                f" --on-nonfinite {config.on_nonfinite}. Try a lower --lr, a longer --warmup, or"
                " --clip."
            )
        if config.on_nonfinite == "skip":
            self.alert(f"{text} The step is left out.")
            return Verdict.SKIP
        self.alert(f"{text} Going back to the last checkpoint.")
        return Verdict.ROLLBACK


@dataclass(frozen=True, order=True)
class Location:
    """Where a number first was not finite. Locations sort by time.

    Attributes:
        micro_batch: from 0. backward: in the backward pass. stage: of a pipeline, in the order of
            the pass. turn: how many units' inputs and outputs were checked before.
        what: "the output", "a gradient in the backward pass", ...
    """

    micro_batch: int
    backward: bool
    stage: int
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
    stage: int = 0
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
            # A backward pass comes to the last stage first
            stage = -self.stage if backward else self.stage
            self.found = Location(
                self.micro_batch, backward, stage, self.turn, self.rank, unit, what
            )

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
    if run.pipeline is not None:
        # The first call of a schedule infers shapes on arbitrary values, which are not to be judged
        repeat(lambda: None)
        run.optimizer.zero_grad()
    restore(before, 0, 1)
    with NonFiniteHooks(engine, ranks.rank, run.part.stage) as hooks:
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


@dataclass
class Pace:
    """Compares the seconds that each rank computes. See [Note: an alert does not flap].
    `factor`: a rank is slow above this multiple of the others' median; 0 names none. `slow`: the
    slow rank.
    """

    factor: float
    slow: int | None = None
    _seen: deque[tuple[float, ...]] = field(default_factory=lambda: deque(maxlen=WINDOW))
    _alerts: int = 0
    #: The rank that may be named next, or the named one, and for how many looks in a row the alert
    #: or its end has been due.
    _next: int | None = None
    _due: int = 0

    def look(self, seconds: Sequence[float]) -> str | None:
        """Add one step's seconds, by rank. Returns a sentence when a rank gets slow or keeps up."""
        self._seen.append(tuple(seconds))
        if self.factor <= 0 or len(seconds) < 2 or len(self._seen) < WINDOW:
            return None
        own = [statistics.median(column) for column in zip(*self._seen, strict=True)]
        named = self.slow is not None
        rank = self.slow if self.slow is not None else own.index(max(own))
        others = statistics.median(own[:rank] + own[rank + 1 :])
        lag = own[rank] - others
        if named:  # well below the factor, for a while
            limit = 1 + (self.factor - 1) / 2
            due, needed = own[rank] <= limit * others or lag <= FLOOR / 2, WINDOW
        else:
            due = own[rank] > self.factor * others and lag > FLOOR
            needed = WINDOW << (self._alerts - 1) if self._alerts else 1
        self._due = (self._due if rank == self._next else 0) + 1 if due else 0
        self._next = rank if due or named else self._next
        if self._due < needed:
            return None
        self._due = 0
        if named:
            self.slow = self._next = None
            return f"rank {rank} keeps up again"
        self.slow, self._alerts = rank, self._alerts + 1
        return (
            f"rank {rank} is slow: it computes {1000 * own[rank]:.0f} ms a step, the others"
            f" {1000 * others:.0f} ms (medians of {WINDOW} steps),"
            f" {own[rank] / max(others, 1e-9):.1f} times as long, and all wait for it"
        )
