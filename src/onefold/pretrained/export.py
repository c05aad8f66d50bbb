"""Export a model as a folder that other libraries open: safetensors in Hugging Face's layout,
configuration, tokenizer.

    onefold.export        from a sharded model: each rank writes its own intervals into the same files (streams.py)
    export_folder.py      from a checkpoint, in one process: tensor by tensor

The folder gets its name when it is complete. An error on one rank is raised on all ranks, and the
unfinished folder is removed.
"""

from __future__ import annotations

import contextlib
import copy
import os
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from onefold.checkpoint.errors import CheckpointError
from onefold.checkpoint.folder import Export, flush
from onefold.checkpoint.manifest import MANIFEST, path_in
from onefold.checkpoint.saving import check_moment
from onefold.checkpoint.tensorfile import CHUNK
from onefold.checkpoint.together import Together, meet
from onefold.layout.holders import BoxInterval, runs
from onefold.optim.clip import across_stages
from onefold.pretrained.fitted import Outline
from onefold.pretrained.hf_names import Layout, is_transformers, writing
from onefold.pretrained.streams import Pieces, Progress, Sheet
from onefold.runtime.engine import Engine
from onefold.runtime.flat import Entry
from onefold.runtime.hooks import engine_of
from onefold.runtime.parameters.parameter import disable_torch_function
from onefold.runtime.parts import MasterParts
from onefold.runtime.state.dicts import beside_parameters
from onefold.runtime.storage import OnDisk

#: The default for the bytes of tensors in one file.
MAX_SHARD_BYTES = 5_000_000_000
CONFIGURATION = ("config.json", "generation_config.json")
#: The files of transformers' tokenizers and processors.
TOKENIZER = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "vocab.json", "vocab.txt", "merges.txt",
    "tokenizer.model", "spiece.model", "sentencepiece.bpe.model", "chat_template.jinja", "chat_template.json", "preprocessor_config.json",
    "processor_config.json",
)  # fmt: skip


def export(
    model: nn.Module | Sequence[nn.Module],
    folder: str | os.PathLike[str],
    dtype: torch.dtype | str | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    progress: Progress | None = None,
    *,
    tokenizer: Any = None,
    overwrite: bool = False,
) -> Path:
    """Write a sharded model as a folder that transformers' `from_pretrained` opens. Collective.

    A transformers model is written as its `save_pretrained` does: the same names, tied weights
    once, config.json. Any other model becomes safetensors with the names of its state dict. No rank
    holds more than its shard and a few MiB. All ranks must share the file system of `folder`.

    Args:
        model: the return value of `onefold.shard`, or a list of those of this rank's stages of a
            pipeline, whose names are those of the whole model. All ranks of all stages call it.
        folder: the folder to create, with its parents.
        dtype: dtype of floating-point parameters in the files. None: each parameter's compute dtype
            (bf16 under bf16). "master": the master weights' dtype (fp32 under bf16).
        max_shard_bytes: the most bytes of tensors in one file. A larger model becomes several files
            with an index.
        progress: called on each rank with (bytes written, bytes to write) of that rank.
        tokenizer: anything with `save_pretrained(folder)`. None copies the tokenizer of the folder
            from which the model was loaded.
        overwrite: replace a model at `folder`, atomically, after the new one is complete.

    Returns:
        folder.

    Raises:
        CheckpointError: on every rank: `folder` exists, or the disk has no space or gives no
            permission.
    """
    stages = [model] if isinstance(model, nn.Module) else list(model)
    if not stages:
        raise ValueError("export was given no stage: give the modules of this rank's stages.")
    engines = [engine_of(each) for each in stages]
    outline = Outline()
    for each, engine in zip(stages, engines, strict=True):
        engine.uninitialized.look()
        engine.uninitialized.refuse("export() would write")
        engine.buffers.refuse_own(each, "export()")
        outline.add(Outline.of(each))
        if dtype == "master":
            outline.dtypes |= masters(engine)
    together = Together.of(engines[0])
    if stages[0] is not model:
        together = Together.across(engines[0], across_stages(engines))
        own, outline = outline, Outline()
        for said in together.all_gather(own):
            outline.add(said)
    asked: Any = None if dtype == "master" else dtype
    model = stages[0]

    def sheet() -> Sheet:
        check_arguments(asked, max_shard_bytes)
        if getattr(model, "peft_config", None):
            raise CheckpointError(
                "this model is one of peft, adapters around another: onefold.save_adapters(model,"
                " folder) writes the adapters. To export the merged model, call merge_and_unload()"
                " before shard()."
            )
        return plan(outline, model if is_transformers(model) else None, asked, max_shard_bytes)

    def beside(there: Path) -> None:
        if is_transformers(model):
            save_configuration(model, asked or first_dtype(outline), there)
        if tokenizer is not None:
            tokenizer.save_pretrained(str(there))
        elif is_transformers(model):
            copy_files(
                Path(str(getattr(model.config, "_name_or_path", "") or "/")), TOKENIZER, there
            )

    return stream(stages, together, Path(folder), sheet, beside, progress, overwrite)


def stream(
    models: Sequence[nn.Module],
    together: Together,
    target: Path,
    sheet: Callable[[], Sheet],
    beside: Callable[[Path], None],
    progress: Progress | None,
    overwrite: bool,
    change: Callable[[Pieces], Pieces] | None = None,
    renamed: Mapping[str, str] | None = None,
) -> Path:
    """Write the tensors of sharded models that a `Sheet` places into a new folder. Collective.

    Args:
        models: one, or this rank's stages of a pipeline.
        together: the ranks of all of them.
        sheet: makes the sheet. It depends on shapes only, so every rank makes the same.
        beside: adds small files to the folder. Called on the first rank.
        change: converts this rank's pieces, which have the sheet's names, to the pieces to write.
        renamed: {name in the model: name in the sheet}, where they differ.

    Raises:
        CheckpointError: on every rank; the unfinished folder is removed.
    """
    engines = [engine_of(model) for model in models]
    for engine in engines:
        meet(engine, "export")
        check_moment(engine, "export", None)
    made: Export | None = None
    planned: Sheet | None = None
    with contextlib.ExitStack() as unless_whole:  # a failure removes the folder
        with together.each_rank():
            planned = sheet()
            if together.rank == 0:
                made = unless_whole.enter_context(Export(target, overwrite))
                planned.files.create(made.folder)
                beside(made.folder)
        assert planned is not None
        there = Path(together.from_first(str(made.folder.resolve()) if made is not None else ""))
        with together.each_rank(), disable_torch_function(), torch.no_grad():
            if not there.is_dir():
                raise CheckpointError(
                    f"{there}, made by the first rank, is not there: export to a folder that all"
                    " ranks share."
                )
            names = renamed or {}
            total = planned.nbytes_of(
                (names.get(name, name), start, stop)
                for engine, model in zip(engines, models, strict=True)
                for name, start, stop in _intervals(engine, model)
            )
            mine: Pieces = (
                (names.get(name, name), start, data)
                for engine, model in zip(engines, models, strict=True)
                for name, start, data in _own(engine, model)
            )
            planned.write(there, mine if change is None else change(mine), total, progress)
        with together.each_rank():
            if made is not None:
                finish(made, overwrite)
    return target


def plan(
    outline: Outline,
    model: nn.Module | None,
    dtype: torch.dtype | None,
    limit: int,
    tied_once: bool = False,
) -> Sheet:
    """Plan the files for the tensors of `outline`.

    Args:
        model: the transformers model that the tensors belong to: names are converted by its rules.
            None: names do not change.
        dtype: dtype of floating-point parameters; None for those in `outline.dtypes`.
        tied_once: without a `model`, write a tied parameter under its first name only.
    """
    once = _tied_patterns(model) if model is not None else None
    unwanted = set(getattr(model, "_keys_to_ignore_on_save", None) or ())
    copies, shapes, dtypes = {}, {}, {}
    for names in outline.ties:
        kept = _kept(names, once) if once is not None else names[:1] if tied_once else names
        copies[names[0]] = [n for n in kept if n not in unwanted]
        kind, shape = outline.tensors[names[0]]
        own = outline.dtypes[names[0]]
        for kept_name in copies[names[0]]:
            shapes[kept_name] = shape
            dtypes[kept_name] = converted(own, dtype if kind == "parameter" else None)
    in_order = {n: shapes[n] for n in outline.tensors if n in shapes}
    layout = Layout.as_it_is(in_order) if model is None else writing(in_order, model)
    return Sheet.of(layout, dtypes, copies, "model", limit)


def converted(own: torch.dtype, asked: torch.dtype | None) -> torch.dtype:
    """Return the dtype in the files of a tensor of dtype `own`. Integer dtypes do not change."""
    return asked if asked is not None and own.is_floating_point else own


def masters(engine: Engine) -> dict[str, torch.dtype]:
    """Return {every name of every parameter: dtype of its master weights}."""
    return {name: entry.flat.dtypes.master for entry in engine.entries for name in entry.names}


def _intervals(engine: Engine, model: nn.Module) -> Iterator[tuple[str, int, int]]:
    """Yield (name, start, stop) of the pieces that `_own` yields."""
    for entry in engine.entries:
        start, stop = entry.accounted()
        if entry.region is not None:
            for run in runs(BoxInterval(entry.region, start, stop), entry.shape):
                yield entry.name, run.at, run.at + run.length
            continue
        yield entry.name, start, stop
    for name, value in beside_parameters(engine, model)[0].items() if engine.rank == 0 else ():
        yield name, 0, value.numel()


def _own(engine: Engine, model: nn.Module) -> Iterator[tuple[str, int, torch.Tensor]]:
    """Yield what this rank writes: its share of every parameter and, on the first rank, the
    buffers. Encoded weights are decoded one flat buffer at a time. Weights on NVMe are read piece
    by piece. The part of a box is yielded row by row.
    """
    parts = MasterParts()
    for entry in engine.entries:
        at, stop = entry.accounted()
        if at == stop:
            continue
        place = parts.place(entry, "", at, stop)
        for piece in place.pieces() if isinstance(place, OnDisk) else [place]:
            if entry.region is not None:
                yield from _rows(entry, at, piece)
            else:
                yield entry.name, at, piece
            at += piece.numel()
    for name, value in beside_parameters(engine, model)[0].items() if engine.rank == 0 else ():
        yield name, 0, value.detach().reshape(-1)


def _rows(entry: Entry, at: int, piece: torch.Tensor) -> Iterator[tuple[str, int, torch.Tensor]]:
    """Yield `piece`, the elements of this rank's box of a parameter from element `at` on, in runs of
    the whole parameter.
    """
    assert entry.region is not None
    step = CHUNK // piece.element_size()
    for start in range(0, piece.numel(), step):
        part = piece[start : start + step].detach().cpu()  # one copy for many rows
        first = at + start
        interval = BoxInterval(entry.region, first, first + part.numel())
        for run in runs(interval, entry.shape):
            here = run.start - first
            yield entry.name, run.at, part[here : here + run.length]


def finish(made: Export, overwrite: bool) -> None:
    for file in made.folder.rglob("*"):
        if file.is_file() and file.suffix != ".safetensors":
            flush(file)
    made.commit(overwrite)


def check_arguments(dtype: Any, max_shard_bytes: Any) -> None:
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise CheckpointError(
            f"dtype={dtype!r}: expected a floating-point torch.dtype such as torch.bfloat16, or"
            " None."
        )
    if not isinstance(max_shard_bytes, int) or max_shard_bytes < 1:
        raise CheckpointError(
            f"max_shard_bytes={max_shard_bytes!r}: expected a number of bytes from 1 up, such as"
            " 5_000_000_000."
        )


# -- tied weights ----------------------------------------------------------------------------------


def _tied_patterns(model: nn.Module) -> list[str]:
    """Return transformers' patterns for names that are tied to another tensor and not saved."""
    return [
        f"{path}.{key}" if path else key
        for path, m in model.named_modules()
        for key in getattr(m, "_tied_weights_keys", None) or ()
    ]


def _kept(names: Sequence[str], patterns: Iterable[str]) -> list[str]:
    """Return the names of one tensor that `save_pretrained` keeps: those that match no pattern, or
    else one of them.
    """
    patterns = list(patterns)
    if len(names) == 1:
        return list(names)
    return [n for n in names if not any(re.search(p, n) for p in patterns)] or [max(names)]


# -- beside the weights ----------------------------------------------------------------------------


def save_configuration(model: Any, dtype: torch.dtype, folder: Path) -> None:
    config = copy.deepcopy(model.config)
    config.dtype = str(dtype).removeprefix("torch.")
    config.architectures = [type(model).__name__]
    if getattr(type(model), "_auto_class", None) is not None:  # custom code is saved with it
        from transformers.dynamic_module_utils import custom_object_save

        custom_object_save(model, str(folder), config=config)
    config.save_pretrained(str(folder))
    if model.can_generate() and getattr(model, "generation_config", None) is not None:
        model.generation_config.save_pretrained(str(folder))


def first_dtype(outline: Outline) -> torch.dtype:
    """Return the model's dtype as transformers defines it: that of the first floating-point
    parameter.
    """
    found = (
        outline.dtypes[n]
        for n, (kind, _) in outline.tensors.items()
        if kind == "parameter" and outline.dtypes[n].is_floating_point
    )
    return next(found, torch.float32)


def copy_files(near: Path, names: Iterable[str], folder: Path) -> None:
    # A checkpoint's files must be inside its folder. A Hugging Face folder may consist of links
    # into a cache.
    whole = (near / MANIFEST).is_file()
    for name in names:
        path = path_in(near, name) if whole else near / name
        if path.is_file():
            shutil.copyfile(path, folder / name)
