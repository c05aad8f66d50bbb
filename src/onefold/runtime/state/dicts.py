"""Whole state dicts of a sharded model, read and written by the modules' own `state_dict()` and
`load_state_dict()`, on stand-ins for the parameters.

[Note: hooks of state dicts] A module's hooks may rename its parameters in the state dict, or save
them in other shapes (one fused weight as three). torch runs them on whatever the modules hold:

| who asks                           | what the modules hold meanwhile                       |
|------------------------------------|-------------------------------------------------------|
| `contents` (checkpoints, exports)  | parameters without values, on the meta device         |
| `full_state_dict`                  | rank 0: whole tensors on the host                     |
| `load_full_state_dict`             | rank 0: parameters on the meta device, which torch    |
|                                    | replaces by the tensors of the dict (`assign=True`)   |

So the model is whole on no rank, but for what rank 0 returns or was given.
"""

from __future__ import annotations

import contextlib
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import nn

from onefold.runtime.boxes import local_of
from onefold.runtime.buffers import persistent, refuse_parts
from onefold.runtime.engine import Engine
from onefold.runtime.flat import Entry
from onefold.runtime.hooks import engine_of
from onefold.runtime.parameters.parameter import disable_torch_function
from onefold.runtime.parts import (
    HeldParts,
    MasterParts,
    StateItem,
    from_first,
    master_items,
    said_by_first,
    to_first,
)
from onefold.runtime.state.start import showing

_LOAD = "load_full_state_dict"


# -- stand-ins -------------------------------------------------------------------------------------


@contextlib.contextmanager
def standing_in(
    engine: Engine, wholes: Mapping[str, torch.Tensor] | None = None
) -> Iterator[dict[int, Entry]]:
    """Inside, modules hold plain parameters over `wholes` (by first name), or on the meta device;
    they have the attributes that the user has set on the sharded ones. Yields {id of a stand-in:
    its entry}.
    """
    shown: dict[Entry, nn.Parameter] = {}
    for entry in engine.entries:
        meta = torch.empty(entry.shape, dtype=entry.flat.dtypes.master, device="meta")
        values = meta if wholes is None else wholes[entry.name]
        shown[entry] = nn.Parameter(values, requires_grad=entry.param.requires_grad)
        own = entry.param.__dict__.items()
        shown[entry].__dict__.update(
            {key: v for key, v in own if not key.startswith(("onefold", "_onefold"))}
        )
    with showing(engine, shown), disable_torch_function():
        yield {id(param): entry for entry, param in shown.items()}


# -- contents --------------------------------------------------------------------------------------

#: The entries of a module's state dict: {name: (value, its entry if it is a parameter)}.
Contents = dict[str, tuple[Any, Entry | None]]


def contents(engine: Engine, module: nn.Module) -> Contents:
    """Return the module's own state dict: sharded parameters with their entries, buffers, extra
    state. Local.

    Parameters have the names that the modules' state dict hooks give them. If a hook turns a
    parameter into other tensors, the dict holds the parameter itself, by its name in the module.

    Raises:
        ShardedParameterError: a buffer is this rank's part of a parameter.
        ValueError: a hook fails on tensors without values.
    """
    buffers = {id(buffer) for buffer in module.buffers()}
    by_name = {name: entry for entry in engine.entries for name in entry.names}
    try:
        with standing_in(engine) as shown:
            held = module.state_dict(keep_vars=True)
    except Exception as error:
        raise ValueError(
            "a state dict hook of the model failed on parameters without values"
            f" ({type(error).__name__}: {error}). Names and shapes are asked for on such"
            " parameters, since no rank has whole ones: let the hook rename and reshape only."
            " onefold.full_state_dict(model) runs it on whole parameters."
        ) from error
    out: Contents = {}
    changed = False
    for name, value in held.items():
        entry = None
        if isinstance(value, torch.Tensor) and not is_extra(name):
            entry = shown.get(id(value))
            if entry is None and value.is_meta and id(value) not in buffers:
                entry = by_name.get(name)  # a hook has made another tensor of it
                if entry is None or value.shape != entry.shape:
                    changed = True
                    continue
            value = refuse_parts(name, value) if entry is None else entry.param
        out[name] = value, entry
    there = {entry for _, entry in out.values()}
    for entry in engine.entries if changed else ():
        if entry not in there:
            out |= dict.fromkeys(entry.names, (entry.param, entry))
    return out


def is_extra(name: str) -> bool:
    return name.rpartition(".")[2] == "_extra_state"


def takes_extra_state(module: nn.Module) -> dict[str, nn.Module]:
    """Return the modules that take an extra state, by its name in the state dict."""
    return {
        f"{path}._extra_state".lstrip("."): each
        for path, each in module.named_modules()
        if type(each).set_extra_state is not nn.Module.set_extra_state
    }


def beside_parameters(
    engine: Engine, module: nn.Module
) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Return what the module's state dict holds besides parameters, by name: (persistent buffers,
    extra states). Local.
    """
    buffers: dict[str, torch.Tensor] = {}
    extra: dict[str, Any] = {}
    for name, (value, entry) in contents(engine, module).items():
        if is_extra(name):
            extra[name] = value
        elif isinstance(value, torch.Tensor) and entry is None:
            buffers[name] = local_of(value)  # a DTensor among buffers is replicated
    return buffers, extra


# -- state dicts -----------------------------------------------------------------------------------
#
# State dicts of whole tensors, as the module's own `state_dict()` and `load_state_dict()` would
# return and take them without sharding. All are collective: every rank calls them.


def full_state_dict(module: nn.Module) -> dict[str, Any]:
    """Return the whole state dict in master precision on rank 0's host, gathered one parameter at a
    time; {} on other ranks. Collective.
    """
    engine = engine_of(module)
    if not engine.unsharded:
        engine.check_moment("full_state_dict")
        for name, buffer in module.named_buffers():
            refuse_parts(name, buffer)  # here, so that every rank raises, not only rank 0
    engine.uninitialized.refuse("full_state_dict() would hold")
    return whole_state_dict(engine, module, MasterParts(), master_items(engine.entries))


def whole_state_dict(
    engine: Engine, module: nn.Module, parts: HeldParts, items: Iterable[StateItem]
) -> dict[str, Any]:
    """Return the module's state dict on rank 0's host, with whole tensors for parameters; {} on
    other ranks. Collective.

    Args:
        parts, items: the values of all parameters.
    """
    engine.buffers.refuse_own(module, "a whole state dict")
    with disable_torch_function(), torch.no_grad():
        found = [(item.name, to_first(engine, parts, item)) for item in items]
        if engine.rank != 0:
            return {}
        wholes = {name: whole for name, whole in found if whole is not None}
        with standing_in(engine, wholes) as shown:
            held = module.state_dict(keep_vars=True)
        # Names of one tensor stay names of one: a file then holds it once
        values = {
            id(value): value.detach() if id(value) in shown else value.detach().cpu().clone()
            for value in held.values()
            if isinstance(value, torch.Tensor)
        }
        for name, value in held.items():
            held[name] = values.get(id(value), value)
        return held  # the modules' own dict, which has their versions


def load_full_state_dict(
    module: nn.Module, state_dict: Mapping[str, Any] | None, strict: bool = True
) -> tuple[list[str], list[str]]:
    """Load rank 0's whole state dict (other ranks may give None). Collective. Returns the missing
    and the unexpected names.

    Raises:
        ValueError: on every rank, if rank 0 gave no dict of tensors, if shapes differ, if names differ
            and `strict` is True, or if ranks have values of their own of a buffer.
    """
    engine = engine_of(module)
    engine.check_moment(_LOAD)
    engine.about_to_write()
    engine.buffers.refuse_own(module, f"the dict of {_LOAD}()")
    given: dict[str, torch.Tensor] = {}
    loads = partial(take, engine, module, state_dict, strict, given)
    missing, unexpected, incoming, extra = said_by_first(engine, f"{_LOAD}()", loads)
    parts, buffers = MasterParts(), persistent(module)
    with disable_torch_function(), torch.no_grad():
        for item in master_items(engine.entries):
            if item.name in incoming:
                from_first(engine, parts, item, given.get(item.name))
        parts.finish()
        loaded = [local_of(b) for name, b in buffers.items() if name not in missing]
        engine.group.broadcast(loaded, engine.state_context("buffers"))
        engine.make_stale()
        engine.uninitialized.given(
            {n for e in engine.entries if e.name in incoming for n in e.names}
            | (buffers.keys() - set(missing))
        )
    for name, value in extra.items():
        takes_extra_state(module)[name].set_extra_state(value)
    return missing, unexpected


def take(
    engine: Engine,
    module: nn.Module,
    state: Any,
    strict: bool,
    given: dict[str, torch.Tensor],
    buffers: bool = True,
) -> tuple[list[str], list[str], list[str], dict[str, Any]]:
    """Let rank 0's module load `state` by its own code, and put what it assigns to parameters into
    `given`, by first name. Returns (missing names, unexpected names, names in `given`, extra
    states, not set yet). `buffers`: load these too.

    Raises:
        ValueError: `state` does not fit; then nothing has been loaded.
    """
    if not isinstance(state, Mapping):
        raise ValueError(
            f"rank 0 was given a {type(state).__name__}; expected a dict of whole tensors, as"
            " onefold.full_state_dict(model) returns or torch.load(path) reads (other ranks may"
            " give None)."
        )
    held = [
        (m._buffers, key, b)
        for m in module.modules()
        for key, b in m._buffers.items()
        if b is not None
    ]
    by_hand, extra, taking = "", dict[str, Any](), takes_extra_state(module)
    # torch writes `assign` into the versions, where the next module that loads the dict would obey it
    copied: Any = OrderedDict(state)
    copied._metadata = {k: dict(v) for k, v in getattr(state, "_metadata", {}).items()}
    for name, each in taking.items():
        each.__dict__["set_extra_state"] = partial(extra.__setitem__, name)
    with torch.no_grad(), standing_in(engine):
        try:
            missing, unexpected = module.load_state_dict(copied, strict=False, assign=True)
        except Exception as error:
            raise ValueError(
                f"the model's own load_state_dict failed: {type(error).__name__}: {error}"
            ) from error
        finally:  # `assign` has put tensors of the state in the buffers' places
            came = [(b, table[key]) for table, key, b in held]
            for table, key, b in held:
                table[key] = b
            for each in taking.values():
                del each.__dict__["set_extra_state"]
        for entry in engine.entries:
            for places, attribute in entry.places:
                param: Any = places[attribute]
                if not param.is_meta:
                    given[entry.name] = param.detach()
                elif param._version:
                    by_hand = entry.name
    if by_hand:
        raise ValueError(
            f"the model's own code copies values into {by_hand!r}, which has no memory here: load"
            " inside `with onefold.full_params(model, write=True):`."
        )
    if strict and (missing or unexpected):
        raise ValueError(
            f"{len(missing)} names are missing ({', '.join(missing[:5])}) and {len(unexpected)} are"
            f" unknown to the model ({', '.join(unexpected[:5])}). Give strict=False to load what"
            " fits."
        )
    for buffer, new in came if buffers else ():
        if new is not buffer:
            local_of(buffer).copy_(local_of(new))  # type: ignore[arg-type]
    return sorted(missing), sorted(unexpected), list(given), extra
