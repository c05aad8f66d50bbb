"""Export the model in a checkpoint as a Hugging Face folder, in one process, tensor by tensor."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

from onefold.checkpoint.errors import CheckpointError
from onefold.checkpoint.folder import Export
from onefold.checkpoint.source import Source
from onefold.checkpoint.tensorfile import CHUNK, numel_of
from onefold.pretrained.export import (
    CONFIGURATION,
    MAX_SHARD_BYTES,
    TOKENIZER,
    check_arguments,
    copy_files,
    finish,
    first_dtype,
    plan,
)
from onefold.pretrained.fitted import Outline
from onefold.pretrained.streams import Progress
from onefold.reading import read_json


def export_folder(
    source: Source,
    folder: str | os.PathLike[str],
    dtype: torch.dtype | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    progress: Progress | None = None,
    *,
    beside: str | os.PathLike[str] | None = None,
    overwrite: bool = False,
) -> Path:
    """Write the model in a checkpoint as a folder that `from_pretrained` opens. Runs in one
    process, 4 MiB at a time.

    Args:
        source: an opened checkpoint.
        folder: as for `export`.
        max_shard_bytes: the same.
        progress: the same.
        overwrite: the same.
        dtype: dtype of floating-point parameters in the files; None for the checkpoint's own, which
            is that of its master weights.
        beside: the folder with config.json and the tokenizer's files; None for the source's own.

    Raises:
        CheckpointError: the source is damaged, or `folder` cannot be written to.
    """
    check_arguments(dtype, max_shard_bytes)
    target = Path(folder)
    near = Path(beside) if beside is not None else source.folder
    if beside is not None and not (Path(beside) / "config.json").is_file():
        raise CheckpointError(
            f"--like {beside} has no config.json: name a Hugging Face folder, or leave it out."
        )
    outline = _outline_of(source)
    tied_once = near is not None and (near / "config.json").is_file()
    sheet = plan(outline, _twin(near, outline), dtype, max_shard_bytes, tied_once)
    items = {item.name: item for item in source.items() if item.kind in ("parameter", "buffer")}

    def pieces() -> Iterator[tuple[str, int, torch.Tensor]]:
        for name, item in items.items():
            count, dtype = numel_of(outline.tensors[name][1]), outline.dtypes[name]
            for start, part in source.blocks(item, 0, count, CHUNK // dtype.itemsize, dtype):
                yield name, start, part

    with Export(target, overwrite) as made:
        sheet.files.create(made.folder)
        if near is not None:
            copy_files(near, (*CONFIGURATION, *TOKENIZER), made.folder)
            _say_dtype(made.folder / "config.json", dtype or first_dtype(outline))
        total = sheet.nbytes_of((name, 0, numel_of(outline.tensors[name][1])) for name in items)
        sheet.write(made.folder, pieces(), total, progress)
        source.compare()
        finish(made, overwrite)
    return target


def _say_dtype(path: Path, dtype: torch.dtype) -> None:
    try:
        config = read_json(path)
    except (OSError, ValueError):
        return
    if not isinstance(config, dict):
        return
    key = "torch_dtype" if "torch_dtype" in config and "dtype" not in config else "dtype"
    config[key] = str(dtype).removeprefix("torch.")
    path.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def _outline_of(source: Source) -> Outline:
    source.refuse_own()
    others, out = source.other_names(), Outline()
    for item, stored in source.items().items():
        if item.kind in ("parameter", "buffer"):
            names = [item.name, *others.get(item.name, ())]
            out.ties.append(names)
            for name in names:
                out.tensors[name], out.dtypes[name] = (item.kind, stored.shape), stored.dtype
    if not out.ties:
        raise CheckpointError("there is no parameter in it to export.")
    return out


def _twin(near: Path | None, outline: Outline) -> nn.Module | None:
    """Return the model of config.json on the meta device; None if the checkpoint's names differ."""
    if near is None or not (near / "config.json").is_file():
        return None
    try:
        import transformers

        config: Any = transformers.AutoConfig.from_pretrained(str(near), local_files_only=True)
        with torch.device("meta"):
            twin: nn.Module = getattr(transformers, config.architectures[0])(config)
    except Exception as error:
        # from_pretrained opens a folder with these names too
        logging.getLogger("onefold").warning(
            "names stay those of the checkpoint: transformers cannot build the model of %s"
            " (%s: %s)",
            near,
            type(error).__name__,
            error,
        )
        return None
    return twin if Outline.of(twin).tensors.keys() == outline.tensors.keys() else None
