"""`engine.save_checkpoint` and `engine.load_checkpoint`: DeepSpeed's calls over Onefold's
checkpoints.

    save_dir/global_step300/    an Onefold checkpoint: safetensors and JSON, loads at any stage and number of ranks
    save_dir/latest             "global_step300"
    save_dir/zero_to_fp32.py    writes the whole model in fp32, as DeepSpeed's script of that name

Checkpoints that DeepSpeed itself saved at ZeRO stages 1 to 3, on any number of ranks, load as well.
They are recognized by their file names. And the whole model of an engine, as one dict or file.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

import onefold
from onefold.checkpoint import CheckpointError
from onefold.checkpoint.folder import latest
from onefold.checkpoint.loading import source_of
from onefold.checkpoint.together import Together
from onefold.deepspeed.reader import LATEST, DeepSpeedSource, named_in
from onefold.pretrained.adapters import embedding_layers
from onefold.reading import StrPath

if TYPE_CHECKING:
    from onefold.deepspeed.engine import DeepSpeedEngine

logger = logging.getLogger("onefold")
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


def save_checkpoint(
    engine: DeepSpeedEngine,
    save_dir: StrPath,
    tag: str | None = None,
    client_state: Mapping[str, Any] | None = None,
    save_latest: bool = True,
    exclude_frozen_parameters: bool = False,
) -> bool:
    """Write a checkpoint to resume from to `save_dir`/`tag`, in Onefold's format. Every rank
    must call it.

    Args:
        tag: the checkpoint's name; None takes "global_step" and the number of steps. An
            existing checkpoint of this name is replaced once the new one is complete.
        client_state: values that `load_checkpoint` returns; the first rank's are saved.
        save_latest: let `save_dir`/latest name this checkpoint.
        exclude_frozen_parameters: leave out parameters that take no gradient (the base of
            adapters). Loading such a checkpoint leaves these parameters as they are.

    Returns:
        True, on every rank, once the checkpoint is complete.

    Raises:
        CheckpointError: the checkpoint could not be written; raised on every rank.
    """
    frozen = not exclude_frozen_parameters
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
        "frozen": frozen,
    }
    onefold.save(
        root / tag,
        model=engine.module,
        optimizer=engine.optimizer,
        scheduler=engine.lr_scheduler,
        scaler=engine.loss_scaler,
        extra={"engine": own, "client_state": dict(client_state or {})},
        step=engine.global_steps,
        overwrite=True,
        # With the embedding layers that peft writes beside adapters, for a run that goes on
        frozen=frozen or embedding_layers(engine.module),
    )
    if save_latest:
        together.said_by_first(lambda: _point_to(root, tag))
    return True


def load_checkpoint(
    engine: DeepSpeedEngine,
    load_dir: StrPath,
    tag: str | None = None,
    load_module_strict: bool = True,
    load_optimizer_states: bool = True,
    load_lr_scheduler_states: bool = True,
    load_module_only: bool = False,
    custom_load_fn: Any = None,
) -> tuple[str | None, dict[str, Any] | None]:
    """Load a checkpoint of this engine, or of DeepSpeed itself at ZeRO stages 1 to 3. Every
    rank must call it.

    The stage and the number of ranks may differ from those of the run that saved it.

    Args:
        load_dir: the `save_dir` that was given to `save_checkpoint`.
        tag: the checkpoint's folder in it; None takes the one that `load_dir`/latest names.
        load_module_strict: raise if a name is only in the model or only in the checkpoint.
        load_optimizer_states: load the optimizer's states and the loss scale.
        load_lr_scheduler_states: load the schedule's state.
        load_module_only: load weights and buffers only; the counts of steps stay as they are.

    Returns:
        the checkpoint's folder, and the `client_state` it was saved with; (None, None) if there
        is no checkpoint.

    Raises:
        CheckpointError: the checkpoint cannot be read or does not fit; raised on every rank.
        NotImplementedError: `custom_load_fn` is given.
    """
    if custom_load_fn is not None:
        raise NotImplementedError(
            "custom_load_fn: no whole state dict exists here to give it; leave it out, and load by"
            " names."
        )
    optimizer = load_optimizer_states and not load_module_only
    together = Together.of(onefold.engine_of(engine.module))
    found = together.said_by_first(lambda: _find(Path(load_dir), tag))
    if found is None:
        if engine.global_rank == 0:
            logger.warning(
                "there is no checkpoint in %s: nothing was loaded. Give a tag to choose one.",
                load_dir,
            )
        return None, None
    folder, own, client_state = found
    schedule = engine.lr_scheduler if load_lr_scheduler_states and not load_module_only else None
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
        strict=load_module_strict and (own["frozen"] or "trained"),
    )
    if not load_module_only:
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
        if (asked := engine.settings.root.checkpoint.tag_validation) == "fail":
            raise TagMismatch(message)
        if asked == "warn" and engine.global_rank == 0:
            logger.warning("%s It is saved as %r.", message, tags[0])
    return tags[0]


def _find(root: Path, tag: str | None) -> tuple[Path, dict[str, Any], dict[str, Any]] | None:
    """Find the checkpoint in `root`: by the tag, else by the file `latest`, else Onefold's
    checkpoint of the greatest step. Returns its folder, what `save` says of it, and the client
    state.
    """
    if tag is None:
        tag = named_in(root)
    folder = latest(root) if tag is None else root / str(tag)
    if folder is None:
        return None
    if not folder.is_dir():
        raise CheckpointError(
            f"{root} has no checkpoint {tag!r}: give the name of a folder in it, or no tag to take"
            " the latest."
        )
    with contextlib.closing(source_of(folder)) as source:
        found = {
            "has_schedule": source.value("scheduler") is not None,
            "has_scaler": "cur_iter" in (source.value("scaler") or {}),
        }
        if isinstance(source, DeepSpeedSource):
            counts = (source.step, source.skipped, source.samples)
            own = {"counts": dict(zip(_COUNTS, counts, strict=True)), "frozen": True}
            return folder, own | found, source.extra
        said = source.value("extra")
        try:
            own, client_state = said["engine"], said["client_state"]
            kept = {name: int(own["counts"][name]) for name in _COUNTS}
            own = {"counts": kept, "frozen": bool(own["frozen"])}
        except (KeyError, TypeError, ValueError, OverflowError):
            raise CheckpointError(
                f"{folder} was not saved by an engine of onefold.initialize: load it with"
                " onefold.load(path, model=engine.module, optimizer=engine.optimizer)."
            ) from None
        return folder, own | found, client_state


def _point_to(root: Path, tag: str) -> None:
    """Write `latest` and the script beside it, each by an atomic rename."""
    for name, text in ((_SCRIPT, _SCRIPT_TEXT), (LATEST, tag)):
        with whole_or_absent(root / name) as aside:
            aside.write_text(text)


# -- the whole model as one dict or file --------------------------------------------------------------


def whole_in(
    module: nn.Module,
    dtype: torch.dtype | None,
    without_frozen: bool,
    beside_adapters: bool = False,
) -> dict[str, Tensor]:
    """Return the whole model on rank 0's host, and an empty dict elsewhere. Collective.

    Args:
        dtype: of floating-point parameters; None takes the dtype in which each computes.
        beside_adapters: `without_frozen` keeps embedding layers that peft writes beside adapters.
    """
    parameters = dict(module.named_parameters(remove_duplicate=False))
    cast: dict[int, Tensor] = {}  # tied names stay one tensor
    out: dict[str, Tensor] = {}
    wholes = onefold.full_state_dict(module)
    kept = embedding_layers(module) if without_frozen and beside_adapters else []
    for name, whole in wholes.items():
        out[name] = whole
        if (known := parameters.get(name)) is None:
            continue
        if without_frozen and not known.requires_grad and name not in kept:
            del out[name]
        elif whole.is_floating_point():
            out[name] = cast.setdefault(id(whole), whole.to(dtype or known.dtype))
    return out


def write_whole(state: dict[str, Tensor], path: Path) -> None:
    """Write safetensors, by the name's suffix, else a pickle for `torch.load`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with whole_or_absent(path) as partial:
        if path.suffix == ".safetensors":
            from safetensors.torch import save_file

            # safetensors refuses tensors that share memory: tied weights are written twice. It has no
            # place for extra states of modules
            tensors = {name: t for name, t in state.items() if isinstance(t, Tensor)}
            save_file({name: t.clone().contiguous() for name, t in tensors.items()}, partial)
        else:
            torch.save(state, partial)


@contextlib.contextmanager
def whole_or_absent(path: Path) -> Iterator[Path]:
    """Yield a name to write to, and rename it to `path` at the end of the block."""
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        yield partial
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)
