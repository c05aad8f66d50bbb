"""`zero.Init`: a model is made by every rank, and kept by the first."""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from onefold.integrations.deepspeed.config import read_deepspeed
from onefold.integrations.deepspeed.names.first_rank import NUMBER, take_over
from onefold.integrations.deepspeed.setup import join
from onefold.recipe import COMPUTE_DTYPES


class Init:
    """Inside, a model's parameters are whole on rank 0 alone, in the dtype of the configuration.

    The other ranks build the model too, and give its memory back at the end of the context; their
    parameters keep shape, dtype and identity. `initialize` shards rank 0's values, as ever.

    Args:
        module: a model that is made already: it is treated as if it had been made inside.
        config_dict_or_path, config: the configuration, of which the precision counts. "auto" counts
            as not set.
        dtype: the dtype of parameters; None takes the configuration's, fp32 if it has none.
        enabled: False does nothing.
        mem_efficient_linear, remote_device, pin_memory, data_parallel_group, mpu, others: accepted;
            where state rests is the recipe's affair.
    """

    def __init__(
        self,
        module: nn.Module | None = None,
        data_parallel_group: Any = None,
        mem_efficient_linear: bool = True,
        remote_device: Any = None,
        pin_memory: bool = False,
        config_dict_or_path: Any = None,
        config: Any = None,
        enabled: bool = True,
        dtype: torch.dtype | None = None,
        mpu: Any = None,
        **others: Any,
    ) -> None:
        self.enabled = enabled
        given = config_dict_or_path if config_dict_or_path is not None else config
        self.dtype = dtype
        if dtype is None and given is not None:
            precision = read_deepspeed(given).precision
            self.dtype = COMPUTE_DTYPES[precision] if precision else torch.float32
        self._made: list[nn.Parameter] = []
        self._register: Any = None
        if enabled:
            join(None, 29500)
            if module is not None:
                self._made = list(module.parameters())
                self._settle()

    def __enter__(self) -> Init:
        if self.enabled:
            self._register = register = nn.Module.register_parameter
            made = self._made

            def noted(module: nn.Module, name: str, param: nn.Parameter | None) -> None:
                register(module, name, param)
                if param is not None:
                    made.append(param)

            nn.Module.register_parameter = noted  # type: ignore[method-assign, assignment]
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self.enabled:
            nn.Module.register_parameter = self._register  # type: ignore[method-assign]
            if error is None:
                self._settle()
            self._made = []

    def _settle(self) -> None:
        """Cast what was made; on the other ranks than the first, give its memory back."""
        alone = not (dist.is_initialized() and dist.get_world_size() > 1)
        first = alone or dist.get_rank() == 0
        for param in {id(p): p for p in self._made}.values():
            if param.is_meta or NUMBER in param.__dict__:
                continue
            if self.dtype is not None and param.is_floating_point() and param.dtype != self.dtype:
                param.data = param.data.to(self.dtype)
            if alone:
                continue
            take_over(param, first)


def zero_wrapper_for_fp_tensor_constructor(
    fn: Callable[..., Tensor], target_fp_dtype: torch.dtype, *args: Any, **kwargs: Any
) -> Callable[..., Tensor]:
    """`fn` itself: `Init` changes no constructor of torch. transformers reads and replaces it."""
    return fn
