"""TRL's `trainer._dist`: how its trainers that generate (GRPO, RLOO) get whole weights.

Inside `summon_full_params`, each unit stays gathered in the compute dtype after its first use, so
that ranks may generate texts of different lengths. The units are released on leaving.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator
from typing import Any

from torch import nn

import onefold
from onefold.runtime.hooks import is_sharded


class WholeWeights:
    """Stands in for TRL's DistributedBackend.

    Args:
        model: the model that is trained. It may be sharded later.
    """

    is_zero3 = False
    is_fsdp = False
    zero_stage = 0
    fsdp_version = None

    def __init__(self, model: nn.Module) -> None:
        self._model = weakref.ref(model)

    @contextlib.contextmanager
    def summon_full_params(self, module: nn.Module, **options: Any) -> Iterator[None]:
        """Keep weights gathered, to generate inside. Collective."""
        with onefold.keep_gathered(module) if is_sharded(module) else contextlib.nullcontext():
            yield

    @contextlib.contextmanager
    def gather_params(self, params: Any) -> Iterator[None]:
        """Gather all parameters of the model, to read them inside. Collective."""
        model = self._model()
        whole = model is not None and is_sharded(model)
        with onefold.full_params(model) if whole else contextlib.nullcontext():  # type: ignore[arg-type]
            yield
