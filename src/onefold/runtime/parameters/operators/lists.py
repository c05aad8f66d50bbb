"""Operations on lists of tensors (torch._foreach_*)."""

from __future__ import annotations

from typing import Any

import torch

from onefold.runtime.parameters.interval import IntervalSpec, spec_of
from onefold.runtime.parameters.operators.local import broadcast_shape, dressed, part_of
from onefold.runtime.parameters.operators.reductions import norms_of
from onefold.runtime.parameters.operators.whole import read_whole, whole_of


def on_lists(func: Any, name: str, args: Any, kwargs: Any) -> Any:
    """Run a `_foreach_` or `_fused_` function on lists with intervals, item by item."""
    if name == "_foreach_norm":
        return norms_of(args[0], args[1] if len(args) > 1 else kwargs.get("ord", 2))
    lists = [
        a for a in args if isinstance(a, (list, tuple)) and a and isinstance(a[0], torch.Tensor)
    ]
    writes = name.endswith("_")
    if name in ("_foreach_max",) or any(len(a) != len(lists[0]) for a in lists):
        return read_whole(func, name, args, kwargs)
    bases: list[IntervalSpec | None] = []
    columns = list(zip(*lists, strict=True))
    for column in columns:
        first = spec_of(column[0])
        if writes:
            bases.append(first)
        else:
            shape = broadcast_shape(column)
            bases.append(
                next(
                    (s for t in column if (s := spec_of(t)) is not None and s.shape == shape), None
                )
            )
    given = []
    for a in args:
        if isinstance(a, (list, tuple)) and a and isinstance(a[0], torch.Tensor):
            a = [
                part_of(t, base, name) if base is not None else whole_of(t, name)
                for t, base in zip(a, bases, strict=True)
            ]
        elif isinstance(a, torch.Tensor):
            a = whole_of(a, name)  # one scalar tensor for all items
        given.append(a)
    out = func(*given, **whole_of(kwargs, name))
    if out is None:
        return None
    return [dressed(o, base) if base is not None else o for o, base in zip(out, bases, strict=True)]


def unscale(func: Any, grads: Any, found_inf: torch.Tensor, inv_scale: torch.Tensor) -> None:
    """Unscale gradients for torch.amp.GradScaler. If one rank finds an infinity, `found_inf` is set
    on all; the host does not wait.
    """
    func(grads, found_inf, inv_scale)
    agreed: set[int] = set()
    for t in grads:
        if (spec := spec_of(t)) is not None:
            engine, _ = spec.owners.meet(spec.name)
            if id(engine) not in agreed:
                agreed.add(id(engine))
                engine.agree_on_overflow(found_inf)
