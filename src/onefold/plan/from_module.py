"""A model from its own code: built on the meta device, where parameters have shapes and no memory,
and read as a plan reads it.

Weights that are computed in tiles (tiling) are units of some rows each:

a module   is cut for a while as `onefold.shard` would cut it, then put back: its units, its trace and its FLOPs are those of the run
a shape    has its large matrices taken out of their units, as names of architectures promise that they are computed rows by rows
"""

from __future__ import annotations

import difflib
import importlib
import inspect
import json
import os
import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from math import gcd
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from onefold.layout import Dtypes
from onefold.plan.shapes import ModelShape, Parameter, Transformer, UnitShape
from onefold.recipe import Recipe
from onefold.runtime.units import Found, find_units
from onefold.tiling.cut import Cut, rows_of_a_tile
from onefold.tiling.modules import EmbeddingTile, Tiled

_LAYERS = ("num_hidden_layers", "n_layer", "num_layers")
_HIDDEN = ("hidden_size", "n_embd", "d_model")
_HEADS = ("num_attention_heads", "n_head", "num_heads")
_FFN = ("intermediate_size", "n_inner", "ffn_dim", "d_ff")
_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts")
_ACTIVE = ("num_experts_per_tok", "num_experts_per_token", "moe_top_k")
_LENGTH = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length")


def model_shape(
    module: nn.Module, units: Sequence[str | type] | None = None, *, name: str = "", seq: int = 0
) -> ModelShape:
    """The parameters of `module` by unit, exactly as `onefold.shard` would bind them; no tensor is
    kept.

    Args:
        units: names or classes of the modules that become units, as `onefold.shard` takes them.
        name: what to call it; "" takes the class's name.
        seq: tokens in a sample, for the transformer's dimensions; 0 takes the longest that the
            module's config names.

    Raises:
        ValueError: `units` names nothing in this model, or it has lazy parameters.
    """
    lazy = [n for n, p in (*module.named_parameters(), *module.named_buffers()) if is_lazy(p)]
    if lazy:
        raise ValueError(
            f"{type(module).__name__} has lazy parameters ({lazy[0]}), without a shape yet: run one"
            " batch through it first."
        )
    shapes = tuple(
        UnitShape(
            spec.name or "(root)",
            tuple(_parameter(f) for f in spec.found),
            looks_up_only=_looks_up_only(spec.module),
        )
        for spec in find_units(module, units)
    )
    return ModelShape(
        name or type(module).__name__,
        shapes,
        transformer_of(module, seq),
        _active_numel(module, shapes),
    )


def _parameter(found: Found) -> Parameter:
    looked_up = any(isinstance(module, nn.Embedding) for module, _ in found.places)
    return Parameter(
        found.names[0],
        tuple(found.param.shape),
        found.param.requires_grad,
        _dtype_name(found.param.dtype),
        looked_up,
    )


def _looks_up_only(module: nn.Module) -> bool:
    """Whether its backward pass comes to none of its parameters; see runtime/unit.py."""
    return type(module) is nn.Embedding or (isinstance(module, EmbeddingTile) and not module.shared)


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _config_of(module: nn.Module) -> Any:
    config = getattr(module, "config", None)
    text = getattr(config, "get_text_config", None)
    return text() if callable(text) else config


def _first(config: Any, names: Sequence[str]) -> int:
    return next((v for n in names if isinstance(v := getattr(config, n, None), int) and v > 0), 0)


def transformer_of(module: nn.Module, seq: int = 0) -> Transformer | None:
    """A transformers model's dimensions from its config; None where the config does not name
    layers, width, heads and vocabulary.
    """
    config = _config_of(module)
    layers, hidden, heads = (_first(config, names) for names in (_LAYERS, _HIDDEN, _HEADS))
    vocabulary = _first(config, ("vocab_size",))
    if not (layers and hidden and heads and vocabulary):
        return None
    experts = _first(config, _EXPERTS) or 1
    own_ffn = _first(config, ("moe_intermediate_size",)) if experts > 1 else 0
    names = {n.rpartition(".")[2] for n, _ in (*module.named_modules(), *module.named_parameters())}
    tied = len({id(p) for p in _ends(module)}) < 2
    return Transformer(
        layers=layers,
        hidden=hidden,
        heads=heads,
        ffn=own_ffn or _first(config, _FFN) or 4 * hidden,
        vocab=vocabulary,
        seq=seq or _first(config, _LENGTH) or 1024,
        kv_heads=_first(config, ("num_key_value_heads",)) or heads,
        head_dim=_first(config, ("head_dim",)) or hidden // heads,
        gated=bool(names & {"gate_proj", "gate_up_proj"}),
        experts=experts,
        active=_first(config, _ACTIVE) or 1,
        tied=tied,
        fused_attention=getattr(config, "_attn_implementation", "sdpa") != "eager",
    )


def _ends(module: nn.Module) -> Iterator[nn.Parameter]:
    """The matrices of a model's two ends: token embedding and head."""
    for get in ("get_input_embeddings", "get_output_embeddings"):
        end = getattr(module, get, lambda: None)()
        if end is not None and getattr(end, "weight", None) is not None:
            yield end.weight


def _active_numel(module: nn.Module, units: Sequence[UnitShape]) -> int:
    """Parameters that one token passes through: of routed experts' only as many as are chosen."""
    config = _config_of(module)
    experts, active = _first(config, _EXPERTS), _first(config, _ACTIVE)
    total = sum(u.numel for u in units)
    if not experts or not active or active >= experts:
        return total
    routed = sum(
        p.numel for u in units for p in u.parameters if re.search(r"(^|\.)experts\.", p.name)
    )
    return total - routed + round(routed * active / experts)


# -- from a name -----------------------------------------------------------------------------------


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
        return _build(_class_for(config), config, as_it_is)
    except ValueError:
        raise
    except Exception as error:  # whatever a config's values break in the model's own code
        raise ValueError(
            f"{path}: transformers could not build this model: {type(error).__name__}: {error}"
        ) from error


def _class_for(config: Any) -> Any:
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


def _build(kind: Any, config: Any, as_it_is: bool = False) -> nn.Module:
    with _quietly(), torch.device("meta"), _without_init():
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
        near = difflib.get_close_matches(attribute, names, 3) or names[:8]
        raise ValueError(
            f"{source}: {package} has no function {attribute!r}. It has"
            f" {', '.join(near) or 'none'}."
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
def _quietly() -> Iterator[None]:
    """Warnings and bars of transformers off inside, then as before; nothing to do where it is not
    imported.
    """
    if "transformers" not in sys.modules:
        yield
        return
    from transformers.utils import logging

    level = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(level)


class _Over(Exception):
    """Ends a cut: leaving it by an exception puts the module back as it was."""


@contextmanager
def in_tiles(module: nn.Module, recipe: Recipe) -> Iterator[tuple[str, ...]]:
    """Inside, the weights of `module` above the recipe's tile are in tiles; gives sentences about
    those that are left whole.

    Raises:
        ValueError: a row is larger than a tile may be, or an embedding does what cannot be done in
            tiles.
    """
    if recipe.tile is None:
        yield ()
        return
    try:
        with Cut(module, recipe) as cut:
            yield tuple(cut.notes)
            raise _Over
    except _Over:
        pass


def lists_of_tiles(module: nn.Module) -> set[int]:
    """The ids of the lists in which tiles are: they are no lists of blocks."""
    return {id(m.tiles) for m in module.modules() if isinstance(m, Tiled)}


def is_in_tiles(model: ModelShape) -> bool:
    """Whether some weight of a shape is in tiles."""
    return any(".tiles." in unit.name for unit in model.units)


def shape_in_tiles(model: ModelShape, recipe: Recipe) -> ModelShape:
    """A shape with its matrices above the recipe's tile in units of their own, `NAME.tiles.0` and
    so on.

    Raises:
        ValueError: a row is larger than a tile may be.
    """
    limit = recipe.tile
    if limit is None:
        return model
    units: list[UnitShape] = []
    for unit in model.units:
        large = [p for p in unit.parameters if len(p.shape) == 2 and _bytes(p, recipe) > limit]
        tiles = [tile for p in large for tile in _tiles_of(p, limit, recipe, unit.looks_up_only)]
        left = replace(unit, parameters=tuple(p for p in unit.parameters if p not in large))
        units += [left, *tiles] if left.parameters or unit is model.units[0] else tiles
    return replace(model, units=tuple(units))


def _bytes(p: Parameter, recipe: Recipe) -> int:
    return p.numel * Dtypes.of(getattr(torch, p.dtype), p.trainable, recipe).compute.itemsize


def _tiles_of(p: Parameter, limit: int, recipe: Recipe, looks_up: bool) -> list[UnitShape]:
    rows, columns = p.shape
    row = _bytes(p, recipe) // rows
    # Rows that blocks of moments allow
    whole = recipe.block // gcd(columns, recipe.block) if recipe.block and p.trainable else 1
    if row * whole > limit:
        least = f"{row * whole:,}"
        raise ValueError(
            f"tile={limit:,} bytes, but {whole} rows of {p.name!r} {p.shape} take {least}: give a"
            f" tile of {least} or more."
        )
    each = rows_of_a_tile(rows, limit // row, whole)
    path = p.name.removesuffix(".weight")
    return [
        UnitShape(
            f"{path}.tiles.{i}",
            (
                replace(
                    p, name=f"{path}.tiles.{i}.weight", shape=(min(each, rows - first), columns)
                ),
            ),
            looks_up,
        )
        for i, first in enumerate(range(0, rows, each))
    ]
