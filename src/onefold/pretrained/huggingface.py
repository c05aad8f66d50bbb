"""Read weights from a Hugging Face folder directly into the shards of a model.

    model.safetensors, or model.safetensors.index.json and its files
      │ HuggingFaceSource            the folder's own names
      │   .fitted(module)            the model's names: prefixes, ties, fused tensors (hf_names.py), peft's wrappers
      ▼
    Fitted ──► loading.apply_source  each rank reads only the elements that it owns, into its master weights

Pickles are refused, and no rank holds the whole model. Parameters that are in a file are not
initialized first.
"""

from __future__ import annotations

import contextlib
import logging
import re
from collections.abc import Callable, Iterable, Mapping, Set
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from onefold.checkpoint.errors import CheckpointError, NotStreamed
from onefold.checkpoint.loading import apply_source, opened_alike
from onefold.checkpoint.saving import begun
from onefold.checkpoint.source import Item, Source, Stored, closed_on_error
from onefold.checkpoint.tensorfile import TensorFile
from onefold.layout import overlap
from onefold.pretrained.hf_names import (
    Outline,
    Runs,
    Shape,
    is_transformers,
    outline_of,
    reading,
    ties,
)
from onefold.reading import StrPath, read_json
from onefold.runtime.hooks import is_sharded
from onefold.wording import few


def unwrapped(module: nn.Module, names: Iterable[str]) -> tuple[nn.Module, dict[str, str]]:
    """Return the model inside peft's wrappers, and {name in `module`: name in the inner model}."""
    inner: Any = getattr(module, "get_base_model", None) if hasattr(module, "peft_config") else None
    base: nn.Module = inner() if callable(inner) else module
    adapters = tuple(
        f"{path}.{part}." if path else f"{part}."
        for path, m in module.named_modules()
        for part in (
            *(getattr(m, "adapter_layer_names", None) or ()),
            *(getattr(m, "other_param_names", None) or ()),
        )
    )
    prefix = next((path + "." for path, m in module.named_modules() if m is base and path), "")
    out = {}
    for name in names:
        if not name.startswith(adapters) and name.startswith(prefix):
            plain = name.removeprefix(prefix)
            if adapters:
                # Adapters of two parameters of one module wrap each other
                plain = re.sub(r"\.((base_layer|original_module)\.)+", ".", plain)
            out[name] = plain
    return base, out


#: {attribute with peft's trained copies of a module: attribute with the original module}.
_COPIES = {"modules_to_save": "original_module", "ln_tuning_layers": "base_layer"}


def copies(module: nn.Module) -> dict[str, str]:
    """Return {parameter of a copy: same parameter of the original module} for each module that peft
    trains as a copy. The copy starts with the original's values. Only parameters on the meta device
    are returned.
    """
    return {
        f"{path}.{kept}.{adapter}.{name}": f"{path}.{original}.{name}"
        for path, wrapping in module.named_modules()
        for kept, original in _COPIES.items()
        if hasattr(wrapping, original)
        for adapter, copy in getattr(wrapping, kept, {}).items()
        for name, parameter in copy.named_parameters()
        if parameter.is_meta
    }


class Fitted(Source):
    """A source that shows another source's tensors under the names of a model.

    Args:
        source: the source of the tensors.
        outline: the outline of the model.
        made: {name in the model: the runs of the source's tensors that it consists of}.
        wanted: names of the model's tensors that the source should have.
        unexpected: tensors of the source without a place in the model.

    Attributes:
        missing: first names of those that it lacks.
        rules: transformers' rules by which names were converted, if any.
    """

    def __init__(
        self,
        source: Source,
        outline: Outline,
        made: Mapping[str, Runs],
        wanted: Set[str],
        unexpected: Iterable[str],
        rules: Any = None,
    ) -> None:
        self.source, self.folder = source, source.folder
        self.missing: list[str] = []
        self.unexpected, self.rules = sorted(unexpected), rules
        self._items: dict[Item, Stored] = {}
        self._runs: dict[Item, Runs] = {}
        self._aliases: dict[str, str] = {}
        for names in ties(outline):
            there = [name for name in names if name in made]
            if not there:
                self.missing += () if wanted.isdisjoint(names) else names[:1]
                continue
            like, runs = outline[names[0]], made[there[0]]
            item = Item("parameter" if isinstance(like, nn.Parameter) else "buffer", names[0])
            dtype = source.stored(Item("parameter", runs[0].name)).dtype if runs else like.dtype
            self._items[item], self._runs[item] = Stored(dtype, tuple(like.shape)), runs
            self._aliases |= dict.fromkeys(names[1:], names[0])
            if any(made[name] != runs for name in there):  # as transformers takes it
                logging.getLogger("onefold").warning(
                    "%s has a tensor for each of %s, which are one parameter in the model: the first"
                    " is read", source.describe, ", ".join(there),
                )  # fmt: skip

    @property
    def describe(self) -> str:
        return self.source.describe

    def items(self) -> Mapping[Item, Stored]:
        return self._items

    def close(self) -> None:
        self.source.close()

    def aliases(self) -> Mapping[str, str]:
        return self._aliases

    def names(self) -> set[str]:
        """Return every name of the model for which the source has values."""
        return {item.name for item in self._items} | set(self._aliases)

    def read(self, item: Item, start: int, stop: int, out: Tensor) -> None:
        for run in self._runs[item]:
            a, b = overlap((run.at, run.at + run.length), (start, stop))
            if a < b:
                at, part = run.start + a - run.at, out[a - start : b - start]
                self.source.read(Item("parameter", run.name), at, at + b - a, part)


def refuse_shapes(there: Mapping[str, Shape], expected: Outline, what: str, hint: str = "") -> None:
    """Raise CheckpointError if tensors that both sides have differ in shape. The message begins
    with `what` and ends with `hint`.
    """
    wrong = [
        f"{name}: {there[name]} there, {tuple(like.shape)} in the model"
        for name, like in expected.items()
        if there.get(name, like.shape) != like.shape
    ]
    if wrong:
        raise CheckpointError(f"{what} {'; '.join(wrong[:5])}.{hint}")


class HuggingFaceSource(Source):
    """A folder with `model.safetensors`, or with `model.safetensors.index.json` and the files that
    it names; or a single such file.

    Args:
        folder: the folder, or a safetensors file.
        name: the beginning of the files' names: "model", or "adapter_model" for peft's.

    Raises:
        CheckpointError: there are no safetensors weights, or a part of them is missing or damaged.
    """

    folder: Path

    def __init__(self, folder: StrPath, name: str = "model") -> None:
        self.folder = Path(folder)
        self._files: list[TensorFile] = []
        self._where: dict[str, TensorFile] = {}
        self._items: dict[Item, Stored] = {}
        with closed_on_error(self):
            self._open(name)

    def _open(self, name: str) -> None:
        path, one = self.folder, self.folder / f"{name}.safetensors"
        index = self.folder / f"{name}.safetensors.index.json"
        if path.is_file() and path.suffix == ".safetensors":
            self.folder, one = path.parent, path
        files: dict[Path, list[str] | None] = {one: None}
        if not one.is_file():
            if not index.is_file():
                raise _no_weights(path, name)
            files = {path / file: keys for file, keys in _index(index).items()}
        for place, keys in files.items():
            file = TensorFile(place)
            self._files.append(file)
            for key in file.header if keys is None else keys:
                if key not in file.header:
                    raise CheckpointError(
                        f"the index of {self.folder} says that {key!r} is in {place.name}, which does"
                        " not hold it."
                    )
                self._where[key], entry = file, file.header[key]
                self._items[Item("parameter", key)] = Stored(entry.dtype, entry.shape)
        method = _quantized(self.folder) if name == "model" else None
        if method:
            raise NotStreamed(
                f"the weights in {self.folder} are quantized ({method}): they cannot be put into a"
                " model as they are. Open it with transformers' from_pretrained, dequantize it,"
                " and save that."
            )

    @property
    def describe(self) -> str:
        return f"the Hugging Face folder {self.folder}"

    def items(self) -> Mapping[Item, Stored]:
        return self._items

    def read(self, item: Item, start: int, stop: int, out: Tensor) -> None:
        self._where[item.name].read(item.name, start, stop, out)

    def close(self) -> None:
        for file in self._files:
            file.close()

    def fitted(self, module: nn.Module) -> Fitted:
        """Return these weights under the names and in the shapes of `module`, which may be sharded
        or not, or on the meta device.

        Raises:
            CheckpointError: shapes differ, or a tensor would have to be computed from others.
        """
        outline = outline_of(module)
        inner, names = unwrapped(module, outline)
        expected = {name: outline[full] for full, name in names.items()}
        stored = {item.name: s.shape for item, s in self.items().items()}
        layout, left, rules = reading(stored, expected, inner)
        there = {name: shape for name, (shape, _) in layout.items()}
        refuse_shapes(there, expected, f"{self.describe} is of another model: shapes differ.")
        made = {full: layout[name][1] for full, name in names.items() if name in layout}
        if not is_sharded(module):
            tied = {name: group for group in ties(outline) for name in group}
            for copy, own in copies(module).items():
                if there_as := next((name for name in tied[own] if name in made), None):
                    made[copy] = made[there_as]
        unexpected = [key for key in left if not _ignored(inner, key)]
        return Fitted(self, outline, made, names.keys(), unexpected, rules)


def opened(folder: StrPath, module: nn.Module) -> Fitted:
    """Open a folder and fit its weights to the model. Raises: CheckpointError."""
    with closed_on_error(HuggingFaceSource(folder)) as source:
        return source.fitted(module)


def load_pretrained(
    module: nn.Module, folder: StrPath, strict: bool = True
) -> tuple[list[str], list[str]]:
    """Load the weights of a Hugging Face folder into an already sharded model. Collective.

    Each rank reads what it owns, in the file's dtype. During the load it holds a few MiB more than
    its shard. With `strict=False`, parameters that are missing in the folder do not change. The
    model's peft adapters never change.

    Args:
        module: the return value of `onefold.shard`.
        folder: a folder with `model.safetensors`, or with `model.safetensors.index.json` and its
            files; or one .safetensors file.

    Returns:
        (names in the model that are missing in the folder, names in the folder that have no place
        in the model).

    Raises:
        CheckpointError: on every rank: the folder cannot be read, shapes differ, or, with `strict`,
            names differ.
    """
    return load_fitted(module, "load_pretrained", partial(opened, folder, module), strict)


def load_fitted(
    module: nn.Module, call: str, fit: Callable[[], Fitted], strict: bool
) -> tuple[list[str], list[str]]:
    """Load the source that `fit` opens; it must be the same on every rank. Collective. `call`: the
    public function that was called. Returns (missing names, unexpected names).
    """
    models, engines, together = begun(call, module)
    with contextlib.closing(opened_alike(together, fit, {"strict": str(strict)})) as fitted:
        loaded = apply_source(engines, models, together, fitted, strict)
    return list(loaded.missing), list(loaded.unexpected)


def recognizes(path: Path) -> bool:
    """Return whether a folder has Hugging Face weights, readable here or not."""
    names = [f"{name}{end}" for name in ("model.safetensors", "pytorch_model.bin")
             for end in ("", ".index.json")]  # fmt: skip
    return any((path / name).is_file() for name in (*names, "adapter_config.json"))


def open_source(path: Path) -> HuggingFaceSource:
    """Open such a folder for `onefold.load`."""
    return HuggingFaceSource(path)


# -- what is in a folder ---------------------------------------------------------------------------


def _index(path: Path) -> dict[str, list[str]]:
    """Read an index: {file: names of its tensors}."""
    try:
        found = read_json(path)["weight_map"]
        out: dict[str, list[str]] = {}
        for key, file in found.items():
            out.setdefault(file, []).append(key)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(
            f"{path} is no index of safetensors files ({type(error).__name__}: {error})."
        ) from None

    def is_there(file: Any) -> bool:
        plain = isinstance(file, str) and Path(file).name == file  # not a path to another folder
        return plain and (path.parent / file).is_file()

    if gone := [str(file) for file in out if not is_there(file)]:
        raise CheckpointError(
            f"{len(gone)} of the {len(out)} files that {path} names are missing in its folder:"
            f" {few(sorted(gone))}."
        )
    return out


def _no_weights(path: Path, name: str) -> CheckpointError:
    """Return the error for a place that has no safetensors."""
    inside = sorted(path.iterdir()) if path.is_dir() else [path]
    endings = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
    pickles = [p.name for p in inside if p.suffix in endings and p.stem != "training_args"]
    if pickles and path.exists():
        return NotStreamed(
            f"the weights at {path} are pickles ({few(pickles)}), which can run code and cannot be"
            " read in parts, so they are not opened. Convert it once:"
            " AutoModel.from_pretrained(folder).save_pretrained(other_folder)."
        )
    gone = "" if path.exists() else " It does not exist, and nothing is downloaded."
    return CheckpointError(
        f"{path} is no .safetensors file, and no folder with {name}.safetensors or its index.{gone} A"
        " checkpoint of Onefold is loaded by onefold.load(path, model=model), peft's adapters by"
        " onefold.load_adapters, and a GGUF file by transformers' from_pretrained(gguf_file=...),"
        " whose model can be saved as a folder."
    )


def _quantized(folder: Path) -> str | None:
    """Return the quantization method that the folder's config.json names, if any."""
    try:
        config = read_json(folder / "config.json")
        found = config.get("quantization_config")
    except (OSError, ValueError, AttributeError):
        return None
    return str(found.get("quant_method", "by its config.json")) if isinstance(found, dict) else None


def _ignored(module: nn.Module, key: str) -> bool:
    """Return whether transformers itself ignores a tensor of this name."""
    own = getattr(module, "_keys_to_ignore_on_load_unexpected", None) or ()
    patterns = (
        (*own, r"rotary_emb\.inv_freq$", r"(^|\.)position_ids$") if is_transformers(module) else ()
    )
    return any(re.search(pattern, key) for pattern in patterns)
