"""The entries of a module's own state dict, and which of them are parameters. Local. See [Note:
hooks of state dicts] in runtime/state/dicts.py.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from onefold.runtime.buffers import refuse_parts
from onefold.runtime.engine import Engine
from onefold.runtime.entry import Entry
from onefold.runtime.flat import Flat
from onefold.runtime.parameters.parameter import disable_torch_function
from onefold.runtime.units import first_tiles


def as_parameters(engine: Engine, wholes: Mapping[str, torch.Tensor]) -> dict[Entry, nn.Parameter]:
    """Return a plain parameter over each whole tensor, with the attributes that the user has set on
    the sharded one. A parameter in tiles has one, under the entry of its first tile.
    """
    out: dict[Entry, nn.Parameter] = {}
    for entry in engine.entries:
        if entry.part.first == 0:
            whole = wholes[entry.part.names[0]]
            # Copy the attributes, except the engine's own
            own = {k: v for k, v in entry.param.__dict__.items() if not k.startswith("_onefold")}
            own.pop("onefold", None)
            out[entry] = nn.Parameter(whole, requires_grad=entry.param.requires_grad)
            out[entry].__dict__.update(own)
    return out


@contextlib.contextmanager
def showing(shown: Mapping[Entry, nn.Parameter]) -> Iterator[None]:
    """Replace the modules' own parameters by these, inside the context."""
    try:
        for entry, param in shown.items():
            Flat.swap(entry, param, entry.param)
        yield
    finally:
        for entry, param in shown.items():
            Flat.swap(entry, entry.param, param)


@contextlib.contextmanager
def unguarded(engine: Engine) -> Iterator[None]:
    """Allow `state_dict()` of the model's modules, which is refused elsewhere: for names and
    shapes.
    """
    engine.full_params_depth += 1
    try:
        yield
    finally:
        engine.full_params_depth -= 1


def own_state_dict(engine: Engine, module: nn.Module) -> dict[str, Any]:
    """Return the module's own state dict with the parameters that it holds now. Local.

    A parameter in tiles appears as its first tile's.
    """
    with unguarded(engine), disable_torch_function(), first_tiles():
        return module.state_dict(keep_vars=True)


#: The entries of a module's state dict: {name: (value, its entry if it is a parameter)}.
Contents = dict[str, tuple[Any, Entry | None]]


def contents(engine: Engine, module: nn.Module) -> Contents:
    """Return the module's own state dict: sharded parameters with their entries, buffers, extra
    state. Local.

    Parameters have the names that the modules' state dict hooks give them. If a hook turns a
    parameter into other tensors, the dict holds the parameter itself, by its name in the module.
    See [Note: hooks of state dicts].

    Raises:
        ShardedParameterError: a buffer is this rank's part of a parameter.
        ValueError: a hook fails on tensors without values.
    """
    return contents_and_changes(engine, module)[0]


def contents_and_changes(engine: Engine, module: nn.Module) -> tuple[Contents, bool]:
    """Return `contents`, and whether a hook turns a parameter into other tensors."""
    entries = {id(e.param): e for e in engine.entries} | {id(e.compute): e for e in engine.entries}
    buffers = {id(buffer) for buffer in module.buffers()}
    by_name = {name: e for e in engine.entries for name in e.part.names}
    out: Contents = {}
    with disable_torch_function():
        try:
            held = own_state_dict(engine, module)
        except Exception:  # a hook may need the shape of the whole
            return _outlined(engine, module)
        for name, value in held.items():
            entry = None
            if isinstance(value, torch.Tensor) and not _is_extra(name):
                entry = entries.get(id(value))
                if entry is None and id(value) in buffers:
                    refuse_parts(name, value)
                elif entry is None:
                    entry = by_name.get(name)
                    if entry is None or value.shape != entry.param.shape:
                        return _outlined(engine, module)
                    value = entry.param  # a hook has put a copy of it into the dict
            out[name] = value, entry
    return out, False


def _outlined(engine: Engine, module: nn.Module) -> tuple[Contents, bool]:
    """Do the same with whole parameters on the meta device, on which hooks may compute."""
    wholes = {
        e.part.names[0]: torch.empty(e.part.shape, dtype=e.flat.dtypes.master, device="meta")
        for e in engine.entries
    }
    shown = as_parameters(engine, wholes)
    of = {id(param): entry for entry, param in shown.items()}
    by_name = {name: entry for entry in shown for name in entry.part.names}
    buffers = {id(buffer) for buffer in module.buffers()}
    try:
        with showing(shown):
            held = own_state_dict(engine, module)
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
        if isinstance(value, torch.Tensor) and not _is_extra(name):
            entry = of.get(id(value))
            if entry is None and value.is_meta and id(value) not in buffers:
                entry = by_name.get(name)
                if entry is None or value.shape != entry.part.shape:
                    changed = True
                    continue
            if entry is None:
                refuse_parts(name, value)
            else:
                value = entry.param
        out[name] = value, entry
    if changed:
        there = {id(entry) for _, entry in out.values()}
        for entry in shown:
            if id(entry) not in there:
                out |= dict.fromkeys(entry.part.names, (entry.param, entry))
    return out, changed


def _is_extra(name: str) -> bool:
    return name.rpartition(".")[2] == "_extra_state"


def beside_parameters(
    engine: Engine, module: nn.Module
) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Return what the module's state dict holds besides parameters, by name: (persistent buffers,
    extra states). Local.
    """
    buffers: dict[str, torch.Tensor] = {}
    extra: dict[str, Any] = {}
    for name, (value, entry) in contents(engine, module).items():
        if _is_extra(name):
            extra[name] = value
        elif isinstance(value, torch.Tensor) and entry is None:
            buffers[name] = value
    return buffers, extra
