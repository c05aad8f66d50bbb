"""The steps of a run that are recorded: one for the report, or those that `--trace` names."""

from __future__ import annotations

import contextlib
from pathlib import Path

from onefold.observe.measure import measured
from onefold.observe.trace import Recording, record
from onefold.train.prepare import Run
from onefold.train.schedule import steps_of


class Window:
    """Records the run's steps from `first` to `last`; what it saw is put into the run."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self.first, self.last = steps_of(run.config.trace, run.steps)
        if run.config.trace is None and run.start:  # this process's first steps also build states and learn orders
            self.first = self.last = min(run.start + self.first, run.steps - 1)
        self._stack = contextlib.ExitStack()
        self._recording: Recording | None = None
        self._whole = 0

    def is_near(self, step: int) -> bool:
        """Whether `step` is recorded, or the next one is the first that will be: both are to begin and end by themselves."""
        return self._recording is not None or step + 1 == self.first

    def begin(self, step: int) -> None:
        """A step is about to begin."""
        if step == self.first:
            profiler = self.run.config.torch_profiler
            seen = record(self.run.model, self.run.optimizer, activations=True, torch_profiler=profiler)
            self._recording = self._stack.enter_context(seen)

    def end(self, step: int, over: bool, whole: bool = True) -> None:
        """A step has ended; `over`: it was the run's last. `whole`: its update was applied; a window without such a step moves on."""
        self._whole += whole and self._recording is not None
        if self._recording is not None and (step >= self.last or over):
            self._stack.close()
            recording, self._recording = self._recording, None
            if not self._whole:
                self.first = self.last = step + 1
                return
            self.run.recording = recording
            self.run.measured = measured(self.run.model, self.run.optimizer, recording)

    def close(self) -> None:
        """The run broke off."""
        self._recording = None
        self._stack.close()

    def write(self, folder: Path) -> Path | None:
        """This rank's trace, if the run was asked for one."""
        config = self.run.config
        if self.run.recording is None or (config.trace is None and not config.torch_profiler):
            return None
        return self.run.recording.write_chrome(folder / f"trace-rank{self.run.ranks.rank}.json")
