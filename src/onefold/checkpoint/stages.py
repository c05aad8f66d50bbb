"""One checkpoint of those that the stages of a pipeline have saved.

    step-00000100/
      stage-0/ ...              a checkpoint of the first stage's module, as `save` writes it
      stage-1/ ...
      config.json ...           the first stage's files beside its tensors: configuration, tokenizer
      manifest.json             written by `join_stages`: all tensors, in the files of the stages
      manifest.sha256
      state.json                the stages' parameter groups and step counts together

No tensor is copied: a manifest may name files in folders below its own. Tensors have the names of
the whole model, so the result loads into the whole model, or into the modules of another number of
stages.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import re
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from onefold.checkpoint.errors import CheckpointError
from onefold.checkpoint.folder import flush
from onefold.checkpoint.folder_source import FolderSource
from onefold.checkpoint.manifest import (
    CHECKSUM,
    MANIFEST,
    STATE,
    FileRecord,
    Manifest,
    Record,
    checksum_line,
)
from onefold.checkpoint.source import Item

#: Of `Manifest.saved_by`: how many stages have been joined.
STAGES_JOINED = "stages of a pipeline"
#: Tensors that belong to ranks, or to the values beside the model: the first stage's are kept.
_OF_FIRST = ("rng", "extra")


def join_stages(path: str | Path, stages: int | None = None) -> Path:
    """Make the folder `path`, in which each stage of a pipeline has saved a checkpoint of its own, a
    checkpoint of the whole model. Call it on one rank, after all saves are done. Returns the folder.

    Scheduler, scaler, data position, random generators and `extra` are those of the first stage, by
    the order of the folders' names. What compressed reductions hold back is left out.

    Args:
        stages: how many there are. Without it a stage whose save left nothing behind is not missed.

    Raises:
        CheckpointError: there are no checkpoints in the folder, some of them are not whole, or they
            do not belong together.
    """
    folder = Path(path)
    if (folder / MANIFEST).exists():
        raise CheckpointError(f"{folder} is a checkpoint already: its stages have been joined.")
    names = sorted((p.parent.name for p in folder.glob(f"*/{MANIFEST}")), key=_in_order)
    names = [name for name in names if not name.startswith(".")]
    if not names:
        raise CheckpointError(
            f"{folder} holds no checkpoints of stages: save each stage's module to a folder in it,"
            f" such as {folder / 'stage-0'}, then call join_stages."
        )
    _refuse_missing(folder, names, stages)
    sources = [FolderSource(folder / name) for name in names]
    steps = {name: source.step for name, source in zip(names, sources, strict=True)}
    if len(set(steps.values())) > 1:
        said = ", ".join(f"{name} at step {step}" for name, step in steps.items())
        raise CheckpointError(f"{folder}: the stages were saved at different steps: {said}.")
    state = _state(folder, sources)
    text = (json.dumps(state) + "\n").encode()
    files = {STATE: FileRecord(len(text), hashlib.sha256(text).hexdigest())}
    for name, source in zip(names, sources, strict=True):
        files |= {f"{name}/{file}": known for file, known in source.manifest.files.items()}
    first = sources[0].manifest
    for file, known in first.files.items():
        # Configuration and tokenizer, which exports read at the top of a checkpoint
        if file != STATE and not known.head_only:
            (folder / file).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(folder / names[0] / file, folder / file)
            flush(folder / file)
            files[file] = known
    manifest = Manifest(
        tuple(_records(folder, names, sources)),
        files,
        first.step,
        first.created,
        {**first.saved_by, STAGES_JOINED: len(names)},
    )
    body = manifest.to_text().encode()
    # The checksum last: without it the folder is no whole checkpoint
    _write(folder / STATE, text)
    _write(folder / MANIFEST, body)
    _write(folder / CHECKSUM, checksum_line(body).encode())
    return folder


def _refuse_missing(folder: Path, names: Sequence[str], stages: int | None) -> None:
    broken = sorted(
        p.name
        for p in folder.iterdir()
        if p.is_dir()
        and p.name not in names
        and (p.name.endswith(".unfinished") or (p.name[0] != "." and any(p.glob("rank-*"))))
    )
    if broken:
        raise CheckpointError(
            f"{folder}: {broken[0]} holds no whole checkpoint: the save of a stage has not finished, or"
            " was killed. Call join_stages when all stages are saved."
        )
    if stages is not None and len(names) != stages:
        raise CheckpointError(
            f"{folder} holds checkpoints of {len(names)} stages ({', '.join(names)}), expected"
            f" {stages}."
        )


def _in_order(name: str) -> list[Any]:
    return [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", name)]


def _records(folder: Path, names: Sequence[str], sources: Sequence[FolderSource]) -> list[Record]:
    found: dict[Item, tuple[str, Record]] = {}
    for number, (name, source) in enumerate(zip(names, sources, strict=True)):
        for record in source.manifest.records:
            item = record.item
            if item.kind in _OF_FIRST and number:
                continue
            if item in found:
                other, known = found[item]
                if item.kind == "buffer" and _contents(known) == _contents(record):
                    continue  # every stage has its own (a table of rotations)
                raise CheckpointError(
                    f"{folder}: both {other} and {name} hold the {item}. The module of a stage must"
                    " have the names of the whole model: keep blocks in a ModuleDict under their"
                    " numbers there."
                )
            pieces = tuple(
                dataclasses.replace(piece, file=f"{name}/{piece.file}") for piece in record.pieces
            )
            found[item] = name, dataclasses.replace(record, pieces=pieces)
    return [record for _, record in found.values()]


def _contents(record: Record) -> Any:
    return record.dtype, record.shape, [(p.start, p.stop, p.crc) for p in record.pieces]


def _state(folder: Path, sources: Sequence[FolderSource]) -> dict[str, Any]:
    first, *others = [source.state for source in sources]
    out = dict(first)
    out["scalars"] = {
        name: value
        for state in (first, *others)
        for name, value in state.get("scalars", {}).items()
    }
    if odd := sorted(name for state in others for name in state.get("extra_state", {})):
        raise CheckpointError(
            f"{folder}: stages after the first have extra states ({', '.join(odd[:3])}), which cannot"
            " be joined."
        )
    optimizers = [state.get("optimizers") or [] for state in (first, *others)]
    if any(optimizers):
        out["optimizers"] = [
            _joined(folder, number, [each[number] for each in optimizers])
            for number in range(_alike(folder, "optimizers", optimizers))
        ]
    return out


def _joined(folder: Path, number: int, optimizers: list[dict[str, Any]]) -> dict[str, Any]:
    """Return one optimizer whose groups have the parameters of the same groups of all stages."""
    each = [optimizer["groups"] for optimizer in optimizers]
    groups = []
    for index in range(_alike(folder, f"groups of optimizer {number}", each)):
        of_stages = [group[index] for group in each]
        options = [{k: v for k, v in group.items() if k != "params"} for group in of_stages]
        unlike = [k for k in options[0] if any(o.get(k) != options[0][k] for o in options)]
        if unlike or any(o.keys() != options[0].keys() for o in options):
            raise CheckpointError(
                f"{folder}: group {index} of optimizer {number} has other options in some stages"
                f" ({', '.join(unlike) or 'other names'}): give the optimizers of all stages the"
                " same."
            )
        groups.append({**options[0], "params": [n for group in of_stages for n in group["params"]]})
    return {**optimizers[0], "groups": groups}


def _alike(folder: Path, what: str, each: Sequence[Sequence[Any]]) -> int:
    numbers = [len(some) for some in each]
    if len(set(numbers)) > 1:
        raise CheckpointError(
            f"{folder}: the stages have different numbers of {what}: {', '.join(map(str, numbers))}."
            " Give each stage's optimizer the same groups, empty ones included."
        )
    return numbers[0]


def _write(path: Path, data: bytes) -> None:
    hidden = path.with_name(f".{path.name}.unfinished")
    hidden.write_bytes(data)
    flush(hidden)
    os.replace(hidden, path)
    flush(path.parent)
