"""Load checkpoints at any stage, on any number of ranks. Each rank reads the bytes that it will
own, and checks them.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

from torch import nn

import onefold.checkpoint.per_rank as per_rank
from onefold.checkpoint.apply import Filling, fit_groups
from onefold.checkpoint.errors import CheckpointError
from onefold.checkpoint.folder import latest, newest_first, of_run
from onefold.checkpoint.folder_source import FolderSource
from onefold.checkpoint.manifest import MANIFEST
from onefold.checkpoint.parts import of_stage
from onefold.checkpoint.saving import (
    Models,
    Optimizers,
    begun,
    check_optimizers,
    kinds_of,
    optimizers_of,
)
from onefold.checkpoint.source import Source, SourceT, closed_on_error, read_by_another
from onefold.checkpoint.together import Together, raise_different
from onefold.checkpoint.values import refuse_another_state
from onefold.runtime.engine import Engine
from onefold.runtime.state.dicts import takes_extra_state


@dataclass(frozen=True)
class Loaded:
    """Information from a checkpoint that was loaded.

    Attributes:
        path: its folder.
        step: the step given to `save`.
        extra: the `extra` given to `save`.
        saved_by: versions, world size, stage and recipe of the run that saved.
        data: the `data` that this rank gave to `save`; None if the ranks gave different data and
            there are now more or fewer ranks.
        missing: with strict=False, names that the checkpoint does not have.
        unexpected: with strict=False, names that the model does not have.
    """

    path: Path
    step: int | None = None
    extra: Any = None
    saved_by: Mapping[str, Any] = field(default_factory=dict)
    data: Any = None
    missing: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()


def load(
    path: str | Path,
    *,
    model: Models | None = None,
    optimizer: Optimizers = None,
    scheduler: Any = None,
    scaler: Any = None,
    data: Any = None,
    strict: bool | Literal["trained"] = True,
    rng: bool = True,
) -> Loaded:
    """Load a checkpoint that `save` has written. Number of ranks and stage may differ from those of
    the save. Collective.

    Args:
        path: a checkpoint; or a folder of checkpoints, of which the newest is loaded; or a
            DeepSpeed checkpoint; or, for the model alone, a Hugging Face folder.
        model: the return value of `onefold.shard`; or, of a pipeline, the list of this rank's stages.
            The ranks of all stages then call it together. None reads step and extra only.
        optimizer: one or several, with the same parameter groups as the saved ones. The state that
            they held before is discarded.
        scheduler: anything with load_state_dict().
        scaler: the same.
        data: the same.
        strict: require that the names in checkpoint and model agree. "trained": parameters that take
            no gradient here may be missing in the checkpoint, and then stay as they are.
        rng: restore the random generators (Python, numpy, torch, CUDA). With another number of
            ranks, see `onefold.checkpoint.per_rank`.

    Raises:
        ValueError: `strict` is none of these.
        CheckpointError: on every rank. Model and optimizer are unchanged if there is no such
            checkpoint or it is of another model. If damaged bytes were found during the read, the
            contents of both are undefined, and an earlier checkpoint must be loaded.
    """
    if strict not in (True, False, "trained"):
        raise ValueError(f'strict={strict!r} is not known: give True, False or "trained".')
    things = {"scheduler": scheduler, "scaler": scaler, "data": data}
    if model is None:
        if any(thing is not None for thing in (optimizer, *things.values())):
            raise CheckpointError(
                "load() was given no model; without one it reads step and extra only."
            )
        with contextlib.closing(source_of(Path(path))) as source:
            return Loaded(
                source.folder or Path(path), source.step, source.value("extra"), source.saved_by
            )
    models, engines, together = begun("load", model)
    given = {name: kinds_of([things[name]]) for name in ("scheduler", "scaler")}
    given["strict"] = str(strict)
    if isinstance(model, nn.Module):
        given["optimizer"] = kinds_of(optimizers_of(optimizer))
    with contextlib.closing(opened_alike(together, lambda: source_of(Path(path)), given)) as source:
        return apply_source(engines, models, together, source, strict, optimizer, things, rng)


def source_of(path: Path) -> Source:
    """Open the checkpoint or Hugging Face folder at `path`.
    Raises: CheckpointError: `path` is neither.
    """
    if (path / MANIFEST).exists():
        return FolderSource(path)
    if path.is_dir():
        path = of_run(path)
        newest = latest(path)
        if newest is not None:
            return FolderSource(newest)
        unnumbered = sorted(folder.name for folder in newest_first(path, damaged=True))
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


def opened_alike(
    together: Together,
    opened: Callable[[], SourceT],
    given: Mapping[str, str] = MappingProxyType({}),
) -> SourceT:
    """Open the same source on all ranks. Collective: all raise if one rank cannot open it, sees other
    tensors in it, or was `given` other things to load.
    """
    with contextlib.ExitStack() as on_error:
        with together.each_rank():
            source = on_error.enter_context(closed_on_error(opened()))
        tensors = hashlib.sha256(repr(sorted(source.items().items())).encode()).digest()
        said = together.all_gather((source.describe, tensors, dict(given)))
        raise_different("load", [given for *_, given in said])
        if len({each[:2] for each in said}) > 1:
            seen = ", ".join(sorted({what for what, *_ in said}))
            raise CheckpointError(
                f"ranks see different checkpoints ({seen}). It must be on a file system that all share."
            )
        return source


def apply_source(
    engines: list[Engine], models: list[nn.Module], together: Together, source: Source, strict: bool | str,
    optimizer: Any = None, things: Mapping[str, Any] = MappingProxyType({}), rng: bool = False,
) -> Loaded:  # fmt: skip
    """Load `source` into the models and everything given with them. Collective."""
    home, optimizers = Together.of(engines[0]), optimizers_of(optimizer)
    # Only an Onefold checkpoint has extra state, random generators and checksums
    own = source if isinstance(source, FolderSource) else None
    values: dict[str, Any] = {}
    fillings: list[Filling] = []
    with together.each_rank():  # all checks, before anything is changed
        values = _values(source, home, things)
        for engine, model in zip(engines, models, strict=True):
            check_optimizers(optimizer)
            fillings.append(Filling(engine, model, source.fitted(model), strict))
    # Of a pipeline: the names that a stage lacks, and those that no stage has
    told = together.all_gather([(f.missing, f.unexpected) for f in fillings])
    said = [each for rank in told for each in rank]
    missing = tuple(dict.fromkeys(name for names, _ in said for name in names))
    unknown = [set(names) for _, names in said]
    unexpected = tuple(n for n in said[0][1] if all(n in names for names in unknown))
    if strict and (missing or unexpected):
        raise CheckpointError(
            f"{source.describe} is of another model: {len(missing)} names are missing in it"
            f" ({', '.join(missing[:5])}), {len(unexpected)} are unknown to this model"
            f" ({', '.join(unexpected[:5])}). Give strict=False to load what fits."
        )
    with together.each_rank():
        for filling in fillings if optimizers else ():
            # A stage finds all that it has; what is stored besides belongs to other stages
            whole = together is home and bool(strict or missing)
            fit_groups(
                engines, of_stage(filling.engine, engines, optimizers), filling.source, whole
            )
    for filling in fillings:
        filling.model()
        if optimizers:
            filling.optimizers(of_stage(filling.engine, engines, optimizers))
    extra, odd, data = source.extra, dict[str, Any](), None
    restore: Callable[[], None] | None = None
    with together.each_rank():
        if error := next((f.error for f in fillings if f.error is not None), None):
            raise error
        if own is not None:
            extra, odd = own.value("extra"), own.value("extra_state") or {}
            data = _of_rank(own.value("data") or {}, home)
            if rng:
                restore = per_rank.restored(own, home.rank, home.data_of)
    # From here on everything has been read, and its checksums are right
    for filling in fillings:
        if filling.source.rules is not None:
            filling.source.rules.remember()  # an export applies the same rules in reverse
    with together.each_rank():
        for model in models:
            for name, module in takes_extra_state(model).items():
                if name in odd:
                    module.set_extra_state(odd[name])
        if restore is not None:
            restore()
        for name, value in values.items():
            try:
                things[name].load_state_dict(value)
            except Exception as failure:
                raise CheckpointError(
                    f"{source.describe}: the given {type(things[name]).__name__} does not load its"
                    f" {name} ({type(failure).__name__}: {failure}). Leave {name} out of load()."
                ) from failure
    return Loaded(
        Path(source.folder or ""), source.step, extra, source.saved_by, data, missing, unexpected
    )


def _of_rank(data: dict[str, Any], together: Together) -> Any:
    """Return the `data` of this rank; None if ranks differed and their number has changed. Ranks
    that compute with the same data count as one.
    """
    if "ranks" not in data:
        return data.get("all")
    same = len(data["ranks"]) == together.data_ranks
    return data["ranks"][together.data_of[together.rank]] if same else None


def _values(source: Source, together: Together, things: Mapping[str, Any]) -> dict[str, Any]:
    """Return the stored states of the given `things`, by name."""
    out: dict[str, Any] = {}
    for name, thing in things.items():
        if thing is None:
            continue
        if not callable(getattr(thing, "load_state_dict", None)):
            raise CheckpointError(f"{name}={thing!r}: expected something with load_state_dict().")
        found = source.value(name)
        if name == "data":
            found = _of_rank(found or {}, together)
        if found is None:
            what = (
                name if name != "data" else f"position in the data for {together.data_ranks} ranks"
            )
            raise CheckpointError(f"{source.describe} holds no {what}; leave {name} out of load().")
        if name != "data":
            refuse_another_state(source.describe, name, thing, found)
        out[name] = found
    return out
