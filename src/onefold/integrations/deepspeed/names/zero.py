"""`zero.Init` and `zero.GatheredParameters`, before the engine and behind it.

| a parameter                      | on rank 0       | on the other ranks             | inside `GatheredParameters`    |
|----------------------------------|-----------------|--------------------------------|--------------------------------|
| made under `Init`, no engine yet | whole           | its shape, one element of NaN  | whole, rank 0's values         |
| of an engine, sharded            | an interval     | an interval                    | whole, in master precision     |
| any other                        | whole           | whole                          | as it is                       |

On leaving, the values of `modifier_rank` are everybody's; without one, what was changed is dropped.
"""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Callable, Iterable, Mapping
from enum import Enum
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from onefold.device import available, default_device
from onefold.integrations.deepspeed.config import read_deepspeed
from onefold.integrations.deepspeed.setup import join
from onefold.recipe import COMPUTE_DTYPES
from onefold.runtime.interval import disable_torch_function
from onefold.runtime.parameter import ShardedParameter, bare, face

_NUMBER, _DEPTH = "_onefold_init_number", "_onefold_gathered"
#: Numbers of parameters made under `Init`, alike on all ranks.
_numbers = itertools.count()


class ZeroParamStatus(Enum):
    """What `param.ds_status` may be. A parameter here is always usable as it stands."""

    AVAILABLE = 1
    NOT_AVAILABLE = 2
    INFLIGHT = 3


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
            if param.is_meta or _NUMBER in param.__dict__:
                continue
            if self.dtype is not None and param.is_floating_point() and param.dtype != self.dtype:
                param.data = param.data.to(self.dtype)
            if alone:
                continue
            param.__dict__[_NUMBER] = next(_numbers)
            if not first:
                _drop(param)


class GatheredParameters:
    """Inside, the parameters are whole on every rank. Collective.

    Args:
        params: a parameter, several, or a module. Those that are whole already are left alone.
        modifier_rank: the rank whose changes are kept on leaving; None keeps none.
        fwd_module: accepted; see `register_external_parameter`.
        enabled: False does nothing.

    Raises:
        ValueError: on leaving: a sharded parameter was given another shape.
        NotImplementedError: `modifier_rank` with parameters that rest on NVMe or encoded.
    """

    def __init__(
        self,
        params: Any,
        modifier_rank: int | None = None,
        fwd_module: nn.Module | None = None,
        enabled: bool = True,
    ) -> None:
        self.modifier_rank = modifier_rank
        self._held: list[tuple[nn.Parameter, bool, Any]] = []
        self._params = _ordered(params) if enabled else []

    def __enter__(self) -> None:
        for param in self._params:
            depth = param.__dict__.get(_DEPTH, 0)
            param.__dict__[_DEPTH] = depth + 1
            kept: Tensor | None = None
            if depth:
                pass  # an outer context has gathered it
            elif isinstance(param, ShardedParameter):
                kept = _gather_sharded(param, self)
            else:
                _lend(param)
            self._held.append((param, depth > 0, kept))

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        held, self._held = self._held, []
        for param, nested, kept in held:
            param.__dict__[_DEPTH] -= 1
            writes = self.modifier_rank is not None and error is None
            with torch.no_grad():
                if writes:
                    _broadcast(param.data, self.modifier_rank or 0)
                if nested:
                    continue
                param.__dict__.pop(_DEPTH)
                if kept is not None:
                    _put_back(param, kept, writes)
                elif dist.get_rank() != 0:
                    _drop(param)


def _ordered(params: Any) -> list[nn.Parameter]:
    """Those that are not whole everywhere, each once, in an order that all ranks share: callers
    may have collected them in a set.
    """
    given: Iterable[Any] = (
        params.parameters()
        if isinstance(params, nn.Module)
        else [params]
        if isinstance(params, Tensor)
        else params
    )
    if not (dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1):
        return []
    found: dict[int, nn.Parameter] = {}
    for p in given:
        parted = isinstance(p, ShardedParameter) or _NUMBER in getattr(p, "__dict__", {})
        if parted or _DEPTH in getattr(p, "__dict__", {}):
            found[id(p)] = p
    return sorted(found.values(), key=_number)


def _number(param: nn.Parameter) -> tuple[int, int]:
    entry = param.__dict__.get("_onefold_entry")
    if entry is not None and (known := entry()) is not None:
        return (1, known.number)
    return (0, param.__dict__.get(_NUMBER, 0))


def _drop(param: nn.Parameter) -> None:
    """Keep shape and dtype, and one element. A read shows NaN rather than numbers of no meaning."""
    value = math.nan if param.is_floating_point() or param.is_complex() else 0
    one = torch.full((1,), value, dtype=param.dtype, device=param.device)
    param.data = one.expand(param.shape)


def _lend(param: nn.Parameter) -> None:
    """Rank 0's values of a parameter that no engine has yet, on every rank."""
    if dist.get_rank() != 0:
        param.data = torch.empty(param.shape, dtype=param.dtype, device=param.device)
    _broadcast(param.data, 0)


def _gather_sharded(param: nn.Parameter, context: GatheredParameters) -> Tensor:
    """Make it a plain whole parameter; what it held is returned."""
    info: Any = param.onefold  # type: ignore[attr-defined]
    if context.modifier_rank is not None and not info.in_place:
        raise NotImplementedError(
            f"GatheredParameters: parameter {info.name!r} rests on NVMe or encoded, and cannot be"
            " changed there with modifier_rank: change it before initialize, or with"
            " onefold.full_params(model, write=True)."
        )
    whole = info.gather()
    with disable_torch_function():
        local = param.data
        bare([param])
        param.data = whole
    return local


def _put_back(param: nn.Parameter, local: Tensor, writes: bool) -> None:
    whole = param.data
    param.data = local
    face([param])
    info: Any = param.onefold  # type: ignore[attr-defined]
    if not writes:
        return
    if whole.shape != info.shape:
        raise ValueError(
            f"GatheredParameters: parameter {info.name!r} of shape {tuple(info.shape)} was given"
            f" shape {tuple(whole.shape)}. Change shapes before initialize, or inside `with"
            " onefold.unsharded(engine.module):`."
        )
    with disable_torch_function():
        held = param.dtype
    param.data = whole.to(held)


def _broadcast(tensor: Tensor, source: int) -> None:
    """`source`'s values to all ranks, over the accelerator where the backend knows nothing else."""
    if tensor.device.type == "cpu" and available() and dist.get_backend() == "nccl":
        there = tensor.to(default_device())
        dist.broadcast(there, src=source)
        tensor.copy_(there)
        return
    flat = tensor if tensor.is_contiguous() else tensor.contiguous()
    dist.broadcast(flat, src=source)
    if flat is not tensor:
        tensor.copy_(flat)


# -- names that ask for nothing here ---------------------------------------------------------------


def register_external_parameter(module: nn.Module, parameter: nn.Parameter) -> None:
    """Nothing: a parameter that another module's forward pass uses is gathered when it is used."""


def unregister_external_parameter(module: nn.Module, parameter: nn.Parameter) -> None:
    """Nothing; see `register_external_parameter`."""


def zero_wrapper_for_fp_tensor_constructor(
    fn: Callable[..., Tensor], target_fp_dtype: torch.dtype, *args: Any, **kwargs: Any
) -> Callable[..., Tensor]:
    """`fn` itself: `Init` changes no constructor of torch. transformers reads and replaces it."""
    return fn


class OnDevice:
    """Inside, modules are made on the device: "meta" for a model that `initialize` fills."""

    def __init__(self, dtype: torch.dtype, device: str = "meta", enabled: bool = True) -> None:
        self.dtype, self.enabled = dtype, enabled
        self._device = torch.device(device)
        self._before = torch.get_default_dtype()

    def __enter__(self) -> None:
        if self.enabled:
            self._before = torch.get_default_dtype()
            torch.set_default_dtype(self.dtype)
            self._device.__enter__()

    def __exit__(self, *error: Any) -> None:
        if self.enabled:
            self._device.__exit__(*error)
            torch.set_default_dtype(self._before)


# -- leaf modules: noted on the module, where libraries look; units are the recipe's ----------------


def set_z3_leaf_module(module: nn.Module, flag: bool = True) -> None:
    """Note on the module that it is one unit."""
    module._z3_leaf = flag  # type: ignore[assignment]


def z3_leaf_module(module: nn.Module) -> bool:
    return bool(getattr(module, "_z3_leaf", False))


def get_z3_leaf_modules(model: nn.Module) -> list[nn.Module]:
    return [module for module in model.modules() if z3_leaf_module(module)]


def _set_where(
    model: nn.Module, fits: Callable[[str, nn.Module], bool], what: Any, flag: bool
) -> list[nn.Module]:
    found = [module for name, module in model.named_modules() if fits(name, module)]
    if not found:
        raise ValueError(f"leaf modules {what!r}: the model has none such; give classes or names.")
    for module in found:
        set_z3_leaf_module(module, flag)
    return found


def set_z3_leaf_modules(
    model: nn.Module, leaf_module_classes: Iterable[type | str], raise_if_not_found: bool = True
) -> list[nn.Module]:
    """Note the modules of these classes, given by class or by name, as leaves; returns them."""
    wanted = tuple(leaf_module_classes)

    def fits(name: str, module: nn.Module) -> bool:
        kind = type(module)
        return any(
            isinstance(module, w)
            if isinstance(w, type)
            else w in (kind.__name__, f"{kind.__module__}.{kind.__qualname__}")
            for w in wanted
        )

    if not raise_if_not_found and not any(fits(n, m) for n, m in model.named_modules()):
        return []
    return _set_where(model, fits, wanted, True)


def unset_z3_leaf_modules(
    model: nn.Module, leaf_module_classes: Iterable[type | str]
) -> list[nn.Module]:
    wanted = tuple(w for w in leaf_module_classes if isinstance(w, type))
    return _set_where(model, lambda _, module: isinstance(module, wanted), wanted, False)


def set_z3_leaf_modules_by_name(model: nn.Module, names: Iterable[str]) -> list[nn.Module]:
    wanted = frozenset(names)
    return _set_where(model, lambda name, _: name in wanted, sorted(wanted), True)


def set_z3_leaf_modules_by_suffix(model: nn.Module, suffixes: Iterable[str]) -> list[nn.Module]:
    wanted = tuple(suffixes)
    return _set_where(model, lambda name, _: name.endswith(wanted), wanted, True)


def local_rank(environment: Mapping[str, str] = os.environ) -> int:
    """This rank's number on its machine, as launchers tell it."""
    return int(environment.get("LOCAL_RANK", 0))
