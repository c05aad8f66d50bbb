"""Save a checkpoint: every rank writes what it owns, and the first rank completes the folder.

all     collect parts ─► [copy to the host]                     the training waits (for an asynchronous save: only here)
first   make the hidden folder
all     write rank-0000R.safetensors, flush ─► report
first   state.json, HF's files, manifest, flush, check every file, rename          the commit
all     learn whether it worked
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import operator
import time
from collections.abc import Collection, Mapping, Sequence
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from onefold.checkpoint.background import Background, Copying
from onefold.checkpoint.errors import CheckpointError
from onefold.checkpoint.folder import OWNER, Unfinished, flush
from onefold.checkpoint.manifest import (
    STATE,
    FileRecord,
    Manifest,
    Record,
    rank_file,
    write_manifest,
)
from onefold.checkpoint.parts import (
    Report,
    collect,
    records,
    saved_by,
    values_of,
    write_parts,
)
from onefold.checkpoint.together import Together, meet, raise_different, raise_first, worded
from onefold.optim.clip import across_stages
from onefold.reading import LARGEST
from onefold.runtime.agree import difference
from onefold.runtime.engine import Engine
from onefold.runtime.hooks import engine_of
from onefold.runtime.state.dicts import beside_parameters
from onefold.wording import in_words, readable

Models = nn.Module | Sequence[nn.Module]
Optimizers = torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None


def save(
    path: str | Path,
    *,
    model: Models,
    optimizer: Optimizers = None,
    scheduler: Any = None,
    scaler: Any = None,
    data: Any = None,
    extra: Any = None,
    step: int | None = None,
    tokenizer: Any = None,
    overwrite: bool = False,
    frozen: bool | Collection[str] = True,
) -> Path:
    """Write a checkpoint folder that loads on any number of ranks, at any stage. Collective.
    Returns after the files have been flushed to disk.

    Args:
        path: the folder to create, on a file system that all ranks share.
        model: the return value of `onefold.shard`; or, of a pipeline, the list of this rank's stages.
            The ranks of all stages then call it together, and the checkpoint is that of the whole
            model. Scheduler, scaler, data and extra are those of the first stage.
        optimizer: one torch optimizer over its parameters, or several.
        scheduler: anything with state_dict(); the first rank's is stored.
        scaler: the same.
        data: the data loader's position: anything with state_dict(), or a dict. Every rank's is
            stored.
        extra: further values, stored from the first rank: numbers, strings, lists, dicts, tensors,
            arrays. Values that need pickle are refused.
        step: the number of steps done. `onefold.load(...).step` returns it. The checkpoint with
            the greatest step counts as the newest.
        tokenizer: anything with save_pretrained(folder), stored in the checkpoint's folder.
        overwrite: replace a checkpoint at `path`, atomically, after the new one is complete.
        frozen: also write parameters that take no gradient; or the names of those to write.
            Without them (for instance the base model under adapters, which is stored elsewhere)
            load with strict="trained".

    Raises:
        CheckpointError: on every rank. No part of the new checkpoint remains, and an older one at
            `path` is unchanged.
    """
    things = {"scheduler": scheduler, "scaler": scaler, "data": data, "extra": extra}
    _Save("save", path, model, optimizer, things, step, tokenizer, overwrite, frozen)()
    return Path(path)


def save_async(
    path: str | Path,
    *,
    model: Models,
    optimizer: Optimizers = None,
    scheduler: Any = None,
    scaler: Any = None,
    data: Any = None,
    extra: Any = None,
    step: int | None = None,
    tokenizer: Any = None,
    overwrite: bool = False,
    frozen: bool | Collection[str] = True,
) -> Background:
    """Save as `save` does, but in the background. The call returns at once; a thread copies the
    state to host memory and then writes it.

    The next optimizer step waits for the copy. Do not write to parameters in other ways before the
    copy is complete: the save detects such writes (except through `.data`) and fails. State on NVMe
    is not copied, since host memory may not hold it. A model with such state is saved before the
    call returns.

    An earlier save of this model that is still under way is waited for first. The copy takes as
    many bytes of host memory as this rank's file. The buffer is kept for later saves.

    Returns:
        An object with `.wait()`, `.done`, `.stall_s` and `.seconds`. `.wait()` returns the path or
        raises the save's error. Without `.wait()`, the next optimizer step raises the error.
    """
    begun = time.perf_counter()
    things = {"scheduler": scheduler, "scaler": scaler, "data": data, "extra": extra}
    work = _Save("save_async", path, model, optimizer, things, step, tokenizer, overwrite, frozen)
    if work.copying is None:  # state on a disk is not copied
        work()
        return Background(work.engines, Path(path), lambda: None, begun)
    return Background(work.engines, Path(path), work, begun, work.copying)


def begun(call: str, model: Models) -> tuple[list[nn.Module], list[Engine], Together]:
    """Begin a call about a model, or about this rank's stages of a pipeline: wait until all ranks have
    made it. Returns the modules, their engines, and the ranks that take part.
    """
    models = [model] if isinstance(model, nn.Module) else list(model)
    engines = [engine_of(each) for each in models]
    for engine in engines:
        engine.check_moment(call)
        meet(engine, call)
    if isinstance(model, nn.Module):
        return models, engines, Together.of(engines[0])
    return models, engines, Together.of(engines[0], across_stages(engines))


def _own_buffers(engine: Engine, model: nn.Module) -> Mapping[str, Any]:
    """Return the buffers of which ranks have values of their own. Collective over the model's ranks."""
    buffers: dict[str, torch.Tensor] = {}
    if engine.buffers.several:
        with Together.of(engine).each_rank():
            buffers, _ = beside_parameters(engine, model)
    return engine.buffers.own(buffers)


def step_of(step: Any) -> int | None:
    """Return `step` as an int. Raises: CheckpointError: it is not an integer, or is negative."""
    try:
        number = None if step is None else operator.index(step)
    except TypeError:
        number = -1
    if isinstance(step, bool) or (number is not None and number < 0):
        raise CheckpointError(f"step={step!r}: expected the number of steps done, 0 or more.")
    return number


def check_optimizers(optimizer: Optimizers) -> None:
    """Check that `optimizer` holds optimizers. Raises: CheckpointError: otherwise."""
    given = optimizers_of(optimizer)
    known = all(isinstance(one, torch.optim.Optimizer) for one in given)
    if not known or len({id(one) for one in given}) < len(given):
        raise CheckpointError(
            f"optimizer={optimizer!r}: expected a torch.optim.Optimizer, or a list of them, each once."
        )


def optimizers_of(optimizer: Any) -> list[torch.optim.Optimizer]:
    """Return the given optimizer or optimizers as a list; [] for None."""
    if optimizer is None:
        return []
    return list(optimizer) if isinstance(optimizer, (list, tuple)) else [optimizer]


def kinds_of(things: Sequence[Any]) -> str:
    """Return the classes of what one argument was given, in words."""
    return ", ".join(type(each).__name__ for each in things if each is not None) or "None"


class _Save:
    """A save. To make it is the part during which the training must wait. To call it writes the
    checkpoint, also in the background.

    Attributes:
        folder: the hidden folder that all ranks write to.
        place: that folder as an object, on the first rank, which renames it.
        texts: objects that write a transformers model's own files.
    """

    copying: Copying | None = None
    place: Unfinished | None = None

    def __init__(
        self, call: str, path: str | Path, model: Models, optimizer: Optimizers, things: Mapping[str, Any], step: int | None,
        tokenizer: Any, overwrite: bool, frozen: bool | Collection[str],
    ) -> None:  # fmt: skip
        """Collective. Raises: CheckpointError: on every rank: what can be found before anything is
        written.
        """
        models, self.engines, self.together = begun(call, model)
        engines, together, self.overwrite = self.engines, self.together, overwrite
        first, given, target = engines[0], optimizers_of(optimizer), Path(path).absolute()
        own = [_own_buffers(engine, each) for engine, each in zip(engines, models, strict=True)]
        with contextlib.ExitStack() as on_error:
            # All ranks learn of errors and of the folder's name before anything is written
            with together.each_rank():
                for engine in engines:  # first, since it may be collective
                    engine.uninitialized.refuse("save() would write")
                self.step = step_of(step)
                if tokenizer is not None and not hasattr(tokenizer, "save_pretrained"):
                    raise CheckpointError(
                        f"tokenizer={tokenizer!r}: expected something with save_pretrained()."
                    )
                for engine in engines:
                    check_optimizers(optimizer)
                    engine.transfers.check()
                ranks = together.ranks[0]
                self.parts = collect(engines, models, given, things, frozen, own, ranks)
                if call == "save_async" and not any(engine.on_disk for engine in engines):
                    self.copying = Copying(first, self.parts)
                if together.rank == 0:
                    self.place = on_error.enter_context(Unfinished(target, overwrite))
            mine = {"path": str(target), "step": self.step, "overwrite": overwrite}
            if together is Together.of(first):
                mine["optimizer"] = kinds_of(given)
            mine["frozen"] = frozen if isinstance(frozen, bool) else ", ".join(sorted(frozen))
            folder = str(self.place.folder) if self.place is not None else ""
            said = together.all_gather((folder, mine))
            raise_different("save", [given for _, given in said])
            for engine in engines:
                home = Together.of(engine)
                updates = home.all_gather(sorted(engine.group.updates))
                engine.group.updates.clear()
                if how := difference(dict(zip(home.ranks, updates, strict=True))):
                    raise CheckpointError(f"save() would write what is not one training: {how}")
            on_error.pop_all()
        self.folder = Path(said[0][0])
        self.data_of = Together.of(first).data_of  # of the first stage, if this is its first rank
        self.saver = saved_by(first) | {"world_size": together.size}
        named = (getattr(models[0], name, None) for name in ("config", "generation_config"))
        self.texts = [
            thing
            for thing in (*named, tokenizer)
            if callable(getattr(thing, "save_pretrained", None))
        ]

    def __call__(self) -> None:
        """Write and commit the checkpoint. Collective. Raises: CheckpointError: on every rank."""
        error: CheckpointError | None = None
        written: FileRecord | None = None
        pieces: list[Report] = []
        me = self.together.rank
        with self.place or contextlib.nullcontext():  # a failure removes the folder
            try:
                if self.copying is not None:
                    self.parts = self.copying.run()
                written, pieces = write_parts(self.folder, rank_file(me), self.parts)
            except OSError as failure:
                said = f"{in_words(failure)}. This rank writes {readable(self.parts.nbytes)}."
                error = CheckpointError(f"nothing can be written in {self.folder.parent}: {said}")
            except Exception as failure:
                error = worded(failure)
            reports = self.together.gather((error, written, pieces, self.parts.values))
            self.together.said_by_first(partial(self._finish, reports))

    def _finish(self, reports: list[Any]) -> None:
        """Complete and rename the folder, on the first rank."""
        assert self.place is not None
        raise_first([error for error, *_ in reports])
        files = {rank_file(rank): written for rank, (_, written, _, _) in enumerate(reports)}
        found = records([pieces for _, _, pieces, _ in reports])
        self._write(found, files, values_of([values for *_, values in reports], self.data_of))
        self._look(files)
        self.place.commit(self.overwrite)

    def _write(
        self, found: tuple[Record, ...], files: dict[str, FileRecord], state: dict[str, Any]
    ) -> None:
        text = json.dumps({**state, "step": self.step}) + "\n"
        if len(text) > LARGEST:
            raise CheckpointError(
                f"extra, data, scheduler and scaler are {len(text)} bytes of JSON, of which at most"
                f" {LARGEST} could be loaded: give large values as tensors."
            )
        (self.folder / STATE).write_text(text, encoding="utf-8")
        for thing in self.texts:
            thing.save_pretrained(str(self.folder))
        for path in sorted(self.folder.rglob("*")):
            name = path.relative_to(self.folder).as_posix()
            if path.is_file() and name not in files and name != OWNER:
                files[name] = FileRecord(hashlib.sha256(path.read_bytes()).hexdigest())
        created = datetime.now(UTC).isoformat(timespec="seconds")
        write_manifest(self.folder, Manifest(found, files, self.step, created, self.saver))
        # Before the rename: the folder's name must not reach the disk before its contents
        for path in self.folder.rglob("*"):
            if not path.name.startswith("rank-"):  # each rank has flushed its own file
                flush(path)

    def _look(self, files: Mapping[str, FileRecord]) -> None:
        """Check, before the rename, that the first rank sees every file."""
        for name in files:
            if not (self.folder / name).exists():
                raise CheckpointError(
                    f"{name} was written but is not seen by the first rank: {self.folder.parent}"
                    " must be on a file system that all ranks share."
                )
