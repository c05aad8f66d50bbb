"""Find the files of a DeepSpeed checkpoint.

    runs/a/latest                                         the name of the newest tag folder
    runs/a/global_step300/                                a tag folder
      mp_rank_00_model_states.pt                          stages 1, 2: one file, the module in the compute dtype
      zero_pp_rank_0_mp_rank_00_model_states.pt           stage 3: one for each rank
      [bf16_]zero_pp_rank_0_mp_rank_00_optim_states.pt    all stages: one for each rank

"mp_rank" is the tensor-parallel rank; only 00 can be read.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from onefold.checkpoint.errors import CheckpointError
from onefold.reading import read_bytes

_SHARD = re.compile(
    r"^(?:bf16_|fp16_)?zero_pp_rank_(?P<rank>\d+)_mp_rank_(?P<other>\d+)_?optim_states\.pt$"
)
_MODEL = re.compile(r"^(?:zero_pp_rank_(?P<rank>\d+)_)?mp_rank_(?P<other>\d+)_model_states\.pt$")
_LATEST = "latest"


@dataclass(frozen=True)
class Files:
    """The files of one checkpoint.

    Attributes:
        tag: the tag folder, which contains all the files.
        shards: each rank's optimizer file, by rank.
        models: each rank's model file, by rank; only one at stages 1 and 2.
    """

    tag: Path
    shards: tuple[Path, ...]
    models: tuple[Path, ...]


def is_deepspeed(path: Path | str) -> bool:
    """Whether `path` is a DeepSpeed checkpoint: a tag folder, or a folder with tag folders.

    Only file names are read.
    """
    path = Path(path)
    try:
        if not path.is_dir() or (path / "manifest.json").exists():
            return False
        return _is_tag(path) or bool(_tags(path))
    except OSError:
        return False


def find(path: Path | str, tag: str | None = None) -> Files:
    """Find a checkpoint's files.

    Args:
        path: a tag folder, or the folder that contains it.
        tag: the tag folder's name; None takes the one that the file `latest` names.

    Raises:
        CheckpointError: there is no checkpoint, files of it are missing, or it is of a kind that
            cannot be read.
    """
    folder = _chosen(Path(path), tag)
    names = sorted(p.name for p in folder.iterdir())
    _refuse_other_kinds(folder, names)
    shards, models = _by_rank(folder, names, _SHARD), _by_rank(folder, names, _MODEL)
    if not shards and models:
        raise CheckpointError(
            f"{folder} has no *_optim_states.pt: it was saved at stage 0, or its optimizer files"
            " were left out. Only checkpoints of the ZeRO stages 1, 2 and 3 are read; for weights"
            " alone, export them with DeepSpeed and load the safetensors."
        )
    return Files(
        folder,
        _without_gaps(folder, shards, "optim_states"),
        _without_gaps(folder, models, "model_states"),
    )


def _chosen(path: Path, tag: str | None) -> Path:
    if not path.is_dir():
        raise CheckpointError(
            f"{path} is no folder: give the one that was given to DeepSpeed's save_checkpoint."
        )
    if tag is None and _is_tag(path):
        return path
    given = tag
    if tag is None and (path / _LATEST).is_file():
        tag = named_in(path / _LATEST)
    found = sorted(p.name for p in _tags(path))
    if tag is None:
        if not found:
            raise CheckpointError(
                f"{path} holds no DeepSpeed checkpoint: expected a file 'latest', or folders with"
                " *_optim_states.pt in them."
            )
        raise CheckpointError(
            f"{path} has no file 'latest' that chooses one of {', '.join(found)}: give the tag, or"
            " the path of one of them."
        )
    folder = path / tag
    if path.resolve() not in folder.resolve().parents or not folder.is_dir() or not _is_tag(folder):
        who = (
            f"the tag {tag!r} was given"
            if given is not None
            else f"its file 'latest' names {tag!r}"
        )
        raise CheckpointError(
            f"{path}: {who}, but there is no such checkpoint in it. There are:"
            f" {', '.join(found) or 'none'}."
        )
    return folder


def named_in(latest: Path) -> str:
    """Return the tag that a file `latest` names. Raises: OSError."""
    return read_bytes(latest, 1 << 16).decode(errors="replace").strip()


def _is_tag(folder: Path) -> bool:
    return any(_SHARD.match(p.name) or _MODEL.match(p.name) for p in folder.iterdir())


def _tags(folder: Path) -> list[Path]:
    return [p for p in folder.iterdir() if p.is_dir() and _is_tag(p)]


def _refuse_other_kinds(folder: Path, names: list[str]) -> None:
    for pattern, what in (
        (r"^(layer_\d+_)?expert_\d+_", "experts divided over ranks (DeepSpeed's MoE)"),
        (r"^layer_\d+-model_", "a pipeline of stages"),
        (r"^zero$", "DeepSpeed's universal form"),
        (r"^offloaded_tensors$", "optimizer states on NVMe, copied as raw swap files"),
    ):
        if any(re.match(pattern, name) for name in names):
            raise CheckpointError(
                f"{folder} holds {what}, which cannot be read. Only data-parallel checkpoints of"
                " ZeRO 1, 2 and 3 can be."
            )


def _by_rank(folder: Path, names: list[str], pattern: re.Pattern[str]) -> dict[int, Path]:
    found: dict[int, Path] = {}
    for name in names:
        match = pattern.match(name)
        if match is None:
            continue
        if int(match["other"]):
            raise CheckpointError(
                f"{folder / name} belongs to a tensor- or pipeline-parallel run, which cannot be"
                " read: only data-parallel ones can."
            )
        rank = int(match["rank"] or 0)
        if rank in found:
            raise CheckpointError(
                f"{folder} holds two checkpoints in one: {found[rank].name} and {name}. Remove the"
                " one that is not meant."
            )
        found[rank] = folder / name
    return found


def _without_gaps(folder: Path, found: dict[int, Path], what: str) -> tuple[Path, ...]:
    missing = sorted(set(range(max(found, default=0) + 1)) - set(found))
    if missing:
        raise CheckpointError(
            f"{folder} has no *_{what}.pt of rank {', '.join(map(str, missing[:5]))}: copy it"
            " whole."
        )
    return tuple(found[rank] for rank in sorted(found))
