"""DeepSpeed's classes of wrapped optimizers, for `isinstance`, and the flat groups that they hold.

An engine's optimizer is torch's own, of any class. It counts as an instance by the engine's stage:

| class                           | the optimizer of an engine                       |
|---------------------------------|--------------------------------------------------|
| `DeepSpeedZeroOptimizer`        | at stage 1 or 2                                  |
| `DeepSpeedZeroOptimizer_Stage3` | at stage 3                                       |
| `FP16_Optimizer`                | at stage 0, in fp16 or bf16                      |
| `BF16_Optimizer`                | none: master weights in fp32 need no other class |
| `FP16_UnfusedOptimizer`         | none                                             |

These attributes of the optimizer are read-only copies of this rank's values, made when they are
read, one item for each parameter group:

| attribute                                                                                     | an item                    |
|-----------------------------------------------------------------------------------------------|----------------------------|
| `fp32_partitioned_groups_flat` (stage 3), `single_partition_of_fp32_groups` (1, 2), `fp32_groups_flat` (0) | master weights, fp32, 1-D  |
| `averaged_gradients`, {number of the group: item}                                             | a list of gradients, fp32, 1-D each |

`optimizer.optimizer` is the optimizer itself.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from onefold.deepspeed.access import (
    local_fp32,
    note_optimizer,
    safe_get_local_grad,
)
from onefold.runtime.hooks import engine_of

if TYPE_CHECKING:
    from onefold.deepspeed.engine import DeepSpeedEngine

#: The optimizers of engines, by DeepSpeed's name for their class.
_known: dict[str, weakref.WeakSet[Any]] = {}
_FLAT = ("fp32_groups_flat", "single_partition_of_fp32_groups", "fp32_partitioned_groups_flat")


class _ByEngine(type):
    def __instancecheck__(cls, instance: Any) -> bool:
        return any(known is instance for known in _known.get(cls.__name__, ()))


class DeepSpeedZeroOptimizer(metaclass=_ByEngine):
    """See this module's table."""


class DeepSpeedZeroOptimizer_Stage3(metaclass=_ByEngine):
    """See this module's table."""


class FP16_Optimizer(metaclass=_ByEngine):
    """See this module's table."""


class BF16_Optimizer(metaclass=_ByEngine):
    """See this module's table."""


class FP16_UnfusedOptimizer(metaclass=_ByEngine):
    """See this module's table."""


class _Groups(Sequence[Tensor]):
    """This rank's master weights of each parameter group, as one tensor."""

    def __init__(self, optimizer: weakref.ref[Any]) -> None:
        self._optimizer = optimizer

    def __len__(self) -> int:
        return len(_groups(self._optimizer))

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        parts = [local_fp32(p) for p in _groups(self._optimizer)[index]["params"]]
        return torch.cat(parts) if parts else torch.empty(0, device="cpu")


class _Gradients(Mapping[int, list[Tensor]]):
    """This rank's gradients of each parameter group."""

    def __init__(self, optimizer: weakref.ref[Any]) -> None:
        self._optimizer = optimizer

    def __len__(self) -> int:
        return len(_groups(self._optimizer))

    def __iter__(self) -> Iterator[int]:
        return iter(range(len(self)))

    def __getitem__(self, index: int) -> list[Tensor]:
        if not 0 <= index < len(self):
            raise KeyError(index)
        found = [safe_get_local_grad(p) for p in _groups(self._optimizer)[index]["params"]]
        return [gradient for gradient in found if gradient is not None]


def _groups(optimizer: weakref.ref[Any]) -> list[dict[str, Any]]:
    there = optimizer()
    return [] if there is None else there.param_groups


def show_groups(engine: DeepSpeedEngine) -> None:
    """Let the engine's optimizer count as an instance of its class, and set its attributes."""
    optimizer, stage = engine.optimizer, engine.zero_optimization_stage()
    note_optimizer(engine_of(engine.module), optimizer)
    if stage == 3:
        kind = "DeepSpeedZeroOptimizer_Stage3"
    elif stage:
        kind = "DeepSpeedZeroOptimizer"
    elif engine.fp16_enabled() or engine.bfloat16_enabled():
        kind = "FP16_Optimizer"
    else:
        return
    for known in _known.values():  # another engine may have had this optimizer
        known.discard(optimizer)
    _known.setdefault(kind, weakref.WeakSet()).add(optimizer)
    ref = weakref.ref(optimizer)
    setattr(optimizer, _FLAT[(stage + 1) // 2], _Groups(ref))
    optimizer.averaged_gradients = _Gradients(ref)
    optimizer.optimizer = weakref.proxy(optimizer)
