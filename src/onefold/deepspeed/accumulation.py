"""When an engine reduces gradients and steps: accumulation over micro-batches.

| gradients are reduced                    | stages 0 and 1                    | stages 2 and 3                    |
|------------------------------------------|-----------------------------------|-----------------------------------|
| the engine counts micro-batches          | in the boundary's backward pass   | in every backward pass            |
| `managed_gradient_accumulation: false`   | in `step()`                       | in every backward pass            |
| inside `coalesce_grad_reduction()`       | when the block ends               | when the block ends               |
| inside `no_sync()`                       | in the next pass outside, or step | it raises                         |
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import onefold
from onefold.deepspeed.data_loader import MicroBatches
from onefold.deepspeed.misuse import EngineMisuse


class Accumulation(MicroBatches):
    """The part of `DeepSpeedEngine` that knows the boundaries. The engine sets the attributes."""

    micro_steps: int
    #: Set by the user, in place of counting; None counts.
    _is_gradient_accumulation_boundary: bool | None
    _inside_no_sync: bool
    _coalescing: bool
    _stepping: bool

    def is_gradient_accumulation_boundary(self) -> bool:
        """Whether the current micro-batch ends with an optimizer step.

        With `managed_gradient_accumulation: false` it is true only while `step` runs.
        """
        if not self.settings.managed_accumulation:
            return self._stepping
        if self._is_gradient_accumulation_boundary is not None:
            return self._is_gradient_accumulation_boundary
        return (self.micro_steps + 1) % self._accumulation == 0

    def set_gradient_accumulation_boundary(self, is_boundary: bool) -> None:
        """Set whether micro-batches end with an optimizer step, instead of counting them.

        Call it before the micro-batch's backward pass. It holds until the next call.

        Raises:
            EngineMisuse: with `managed_gradient_accumulation: false`, every `step()` is a boundary.
        """
        self._refuse_unmanaged("set_gradient_accumulation_boundary()")
        self._is_gradient_accumulation_boundary = is_boundary

    @property
    def reduces_now(self) -> bool:
        """Whether a backward pass that runs now ends with reduced gradients, if the recipe does not
        reduce in every pass.
        """
        return not self._coalescing and self.is_gradient_accumulation_boundary()

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Run passes inside under `onefold.no_sync`, at stages 0 and 1.

        `step()` raises inside, so these micro-batches are not counted.

        Raises:
            EngineMisuse: the stage divides gradients, or the call is inside another such block.
        """
        if self.settings.stage > 1:
            raise EngineMisuse(
                f"no_sync context manager is incompatible with ZeRO stage {self.settings.stage},"
                " which divides gradients: use engine.coalesce_grad_reduction(), or"
                " onefold.no_sync(engine.module)."
            )
        self._refuse_nesting("no_sync()")
        self._inside_no_sync = True
        try:
            with onefold.no_sync(self.module):
                yield
        finally:
            self._inside_no_sync = False

    @contextlib.contextmanager
    def coalesce_grad_reduction(self) -> Iterator[None]:
        """Reduce the gradients of all backward passes inside once, when the block ends.

        Meanwhile every rank holds its whole gradients. `step()` raises inside. If the block raises,
        nothing is reduced at its end.

        Raises:
            EngineMisuse: the call is inside `no_sync` or another such block, or
                `managed_gradient_accumulation` is false.
        """
        self._refuse_unmanaged("coalesce_grad_reduction()")
        self._refuse_nesting("coalesce_grad_reduction()")
        runtime = onefold.engine_of(self.module)
        self._coalescing = runtime.progress.holds_whole = True
        boundary = self._is_gradient_accumulation_boundary
        try:
            yield
            self._coalescing, self._is_gradient_accumulation_boundary = False, True
            runtime.reduce_pending()
        finally:
            self._coalescing = runtime.progress.holds_whole = False
            self._is_gradient_accumulation_boundary = boundary

    def _refuse_nesting(self, call: str) -> None:
        if self._inside_no_sync or self._coalescing:
            raise EngineMisuse(
                f"no_sync context manager reentry is unsupported: engine.{call} cannot be nested"
                " inside engine.no_sync() or engine.coalesce_grad_reduction(). Leave that first."
            )

    def _refuse_unmanaged(self, call: str) -> None:
        if not self.settings.managed_accumulation:
            raise EngineMisuse(
                f"engine.{call} decides when gradients are reduced, and so does"
                ' "managed_gradient_accumulation": false, where each step() is a boundary: leave'
                " one of them out."
            )
