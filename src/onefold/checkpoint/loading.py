"""Loading: at any stage, on any number of ranks. Each rank reads the bytes it will own; every byte
that was read is checked.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import nn

import onefold.checkpoint.per_rank as per_rank
from onefold.checkpoint.apply import (
    ModelFit,
    StateReader,
    fill_model,
    fill_optimizers,
    fit_groups,
    fit_model,
)
from onefold.checkpoint.background import Background
from onefold.checkpoint.errors import CheckpointError
from onefold.checkpoint.folder import checkpoints, latest, of_run
from onefold.checkpoint.folder_source import FolderSource
from onefold.checkpoint.manifest import MANIFEST
from onefold.checkpoint.per_rank import Lost
from onefold.checkpoint.saving import Optimizers, check_moment, optimizers_of
from onefold.checkpoint.source import Item, Source, closed_on_error, read_by_another
from onefold.checkpoint.together import Said, Together, meet, raise_first, worded
from onefold.checkpoint.values import decode
from onefold.checkpoint.views import Prefetched
from onefold.runtime.engine import Engine
from onefold.runtime.registry import engine_of
from onefold.runtime.state.contents import beside_parameters


@dataclass(frozen=True)
class Loaded:
    """What a checkpoint said.

    Attributes:
        path: its folder.
        step: as it was given to `save`.
        extra: the same.
        saved_by: versions, world size, stage and recipe of the run that saved.
        data: what this rank gave as data, where each rank may have it: all had the same, or there
            are as many ranks as then.
        missing: with strict=False, names that the checkpoint does not have.
        unexpected: with strict=False, names that the model does not have.
        notes: a sentence for each thing that could not be resumed as it was.
    """

    path: Path
    step: int | None = None
    extra: Any = None
    saved_by: Mapping[str, Any] = field(default_factory=dict)
    data: Any = None
    missing: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


def load(
    path: str | Path,
    *,
    model: nn.Module | None = None,
    optimizer: Optimizers = None,
    scheduler: Any = None,
    scaler: Any = None,
    data: Any = None,
    strict: bool = True,
    rng: bool = True,
) -> Loaded:
    """Load what `save` has written, on whatever ranks and at whatever stage there are now.
    Collective.

    Args:
        path: a checkpoint; or a folder of checkpoints, of which the newest is taken; or a DeepSpeed
            checkpoint; or, for the model alone, a Hugging Face folder.
        model: what `onefold.shard` returned; None reads step and extra only.
        optimizer: one or several, with the groups of the one that was saved; what it held before is
            gone.
        scheduler: things with load_state_dict().
        scaler: the same.
        data: the same.
        strict: names must agree.
        rng: restore the random generators (Python, numpy, torch, CUDA); see
            `onefold.checkpoint.per_rank` for other numbers of ranks.

    Raises:
        CheckpointError: on every rank. Model and optimizer are as they were if there is no such
            checkpoint or it is of another model; if bytes were found damaged while they were read,
            both are undefined, and an earlier checkpoint must be loaded.
    """
    things = {"scheduler": scheduler, "scaler": scaler, "data": data}
    if model is None:
        return _without_model(Path(path), optimizer, *things.values())
    engine = engine_of(model)
    engine.refuse_changes("load")
    meet(engine, "load")
    with contextlib.closing(_open(engine, Path(path))) as source:
        return _apply(engine, model, source, None, optimizer, things, strict, rng)


class Loading(Background):
    """A load under way. `.wait()` applies what was read and returns `Loaded`; collective."""

    tell_steps = False

    def __init__(
        self,
        engine: Engine,
        source: Source,
        ahead: Prefetched,
        finish: Any,
        begun: float,
        path: Path,
    ) -> None:
        self._finish, self._source = finish, source
        super().__init__(engine, path, ahead.read_all, begun)

    def wait(self, timeout: float | None = None) -> Loaded:  # type: ignore[override]
        error: Exception | None = None
        try:
            super().wait(timeout)
        except TimeoutError:
            raise
        except Exception as failure:
            error = failure
        try:
            return self._finish(error)
        finally:
            self._source.close()


def load_async(
    path: str | Path,
    *,
    model: nn.Module,
    optimizer: Optimizers = None,
    scheduler: Any = None,
    scaler: Any = None,
    data: Any = None,
    strict: bool = True,
    rng: bool = True,
) -> Loading:
    """As `load`, but this rank's bytes are read into host memory behind whatever the program does
    meanwhile; `.wait()` applies them.

    It takes as many bytes of host memory as this rank reads. Nothing of model and optimizer changes
    before `.wait()`.
    """
    begun = time.perf_counter()
    engine = engine_of(model)
    engine.refuse_changes("load_async")
    meet(engine, "load_async")
    with closed_on_error(_open(engine, Path(path))) as source, Together.of(engine).each_rank():
        ahead = Prefetched(engine, source.fitted(model), optimizer is not None)

    def finish(error: Exception | None) -> Loaded:
        # Ranks read at different speeds: they wait longer here than `meet` would
        Together.of(engine).agree(error)
        things = {"scheduler": scheduler, "scaler": scaler, "data": data}
        return _apply(engine, model, source, ahead, optimizer, things, strict, rng)

    return Loading(engine, source, ahead, finish, begun, Path(path))


def source_of(path: Path) -> Source:
    """Whatever lies at `path`. Raises: CheckpointError: nothing that can be read."""
    if (path / MANIFEST).exists():
        return FolderSource(path)
    if path.is_dir():
        path = of_run(path)
        newest = latest(path)
        if newest is not None:
            return FolderSource(newest)
        unnumbered = sorted(folder.name for _, folder in checkpoints(path))
        if unnumbered:
            raise CheckpointError(
                f"{path} holds checkpoints whose step cannot be told ({', '.join(unnumbered[:5])}):"
                " saved without step=, or damaged. Name one."
            )
        if (other := read_by_another(path)) is not None:
            return other
    there = "a folder without a checkpoint" if path.is_dir() else "nothing"
    raise CheckpointError(
        f"{path} is {'a file' if path.is_file() else there}; expected a checkpoint that onefold.save wrote, a folder of them, a"
        " run's output folder, a DeepSpeed or a Hugging Face folder."
    )


def _open(engine: Engine, path: Path) -> Source:
    """Collective: all ranks read the same checkpoint, and all raise if one cannot."""
    together = Together.of(engine)
    with contextlib.ExitStack() as on_error:
        with together.each_rank():
            source = on_error.enter_context(closed_on_error(source_of(path)))
        seen = sorted(set(together.all_gather(source.describe)))
        if len(seen) > 1:
            raise CheckpointError(
                f"{path}: ranks see different checkpoints ({', '.join(seen)}). It must be on a file"
                " system that all share."
            )
        return source


def _apply(
    engine: Engine, model: nn.Module, source: Source, ahead: Source | None, optimizer: Any, things: dict[str, Any], strict: bool,
    rng: bool,
) -> Loaded:  # fmt: skip
    """`ahead`: what was read of `source` before, under the model's names. Collective."""
    together, optimizers = Together.of(engine), optimizers_of(optimizer)
    # It has more than weights and states
    own = source if isinstance(source, FolderSource) else None
    values: dict[str, Any] = {}
    reader: Source = source if ahead is None else ahead
    fit: ModelFit | None = None
    with together.each_rank():  # everything that can be wrong, before anything is changed
        values = _values(source, together, things)
        check_moment(engine, "load", optimizer)
        if ahead is None:
            reader = source.fitted(model)
        fit = fit_model(engine, model, reader, strict)
        if own is not None:
            _fit_extra_state(engine, model, own, fit, strict)
        if optimizers:
            fit_groups(engine, optimizers, reader)
    assert fit is not None
    reading = StateReader(engine, reader)
    fill_model(engine, fit, reading)
    if optimizers:
        fill_optimizers(engine, optimizers, reading)
    beside, lost = _Beside(extra=source.extra), None
    if own is not None and reading.error is None:
        try:  # each rank reads its own: what one meets is told to all below
            beside = _Beside.of(own, together, rng)
        except Exception as failure:
            reading.error = failure
    if own is not None and optimizers:
        lost = Lost.read(engine, own, together, reading)
    # From here on all of it was read, and is sound
    _verify(together, own, reading.error)
    if reader.rules is not None:
        reader.rules.remember()  # an export goes back through them
    _set_extra_state(model, beside.extra_state)
    if lost is not None:
        lost.apply()
    else:
        engine.residuals.forget()
    if beside.random is not None:
        per_rank.restore(beside.random, together.rank, beside.streams)
    with together.each_rank():
        for name, value in values.items():
            things[name].load_state_dict(value)
    return Loaded(
        Path(source.folder or ""),
        source.step,
        beside.extra,
        source.saved_by,
        beside.data,
        tuple(fit.missing),
        tuple(fit.unexpected),
        (lost.note,) if lost is not None and lost.note else (),
    )


@dataclass(frozen=True)
class _Beside:
    """What a checkpoint has for this rank beside weights and states; `streams`: of how many ranks
    it has generators. `data`: None where it cannot be told which rank's is this one's.
    """

    random: dict[str, Any] | None = None
    streams: int = 0
    extra: Any = None
    extra_state: dict[str, Any] = field(default_factory=dict)
    data: Any = None

    @classmethod
    def of(cls, source: FolderSource, together: Together, rng: bool) -> _Beside:
        streams, random = sum(item.kind == "rng" for item in source.records), None
        if rng and streams:
            text = bytes(source.whole(Item("rng", str(together.rank % streams))).numpy())
            random = decode(json.loads(text))
        extra, extra_state = source.value("extra"), source.value("extra_state") or {}
        data = _of_rank(source.value("data") or {"all": None}, together)
        return cls(random, streams, extra, extra_state, data)


def _of_rank(data: dict[str, Any], together: Together) -> Any:
    """What this rank gave as `data`; None where it cannot be told which rank's is this one's."""
    if "all" in data:
        return data["all"]
    return data["ranks"][together.rank] if len(data["ranks"]) == together.size else None


def _verify(together: Together, own: FolderSource | None, error: Exception | None) -> None:
    """Whether all ranks could read, and what they have read is what the manifest says."""
    checks = own.checks if own is not None else []
    said = together.gather((None if error is None else worded(error), checks))
    told: Said | None = None
    if together.rank == 0:
        try:
            raise_first([e for e, _ in said])
            if own is not None:
                own.compare_with([check for _, some in said for check in some])
        except CheckpointError as failure:
            told = worded(failure)
    checks.clear()
    told = together.from_first(told)
    if told is not None:
        raise told.raised()


def _values(source: Source, together: Together, things: dict[str, Any]) -> dict[str, Any]:
    """The stored states of the `things` that were given, by name."""
    out: dict[str, Any] = {}
    for name, thing in things.items():
        if thing is None:
            continue
        if not callable(getattr(thing, "load_state_dict", None)):
            raise CheckpointError(f"{name}={thing!r}: expected something with load_state_dict().")
        found = source.value(name)
        if found is None:
            what = "position in the data" if name == "data" else name
            raise CheckpointError(f"{source.describe} holds no {what}; leave {name} out of load().")
        if name == "data" and "ranks" in found and len(found["ranks"]) != together.size:
            raise CheckpointError(
                f"{source.describe}: each of its {len(found['ranks'])} ranks was elsewhere in its"
                f" data, which cannot be divided among {together.size}. Load on as many ranks, or"
                " leave data out and give a position that is the same on every rank when saving."
            )
        out[name] = _of_rank(found, together) if name == "data" else found
    return out


def _fit_extra_state(
    engine: Engine, model: nn.Module, source: FolderSource, fit: ModelFit, strict: bool
) -> None:
    """Enter in `fit` how extra states differ. Raises: CheckpointError: under `strict`."""
    theirs = set(source.state.get("extra_state", {}))
    ours = set(beside_parameters(engine, model)[1])
    if strict and theirs != ours:
        raise CheckpointError(
            f"{source.describe} is of another model: extra states are missing in it"
            f" ({', '.join(sorted(ours - theirs)[:5]) or 'none'}) or unknown to this model"
            f" ({', '.join(sorted(theirs - ours)[:5]) or 'none'}). Give strict=False to load what"
            " fits."
        )
    fit.missing.extend(sorted(ours - theirs))
    fit.unexpected.extend(sorted(theirs - ours))


def _set_extra_state(model: nn.Module, odd: dict[str, Any]) -> None:
    for name, value in odd.items():
        owner = dict(model.named_modules()).get(name.removesuffix("_extra_state").rstrip("."))
        if owner is not None and type(owner).get_extra_state is not nn.Module.get_extra_state:
            owner.set_extra_state(value)


def _without_model(path: Path, *things: Any) -> Loaded:
    if any(thing is not None for thing in things):
        raise CheckpointError(
            "load() was given no model; without one it reads step and extra only."
        )
    with contextlib.closing(source_of(path)) as source:
        if not isinstance(source, FolderSource):
            return Loaded(path)
        return Loaded(source.folder, source.step, source.value("extra"), source.saved_by)
