"""What callers find on the parameters and the optimizer of an engine at stage 3.

TRL removes DeepSpeed's hooks from the model before it generates inside `GatheredParameters`, and
registers them again afterwards. Onefold's gathered model communicates nothing, so no hook has to be
removed.
"""

from __future__ import annotations

import weakref
from typing import Any

from torch import Tensor, nn

import onefold
from onefold.integrations.deepspeed.names.parameter_facts import (
    ZeroParamStatus,
    note,
    serve_facts,
)


def mark(model: nn.Module) -> None:
    """Set `ds_status` and the attributes beside it on the parameters of a model at stage 3."""
    serve_facts()
    # TRL's fused losses also ask plain tensors for a status: a parameter that was saved for the
    # backward pass comes back as a plain tensor, whole.
    Tensor.ds_status = ZeroParamStatus.AVAILABLE  # type: ignore[attr-defined]
    for entry in onefold.engine_of(model).entries:
        said: dict[str, Any] = entry.param.__dict__
        divided = "onefold" in said and said["onefold"].sharded
        status = ZeroParamStatus.NOT_AVAILABLE if divided else ZeroParamStatus.AVAILABLE
        note(entry.param, status, persists=not divided)
        said["ds_active_sub_modules"] = set()
        if divided:  # scripts gather the parameters that have a ds_id
            said["ds_id"] = entry.number
    for module in model.modules():
        module.__dict__["ds_external_parameters"] = _none


def _none() -> tuple[()]:
    """Return no external parameters: modules do not have to register the ones they use."""
    return ()


class ParameterCoordinator:
    """Stands in for DeepSpeed's trace of gathers. Onefold keeps no trace that could be outdated."""

    def is_invalid_trace(self) -> bool:
        return True

    def _invalidate_trace(self) -> None:
        pass


class ParameterOffload:
    """The object that callers find as `optimizer.parameter_offload`.

    Attributes:
        forward_hooks, backward_hooks: handles of hooks that TRL removes; always empty.
        param_coordinator: a `ParameterCoordinator`.
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
        """Do nothing: no hook was removed."""
