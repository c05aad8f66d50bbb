"""Error messages for operations that cannot be done on an interval."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from onefold.runtime.parameters.interval import IntervalSpec, ShardedParameterError, spec_of
from onefold.runtime.parameters.operators.names import VIEWS


def tensors_among(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, (list, tuple)):
        return [t for v in value for t in tensors_among(v)]
    if isinstance(value, dict):
        return [t for v in value.values() for t in tensors_among(v)]
    return []


def subject_of(args: Any, kwargs: Any) -> str:
    found = [s for t in tensors_among((args, kwargs)) if (s := spec_of(t)) is not None]
    said = dict.fromkeys(
        f"{s.name!r} (this rank holds elements {s.start} to {s.stop} of shape {tuple(s.shape)})"
        for s in found[:3]
    )
    return " and ".join(said) or "a sharded parameter"


def refusal(func: Any, name: str, args: Any, kwargs: Any) -> ShardedParameterError:
    said = f"{name} of {subject_of(args, kwargs)} cannot be done on a part. "
    if name in VIEWS or name == "[...]":
        said += "A view in another order would be a copy, and what is written to it would be lost. "
    return ShardedParameterError(
        said + "Every rank: read a whole copy with `parameter.onefold.gather()`, or read and write"
        " inside `with onefold.full_params(model, write=True):`. To change the model itself"
        " (resize_token_embeddings, a new head) use `with onefold.unsharded(model):`."
    )


def mismatch(
    name: str, base: IntervalSpec, others: Sequence[torch.Tensor]
) -> ShardedParameterError:
    shapes = ", ".join(
        str(tuple(s.shape if (s := spec_of(t)) is not None else t.shape)) for t in others
    )
    return ShardedParameterError(
        f"{name} on {base.name!r} of shape {tuple(base.shape)} was given {shapes or 'nothing'}:"
        " expected a number, or a tensor that broadcasts to that shape (the whole's; each rank"
        " takes its slice)."
    )
