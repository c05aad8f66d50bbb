"""`engine.save_checkpoint` and `engine.load_checkpoint`: DeepSpeed's calls over Onefold's
checkpoints.

    save_dir/global_step300/    an Onefold checkpoint: safetensors and JSON, loads at any stage and number of ranks
    save_dir/latest             "global_step300"
    save_dir/zero_to_fp32.py    writes the whole model in fp32, as DeepSpeed's script of that name

Checkpoints that DeepSpeed itself saved at ZeRO stages 1 to 3, on any number of ranks, load as well.
They are recognized by their file names.
"""

from __future__ import annotations

import contextlib
import logging
import os
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

import onefold
from onefold.checkpoint import CheckpointError
from onefold.checkpoint.folder import latest
from onefold.checkpoint.loading import source_of
from onefold.checkpoint.source import Source
from onefold.checkpoint.together import Together
from onefold.deepspeed.reader import DeepSpeedSource, named_in
from onefold.pretrained.adapters import embedding_layers
from onefold.wording import few

if TYPE_CHECKING:
    from onefold.deepspeed.engine import DeepSpeedEngine

logger = logging.getLogger("onefold")
_LATEST = "latest"
_COUNTS = ("global_steps", "skipped_steps", "global_samples")
_SCRIPT = "zero_to_fp32.py"
_SCRIPT_TEXT = '''"""Write the whole model of a checkpoint in this folder in fp32:

    python zero_to_fp32.py . OUTPUT

OUTPUT is a folder, or a file that ends in .bin or .safetensors; --help says what else there is.
"""

try:
    from onefold.deepspeed.zero_to_fp32 import main
except ImportError:
    raise SystemExit("This checkpoint was saved by Onefold: install onefold, and run it again.")

main()
'''


class TagMismatch(CheckpointError, AssertionError):
    """Ranks gave `save_checkpoint` different tags."""


def save(
    engine: DeepSpeedEngine,
    save_dir: str | os.PathLike[str],
    tag: str | None,
    client_state: Mapping[str, Any],
    newest: bool,
    frozen: bool,
) -> None:
    """Write a checkpoint; see `DeepSpeedEngine.save_checkpoint`."""
    root, tag = Path(save_dir), f"global_step{engine.global_steps}" if tag is None else str(tag)
    together = Together.of(onefold.engine_of(engine.module))
    tag = _agreed_tag(engine, together.all_gather(tag))
    if not os.fspath(save_dir) or not tag or Path(tag).name != tag:
        raise ValueError(
            f"save_checkpoint was given save_dir={os.fspath(save_dir)!r} and tag={tag!r}: expected"
            " a folder, and a name for one in it."
        )
    own = {
        "counts": {name: getattr(engine, name) for name in _COUNTS},
        "has_schedule": engine.lr_scheduler is not None,
        "has_scaler": engine.loss_scaler is not None,
        "frozen": frozen,
        "frozen_names": [n for n, p in engine.module.named_parameters() if not p.requires_grad],
    }
    onefold.save(
        root / tag,
        model=engine.module,
        optimizer=engine.optimizer,
        scheduler=engine.lr_scheduler,
        scaler=engine.loss_scaler,
        extra={"engine": own, "client_state": dict(client_state)},
        step=engine.global_steps,
        overwrite=True,
        # With the embedding layers that peft writes beside adapters, for a run that goes on
        frozen=frozen or embedding_layers(engine.module),
    )
    if newest:
        together.said_by_first(lambda: _point_to(root, tag))


def load(
    engine: DeepSpeedEngine,
    load_dir: str | os.PathLike[str],
    tag: str | None,
    strict: bool,
    *,
    optimizer: bool,
    scheduler: bool,
    counts: bool,
) -> tuple[str | None, dict[str, Any] | None]:
    """Load a checkpoint, and what of `optimizer`, `scheduler` and `counts` is true; see
    `DeepSpeedEngine.load_checkpoint`.
    """
    together = Together.of(onefold.engine_of(engine.module))
    found = together.said_by_first(lambda: _find(Path(load_dir), tag, engine.module))
    if found is None:
        if engine.global_rank == 0:
            logger.warning(
                "there is no checkpoint in %s: nothing was loaded. Give a tag to choose one.",
                load_dir,
            )
        return None, None
    folder, own, client_state = found
    schedule = engine.lr_scheduler if scheduler else None
    if schedule is not None and not own["has_schedule"]:
        raise CheckpointError(
            f"{folder} holds no state of a learning-rate schedule, and this run has one: give"
            " load_lr_scheduler_states=False to start the schedule anew."
        )
    scaler = engine.loss_scaler if optimizer and own["has_scaler"] else None
    onefold.load(
        folder,
        model=engine.module,
        optimizer=engine.optimizer if optimizer else None,
        scheduler=schedule,
        # None too if the configuration fixes the scale
        scaler=scaler if scaler is not None and scaler.dynamic else None,
        strict=strict and own["frozen"],
    )
    if counts:
        vars(engine).update(own["counts"])
        engine.micro_steps = engine.global_steps * engine.gradient_accumulation_steps()
    return str(folder), client_state


def _agreed_tag(engine: DeepSpeedEngine, tags: list[str]) -> str:
    """Return the first rank's tag. What other tags cause, `checkpoint.tag_validation` says.

    Raises:
        TagMismatch: the tags differ, and the configuration says "fail"; raised on every rank.
    """
    if len(set(tags)) > 1:
        given = ", ".join(f"{name!r} on rank {rank}" for rank, name in enumerate(tags[:8]))
        message = (
            f"save_checkpoint was given different tags: {given}. A checkpoint is one folder of all"
            " ranks: give the same tag on every rank."
        )
        if engine.checkpoint_tag_validation_fail():
            raise TagMismatch(message)
        if engine.checkpoint_tag_validation_enabled() and engine.global_rank == 0:
            logger.warning("%s It is saved as %r.", message, tags[0])
    return tags[0]


def _find(
    root: Path, tag: str | None, module: nn.Module
) -> tuple[Path, dict[str, Any], dict[str, Any]] | None:
    """Find the checkpoint in `root`: by the tag, else by the file `latest`, else Onefold's
    checkpoint of the greatest step. Returns its folder, what `save` says of it, and the client
    state.
    """
    if tag is None:
        try:
            tag = named_in(root / _LATEST)
        except OSError:
            newest = latest(root)
            if newest is None:
                return None
            tag = newest.name
    folder = root / str(tag)
    if not folder.is_dir():
        raise CheckpointError(
            f"{root} has no checkpoint {tag!r}: give the name of a folder in it, or no tag to take"
            " the latest."
        )
    with contextlib.closing(source_of(folder)) as source:
        if isinstance(source, DeepSpeedSource):
            return folder, _of_deepspeed(source), source.extra
        said = said_by_engine(source)
        if said is None:
            raise CheckpointError(
                f"{folder} was not saved by an engine of onefold.initialize: load it with"
                " onefold.load(path, model=engine.module, optimizer=engine.optimizer)."
            )
        if not said["engine"]["frozen"]:
            _check_names(source, folder, module)
        return folder, said["engine"], said["client_state"]


def said_by_engine(source: Source) -> dict[str, Any] | None:
    """Return {"engine": what `save` says of a checkpoint, "client_state"}; None for a checkpoint of
    onefold.save from another loop.
    """
    extra = source.value("extra")
    own = isinstance(extra, dict) and extra.keys() == {"engine", "client_state"}
    return extra if own else None


def _of_deepspeed(source: DeepSpeedSource) -> dict[str, Any]:
    if any(g.get("bias_correction") is False for gs in source.groups() or () for g in gs):
        logger.warning(
            "%s: bias_correction=False is not read. torch's Adam always corrects: its steps will"
            " be of other sizes.",
            source.folder,
        )
    return {
        "counts": dict(zip(_COUNTS, (source.steps, source.skipped, source.samples), strict=True)),
        "has_schedule": source.scheduler is not None,
        "has_scaler": "cur_iter" in (source.scaler or {}),
        "frozen": True,
    }


def _check_names(source: Source, folder: Path, module: nn.Module) -> None:
    """Check a checkpoint without frozen parameters against the model. It is loaded non-strictly, so
    a checkpoint of another model must be found here.

    Raises:
        CheckpointError: it lacks parameters that are trained here, or has others that the model
            lacks.
    """
    held = {item.name for item in source.items() if item.kind == "parameter"}
    parameters = dict(module.named_parameters(remove_duplicate=False))
    alone = [name for name, p in module.named_parameters() if p.requires_grad]
    lacking = sorted(
        name
        for name in alone
        if not held.intersection(n for n, p in parameters.items() if p is parameters[name])
    )
    if lacking or (unexpected := sorted(held - parameters.keys())):
        names = lacking or unexpected
        what = "lacks, and are trained here" if lacking else "has, and this model has not"
        raise CheckpointError(
            f"{folder} was saved with exclude_frozen_parameters=True, of another model:"
            f" {len(names)} parameters that it {what} ({few(names)})."
        )


def _point_to(root: Path, tag: str) -> None:
    """Write `latest` and the script beside it, each by an atomic rename."""
    for name, text in ((_SCRIPT, _SCRIPT_TEXT), (_LATEST, tag)):
        aside = root / f".{name}.{os.getpid()}"
        try:
            aside.write_text(text)
            if name == _SCRIPT:
                with contextlib.suppress(OSError):  # a network share may refuse it
                    aside.chmod(aside.stat().st_mode | stat.S_IXUSR)
            os.replace(aside, root / name)
        finally:
            aside.unlink(missing_ok=True)
