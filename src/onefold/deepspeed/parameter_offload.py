"""What callers read from modules and the optimizer at stage 3: hooks to remove.

TRL removes DeepSpeed's hooks from the model before it generates inside `GatheredParameters`, and
registers them again afterwards. Onefold's gathered model communicates nothing, so no hook has to be
removed.
"""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from torch import nn
from torch.utils.hooks import RemovableHandle

import onefold
from onefold.deepspeed.gathered import mark_parameters
from onefold.deepspeed.parameter_facts import PASSES, alone

_NO_PARAMS: Mapping[str, nn.Parameter] = MappingProxyType({})


def mark(model: nn.Module) -> None:
    """Give the parameters of a model at stage 3 the attributes of parameter_facts.py."""
    params = [entry.param for entry in onefold.engine_of(model).entries]
    mark_parameters(params)
    if alone():
        _count_passes(model, params)
    for module in model.modules():
        module.__dict__["ds_external_parameters"] = _none
        module.__dict__["_external_params"] = _NO_PARAMS


def _count_passes(model: nn.Module, params: list[nn.Parameter]) -> None:
    """Let the parameters know whether a forward pass is under way. On one rank the engine has
    nothing to do in a pass, and does not know.
    """
    passes = [0]

    def begin(*_: Any) -> None:
        passes[0] += 1

    def end(*_: Any) -> None:
        passes[0] -= 1

    model.register_forward_pre_hook(begin)
    model.register_forward_hook(end, always_call=True)
    for param in params:
        param.__dict__[PASSES] = passes


def _none() -> tuple[()]:
    """Return no external parameters: modules do not have to register the ones they use."""
    return ()


class ParameterOffload:
    """The object that callers find as `optimizer.parameter_offload`. As a context it does what
    callers do around generation: hooks are removed inside.

    Attributes:
        forward_hooks, backward_hooks: handles of hooks that TRL removes: one that does nothing.
    """

    forward_hooks: list[Any]
    backward_hooks: list[Any]

    def __init__(self, module: nn.Module) -> None:
        self._module = weakref.ref(module)
        self._register_deepspeed_module(module)

    def __enter__(self) -> None:
        self.forward_hooks, self.backward_hooks = [], []

    def __exit__(self, *_: Any) -> None:
        self._register_deepspeed_module(self.module)

    def empty_partition_cache(self) -> None:
        """Do nothing: gathered weights are released after each use."""

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
        self.forward_hooks, self.backward_hooks = (
            [RemovableHandle(OrderedDict())],
            [RemovableHandle(OrderedDict())],
        )
