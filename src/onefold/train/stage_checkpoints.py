"""Checkpoints of a run with `--pp`: each stage saves its own part, and the first rank joins them.

    .step-00000100.4f1c.unfinished/    made by the first rank
      stage-0/ ... stage-1/            saved by the ranks of each stage, in the background
    step-00000100/                     joined (`join_stages`), then renamed by the first rank

A start with as many stages loads its own part, with its random generators. Any other start, also one
without a pipeline, loads the whole.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from onefold.checkpoint.background import Background
from onefold.checkpoint.checkpointer import Checkpointer
from onefold.checkpoint.errors import CheckpointError
from onefold.checkpoint.folder import Unfinished
from onefold.checkpoint.loading import Loaded, load
from onefold.checkpoint.manifest import MANIFEST
from onefold.checkpoint.saving import save, save_async
from onefold.checkpoint.stages import join_stages
from onefold.checkpoint.together import raise_first, worded
from onefold.processes.ranks import Ranks

if TYPE_CHECKING:
    from onefold.train.prepare import Run


def folder_of(stage: int) -> str:
    """Return the name of a stage's folder in a checkpoint."""
    return f"stage-{stage}"


@contextlib.contextmanager
def each_rank(ranks: Ranks) -> Iterator[None]:
    """Run a block of work. At its end, an error about checkpoints on one rank is raised on all."""
    error: Exception | None = None
    try:
        yield
    except (CheckpointError, OSError) as raised:
        error = raised
    raise_first(ranks.gather(None if error is None else worded(error)))


class SavingStages:
    """A save under way in all stages.

    Attributes:
        path: the checkpoint.
    """

    def __init__(self, path: Path, own: Background, ranks: Ranks) -> None:
        self.path, self.own, self._ranks = path, own, ranks

    @property
    def done(self) -> bool:
        """Whether all stages have saved their parts. Collective."""
        return self._ranks.least(float(self.own.done)) == 1.0

    @property
    def seconds(self) -> float | None:
        return self.own.seconds

    @property
    def stall_s(self) -> float:
        return self.own.stall_s


class StageCheckpointer(Checkpointer):
    """The checkpoints of a run in stages: `save` and `wait` are collective over all of them.

    Args:
        ranks: of all stages. stage: this rank's.

    Attributes:
        saving: the save under way in the background.
    """

    def __init__(self, root: Path, ranks: Ranks, stage: int, model: nn.Module, **how: Any) -> None:
        self.ranks, self.stage = ranks, stage
        self.saving: SavingStages | None = None
        self._place: Unfinished | None = None  # on the first rank
        with each_rank(ranks):
            super().__init__(root, model=model, **how)

    def _take(self) -> None:
        if self.ranks.is_first:
            super()._take()

    def save(self, step: int, **parts: Any) -> Path:
        """Save a checkpoint for `step`, as `Checkpointer.save` does. Collective."""
        self.wait()
        target = self.root / f"step-{step:08d}"

        def begin() -> Path:
            self._place = Unfinished(target, overwrite=True)
            return self._place.folder

        folder = self.ranks.on_first(begin)
        if self.stage:
            parts["tokenizer"] = None  # the first stage's is that of the whole
        with self._or_removed(), each_rank(self.ranks):
            act: Callable[..., Any] = save_async if self.asynchronous else save
            own = act(folder / folder_of(self.stage), model=self.model, step=step, **parts)
        if self.asynchronous:
            self.saving = SavingStages(target, own, self.ranks)
        else:
            self._join(target)
        return target

    def wait(self) -> None:
        """Wait until no save is under way. Collective. Raises: CheckpointError: the last one failed."""
        saving, self.saving = self.saving, None
        if saving is not None:
            with self._or_removed(), each_rank(self.ranks):
                saving.own.wait()
            self._join(saving.path)

    def _join(self, target: Path) -> None:
        with self._or_removed():
            self.ranks.on_first(lambda: self._joined(target))

    def _joined(self, target: Path) -> None:
        assert self._place is not None
        join_stages(self._place.folder)
        self._place.commit(overwrite=True)
        self._place = None
        self._prune(target)

    @contextlib.contextmanager
    def _or_removed(self) -> Iterator[None]:
        """Remove the unfinished folder if the block fails."""
        try:
            yield
        except BaseException:
            if self._place is not None:
                self._place.discard()
                self._place = None
            raise


def load_stage(run: Run, path: Path, states: Mapping[str, Any]) -> Loaded:
    """Load this rank's stage of a checkpoint, of any number of stages. Collective over all stages.

    Raises:
        CheckpointError: on every rank.
    """
    part, loaded = run.part, None
    saved = len(list(path.glob(f"stage-*/{MANIFEST}")))
    alike = saved == part.stages
    with each_rank(run.ranks):
        where = path / folder_of(part.stage) if alike else path
        # Other generators than the first stage's are not in the whole
        rng = alike or part.stage == 0
        loaded = load(where, **states, strict=alike, rng=rng)
        if loaded.missing:
            raise CheckpointError(
                f"{path} is of another model: {', '.join(loaded.missing[:5])} are missing in it."
            )
    assert loaded is not None
    if not rng:
        torch.manual_seed(torch.initial_seed() + 1 + (loaded.step or 0))
    return loaded
