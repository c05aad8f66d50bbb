"""Parameter groups by expert, as DeepSpeed's examples make them for every model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def split_params_into_different_moe_groups_for_optimizer(
    param_groups: Mapping[str, Any] | list[Any] | tuple[Any, ...], max_group_size: Any = None
) -> list[dict[str, Any]]:
    """Return the parameter groups as a list. A model without experts of DeepSpeed's own keeps its
    groups.

    Args:
        param_groups: a group, or several.
        max_group_size: accepted without effect: it divides groups of experts.

    Raises:
        NotImplementedError: a parameter is an expert's (`allreduce` is false).
        ValueError: `param_groups` is no group and no list of groups.
    """
    groups = [param_groups] if isinstance(param_groups, Mapping) else param_groups
    if not isinstance(groups, (list, tuple)):
        raise ValueError(
            f'param_groups is a {type(param_groups).__name__}: expected a dict with "params", or a'
            " list of them."
        )
    made = [dict(group) for group in groups]
    for group in made:
        group["params"] = list(group["params"])
        if any(getattr(param, "allreduce", True) is False for param in group["params"]):
            raise NotImplementedError(
                "a parameter belongs to an expert (its `allreduce` is false): expert parallelism is"
                " not built yet."
            )
    return made


def is_moe_param(param: Any) -> bool:
    """Whether the parameter is an expert's of DeepSpeed's own layer."""
    return getattr(param, "allreduce", True) is False
