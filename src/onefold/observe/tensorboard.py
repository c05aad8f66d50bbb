"""Rows of figures for TensorBoard."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from types import TracebackType
from typing import Any

from onefold.observe.meter import flat


class TensorBoard:
    """Writes rows (of `Meter.step`, or any dictionary of numbers) as scalars; a context manager.

    Args:
        folder: where the event files go; `tensorboard --logdir FOLDER` shows them.
        after: the step to go on from; what stands there for later ones is void. None begins anew.

    Raises:
        ModuleNotFoundError: TensorBoard is not installed; the message says how to install it.
    """

    def __init__(self, folder: str | Path, *, after: int | None = None) -> None:
        try:
            self._module: Any = import_module("torch.utils.tensorboard")
        except ImportError as error:
            raise ModuleNotFoundError(
                "writing for TensorBoard needs the package tensorboard, which is not installed: pip"
                " install tensorboard",
                name="tensorboard",
            ) from error
        self._folder = str(folder)
        self._open(after)

    def _open(self, after: int | None) -> None:
        void = None if after is None else after + 1
        self._writer: Any = self._module.SummaryWriter(self._folder, purge_step=void)

    def write(self, row: Mapping[str, Any], step: int | None = None) -> None:
        """Every number of `row` as a scalar at `step` (None takes row["step"])."""
        at = step if step is not None else row.get("step")
        for name, value in flat(row).items():
            if name != "step":
                self._writer.add_scalar(name.replace(" ", "_"), value, at)

    def cut(self, after: int) -> None:
        """Void what was written for steps beyond `after`."""
        self.close()
        self._open(after)

    def close(self) -> None:
        self._writer.close()

    def __enter__(self) -> TensorBoard:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
