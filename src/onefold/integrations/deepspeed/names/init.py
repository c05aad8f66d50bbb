"""`zero.Init`: a model is made by every rank, and each keeps its part of what rank 0 made."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.utils.parametrize import ParametrizationList

from onefold.integrations.deepspeed.config import read_deepspeed
from onefold.integrations.deepspeed.names import divided
from onefold.integrations.deepspeed.names.rendezvous import leave, rendezvous
from onefold.integrations.deepspeed.names.trl_digest import digest_by_parameter
from onefold.integrations.deepspeed.setup import join
from onefold.recipe import COMPUTE_DTYPES

#: Bytes of parameters that a rank may hold whole while a model is made; one that is larger is held
#: alone.
LIMIT = 64 << 20
#: References to a tensor's memory that are not another tensor's: its own, and that of who counts.
_OWN_REFERENCES = 2


class Init:
    """Inside, a model is made as ever, and no rank holds it whole: of what rank 0 made each rank
    keeps an interval.

    | while a model is made                         | on each rank                                    |
    |-----------------------------------------------|-------------------------------------------------|
    | a parameter is new                            | whole, until `LIMIT` bytes are                  |
    | more than that is whole                       | all but the newest are divided, rank 0's values |
    | code reads or writes a divided one (`apply`)  | it is gathered, and counts as new               |
    | somebody holds a view of one (on rank 0)      | it stays whole meanwhile                        |
    | the end of the context                        | all are divided, in the configuration's dtype   |

    Every rank runs the same code inside: divisions are collective, and ranks that do not come to the
    same raise (rendezvous.py). Parameters of another class than `nn.Parameter`, those on the meta
    device, and those that a weight is made of by torch's parametrizations (weight_norm) stay as they
    are: who reads such a weight gathers nothing. What may be done with divided parameters is in
    divided.py; `initialize` takes them over unit by unit.

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
        self._made: dict[int, nn.Parameter] = {}
        self._whole: list[nn.Parameter] = []
        self._stuck = 0
        self._register: Any = None
        if enabled:
            join(None, 29500)
            if module is not None:
                for param in module.parameters():
                    self._note(param)
                self._end()

    def __enter__(self) -> Init:
        # Of two contexts the outer one does the work
        self.enabled = self.enabled and not divided.gathers
        if self.enabled:
            self._register = register = nn.Module.register_parameter

            def noted(module: nn.Module, name: str, param: nn.Parameter | None) -> None:
                register(module, name, param)
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
            elif not _alone():
                leave(error)
            self._made, self._whole = {}, []

    def _note(self, param: nn.Parameter, stays: bool = False) -> None:
        """A module has a parameter: if it is new, it is whole, and may go unless it `stays`."""
        if id(param) in self._made or divided.NUMBER in param.__dict__ or param.is_meta:
            return
        self._made[id(param)] = param
        if not _alone():
            divided.number(param)
            if stays:
                divided.stays(param)
            self._add([param])

    def _gather(self, params: Sequence[nn.Parameter]) -> None:
        """Code uses divided parameters while the model is made."""
        rendezvous(lambda: f"a constructor reads or changes {divided.shapes(params)}", params)
        divided.gather(params)
        self._add(params)

    def _add(self, params: Sequence[nn.Parameter]) -> None:
        """These are whole now, and stay so; others may have to go."""
        self._whole += params
        if sum(_bytes(p) for p in self._whole) <= LIMIT + self._stuck:
            return
        rendezvous(lambda: "parameters are divided, to make others", self._whole)
        # Whoever has a view of its memory may still write there: rank 0's values count
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
        """Divide what is whole, and cast all."""
        digest_by_parameter()
        if not _alone():
            rendezvous(lambda: "the model has been made", list(self._made.values()))
        for param in self._made.values():
            if isinstance(param, nn.parameter.UninitializedParameter):
                continue
            if not _alone():
                divided.divide(param, 0)
            if self.dtype is not None and param.is_floating_point() and param.dtype != self.dtype:
                divided.cast(param, self.dtype)


def _alone() -> bool:
    return not (dist.is_initialized() and dist.get_world_size() > 1)


def _bytes(param: nn.Parameter) -> int:
    return param.numel() * param.itemsize if divided.can_divide(param) else 0


def _is_free(param: nn.Parameter) -> bool:
    """Whether no other tensor has its memory."""
    if not divided.can_divide(param):
        return False
    references: int = torch._C._storage_Use_Count(param.untyped_storage()._cdata)
    return references <= _OWN_REFERENCES


def zero_wrapper_for_fp_tensor_constructor(
    fn: Callable[..., Tensor], target_fp_dtype: torch.dtype, *args: Any, **kwargs: Any
) -> Callable[..., Tensor]:
    """`fn` itself: `Init` changes no constructor of torch. transformers reads and replaces it."""
    return fn
