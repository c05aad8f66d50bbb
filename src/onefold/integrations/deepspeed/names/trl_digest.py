"""TRL's digest of a model's weights, for models that were made under `zero.Init`.

TRL takes the digest (`hash_module`) for `precompute_ref_log_probs`. Here one parameter at a time is
gathered for it. The digest equals that of the whole model, so TRL finds log probabilities that were
computed under DDP. As in TRL, every rank computes it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from onefold.integrations.deepspeed.names.divided import DividedParameter
from onefold.integrations.deepspeed.names.gathered import GatheredParameters

_NAME = "hash_module"
_WHERE = ("trl.trainer.utils", "trl.trainer.dpo_trainer", "trl.trainer.kto_trainer")


class _Whole:
    """Stands in for a parameter: `cpu()` gathers it and returns its whole values."""

    def __init__(self, param: nn.Parameter) -> None:
        self._param = param

    def cpu(self) -> Tensor:
        with GatheredParameters(self._param):
            return self._param.detach().cpu().clone()


class _Values:
    """Stands in for a module: its `state_dict()` holds a `_Whole` for each parameter."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module

    def state_dict(self) -> dict[str, Any]:
        parameters = dict(self._module.named_parameters(remove_duplicate=False))
        return {
            name: _Whole(parameters[name]) if name in parameters else value
            for name, value in self._module.state_dict().items()
        }


def digest_by_parameter() -> None:
    """Replace `hash_module` in the loaded modules of TRL by one that knows divided parameters."""
    for where in _WHERE:
        host = sys.modules.get(where)
        plain = getattr(host, _NAME, None)
        if plain is not None and not hasattr(plain, "onefold"):
            setattr(host, _NAME, _knowing(plain))


def _knowing(plain: Callable[[Any], str]) -> Callable[[nn.Module], str]:
    def hash_module(module: nn.Module) -> str:
        divided = any(isinstance(p, DividedParameter) for p in module.parameters())
        return plain(_Values(module) if divided else module)

    hash_module.onefold = True  # type: ignore[attr-defined]
    return hash_module
