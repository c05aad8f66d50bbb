"""Loading: at any stage, on any number of ranks. Each rank reads the bytes it will own; every byte
that was read is checked.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import nn

import onefold.checkpoint.rng as random_states
from onefold.checkpoint.apply import (
    Fit,
    Reading,
    fill_model,
    fill_optimizers,
    fit_groups,
    fit_model,
)
from onefold.checkpoint.background import Background, settle
from onefold.checkpoint.errors import CheckpointError
from onefold.checkpoint.folder import checkpoints, latest, of_run
from onefold.checkpoint.folder_source import FolderSource, compare
from onefold.checkpoint.huggingface import HuggingFaceSource, is_hugging_face
from onefold.checkpoint.manifest import MANIFEST
from onefold.checkpoint.prefetch import Prefetched
from onefold.checkpoint.residuals import Lost
from onefold.checkpoint.saving import Optimizers, check_moment, optimizers_of
from onefold.checkpoint.source import Item, Source, read_by_another
from onefold.checkpoint.together import Said, Together, meet, raise_first, worded
from onefold.checkpoint.values import decode
from onefold.runtime.checks import refuse_changes
from onefold.runtime.engine import Engine
from onefold.runtime.registry import engine_of
from onefold.runtime.state import beside_parameters


@dataclass(frozen=True)
class Loaded:
    """What a checkpoint said.

    Attributes:
        path: its folder. step, extra: as they were given to `save`. saved_by: versions, world size,
            stage and recipe of the run that saved.
        data: what this rank gave as data, where each rank may have it: all had the same, or there
            are as many ranks as then.
        missing, unexpected: with strict=False, names that the checkpoint has not, and that the
            model has not.
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
        scheduler, scaler, data: things with load_state_dict().
        strict: names must agree.
        rng: restore the random generators (Python, numpy, torch, CUDA); see
            `onefold.checkpoint.rng` for other numbers of ranks.

    Raises:
        CheckpointError: on every rank. Model and optimizer are as they were if there is no such
            checkpoint or it is of another model; if bytes were found damaged while they were read,
            both are undefined, and an earlier checkpoint must be loaded.
    """
    if model is None:
        return _without_model(Path(path), optimizer, scheduler, scaler, data)
    engine = engine_of(model)
    refuse_changes(engine, "load")
    meet(engine, "load")
    settle(engine)
    source = _open(engine, Path(path))
    try:
        return _apply(engine, model, source, None, optimizer, scheduler, scaler, data, strict, rng)
    finally:
        source.close()


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
    refuse_changes(engine, "load_async")
    meet(engine, "load_async")
    settle(engine)
    source = _open(engine, Path(path))
    error: Exception | None = None
    try:
        ahead = Prefetched(engine, _named_as(model, source), optimizer is not None)
    except Exception as failure:
        error = failure
    try:
        Together.of(engine).agree(error)
    except CheckpointError:
        source.close()
        raise

    def finish(error: Exception | None) -> Loaded:
        # Ranks read at different speeds: they wait longer here than `meet` would
        Together.of(engine).agree(error)
        return _apply(engine, model, source, ahead, optimizer, scheduler, scaler, data, strict, rng)

    return Loading(engine, source, ahead, finish, begun, Path(path))


def source_of(path: Path) -> Source:
    """Whatever lies at `path`.

    Raises:
        CheckpointError: nothing that can be read.
    """
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
        if is_hugging_face(path):
            return HuggingFaceSource(path)
    what = (
        "a file"
        if path.is_file()
        else "a folder without a checkpoint"
        if path.is_dir()
        else "nothing"
    )
    raise CheckpointError(
        f"{path} is {what}; expected a checkpoint that onefold.save wrote, a folder of them, a"
        " run's output folder, a DeepSpeed or a Hugging Face folder."
    )


def _open(engine: Engine, path: Path) -> Source:
    """Collective: all ranks read the same checkpoint, and all raise if one cannot."""
    together = Together.of(engine)
    source: Source | None = None
    error: Exception | None = None
    try:
        source = source_of(path)
    except (CheckpointError, OSError) as failure:
        error = failure
    said = together.all_gather(
        (None if error is None else worded(error), source.describe if source is not None else "")
    )
    try:
        raise_first([e for e, _ in said])
    except CheckpointError:
        if source is not None:
            source.close()
        raise
    assert source is not None
    seen = [name for _, name in said]
    if len(set(seen)) > 1:
        source.close()
        raise CheckpointError(
            f"{path}: ranks see different checkpoints ({', '.join(sorted(set(seen)))}). It must be"
            " on a file system that all share."
        )
    return source


def _named_as(model: nn.Module, source: Source) -> Source:
    """`source` under the names of `model`: those of a Hugging Face folder are of another library's
    model. Raises: CheckpointError.
    """
    return source.fitted(model) if isinstance(source, HuggingFaceSource) else source


def _apply(
    engine: Engine, model: nn.Module, source: Source, ahead: Source | None, optimizer: Any, scheduler: Any, scaler: Any, data: Any,
    strict: bool, rng: bool,
) -> Loaded:  # fmt: skip
    """`ahead`: what was read of `source` before, under the model's names. Collective."""
    together, optimizers = Together.of(engine), optimizers_of(optimizer)
    error: Exception | None = None
    values: dict[str, Any] = {}
    reader: Source = source if ahead is None else ahead
    fit: Fit | None = None
    try:  # everything that can be wrong, before anything is changed
        values = _values(source, together, scheduler, scaler, data)
        _check_things(scheduler=scheduler, scaler=scaler, data=data)
        check_moment(engine, "load", optimizer)
        if ahead is None:
            reader = _named_as(model, source)
        fit = fit_model(engine, model, reader, strict)
        if isinstance(source, FolderSource):
            _fit_extra_state(engine, model, source, fit, strict)
        if optimizers:
            fit_groups(engine, optimizers, reader)
    except Exception as failure:
        error = failure
    together.agree(error)
    assert fit is not None
    reading = Reading(engine, reader)
    fill_model(engine, fit, reading)
    if optimizers:
        fill_optimizers(engine, optimizers, reading)
    beside, lost = _Beside(), None
    if isinstance(source, FolderSource) and reading.error is None:
        try:  # each rank reads its own: what one meets is told to all below
            beside = _Beside.of(source, together, rng)
        except Exception as failure:
            reading.error = failure
    if isinstance(source, FolderSource) and optimizers:
        lost = Lost.read(engine, source, together, reading)
    _verify(together, source, reading.error)
    rules = getattr(reader, "rules", None)
    if rules is not None:
        rules.remember()  # an export goes back through them
    if isinstance(source, FolderSource):
        _set_extra_state(model, beside.odd)
    if lost is not None:
        lost.apply()
    else:
        engine.residuals.forget()
    if beside.random is not None:
        random_states.restore(beside.random, together.rank, beside.streams)
    try:
        for name, thing in (("scheduler", scheduler), ("scaler", scaler), ("data", data)):
            if thing is not None:
                thing.load_state_dict(values[name])
    except Exception as failure:
        error = failure
    together.agree(error)
    names = tuple(fit.missing), tuple(fit.unexpected)
    if not isinstance(source, FolderSource):
        return Loaded(
            Path(getattr(source, "folder", "")),
            getattr(source, "step", None),
            getattr(source, "extra", None),
            {},
            None,
            *names,
        )
    notes = (lost.note,) if lost is not None and lost.note else ()
    return Loaded(
        source.folder,
        source.state["step"],
        beside.extra,
        source.manifest.saved_by,
        beside.data,
        *names,
        notes,
    )


@dataclass(frozen=True)
class _Beside:
    """What a checkpoint has for this rank beside weights and states; `streams`: of how many ranks
    it has generators.
    """

    random: dict[str, Any] | None = None
    streams: int = 0
    extra: Any = None
    odd: dict[str, Any] = field(default_factory=dict)
    data: Any = None

    @classmethod
    def of(cls, source: FolderSource, together: Together, rng: bool) -> _Beside:
        streams = sum(item.kind == "rng" for item in source.records)
        random = _random(source, together.rank % streams) if rng and streams else None
        return cls(
            random,
            streams,
            source.value("extra"),
            source.value("extra_state") or {},
            _own_data(source, together),
        )


def _verify(together: Together, source: Source, error: Exception | None) -> None:
    """Whether all ranks could read, and, on the first of them, whether what all have read is what
    the manifest says.
    """
    checks = source.checks if isinstance(source, FolderSource) else []
    said = together.gather((None if error is None else worded(error), checks))
    told: Said | None = None
    if together.rank == 0:
        try:
            raise_first([e for e, _ in said])
            if isinstance(source, FolderSource):
                compare(source, [check for _, some in said for check in some])
        except CheckpointError as failure:
            told = worded(failure)
    checks.clear()
    told = together.from_first(told)
    if told is not None:
        raise told.raised()


def _values(
    source: Source, together: Together, scheduler: Any, scaler: Any, data: Any
) -> dict[str, Any]:
    """The stored states of what was given."""
    out: dict[str, Any] = {}
    for name, thing in (("scheduler", scheduler), ("scaler", scaler)):
        if thing is None:
            continue
        found = (
            source.value(name) if isinstance(source, FolderSource) else getattr(source, name, None)
        )
        if found is None:
            raise CheckpointError(f"{source.describe} holds no {name}; leave {name} out of load().")
        out[name] = found
    if data is not None:
        stored = source.state.get("data") if isinstance(source, FolderSource) else None
        if stored is None:
            raise CheckpointError(
                f"{source.describe} holds no position in the data; leave data out of load()."
            )
        if "ranks" in stored and len(stored["ranks"]) != together.size:
            raise CheckpointError(
                f"{source.describe}: each of its {len(stored['ranks'])} ranks was elsewhere in its"
                f" data, which cannot be divided among {together.size}. Load on as many ranks, or"
                " leave data out and give a position that is the same on every rank when saving."
            )
        out["data"] = decode(stored["all"] if "all" in stored else stored["ranks"][together.rank])
    return out


def _own_data(source: FolderSource, together: Together) -> Any:
    """What this rank, or every rank, had given as data; None where it cannot be told."""
    stored = source.state.get("data") or {}
    ranks = stored.get("ranks", ())
    return decode(
        stored["all"]
        if "all" in stored
        else ranks[together.rank]
        if len(ranks) == together.size
        else None
    )


def _fit_extra_state(
    engine: Engine, model: nn.Module, source: FolderSource, fit: Fit, strict: bool
) -> None:
    """Compare the modules with extra state (get_extra_state), and enter differences in `fit`.
    Raises: CheckpointError: under `strict`.
    """
    theirs, ours = (
        set(source.state.get("extra_state", {})),
        set(beside_parameters(engine, model)[1]),
    )
    if strict and theirs != ours:
        raise CheckpointError(
            f"{source.describe} is of another model: extra states are missing in it"
            f" ({', '.join(sorted(ours - theirs)[:5]) or 'none'}) or unknown to this model"
            f" ({', '.join(sorted(theirs - ours)[:5]) or 'none'}). Give strict=False to load what"
            " fits."
        )
    fit.missing.extend(sorted(ours - theirs))
    fit.unexpected.extend(sorted(theirs - ours))


def _check_things(**things: Any) -> None:
    for name, thing in things.items():
        if thing is not None and not callable(getattr(thing, "load_state_dict", None)):
            raise CheckpointError(f"{name}={thing!r}: expected something with load_state_dict().")


def _set_extra_state(model: nn.Module, odd: dict[str, Any]) -> None:
    for name, value in odd.items():
        owner = dict(model.named_modules()).get(name.removesuffix("_extra_state").rstrip("."))
        if owner is not None and type(owner).get_extra_state is not nn.Module.get_extra_state:
            owner.set_extra_state(value)


def _random(source: FolderSource, rank: int) -> dict[str, Any]:
    """The random generators as `rank` had them."""
    stored = source.whole(Item("rng", str(rank)))
    state: dict[str, Any] = decode(json.loads(bytes(stored.numpy())))
    return state


def _without_model(path: Path, *things: Any) -> Loaded:
    if any(thing is not None for thing in things):
        raise CheckpointError(
            "load() was given no model; without one it reads step and extra only."
        )
    source = source_of(path)
    try:
        if not isinstance(source, FolderSource):
            return Loaded(path)
        return Loaded(
            source.folder, source.state["step"], source.value("extra"), source.manifest.saved_by
        )
    finally:
        source.close()


__all__ = ["Loaded", "Loading", "load", "load_async", "source_of"]
