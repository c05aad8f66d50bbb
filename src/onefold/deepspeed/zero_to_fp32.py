"""`deepspeed.utils.zero_to_fp32`: the whole model from a checkpoint, without an engine.

runs/a/latest            "global_step300"
runs/a/zero_to_fp32.py   python runs/a/zero_to_fp32.py runs/a OUTPUT
runs/a/global_step300/   Onefold's checkpoint, or DeepSpeed's
"""

from __future__ import annotations

import argparse
import contextlib
import json
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor, nn

import onefold
from onefold.checkpoint.errors import CheckpointError
from onefold.checkpoint.loading import source_of
from onefold.checkpoint.source import Item, Source
from onefold.deepspeed.checkpoints import write_whole
from onefold.deepspeed.reader import named_in
from onefold.deepspeed.zero import INSIDE
from onefold.pretrained.export import files_of
from onefold.pretrained.hf_names import Outgoing
from onefold.reading import StrPath
from onefold.recipe.options import bytes_of
from onefold.runtime.hooks import is_sharded

__all__ = [
    "convert_zero_checkpoint_to_fp32_state_dict",
    "get_fp32_state_dict_from_zero_checkpoint",
    "load_state_dict_from_zero_checkpoint",
]
#: An output with one of these suffixes is a file; any other is a folder.
_FILES = (".bin", ".pt", ".pth", ".ckpt", ".safetensors")


def get_fp32_state_dict_from_zero_checkpoint(
    checkpoint_dir: StrPath,
    tag: str | None = None,
    exclude_frozen_parameters: bool = False,
    lazy_mode: bool = False,
) -> dict[str, Tensor]:
    """Return the whole model in fp32 from a checkpoint of Onefold or DeepSpeed, in one process.

    Args:
        tag: the checkpoint's folder in `checkpoint_dir`; None takes the one that the file `latest`
            names.
        exclude_frozen_parameters: leave out parameters that were not trained.
        lazy_mode: accepted without effect; all values are read.

    Raises:
        CheckpointError: there is no checkpoint that can be read, or it does not say which
            parameters were frozen.
    """
    with contextlib.closing(source_of(_folder(checkpoint_dir, tag))) as source:
        return _state(source, _tensors(source, exclude_frozen_parameters))


def load_state_dict_from_zero_checkpoint(
    model: nn.Module, checkpoint_dir: StrPath, tag: str | None = None
) -> nn.Module:
    """Load a checkpoint's whole model, and return `model`.

    | `model` is                | what happens                                                      |
    |---------------------------|-------------------------------------------------------------------|
    | not sharded               | it is moved to the host, and loaded there                         |
    | an engine's               | each rank loads its part; every rank must call                    |
    | an engine's, and gathered | the whole is the checkpoint's, in fp32, until GatheredParameters ends |

    What the checkpoint lacks (frozen parameters that were left out) stays as it is. The optimizer's
    states stay as they are.

    Raises:
        CheckpointError: there is no checkpoint that can be read.
        RuntimeError: some parameters of an engine's model are gathered, and others are not.
    """
    if not is_sharded(model):
        model = model.cpu()
        model.load_state_dict(
            get_fp32_state_dict_from_zero_checkpoint(checkpoint_dir, tag), strict=False
        )
        return model
    gathered = [INSIDE in param.__dict__ for param in model.parameters()]
    if not any(gathered):
        onefold.load(_folder(checkpoint_dir, tag), model=model, strict=False)
        return model
    if not all(gathered):
        raise RuntimeError(
            f"load_state_dict_from_zero_checkpoint was given a model of which {sum(gathered)} of"
            f" {len(gathered)} parameters are gathered: gather all of them, or none."
        )
    state = get_fp32_state_dict_from_zero_checkpoint(checkpoint_dir, tag)
    for name, param in model.named_parameters():
        if name in state:
            param.data = state[name].to(param.device)
    for name, buffer in model.named_buffers():
        if name in state:
            buffer.copy_(state[name])
    return model


def convert_zero_checkpoint_to_fp32_state_dict(
    checkpoint_dir: StrPath,
    output_dir: StrPath,
    max_shard_size: int | str | None = "5GB",
    safe_serialization: bool = False,
    tag: str | None = None,
    exclude_frozen_parameters: bool = False,
) -> None:
    """Write a checkpoint's whole model in fp32, to one file or to several files and an index.

    No more than one file's values are in memory at a time.

    Args:
        output_dir: a folder, for pytorch_model.bin or model.safetensors; or a file, if the name
            ends in .bin, .pt, .pth, .ckpt or .safetensors.
        max_shard_size: the most bytes in a file, also as a text such as "5GB"; None for one file.
        safe_serialization: write safetensors, instead of pickles for `torch.load`.
        checkpoint_dir, tag, exclude_frozen_parameters: see
            `get_fp32_state_dict_from_zero_checkpoint`.

    Raises:
        CheckpointError: see `get_fp32_state_dict_from_zero_checkpoint`.
    """
    target = Path(output_dir)
    single = target.suffix in _FILES
    safe = safe_serialization or target.suffix == ".safetensors"
    stem, suffix = ("model", ".safetensors") if safe else ("pytorch_model", ".bin")
    folder = target.parent if single else target
    unlimited = single or max_shard_size is None
    with contextlib.closing(source_of(_folder(checkpoint_dir, tag))) as source:
        tensors = _tensors(source, exclude_frozen_parameters)
        like = {
            own[0]: Outgoing(torch.empty(source.stored(item).shape, device="meta"), None)
            for item, own in tensors.items()
        }
        limit = 1 << 62 if unlimited else bytes_of("max_shard_size", max_shard_size)
        folder.mkdir(parents=True, exist_ok=True)
        places: dict[str, str] = {}
        for key, group in files_of(like, limit, stem).items():
            file = target.name if single else Path(key).stem + suffix
            held = {item: own for item, own in tensors.items() if own[0] in group}
            write_whole(_state(source, held), folder / file)
            places |= {name: file for own in held.values() for name in own}
    if len({*places.values()}) > 1:
        size = sum(outgoing.like.nbytes for outgoing in like.values())
        index = {"metadata": {"total_size": size}, "weight_map": places}
        text = json.dumps(index, indent=2, sort_keys=True) + "\n"
        (folder / f"{stem}{suffix}.index.json").write_text(text, encoding="utf-8")


def main(arguments: list[str] | None = None) -> None:
    """Run `zero_to_fp32.py`, with the arguments of DeepSpeed's script of that name."""
    parser = argparse.ArgumentParser(
        prog="zero_to_fp32.py", description="Write the whole model of a checkpoint in fp32."
    )
    parser.add_argument("checkpoint_dir", help="the folder with the file `latest`")
    parser.add_argument("output_dir", help="a folder, or a file that ends in .bin or .safetensors")
    parser.add_argument("--max_shard_size", default="5GB", help="bytes of a file, such as 5GB")
    parser.add_argument("--safe_serialization", action="store_true", help="write safetensors")
    parser.add_argument("-t", "--tag", default=None, help="the folder in it; else what latest says")
    parser.add_argument("--exclude_frozen_parameters", action="store_true")
    parser.add_argument("-d", "--debug", action="store_true", help="accepted; without effect")
    given = vars(parser.parse_args(arguments))
    given.pop("debug")
    try:
        convert_zero_checkpoint_to_fp32_state_dict(**given)
    except (CheckpointError, OSError, ValueError) as error:
        parser.exit(1, f"zero_to_fp32.py: {error}\n")


def _folder(folder: StrPath, tag: str | None) -> Path:
    path = Path(folder)
    tag = named_in(path) if tag is None else tag
    return path if tag is None else path / tag


def _tensors(source: Source, without_frozen: bool) -> dict[Item, list[str]]:
    """Return the parameters and buffers of a checkpoint with all their names."""
    source.refuse_own()
    other, trained = source.other_names(), _trained_in(source) if without_frozen else None
    return {
        item: [item.name, *other.get(item.name, ())]
        for item in source.items()
        if item.kind == "buffer"
        or (item.kind == "parameter" and (trained is None or item.name in trained))
    }


def _state(source: Source, tensors: Mapping[Item, list[str]]) -> dict[str, Tensor]:
    """Read tensors in fp32. Tied names share one."""
    out: dict[str, Tensor] = {}
    for item, names in tensors.items():
        out |= dict.fromkeys(names, source.whole(item).float())
    return out


def _trained_in(source: Source) -> set[str]:
    """Return the names of parameters that an optimizer has.

    Raises:
        CheckpointError: the checkpoint does not say which parameters were frozen.
    """
    groups = source.groups()
    if groups is None:
        raise CheckpointError(
            f"{source.describe} has no optimizer, and so does not say which parameters were frozen:"
            " leave exclude_frozen_parameters out."
        )
    return {
        source.stored_name(name) for made in groups for group in made for name in group["params"]
    }
