"""TRL's `trainer._dist`: how its trainers that generate (GRPO, RLOO) come to whole weights.

Inside, units stay gathered in the compute dtype after their first use, so that ranks may generate
texts of different lengths. They are let go on leaving.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator
from typing import Any

from torch import nn

import onefold
from onefold.runtime.registry import is_sharded


class WholeWeights:
    """Stands in for TRL's DistributedBackend.

    Args:
        model: the model that is trained; may be sharded later.
    """

    is_zero3 = False
    is_fsdp = False
    zero_stage = 0
    fsdp_version = None

    def __init__(self, model: nn.Module) -> None:
        self._model = weakref.ref(model)

    @contextlib.contextmanager
    def summon_full_params(self, module: nn.Module, **options: Any) -> Iterator[None]:
        """Generate inside. Collective."""
        with onefold.keep_gathered(module) if is_sharded(module) else contextlib.nullcontext():
            yield

    @contextlib.contextmanager
    def gather_params(self, params: Any) -> Iterator[None]:
        """Read whole parameters inside: all of the model's. Collective."""
        model = self._model()
        whole = model is not None and is_sharded(model)
        with onefold.full_params(model) if whole else contextlib.nullcontext():  # type: ignore[arg-type]
            yield
