"""A model's own code by its name, folder or factory: built on the meta device, where parameters have
shapes and no memory, and read as a `ModelShape`.
"""

from __future__ import annotations

import difflib
import importlib
import os
import re
import sys
import tomllib
import traceback
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from onefold.plan.shapes import ModelShape, Parameter, Transformer, UnitShape
from onefold.reading import read_json
from onefold.runtime.units import Found, find_units, keeps_dtype
from onefold.wording import did_you_mean

# Names that configs use for a dimension
_LAYERS = ("num_hidden_layers", "n_layer", "num_layers")
_HIDDEN = ("hidden_size", "n_embd", "d_model")
_HEADS = ("num_attention_heads", "n_head", "num_heads")
_FFN = ("intermediate_size", "n_inner", "ffn_dim", "d_ff")
_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts")
_ACTIVE = ("num_experts_per_tok", "num_experts_per_token", "moe_top_k")
_LENGTH = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length")

# -- public architectures --------------------------------------------------------------------------


@cache
def architectures() -> tuple[Mapping[str, Mapping[str, Any]], Mapping[str, str]]:
    """Return the values of each architecture's config by its name; its name by other spellings."""
    text = resources.files("onefold.plan").joinpath("architectures.toml").read_text("utf-8")
    families = tomllib.loads(text)
    aliases = families.pop("aliases")
    return {
        name: {"model_type": family, **row}
        for family, rows in families.items()
        for name, row in rows.items()
    }, aliases


def known(name: object) -> str | None:
    """Return the name of an architecture by a spelling of it, without organization, case and suffixes:
    "meta-llama/Llama-2-7b-hf" is "llama-2-7b". None if there is none, or if a folder with a
    config.json is called so.
    """
    if os.path.isfile(os.path.join(str(name), "config.json")):
        return None
    plain = str(name).strip().lower().replace("_", "-").rsplit("/", 1)[-1]
    for part in ("meta-", "-hf", "-v0.1"):
        plain = plain.removeprefix(part).removesuffix(part)
    rows, aliases = architectures()
    found = aliases.get(plain, plain)
    return found if found in rows else None


# -- from code to a module -------------------------------------------------------------------------


def module_of(source: str | Path, as_it_is: bool = False) -> nn.Module:
    """Build the model that `source` names on the meta device, which allocates nothing.

    Args:
        source: the name of a public architecture, a folder with a config.json, the config.json
            itself, or `package.module:factory` (called without arguments).
        as_it_is: a config's model keeps the dtype that the config names. Otherwise it is fp32, and
            the recipe decides the dtypes.

    Raises:
        ValueError: `source` names nothing, or what it names makes no module; the message says what
            was looked for.
    """
    path, text = Path(source), str(source)
    rows, aliases = architectures()
    if (name := known(source)) is not None:
        return built(text, rows[name], as_it_is)
    if text and path.exists():
        return _from_config(path / "config.json" if path.is_dir() else path, as_it_is)
    if re.fullmatch(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*", text):
        with torch.random.fork_rng(devices=[]):
            return made_by(text, torch.device("meta"))[0]
    raise ValueError(
        f"no architecture and no folder is called {text!r}."
        f" {did_you_mean(text.lower(), [*rows, *aliases], 3)} Or give a config.json (nothing is downloaded),"
        " package.module:factory, or --params."
    )


def _from_config(path: Path, as_it_is: bool) -> nn.Module:
    try:
        values = read_json(path)
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} cannot be read as JSON: {error}.") from None
    if not isinstance(values, dict) or not isinstance(values.get("model_type"), str):
        raise ValueError(
            f'{path} has no "model_type", so it is no Hugging Face config. A Llama\'s says'
            ' "model_type": "llama".'
        )
    return built(str(path), values, as_it_is)


def built(source: str, values: Mapping[str, Any], as_it_is: bool = False) -> nn.Module:
    """Build the model of transformers whose config has these values on the meta device; `as_it_is` as
    in `module_of`. Raises ValueError in words about `source`.
    """
    try:
        import transformers
    except ModuleNotFoundError:
        raise ValueError(
            f"{source}: a model's code comes from transformers, which is not installed: pip install"
            " 'onefold[train]'."
        ) from None
    kind = values["model_type"]
    configs = transformers.models.auto.configuration_auto.CONFIG_MAPPING
    if kind not in configs:
        near = difflib.get_close_matches(kind, list(configs.keys()), 3)
        hint = (
            f"Did you mean {' or '.join(near)}?"
            if near
            else "Code of a model's own is not run; name it as package.module:factory."
        )
        raise ValueError(
            f"{source}: transformers {transformers.__version__} has no model_type {kind!r}. {hint}"
        )
    try:
        config = configs[kind].from_dict(dict(values))
        own = {} if as_it_is else {"dtype": torch.float32}
        with quietly(), torch.device("meta"):
            module: nn.Module = class_for(config)._from_config(config, **own)
        return module.train()
    except ValueError:
        raise
    except Exception as error:  # a config's values may break anything in the model's own code
        raise ValueError(
            f"{source}: transformers could not build this model: {type(error).__name__}:"
            f" {' '.join(str(error).split())[:300]}"
        ) from error


def class_for(config: Any) -> Any:
    """Return the class that the config's `architectures` names, else the causal language model of
    its type, else the plain model.
    """
    import transformers

    for wanted in getattr(config, "architectures", None) or ():
        if (found := getattr(transformers, wanted, None)) is not None:
            return found
    for auto in (transformers.AutoModelForCausalLM, transformers.AutoModel):
        if type(config) in auto._model_mapping:
            return auto._model_mapping[type(config)]
    raise ValueError(f"transformers has no model class for {type(config).__name__}.")


def made_by(source: str, within: AbstractContextManager[Any]) -> tuple[nn.Module, Any]:
    """Call `package.module:factory` without arguments inside a context. Returns (the module that it makes, in training
    mode; its tokenizer or None). Raises ValueError: it is not there, fails or makes no module.
    """
    package, _, attribute = source.partition(":")
    if os.getcwd() not in sys.path:  # as `python -m` does
        sys.path.insert(0, os.getcwd())
    try:
        factory = getattr(importlib.import_module(package), attribute)
        with within:
            made = factory()
    except Exception as error:  # the user's own code may raise anything
        last = traceback.extract_tb(error.__traceback__)[-1]
        raise ValueError(
            f"{source}: {type(error).__name__}: {error} ({last.filename}, line {last.lineno})"
        ) from error
    module, tokenizer = made if isinstance(made, tuple) and len(made) == 2 else (made, None)
    if not isinstance(module, nn.Module):
        raise ValueError(
            f"{source}: expected an nn.Module or (nn.Module, tokenizer), got {type(made).__name__}."
        )
    return module.train(), tokenizer


def adapted(
    module: nn.Module,
    rank: int,
    alpha: int | None = None,
    targets: str | list[str] = "all-linear",
) -> Any:
    """Freeze a module of transformers in place and return it with peft's adapters of this rank on its
    linear layers: "all-linear", all but the head, or those of these names.

    Raises:
        ValueError: peft is not installed, or has no adapters for these layers.
    """
    try:
        import peft
    except ModuleNotFoundError:
        raise ValueError(
            "peft is not installed, which adapters need: pip install 'onefold[train]'."
        ) from None
    settings = peft.LoraConfig(
        r=rank,
        lora_alpha=alpha if alpha is not None else 2 * rank,
        target_modules=targets,
        fan_in_fan_out=any(type(m).__name__ == "Conv1D" for m in module.modules()),
        task_type="CAUSAL_LM",
    )
    empty = any(p.is_meta for p in module.parameters())
    with torch.device("meta" if empty else "cpu"), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # warnings about names that transformers will remove
        return peft.get_peft_model(module, settings).train()


@contextmanager
def quietly() -> Iterator[None]:
    """Turn off the warnings and progress bars of transformers inside, if it is imported."""
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


# -- from a module to its shape --------------------------------------------------------------------


def model_shape(
    module: nn.Module, units: Sequence[str | type] | None = None, *, name: str = ""
) -> ModelShape:
    """Read the parameters of `module` by unit, exactly as `onefold.shard` would bind them. No
    tensor is kept.

    Args:
        units: names or classes of the modules that become units, as for `onefold.shard`.
        name: the model's name; "" takes the name of its class.

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
            looks_up_only=type(spec.module) is nn.Embedding,
        )
        for spec in find_units(module, units)
    )
    return ModelShape(name or type(module).__name__, shapes, transformer_of(module))


def _parameter(found: Found) -> Parameter:
    looked_up = any(
        isinstance(module, nn.Embedding | nn.EmbeddingBag) for module, _ in found.places
    )
    return Parameter(
        found.names[0],
        tuple(found.param.shape),
        found.param.requires_grad,
        found.param.dtype,
        looked_up,
        keeps_dtype(found),
    )


def _config_of(module: nn.Module) -> Any:
    config = getattr(module, "config", None)
    text = getattr(config, "get_text_config", None)
    return text() if callable(text) else config


def _first(config: Any, names: Sequence[str]) -> int:
    return next((v for n in names if isinstance(v := getattr(config, n, None), int) and v > 0), 0)


def positions_of(module: nn.Module) -> int:
    """Return the longest sample that a module's config names; 0: it names none."""
    return _first(_config_of(module), _LENGTH)


def transformer_of(module: nn.Module) -> Transformer | None:
    """Read a transformers model's dimensions from its config. None if the config does not name
    layers, width, heads and vocabulary.
    """
    config = _config_of(module)
    layers, hidden, heads = (_first(config, names) for names in (_LAYERS, _HIDDEN, _HEADS))
    vocabulary = _first(config, ("vocab_size",))
    if not (layers and hidden and heads and vocabulary):
        return None
    experts = _first(config, _EXPERTS) or 1
    # Heads of latent attention (DeepSeek-V2, section 2.1) have a part that is rotated
    latent = sum(_first(config, (name,)) for name in ("qk_rope_head_dim", "qk_nope_head_dim"))
    head_dim = latent or _first(config, ("head_dim",)) or hidden // heads
    own_ffn = _first(config, ("moe_intermediate_size",)) if experts > 1 else 0
    return Transformer(
        layers=layers,
        hidden=hidden,
        heads=heads,
        ffn=own_ffn or _first(config, _FFN) or 4 * hidden,
        vocab=vocabulary,
        kv_heads=_first(config, ("num_key_value_heads",)) or heads,
        head_dim=head_dim,
        experts=experts,
        active=_first(config, _ACTIVE) or 1,
        tied=bool(getattr(config, "tie_word_embeddings", True)),
        value_dim=_first(config, ("v_head_dim",)),
    )
