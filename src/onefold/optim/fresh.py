"""Copies of an optimizer that step other parameters than its own: what it would do with them."""

from __future__ import annotations

import contextlib
import copy
import sys
from collections import OrderedDict, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode

from onefold.runtime.parameters.parameter import disable_torch_function
from onefold.runtime.stepper import (
    TouchesReal,
    held_inside,
    kept_by,
    own_attributes,
    own_numbers,
    raw,
)


class Communicates(RuntimeError):
    """A step communicates by itself."""


class _Alone(TorchDispatchMode):
    """Refuses writes to `real` tensors, and collectives: another rank may make this trial at another
    time, or not at all. Random numbers are the same in every call, so that an update that draws some
    (a first basis) comes out alike beside another one. Leave the generators as they were around it.
    """

    def __init__(self, real: Sequence[torch.Tensor], device: torch.device) -> None:
        super().__init__()
        self.real = {_storage_of(each) for each in real}
        self.device = device

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.namespace in ("c10d", "_c10d_functional"):
            raise Communicates(f"it calls {func.name()}")
        for i, each in enumerate(func._schema.arguments if func._schema.is_mutable else ()):
            if each.alias_info is not None and each.alias_info.is_write:
                written = args[i] if i < len(args) else kwargs.get(each.name)
                for some in written if isinstance(written, (list, tuple)) else (written,):
                    if isinstance(some, torch.Tensor) and _storage_of(some) in self.real:
                        raise TouchesReal(
                            "a copy of it that steps a small matrix writes to the model's own"
                            " parameters or gradients. Let it find them in `self.param_groups` alone."
                        )
        if torch.Tag.nondeterministic_seeded in func.tags:
            torch.default_generator.manual_seed(0)
            if self.device.type != "cpu":
                torch.get_device_module(self.device).manual_seed(0)
        return func(*args, **kwargs)


def _storage_of(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata


@contextlib.contextmanager
def alone(optimizer: Optimizer, device: torch.device) -> Iterator[None]:
    """Inside, a copy of `optimizer` steps a stand-in on `device`: nothing communicates, nothing that
    the optimizer itself steps is written to, and no generator of random numbers moves.
    """
    apart = [device] if device.type != "cpu" else []
    kind = {"device_type": device.type} if apart else {}
    with disable_torch_function():
        params = [p for group in optimizer.param_groups for p in group["params"]]
        real = [t for p in params for t in (p, p.grad) if t is not None]
        mode = _Alone(real, device)
    before, raw.optimizer = raw.optimizer, optimizer
    try:
        with (
            torch.random.fork_rng(devices=apart, **kind),
            torch.enable_grad(),
            _uncompiled(),
            mode,
        ):
            yield
    finally:
        raw.optimizer = before


def _uncompiled() -> contextlib.AbstractContextManager[Any]:
    """Inside, compiled functions run as they are written. Under a dispatch mode the compiler would
    pass them over, and never compile them again.
    """
    if "torch._dynamo" not in sys.modules:  # nothing is compiled; importing it takes a second
        return contextlib.nullcontext()
    stance: contextlib.AbstractContextManager[Any] = torch.compiler.set_stance("force_eager")
    return stance


def probe(data: torch.Tensor, optimizer: Optimizer, like: Any) -> nn.Parameter:
    """Return a parameter over `data` with the numbers among the attributes of `like`, if any."""
    out = nn.Parameter(data)
    if like is not None:
        _, own, keys = next(kept_by(optimizer, like))
        out.__dict__.update(own_numbers({key: own[key] for key in keys}))
    return out


def twin_of(optimizer: Optimizer, group: dict[str, Any], probes: Sequence[nn.Parameter]) -> Any:
    """Return a copy of `optimizer` that has `probes` in a copy of its group `group`, no state, and no
    hook. It counts apart. So do copies of the optimizers that it holds: those that step parameters of
    `group` have the probes too.
    """
    twin = object.__new__(type(optimizer))
    # Schedulers replace `step` in the instance by one that counts
    twin.__dict__.update({k: v for k, v in optimizer.__dict__.items() if k != "step"})
    own = own_attributes(twin)
    twin.__dict__.update({k: copy.copy(v) for k, v in own.items() if type(v) in _KEPT_IN})
    twin.__dict__.update(own_numbers(own))
    twin.state = defaultdict(dict)
    tensors = {k: v.clone() for k, v in group.items() if isinstance(v, torch.Tensor)}
    twin.param_groups = [{**group, **tensors, **own_numbers(group), "params": [*probes]}]
    twin._optimizer_step_pre_hooks, twin._optimizer_step_post_hooks = OrderedDict(), OrderedDict()
    here, twins = {id(p) for p in group["params"]}, dict[int, Any]()
    for each in held_inside(optimizer).values():
        if id(each) not in twins:
            its = next((g for g in each.param_groups if here & {*map(id, g["params"])}), None)
            has = probes if its is not None else ()
            twins[id(each)] = twin_of(each, its or each.param_groups[0], has)
    for name, value in own_attributes(twin).items() if twins else ():
        twin.__dict__[name] = _exchanged(value, twins)
    return twin


def _exchanged(value: Any, twins: Mapping[int, Any]) -> Any:
    """Return `value` with `twins` in the places of the optimizers with these ids."""
    some = value.values() if isinstance(value, dict) else value
    if isinstance(value, (dict, list, tuple)) and any(id(v) in twins for v in some):
        if isinstance(value, dict):
            return {k: twins.get(id(v), v) for k, v in value.items()}
        return [twins.get(id(v), v) for v in value]
    return twins.get(id(value), value)


_KEPT_IN = (dict, list, set, defaultdict, OrderedDict)


def give_tables(twin: Any, optimizer: Optimizer, probes: Sequence[nn.Parameter], like: Any) -> None:
    """Let the tables of `optimizer` have for each of `probes`, in `twin`, the number for `like`."""
    for name, table, keys in kept_by(optimizer, like) if like is not None else ():
        for value in own_numbers({key: table[key] for key in keys if name}).values():
            by_id = isinstance(next(iter(table)), int)
            new = copy.copy(table)
            new.update({id(each) if by_id else each: value for each in probes})
            twin.__dict__[name] = new


def fresh_state(
    optimizer: Optimizer,
    group: dict[str, Any],
    param: torch.Tensor,
    shape: Sequence[int] | None = None,
) -> dict[str, Any]:
    """Return the state that `optimizer` would give `param`, of its group `group`, at its first
    step. A copy of the optimizer steps a probe, so no parameter, hook or step count changes.

    `shape`: of the parameter, if the optimizer steps it in another one than it has here.

    In contrast, torch's `_init_optim_state` steps the real optimizer, with zero gradients and a
    learning rate of zero, and leaves `step` at 1.

    Raises:
        Exception: what the optimizer's step raises, for instance because it needs a closure.
    """
    like = torch.zeros_like(param) if shape is None else param.new_zeros(shape)
    one = probe(like, optimizer, param)
    one.grad = torch.zeros_like(one)
    twin = twin_of(optimizer, group, [one])
    give_tables(twin, optimizer, [one], param)
    with alone(optimizer, like.device):
        twin.step()
    state = dict(twin.state.get(one, {}))
    step = state.get("step")
    if isinstance(step, torch.Tensor):
        step.zero_()
    elif step is not None:
        state["step"] = 0
    return state
