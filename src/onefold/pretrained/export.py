"""Write a model as a folder that other libraries open: safetensors in Hugging Face's layout,
configuration, tokenizer.

    onefold.export        from a sharded model, by its ranks
    export_folder         from a checkpoint, in one process

    plan (shapes on the meta device) ──► files with their headers ──► each tensor in turn:

    | a tensor                                                             | is written by                          |
    |----------------------------------------------------------------------|----------------------------------------|
    | as the model has it                                                  | each rank, what it accounts for        |
    | joined or divided by transformers, merged with an adapter, or held   | the first rank, on which it is whole   |
    | in boxes of a mesh                                                   |                                        |

The folder gets its name when it is complete. An error on one rank is raised on all ranks, and the
unfinished folder is removed.
"""

from __future__ import annotations

import contextlib
import copy
import json
import logging
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from onefold.checkpoint.errors import CheckpointError
from onefold.checkpoint.folder import Export, flush
from onefold.checkpoint.manifest import MANIFEST, path_in
from onefold.checkpoint.parts import Held
from onefold.checkpoint.source import Source
from onefold.checkpoint.tensorfile import Planned, numel_of, write_tensors
from onefold.checkpoint.together import Together, meet
from onefold.comm import StallError
from onefold.optim.clip import across_stages
from onefold.pretrained.fitted import Outline
from onefold.pretrained.hf_names import Outgoing, is_transformers, writing
from onefold.reading import StrPath, read_json
from onefold.runtime.engine import Engine
from onefold.runtime.flat import Entry
from onefold.runtime.hooks import engine_of
from onefold.runtime.parameters.parameter import disable_torch_function
from onefold.runtime.parts import MasterParts, StateItem, to_first
from onefold.runtime.state.dicts import beside_parameters

#: The default for the bytes of tensors in one file.
MAX_SHARD_BYTES = 5_000_000_000
CONFIGURATION = ("config.json", "generation_config.json")
#: The files of transformers' tokenizers and processors.
TOKENIZER = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "vocab.json", "vocab.txt", "merges.txt",
    "tokenizer.model", "spiece.model", "sentencepiece.bpe.model", "chat_template.jinja", "chat_template.json", "preprocessor_config.json",
    "processor_config.json",
)  # fmt: skip

#: What returns a tensor in a dtype, whole on the host of the first rank, None elsewhere (collective);
#: and the parameter that it is, if each rank may write a part of it.
Make = tuple[Callable[[torch.dtype], Tensor | None], Entry | None]


def export(
    model: nn.Module | Sequence[nn.Module],
    folder: StrPath,
    dtype: torch.dtype | str | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    *,
    tokenizer: Any = None,
    overwrite: bool = False,
) -> Path:
    """Write a sharded model as a folder that transformers' `from_pretrained` opens. Collective.

    A transformers model is written as its `save_pretrained` does: the same names, tied weights
    once, config.json. Any other model becomes safetensors with the names of its state dict. Every
    rank writes its part, so all must share the file system of `folder`. They hold a few MiB besides
    their shards. The first rank also holds, one at a time, the whole tensors that transformers joins
    or divides (all experts of a layer) or that other axes than data divide.

    Args:
        model: the return value of `onefold.shard`, or a list of those of this rank's stages of a
            pipeline, whose names are those of the whole model. All ranks of all stages call it.
        folder: the folder to create, with its parents.
        dtype: dtype of floating-point parameters in the files. None: each parameter's compute dtype
            (bf16 under bf16). "master": the master weights' dtype (fp32 under bf16).
        max_shard_bytes: the most bytes of tensors in one file. A larger model becomes several files
            with an index.
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
    begin(engines)
    asked: Any = None if dtype == "master" else dtype
    check_arguments(asked, max_shard_bytes)
    if getattr(stages[0], "peft_config", None):
        raise CheckpointError(
            "this model is one of peft, adapters around another: onefold.save_adapters(model,"
            " folder) writes the adapters. To export the merged model, call merge_and_unload()"
            " before shard()."
        )
    outline, makes = Outline(), dict[str, Make]()
    for each, engine in zip(stages, engines, strict=True):
        engine.uninitialized.refuse("export() would write")
        engine.buffers.refuse_own(each, "export()")
        outline.add(Outline.of(each))
        if dtype == "master":
            outline.dtypes |= masters(engine)
        makes |= wholes(engine, each)
    together = Together.of(engines[0])
    if stages[0] is not model:
        together = Together.of(engines[0], across_stages(engines))
        told = together.all_gather((outline, engines[0].group.ranks))
        outline, owners = Outline(), dict[str, Any]()
        for said, ranks in told:
            outline.add(said)
            owners = dict.fromkeys(said.tensors, ranks) | owners
        # What an earlier stage has too, that one writes
        makes = {n: make for n, make in makes.items() if owners[n] == engines[0].group.ranks}
    kind = stages[0] if is_transformers(stages[0]) else None

    tensors = plan(outline, makes, kind, asked)
    beside = partial(save_beside, kind, asked or first_dtype(outline), tokenizer)
    return write(together, Path(folder), tensors, beside, max_shard_bytes, overwrite)


def begin(engines: Iterable[Engine]) -> None:
    """Check that all ranks export, and that this is a moment to do so. Collective."""
    for engine in engines:
        engine.check_moment("export")
        meet(engine, "export")


def wholes(engine: Engine, model: nn.Module) -> dict[str, Make]:
    """Return what makes each parameter (by its first name) whole, and on the first rank each buffer.
    Neighbours in the order of units decode an encoded flat buffer once.
    """
    parts = MasterParts()

    def parameter(entry: Any, dtype: torch.dtype) -> Tensor | None:
        return to_first(engine, parts, StateItem(entry, "", dtype))

    def buffer(value: Tensor, dtype: torch.dtype) -> Tensor:
        return value.detach().to("cpu", dtype)

    buffers = beside_parameters(engine, model)[0].items() if engine.rank == 0 else ()
    makes: dict[str, Make] = {name: (partial(buffer, value), None) for name, value in buffers}
    for entry in engine.entries:
        divided = entry.box is not None and entry.box.divided
        makes[entry.name] = partial(parameter, entry), None if divided else entry
    return makes


def plan(
    outline: Outline,
    makes: Mapping[str, Make],
    model: nn.Module | None,
    dtype: torch.dtype | None,
    tied_once: bool = False,
) -> dict[str, Outgoing]:
    """Return the files' tensors for those of `outline`.

    Args:
        makes: what makes them whole; without those in which this rank has no part.
        model: the transformers model that the tensors belong to: names are converted by its rules.
            None: names do not change.
        dtype: dtype of floating-point parameters; None for those in `outline.dtypes`.
        tied_once: without a `model`, write a tied parameter under its first name only.
    """
    once = _tied_patterns(model) if model is not None else None
    unwanted = set(getattr(model, "_keys_to_ignore_on_save", None) or ())
    found, parts = dict[str, Outgoing](), MasterParts()
    for names in outline.ties:
        first = names[0]
        kept = _kept(names, once) if once is not None else names[:1] if tied_once else names
        kind, shape = outline.tensors[first]
        to = converted(outline.dtypes[first], dtype if kind == "parameter" else None)
        make, entry = makes.get(first, (None, None))
        held = None if entry is None else Held(entry, "", to, parts, *parts.accounted(entry))
        tensor = Outgoing(to, shape, make and partial(make, to), held)
        found |= {name: tensor for name in kept if name not in unwanted}
    in_order = {name: found[name] for name in outline.tensors if name in found}
    return in_order if model is None else writing(in_order, model)


def write(
    together: Together | None,
    target: Path,
    tensors: Mapping[str, Outgoing],
    beside: Callable[[Path], None],
    limit: int,
    overwrite: bool,
    name: str = "model",
) -> Path:
    """Write tensors, and what is beside them, into a new folder. Collective.

    Args:
        together: the ranks; None for one process alone.
        beside: adds small files to the folder. Called on the first rank.
        limit: the most bytes of tensors in one file.
        name: how the files are called.

    Raises:
        CheckpointError: on every rank; the unfinished folder is removed.
    """
    files, made = files_of(tensors, limit, name), None
    each_rank = contextlib.nullcontext if together is None else together.each_rank
    rank = 0 if together is None else together.rank
    with contextlib.ExitStack() as unless_whole:  # a failure removes the folder
        with each_rank():
            if rank == 0:
                made = unless_whole.enter_context(Export(target, overwrite))
                _prepare(made.folder, files, name)
                beside(made.folder)
        there = str(made.folder.resolve()) if made is not None else ""
        there = there if together is None else together.from_first(there)
        with each_rank(), disable_torch_function(), torch.no_grad():
            write_files(Path(there), files)
        with each_rank():
            if made is not None:
                for file in made.folder.rglob("*"):
                    if file.is_file() and file.suffix != ".safetensors":
                        flush(file)
                made.commit(overwrite)
    return target


def files_of(
    tensors: Mapping[str, Outgoing], limit: int, name: str = "model"
) -> dict[str, dict[str, Outgoing]]:
    """Divide tensors among files of at most `limit` bytes, or of one larger tensor. In a file the
    widest dtypes come first, which aligns every element to its size.
    """
    groups: list[dict[str, Outgoing]] = [{}]
    filled = 0
    for key, tensor in tensors.items():
        if groups[-1] and filled + tensor.nbytes > limit:
            groups.append({})
            filled = 0
        groups[-1][key] = tensor
        filled += tensor.nbytes
    many = len(groups) > 1
    return {
        f"{name}{f'-{number:05d}-of-{len(groups):05d}' if many else ''}.safetensors": dict(
            sorted(group.items(), key=lambda of: -of[1].dtype.itemsize)
        )
        for number, group in enumerate(groups, 1)
    }


def _prepare(folder: Path, files: Mapping[str, Mapping[str, Outgoing]], name: str) -> None:
    """Write the index of several files.
    Raises: CheckpointError: the disk has no space for them.
    """
    tensors = [tensor for group in files.values() for tensor in group.values()]
    size, free = sum(t.nbytes for t in tensors), shutil.disk_usage(folder).free
    if free < size:
        raise CheckpointError(
            f"{folder.parent} has {free / 2**20:,.2f} MiB free, and {size / 2**20:,.2f} MiB are to be"
            " written; free space there, or choose another disk."
        )
    if len(files) > 1:
        count = sum(numel_of(tensor.shape) for tensor in tensors)
        index = {
            "metadata": {"total_parameters": count, "total_size": size},
            "weight_map": dict(sorted((key, file) for file in files for key in files[file])),
        }
        path = folder / f"{name}.safetensors.index.json"
        path.write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def write_files(folder: Path, files: Mapping[str, Mapping[str, Outgoing]]) -> None:
    """Write what this rank writes, and take part in making tensors whole. After an error it goes on
    taking part, and raises at the end.
    """
    error: Exception | None = None
    for file, group in files.items():
        left = iter(group.values())
        if error is None:
            try:
                _write_file(folder / file, group, left)
            except StallError:
                raise
            except Exception as raised:
                error = raised
        for tensor in left:
            tensor.written()
    if error is not None:
        raise error


def _write_file(path: Path, group: Mapping[str, Outgoing], left: Iterator[Outgoing]) -> None:
    """Write what this rank writes of a file. Each tensor is taken out of `left` before."""
    if not path.parent.is_dir():
        raise CheckpointError(
            f"{path.parent}, made by the first rank, is not there: export to a folder that all ranks"
            " share."
        )

    def following() -> Iterable[Tensor]:
        return next(left).written()

    planned = [
        Planned(key, t.dtype, t.shape, following, 0 if t.held is None else t.held.x)
        for key, t in group.items()
    ]
    write_tensors(path, planned, shared=True)


def converted(own: torch.dtype, asked: torch.dtype | None) -> torch.dtype:
    """Return the dtype in the files of a tensor of dtype `own`. Integer dtypes do not change."""
    return asked if asked is not None and own.is_floating_point else own


def masters(engine: Engine) -> dict[str, torch.dtype]:
    """Return {every name of every parameter: dtype of its master weights}."""
    return {name: entry.flat.dtypes.master for entry in engine.entries for name in entry.names}


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


def save_beside(model: Any, dtype: torch.dtype, tokenizer: Any, folder: Path) -> None:
    """Write the configuration of a transformers model (None for another), and the tokenizer: None
    copies that of the folder from which the model was loaded.
    """
    if tokenizer is not None:
        tokenizer.save_pretrained(str(folder))
    if model is None:
        return
    if tokenizer is None:
        copy_files(Path(getattr(model.config, "_name_or_path", "") or "/"), TOKENIZER, folder)
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


# -- from a checkpoint -----------------------------------------------------------------------------


def export_folder(
    source: Source,
    folder: StrPath,
    dtype: torch.dtype | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    progress: Callable[[int, int], object] | None = None,
    *,
    beside: StrPath | None = None,
    overwrite: bool = False,
) -> Path:
    """Write the model in a checkpoint as a folder that `from_pretrained` opens. Runs in one
    process, tensor by tensor.

    Args:
        source: an opened checkpoint.
        folder: as for `export`.
        dtype: dtype of floating-point parameters in the files; None for the checkpoint's own, which
            is that of its master weights.
        max_shard_bytes: as for `export`.
        progress: called for each tensor that has been read, with (its bytes, the bytes of all).
        beside: the folder with config.json and the tokenizer's files; None for the source's own.
        overwrite: as for `export`.

    Raises:
        CheckpointError: the source is damaged, or `folder` cannot be written to.
    """
    check_arguments(dtype, max_shard_bytes)
    near = Path(beside) if beside is not None else source.folder
    known = near is not None and (near / "config.json").is_file()
    if beside is not None and not known:
        raise CheckpointError(
            f"--like {beside} has no config.json: name a Hugging Face folder, or leave it out."
        )

    def read(item: Any, to: torch.dtype) -> Tensor:
        whole = source.whole(item).to(to)
        if progress is not None:
            progress(whole.nbytes, size)
        return whole

    outline, makes = Outline(), dict[str, Make]()
    others = source.other_names()
    source.refuse_own()
    for item, stored in source.items().items():
        if item.kind in ("parameter", "buffer"):
            names = [item.name, *others.get(item.name, ())]
            outline.ties.append(names)
            for name in names:
                outline.tensors[name], outline.dtypes[name] = (
                    (item.kind, stored.shape),
                    stored.dtype,
                )
            makes[item.name] = (partial(read, item), None)
    if not makes:
        raise CheckpointError("there is no parameter in it to export.")
    twin = _twin(near, outline) if known else None
    tensors = plan(outline, makes, twin, dtype, tied_once=known)
    size = sum(tensor.nbytes for tensor in tensors.values())

    def small(there: Path) -> None:
        if near is not None:
            copy_files(near, (*CONFIGURATION, *TOKENIZER), there)
            _say_dtype(there / "config.json", dtype or first_dtype(outline))

    return write(None, Path(folder), tensors, small, max_shard_bytes, overwrite)


def _say_dtype(path: Path, dtype: torch.dtype) -> None:
    with contextlib.suppress(OSError, ValueError, TypeError):
        config = read_json(path)
        key = "torch_dtype" if "torch_dtype" in config and "dtype" not in config else "dtype"
        config[key] = str(dtype).removeprefix("torch.")
        path.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def _twin(near: Path | None, outline: Outline) -> nn.Module | None:
    """Return the model of config.json on the meta device; None if the checkpoint's names differ."""
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
