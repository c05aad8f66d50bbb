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
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from onefold.checkpoint.errors import CheckpointError
from onefold.checkpoint.folder import Export, flush
from onefold.checkpoint.manifest import MANIFEST, path_in
from onefold.checkpoint.parts import Held
from onefold.checkpoint.source import Item, Source
from onefold.checkpoint.tensorfile import Planned, write_tensors
from onefold.checkpoint.together import Together, meet
from onefold.comm import StallError
from onefold.optim.clip import across_stages
from onefold.pretrained.hf_names import (
    Outgoing,
    Outline,
    is_transformers,
    joined,
    outline_of,
    stand_in,
    ties,
    writing,
)
from onefold.pretrained.weights import on_meta
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

#: What a tensor is: a parameter of the model, or what returns it in a dtype, as `Outgoing.make`.
Origin = Entry | Callable[[torch.dtype], Tensor | None]


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
    said: list[Any] = []
    origins, owners = dict[str, Origin](), dict[str, Any]()
    for each, engine in zip(stages, engines, strict=True):
        engine.uninitialized.refuse("export() would write")
        engine.buffers.refuse_own(each, "export()")
        said.append((outline_of(each, dtype == "master"), engine.group.ranks))
        origins |= origins_of(engine, each)
    together = Together.of(engines[0])
    if stages[0] is not model:
        together = Together.of(engines[0], across_stages(engines))
        said = [stage for rank in together.all_gather(said) for stage in rank]
    outline = joined(names for names, _ in said)
    for names, ranks in reversed(said):  # what an earlier stage has too, that one writes
        owners |= dict.fromkeys(names, ranks)
    origins = {n: of for n, of in origins.items() if owners.get(n) == engines[0].group.ranks}
    kind = stages[0] if is_transformers(stages[0]) else None

    tensors = plan(outline, origins, kind, asked)
    beside = partial(save_beside, kind, asked or first_dtype(outline), tokenizer)
    return write(together, Path(folder), tensors, beside, max_shard_bytes, overwrite)


def begin(engines: Iterable[Engine]) -> None:
    """Check that all ranks export, and that this is a moment to do so. Collective."""
    for engine in engines:
        engine.check_moment("export")
        meet(engine, "export")


def origins_of(engine: Engine, model: nn.Module) -> dict[str, Origin]:
    """Return the origins of the parameters, by first name, and on the first rank of the buffers."""
    buffers = beside_parameters(engine, model)[0].items() if engine.rank == 0 else ()
    out: dict[str, Origin] = {name: partial(b.detach().to, "cpu") for name, b in buffers}
    return out | {entry.name: entry for entry in engine.entries}


def whole(parts: MasterParts, origin: Origin, dtype: torch.dtype) -> Tensor | None:
    """Make a tensor whole, as `Outgoing.make`. Neighbours in the order of units decode an encoded
    flat buffer once.
    """
    if not isinstance(origin, Entry):
        return origin(dtype)
    engine = origin.engine()
    assert engine is not None
    return to_first(engine, parts, StateItem(origin, "", dtype))


def plan(
    outline: Outline,
    origins: Mapping[str, Origin],
    model: nn.Module | None,
    dtype: torch.dtype | None,
    tied_once: bool = False,
) -> dict[str, Outgoing]:
    """Return the files' tensors for those of `outline`.

    Args:
        origins: of those in which this rank has a part, by their first names.
        model: the transformers model that the tensors belong to: names are converted by its rules.
            None: names do not change.
        dtype: dtype of floating-point parameters; None for that of each.
        tied_once: without a `model`, write a tied parameter under its first name only.
    """
    once = None  # transformers' patterns for names that are tied to another tensor and not saved
    if model is not None:
        from transformers.modeling_utils import _get_tied_weight_keys

        once = _get_tied_weight_keys(model)
    unwanted = set(getattr(model, "_keys_to_ignore_on_save", None) or ())
    found, parts = dict[str, Outgoing](), MasterParts()
    for names in ties(outline):
        kept = _kept(names, once) if once is not None else names[:1] if tied_once else names
        like = outline[names[0]]
        if dtype is not None and isinstance(like, nn.Parameter) and like.is_floating_point():
            like = like.to(dtype)
        origin, held = origins.get(names[0]), None
        if isinstance(origin, Entry) and origin.region is None:
            held = Held(origin, "", like.dtype, parts, *parts.accounted(origin))
        make = None if origin is None else partial(whole, parts, origin, like.dtype)
        tensor = Outgoing(like, make, held)
        found |= {name: tensor for name in kept if name not in unwanted}
    in_order = {name: found[name] for name in outline if name in found}
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
        if groups[-1] and filled + tensor.like.nbytes > limit:
            groups.append({})
            filled = 0
        groups[-1][key] = tensor
        filled += tensor.like.nbytes
    many = len(groups) > 1
    return {
        f"{name}{f'-{number:05d}-of-{len(groups):05d}' if many else ''}.safetensors": dict(
            sorted(group.items(), key=lambda of: -of[1].like.itemsize)
        )
        for number, group in enumerate(groups, 1)
    }


def _prepare(folder: Path, files: Mapping[str, Mapping[str, Outgoing]], name: str) -> None:
    """Write the index of several files.
    Raises: CheckpointError: the disk has no space for them.
    """
    tensors = [tensor.like for group in files.values() for tensor in group.values()]
    size, free = sum(t.nbytes for t in tensors), shutil.disk_usage(folder).free
    if free < size:
        raise CheckpointError(
            f"{folder.parent} has {free / 2**20:,.2f} MiB free, and {size / 2**20:,.2f} MiB are to be"
            " written; free space there, or choose another disk."
        )
    if len(files) > 1:
        count = sum(t.numel() for t in tensors)
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
    if not folder.is_dir():
        error = CheckpointError(
            f"{folder}, made by the first rank, is not there: export to a folder that all ranks share."
        )
    for file, group in files.items():
        left = iter(group.values())
        planned = [
            Planned(
                key,
                t.like.dtype,
                tuple(t.like.shape),
                lambda left=left: next(left).written(),  # type: ignore[misc]
                t.held.x if t.held else 0,
            )
            for key, t in group.items()
        ]
        try:
            if error is None:
                write_tensors(folder / file, planned, shared=True)
        except StallError:
            raise
        except Exception as raised:
            error = raised
        for tensor in left:
            tensor.written()
    if error is not None:
        raise error


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


def _kept(names: list[str], patterns: Iterable[str]) -> list[str]:
    """Return the names of one tensor that `save_pretrained` keeps: those that match no pattern, or
    else one of them.
    """
    if len(names) == 1:
        return names
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
    parameters = (like for like in outline.values() if isinstance(like, nn.Parameter))
    return next((p.dtype for p in parameters if p.is_floating_point()), torch.float32)


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

    def read(item: Item, to: torch.dtype) -> Tensor:
        return source.whole(item).to(to)

    outline, origins = Outline(), dict[str, Origin]()
    others = source.other_names()
    source.refuse_own()
    for item, stored in source.items().items():
        if item.kind in ("parameter", "buffer"):
            like = stand_in(stored.shape, stored.dtype)
            if item.kind == "parameter":
                like = nn.Parameter(like, requires_grad=False)
            outline |= dict.fromkeys([item.name, *others.get(item.name, ())], like)
            origins[item.name] = partial(read, item)
    if not origins:
        raise CheckpointError("there is no parameter in it to export.")
    twin = _twin(near, outline) if near is not None and known else None
    tensors = plan(outline, origins, twin, dtype, tied_once=known)

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


def _twin(near: Path, outline: Outline) -> nn.Module | None:
    """Return the model of config.json on the meta device; None if the checkpoint's names differ."""
    try:
        import transformers

        kind = read_json(near / "config.json")["architectures"][0]
        twin = on_meta(near, getattr(transformers, kind), dtype=None)
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
    return twin if outline_of(twin).keys() == outline.keys() else None
