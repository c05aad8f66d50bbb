"""`zero.Init`: every rank makes the model, and keeps its part of rank 0's values."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import ParametrizationList

from onefold.deepspeed import divided
from onefold.deepspeed.meaning import DeepSpeedConfig
from onefold.deepspeed.parameter_facts import alone, check_writes, give_facts
from onefold.deepspeed.rendezvous import leave, rendezvous
from onefold.deepspeed.setup import join
from onefold.recipe import COMPUTE_DTYPES
from onefold.runtime.parameters.interval import entry_of

__all__ = ["Init", "zero_wrapper_for_fp_tensor_constructor"]
#: Bytes of parameters that a rank may hold whole while a model is made. A parameter above the limit
#: is the only whole one.
LIMIT = 64 << 20
#: References to the storage of a tensor that nobody else views: the tensor's own reference, and
#: that of the storage object through which `_is_free` counts.
_OWN_REFERENCES = 2


class Init:
    """Make a model that no rank holds whole: each rank keeps an interval of rank 0's values.

    | while a model is made                          | on each rank                                   |
    |------------------------------------------------|------------------------------------------------|
    | a parameter is new                             | it stays whole                                 |
    | more than `LIMIT` bytes are whole              | all but the newest are divided                 |
    | code uses a divided parameter (as `apply` may) | it is gathered, and counts as new              |
    | rank 0 holds a view of a parameter             | it stays whole as long as the view exists      |
    | the context ends                               | all are divided, in the configuration's dtype  |

    Dividing and gathering are collective, so every rank must run the same code inside. Ranks that
    do different things raise (rendezvous.py). These parameters are never divided:

    - parameters of another class than `nn.Parameter`, and those on the meta device;
    - the sources of torch's parametrizations (weight_norm), because reading the computed weight
      would not gather them.

    divided.py lists what may be done with divided parameters. `initialize` takes them over unit by
    unit.

    Args:
        module: a model that exists already. It is treated as if it had been made inside.
        config_dict_or_path, config: the configuration. Only its precision and
            `enable_sanity_checks` are used; "auto" counts as not set.
        dtype: the dtype of parameters; None takes the configuration's, fp32 if it has none.
        enabled: False does nothing.
        mem_efficient_linear, remote_device, pin_memory, data_parallel_group, mpu, others: accepted
            without effect; the recipe says where state is stored.
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
        self.dtype, self._checks = dtype, False
        if given is not None:
            read = DeepSpeedConfig(given, only_recipe=True)
            self._checks = read.enable_sanity_checks
            if dtype is None:
                self.dtype = COMPUTE_DTYPES[read.precision] if read.precision else torch.float32
        self._made: dict[int, nn.Parameter] = {}
        self._modules: dict[int, nn.Module] = {}
        self._whole: list[nn.Parameter] = []
        self._stuck = 0
        self._register: Any = None
        if enabled:
            join(None)
            if module is not None:
                for param in module.parameters():
                    self._note(param)
                self._end()

    def __enter__(self) -> Init:
        # Of nested contexts, only the outermost does the work
        self.enabled = self.enabled and not divided.gathers
        if self.enabled:
            self._register = register = nn.Module.register_parameter

            def noted(module: nn.Module, name: str, param: nn.Parameter | None) -> None:
                register(module, name, param)
                self._modules[id(module)] = module
                if param is not None:
                    self._note(param, isinstance(module, ParametrizationList))

            nn.Module.register_parameter = noted  # type: ignore[method-assign, assignment]
            divided.gathers.append(self._gather)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self.enabled:
            nn.Module.register_parameter = self._register  # type: ignore[method-assign]
            divided.gathers.remove(self._gather)
            if error is None:
                self._end()
            elif not alone():
                leave(error)
            self._made, self._modules, self._whole = {}, {}, []

    def _note(self, param: nn.Parameter, stays: bool = False) -> None:
        """Note a parameter that a module has registered. With `stays` it is never divided."""
        if id(param) in self._made or divided.EARLY in param.__dict__ or param.is_meta:
            return
        self._made[id(param)] = param
        give_facts([param])
        if not alone():
            divided.note(param, stays)
            self._add([param])

    def _gather(self, params: Sequence[nn.Parameter]) -> None:
        """Gather divided parameters that code uses while the model is made."""
        rendezvous(lambda: f"a constructor reads or changes {divided.shapes(params)}", params)
        divided.gather(params)
        self._add(params)

    def _add(self, params: Sequence[nn.Parameter]) -> None:
        """Count `params` as whole; divide older ones if more than `LIMIT` bytes are whole now."""
        # An engine may have been made inside: it has taken its parameters over
        self._whole = [p for p in (*self._whole, *params) if entry_of(p) is None]
        if sum(_bytes(p) for p in self._whole) <= LIMIT + self._stuck:
            return
        rendezvous(lambda: "parameters are divided, to make others", self._whole)
        # A constructor that holds a view of a parameter may still write through it. Rank 0 decides
        # for all, because its values are the ones that are kept.
        free = divided.agreed([_is_free(p) for p in self._whole])
        last = {id(p) for p in params}
        kept = []
        for param, is_free in zip(self._whole, free, strict=True):
            if is_free and id(param) not in last:
                divided.divide(param, 0)
            else:
                kept.append(param)
        self._whole = kept
        self._stuck = sum(_bytes(p) for p in kept if id(p) not in last)

    def _end(self) -> None:
        """Divide the parameters that are still whole, and cast all."""
        # `to_empty` puts new parameters in the place of those on the meta device (skip_init)
        for module in self._modules.values():
            for param in module._parameters.values():
                if param is not None:
                    self._note(param, isinstance(module, ParametrizationList))
        made = [param for param in self._made.values() if entry_of(param) is None]
        give_facts(made)
        if self._checks:
            check_writes(made)
        if not alone():
            rendezvous(lambda: "the model has been made", made)
        for param in made:
            if isinstance(param, nn.parameter.UninitializedParameter):
                continue
            if not alone():
                divided.divide(param, 0)
            if self.dtype is not None and param.is_floating_point() and param.dtype != self.dtype:
                divided.cast(param, self.dtype)


def _bytes(param: nn.Parameter) -> int:
    return param.numel() * param.itemsize if divided.can_divide(param) else 0


def _is_free(param: nn.Parameter) -> bool:
    """Whether no other tensor shares the parameter's storage."""
    if not divided.can_divide(param):
        return False
    references: int = torch._C._storage_Use_Count(param.untyped_storage()._cdata)
    return references <= _OWN_REFERENCES


def zero_wrapper_for_fp_tensor_constructor(
    fn: Callable[..., Tensor], target_fp_dtype: torch.dtype, *args: Any, **kwargs: Any
) -> Callable[..., Tensor]:
    """Return `fn` unchanged: `Init` patches none of torch's constructors.

    The name exists because transformers reads and replaces it.
    """
    return fn
