"""A model from its own code, built on the meta device, where parameters have shapes and no memory."""

from __future__ import annotations

import difflib
import importlib
import inspect
import json
import os
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import nn

from onefold.wording import did_you_mean


def module_of(source: str | Path, as_it_is: bool = False) -> nn.Module:
    """The model that `source` names, on the meta device: never allocated, however large.

    Args:
        source: a folder with a config.json, the config.json itself, or `package.module:factory`
            (called without arguments).
        as_it_is: a config's model keeps the dtype that the config names; else it is fp32, from
            which a plan follows the recipe.

    Raises:
        ValueError: there is no such thing, or it makes no module; the message says what was looked
            for.
    """
    path = Path(source)
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise ValueError(
                f"{source}: this folder has no config.json, so it is no Hugging Face model."
            )
        return _from_config(path / "config.json", as_it_is)
    if path.is_file():
        if path.suffix != ".json":
            raise ValueError(
                f"{source}: expected a config.json, its folder, or package.module:factory."
            )
        return _from_config(path, as_it_is)
    if re.fullmatch(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*", str(source)):
        return _from_factory(str(source))
    raise ValueError(
        f"{source}: there is no such folder or file, and it is not package.module:factory. Nothing"
        " is downloaded."
    )


def _from_config(path: Path, as_it_is: bool) -> nn.Module:
    try:
        import transformers
    except ModuleNotFoundError:
        raise ValueError(
            f"{path}: reading a Hugging Face config needs transformers: pip install"
            " 'onefold[train]'."
        ) from None
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} is not readable JSON: {error}.") from None
    if not isinstance(values, dict) or not isinstance(values.get("model_type"), str):
        raise ValueError(
            f'{path} has no "model_type", so it is no Hugging Face config. A Llama\'s says'
            ' "model_type": "llama".'
        )
    kind = values["model_type"]
    known = transformers.models.auto.configuration_auto.CONFIG_MAPPING
    if kind not in known:
        near = difflib.get_close_matches(kind, list(known.keys()), 3)
        hint = (
            f"Did you mean {' or '.join(near)}?"
            if near
            else "Code of a model's own is not run; name it as package.module:factory."
        )
        raise ValueError(
            f"{path}: transformers {transformers.__version__} has no model_type {kind!r}. {hint}"
        )
    try:
        config = transformers.AutoConfig.from_pretrained(str(path), local_files_only=True)
        return build(class_for(config), config, as_it_is)
    except ValueError:
        raise
    except Exception as error:  # whatever a config's values break in the model's own code
        raise ValueError(
            f"{path}: transformers could not build this model: {type(error).__name__}: {error}"
        ) from error


def class_for(config: Any) -> Any:
    """The class that the config's `architectures` names, else the causal language model, else the
    plain model of its type.
    """
    import transformers

    for wanted in getattr(config, "architectures", None) or ():
        if (found := getattr(transformers, wanted, None)) is not None:
            return found
    for auto in (transformers.AutoModelForCausalLM, transformers.AutoModel):
        if type(config) in auto._model_mapping:
            return auto._model_mapping[type(config)]
    raise ValueError(f"transformers has no model class for {type(config).__name__}.")


def build(kind: Any, config: Any, as_it_is: bool = False) -> nn.Module:
    with quietly(), torch.device("meta"), _without_init():
        module = kind._from_config(config) if hasattr(kind, "_from_config") else kind(config)
    if hasattr(module, "tie_weights"):
        module.tie_weights()  # left out with the initialization
    # A plan follows the recipe from there
    if not as_it_is and module.dtype not in (torch.float32, torch.float64):
        module = module.float()
    return module.train()


def _from_factory(source: str) -> nn.Module:
    """What `package.module:factory` makes. Raises ValueError for whatever the user's own code does
    not bear.
    """
    factory, attribute = factory_of(source), source.partition(":")[2]
    with torch.random.fork_rng(devices=[]), torch.device("meta"):
        try:
            made = factory()
        except Exception as error:
            raise ValueError(
                f"{source}: calling {attribute}() failed: {type(error).__name__}: {error}"
            ) from error
    module = made[0] if isinstance(made, tuple) and made else made
    if not isinstance(module, nn.Module):
        raise ValueError(
            f"{source}: expected an nn.Module or (nn.Module, tokenizer), got {type(made).__name__}."
        )
    return module.train()


def factory_of(source: str) -> Callable[[], Any]:
    """The function that `package.module:factory` names, which needs no arguments. Raises
    ValueError.
    """
    package, _, attribute = source.partition(":")
    if os.getcwd() not in sys.path:  # as `python -m` has it
        sys.path.insert(0, os.getcwd())
    try:
        found = importlib.import_module(package)
    except ModuleNotFoundError as error:
        raise ValueError(
            f"{source}: cannot import {error.name!r} from {os.getcwd()} or the installed packages."
        ) from None
    except Exception as error:  # what a module does when it is imported is its own
        raise ValueError(
            f"{source}: importing {package} failed: {type(error).__name__}: {error}"
        ) from error
    factory = getattr(found, attribute, None)
    if hasattr(found, attribute) and not callable(factory):
        raise ValueError(
            f"{source}: {attribute} is of type {type(factory).__name__}; expected a function that"
            " returns an nn.Module."
        )
    if not callable(factory):
        names = [n for n, value in vars(found).items() if callable(value) and not n.startswith("_")]
        raise ValueError(
            f"{source}: {package} has no function {attribute!r}. {did_you_mean(attribute, names)}"
        )
    free = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    needed = [
        p.name
        for p in inspect.signature(factory).parameters.values()
        if p.default is p.empty and p.kind not in free
    ]
    if needed:
        raise ValueError(
            f"{source}: the factory is called without arguments, but {attribute} asks for"
            f" {', '.join(needed)}."
        )
    return factory


@contextmanager
def _without_init() -> Iterator[None]:
    """Inside, transformers does not go through a new model to initialize it: there is nothing to
    initialize.
    """
    # Of version 5, of earlier ones
    for home in ("transformers.initialization", "transformers.modeling_utils"):
        try:
            skip = getattr(importlib.import_module(home), "no_init_weights", None)
        except ModuleNotFoundError:
            continue
        if skip is not None:
            break
    with skip() if skip is not None else nullcontext():
        yield


@contextmanager
def quietly() -> Iterator[None]:
    """Warnings and bars of transformers off inside, then as before; nothing to do where it is not
    imported.
    """
    if "transformers" not in sys.modules:
        yield
        return
    from transformers.utils import logging

    level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()
