"""A module as a plan reads it: its parameters by unit, its dimensions."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from onefold.plan.shapes import ModelShape, Parameter, Transformer, UnitShape
from onefold.runtime.units import Found, find_units
from onefold.tiling.modules import EmbeddingTile

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
