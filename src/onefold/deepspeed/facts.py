"""The attributes `ds_*` that callers read from parameters, under `zero.Init` and at stage 3.

| attribute                              | is                                                                     |
|----------------------------------------|------------------------------------------------------------------------|
| ds_id                                  | the parameter's number, unique in the process, the same on all ranks   |
| ds_shape, ds_numel                     | those of the whole parameter                                           |
| ds_status                              | AVAILABLE where this code sees the whole parameter, else NOT_AVAILABLE |
| ds_tensor                              | this rank's elements, one-dimensional; writes to it are kept. Of a     |
|                                        | parameter on NVMe it has a shape only                                  |
| ds_persist                             | whether this rank keeps the whole parameter between passes             |
| ds_active_sub_modules                  | a set for callers; always empty here                                   |
| all_gather(), partition()              | `GatheredParameters` as calls: enter it, and leave it                  |

Parameters that were not made under `zero.Init`, and belong to no engine of stage 3, have none of
these attributes. On one rank nothing is divided. The status is NOT_AVAILABLE outside of passes and
`GatheredParameters` there too, as in DeepSpeed, so that code behaves alike on every number of ranks.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from enum import Enum
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from onefold.deepspeed import divided
from onefold.runtime.parameters.interval import disable_torch_function, entry_of
from onefold.runtime.parameters.parameter import Whole
from onefold.runtime.parameters.values import elsewhere

__all__ = ["ZeroParamStatus"]
#: How many contexts have gathered a parameter (zero.py).
DEPTH = "_onefold_gathered"
#: This rank's elements, while a context has gathered the parameter.
LOCAL = "_onefold_local"
#: Whether a write in a context that drops it raises (`enable_sanity_checks`).
CHECKED = "_onefold_checked"
#: A list with an item for each forward pass of the parameter's model under way; on one rank only.
PASSES = "_onefold_passes"
_ids = itertools.count()


class ZeroParamStatus(Enum):
    """The values of `param.ds_status`: whole, divided, being gathered."""

    AVAILABLE = 1
    NOT_AVAILABLE = 2
    INFLIGHT = 3


def give_facts(params: Iterable[nn.Parameter], checked: bool = False) -> None:
    """Give the parameters the attributes `ds_*`. All ranks give them in the same order. `checked`:
    the configuration enables sanity checks.
    """
    for name in SHOWN.keys() - vars(Tensor).keys():  # once in a process that uses it
        setattr(Tensor, name, property(partial(_read, name)))
    for param in params:
        if isinstance(param, nn.parameter.UninitializedParameter):
            continue
        own = param.__dict__
        own.setdefault("ds_id", next(_ids))
        own["ds_shape"], own["ds_numel"] = torch.Size(param.shape), param.numel()
        own.setdefault("ds_active_sub_modules", set())
        if checked:
            own[CHECKED] = True


def take_facts(params: Iterable[nn.Parameter]) -> None:
    """Remove what `give_facts` has set: the parameters' model goes on below stage 3."""
    for param in params:
        for name in ("ds_id", "ds_shape", "ds_numel", "ds_active_sub_modules", PASSES):
            param.__dict__.pop(name, None)


def alone() -> bool:
    return not (dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1)


def status_of(param: nn.Parameter) -> ZeroParamStatus:
    entry = entry_of(param)
    if isinstance(param, Whole) or param.__dict__.get(DEPTH):
        whole = True
    elif alone():
        whole = bool(param.__dict__.get(PASSES))
    elif isinstance(param, divided.DividedParameter):
        whole = False
    else:
        whole = entry is None or not entry.flat.divided or entry.flat.swapped_in
    return ZeroParamStatus.AVAILABLE if whole else ZeroParamStatus.NOT_AVAILABLE


def local_part(param: nn.Parameter) -> Tensor:
    """Return this rank's elements, in memory. Those on NVMe, or encoded ones, are an `Elsewhere`:
    it has a shape, and computing with it raises.
    """
    own = param.__dict__
    held = own[LOCAL] if LOCAL in own else divided.values_of(param)
    entry = entry_of(param)
    if held is None:
        held = param if entry is None else entry.param
    with disable_torch_function():
        part = held.detach().as_subclass(Tensor).reshape(-1)
        if entry is not None and not entry.flat.storage.in_place:
            return elsewhere(part, f"ds_tensor of {entry.slot.name!r}")
        return part


def _persists(param: nn.Parameter) -> bool:
    entry = entry_of(param)
    if entry is not None:
        return alone() or not entry.flat.divided
    return not isinstance(param, divided.DividedParameter)


# -- on the class of tensors -------------------------------------------------------------------------


#: {attribute of torch's class of tensors: returns it for a parameter}, of what changes over time.
SHOWN: dict[str, Callable[[Any], Any]] = {
    "ds_status": status_of,
    "ds_tensor": local_part,
    "ds_persist": _persists,
}


def _read(name: str, tensor: Any) -> Any:
    # TRL's fused losses ask plain tensors, too: a parameter that was saved for the backward pass
    # comes back as a plain tensor, whole.
    if name == "ds_status" and not isinstance(tensor, nn.Parameter):
        return ZeroParamStatus.AVAILABLE
    if "ds_id" not in tensor.__dict__:
        raise AttributeError(
            f"{type(tensor).__name__!r} object has no attribute {name!r}: only parameters made under"
            " deepspeed.zero.Init, or of an engine at stage 3, have it."
        )
    return SHOWN[name](tensor)
