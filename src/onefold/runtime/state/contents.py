"""What a module's own state dict holds: by name, and which of it are parameters. Local. See [Note: hooks
of state dicts] in runtime/state/dicts.py.
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
    """A parameter over each whole, with what somebody put on the one that it stands for; of those
    in tiles at the first.
    """
    out: dict[Entry, nn.Parameter] = {}
    for entry in engine.entries:
        if entry.part.first == 0:
            whole = wholes[entry.part.names[0]]
            # A copy of the attributes, but for the engine's own
            own = {k: v for k, v in entry.param.__dict__.items() if not k.startswith("_onefold")}
            own.pop("onefold", None)
            out[entry] = nn.Parameter(whole, requires_grad=entry.param.requires_grad)
            out[entry].__dict__.update(own)
    return out


@contextlib.contextmanager
def showing(shown: Mapping[Entry, nn.Parameter]) -> Iterator[None]:
    """Inside, the modules have these parameters in the places of their own."""
    try:
        for entry, param in shown.items():
            Flat.swap(entry, param, entry.param)
        yield
    finally:
        for entry, param in shown.items():
            Flat.swap(entry, entry.param, param)


@contextlib.contextmanager
def unguarded(engine: Engine) -> Iterator[None]:
    """Inside, `state_dict()` of the model's modules gives what they hold: for names and shapes."""
    engine.whole_depth += 1
    try:
        yield
    finally:
        engine.whole_depth -= 1


def own_state_dict(engine: Engine, module: nn.Module) -> dict[str, Any]:
    """The module's own state dict of what stands in its places now. Local.

    A parameter in tiles stands there as its first tile's.
    """
    with unguarded(engine), disable_torch_function(), first_tiles():
        return module.state_dict(keep_vars=True)


#: The entries of a module's state dict, parameters with what they are.
Contents = dict[str, tuple[Any, Entry | None]]


def contents(engine: Engine, module: nn.Module) -> Contents:
    """The module's own state dict: this rank's intervals with the entries that they are of, buffers,
    extra state. Local.

    Parameters have the names that a hook of a module has given them. What a hook has made other
    tensors of stands there as it is in the module, by its own names. See [Note: hooks of state
    dicts].

    Raises:
        ShardedParameterError: a buffer is this rank's part of a parameter.
        ValueError: a hook does not go over tensors without values.
    """
    return contents_and_changes(engine, module)[0]


def contents_and_changes(engine: Engine, module: nn.Module) -> tuple[Contents, bool]:
    """`contents`, and whether a hook has made other tensors of parameters."""
    entries = {id(e.param): e for e in engine.entries} | {id(e.compute): e for e in engine.entries}
    buffers = {id(buffer) for buffer in module.buffers()}
    by_name = {name: e for e in engine.entries for name in e.part.names}
    out: Contents = {}
    with disable_torch_function():
        try:
            held = own_state_dict(engine, module)
        except Exception:  # of a hook that asks for whole shapes
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
                    value = entry.param  # of which a hook has put a copy there
            out[name] = value, entry
    return out, False


def _outlined(engine: Engine, module: nn.Module) -> tuple[Contents, bool]:
    """The same from whole parameters without memory: what hooks make of these has none either."""
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
    """What the module's state dict holds besides parameters: (persistent buffers, extra states),
    each by its name there. Local.
    """
    buffers: dict[str, torch.Tensor] = {}
    extra: dict[str, Any] = {}
    for name, (value, entry) in contents(engine, module).items():
        if _is_extra(name):
            extra[name] = value
        elif isinstance(value, torch.Tensor) and entry is None:
            buffers[name] = value
    return buffers, extra
