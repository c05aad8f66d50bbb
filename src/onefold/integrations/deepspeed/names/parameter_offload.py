"""What callers ask of parameters and of the optimizer at stage 3: status, and hooks to take off.

TRL takes DeepSpeed's hooks off the model before it generates inside `GatheredParameters`, and puts
them on again. Here the gathered model sends nothing by itself, so that there is nothing to take off.
"""

from __future__ import annotations

import weakref
from enum import Enum
from typing import Any

from torch import Tensor, nn

import onefold


class ZeroParamStatus(Enum):
    """What `param.ds_status` may be: whole, divided, on its way."""

    AVAILABLE = 1
    NOT_AVAILABLE = 2
    INFLIGHT = 3


def mark(model: nn.Module) -> None:
    """Say of each parameter of a model at stage 3 that it is divided."""
    # A parameter that was saved for the backward pass comes back there as a plain tensor, whole.
    # TRL's fused losses ask it for its status, too.
    Tensor.ds_status = ZeroParamStatus.AVAILABLE  # type: ignore[attr-defined]
    for entry in onefold.engine_of(model).entries:
        said: dict[str, Any] = entry.param.__dict__
        divided = "onefold" in said and said["onefold"].sharded
        said["ds_status"] = ZeroParamStatus.NOT_AVAILABLE if divided else ZeroParamStatus.AVAILABLE
        said["ds_active_sub_modules"] = set()
        if divided:  # scripts take this for a sign that they have to gather
            said["ds_id"] = entry.number
    for module in model.modules():
        module.__dict__["ds_external_parameters"] = _none


def _none() -> tuple[()]:
    """Parameters of other modules that a module uses: none has to be told."""
    return ()


class ParameterCoordinator:
    """The order of gathers. Each forward pass goes by what it does, so none is out of date."""

    def is_invalid_trace(self) -> bool:
        return True

    def _invalidate_trace(self) -> None:
        pass


class ParameterOffload:
    """`optimizer.parameter_offload`.

    Attributes:
        forward_hooks, backward_hooks: handles that may be removed: none.
        param_coordinator: see there.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = weakref.ref(module)
        self.forward_hooks: list[Any] = []
        self.backward_hooks: list[Any] = []
        self.param_coordinator = ParameterCoordinator()

    @property
    def module(self) -> nn.Module:
        """The model of the engine.

        Raises:
            RuntimeError: it is gone.
        """
        module = self._module()
        if module is None:
            raise RuntimeError("the model of this optimizer is gone: keep the engine.")
        return module

    def _register_deepspeed_module(self, module: nn.Module, count: Any = None) -> None:
        """Nothing: no hook was taken off."""
