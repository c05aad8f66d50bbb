"""Whole state dicts of a sharded model, read and written."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from onefold.runtime.boxes import local_of
from onefold.runtime.buffers import persistent, refuse_parts
from onefold.runtime.engine import Engine
from onefold.runtime.flat import Entry, Flat
from onefold.runtime.gather_paths import state_context
from onefold.runtime.hooks import GUARD
from onefold.runtime.parameters.parameter import disable_torch_function
from onefold.runtime.parts import (
    HeldParts,
    MasterParts,
    StateItem,
    from_first,
    master_items,
    tell_all,
    to_first,
)

# -- contents --------------------------------------------------------------------------------------
#
# The entries of a module's own state dict, and which of them are parameters. Local. See [Note:
# hooks of state dicts] in runtime/state/dicts.py.


def as_parameters(engine: Engine, wholes: Mapping[str, torch.Tensor]) -> dict[Entry, nn.Parameter]:
    """Return a plain parameter over each whole tensor, with the attributes that the user has set on
    the sharded one.
    """
    out: dict[Entry, nn.Parameter] = {}
    for entry in engine.entries:
        # Copy the attributes, except the engine's own
        own = {k: v for k, v in entry.param.__dict__.items() if not k.startswith("_onefold")}
        own.pop("onefold", None)
        out[entry] = nn.Parameter(wholes[entry.name], requires_grad=entry.param.requires_grad)
        out[entry].__dict__.update(own)
    return out


@contextlib.contextmanager
def showing(shown: Mapping[Entry, nn.Parameter]) -> Iterator[None]:
    """Replace the modules' own parameters by these, inside the context."""

    def back() -> None:
        for entry, param in shown.items():
            Flat.swap(entry, entry.param, param)

    try:
        try:
            for entry, param in shown.items():
                Flat.swap(entry, param, entry.param)
            yield
        finally:
            back()
    finally:
        back()  # again: Ctrl-C may have come during the first


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
    """Return the module's own state dict with the parameters that it holds now. Local."""
    with unguarded(engine), disable_torch_function():
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
    by_name = {name: e for e in engine.entries for name in e.names}
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
        e.name: torch.empty(e.shape, dtype=e.flat.dtypes.master, device="meta")
        for e in engine.entries
    }
    shown = as_parameters(engine, wholes)
    of = {id(param): entry for entry, param in shown.items()}
    by_name = {name: entry for entry in shown for name in entry.names}
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
                if entry is None or value.shape != entry.shape:
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
                out |= dict.fromkeys(entry.names, (entry.param, entry))
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
            buffers[name] = local_of(value)  # a DTensor among buffers is replicated
    return buffers, extra


# -- state dicts -----------------------------------------------------------------------------------
#
# State dicts of whole tensors, as the module's own `state_dict()` and `load_state_dict()` would
# return and take them without sharding. All are collective: every rank calls them.
#
# [Note: hooks of state dicts] A module's hooks may rename its parameters in the state dict, or save
# them in other shapes (one fused weight as three). To run the hooks on values, rank 0 puts whole
# tensors in place of the modules' parameters while torch collects or loads the state dict. Code that
# needs only names, such as checkpoints, looks at the state dict of the sharded parameters; if a hook
# changes their shapes, at the state dict of whole parameters without memory (`contents`, in
# runtime/state/dicts.py).


def full_state_dict(engine: Engine, module: nn.Module) -> dict[str, torch.Tensor]:
    """Return whole tensors on rank 0's host; {} on other ranks. See `onefold.full_state_dict`."""
    if not engine.unsharded:
        engine.refuse_changes("full_state_dict")
        for name, buffer in module.named_buffers():
            refuse_parts(name, buffer)  # here, so that every rank raises, not only rank 0
    engine.uninitialized.look()
    engine.uninitialized.refuse("full_state_dict() would hold")
    return whole_state_dict(engine, module, MasterParts(), master_items(engine.entries))


def whole_state_dict(
    engine: Engine, module: nn.Module, parts: HeldParts, items: Iterable[StateItem]
) -> dict[str, torch.Tensor]:
    """Return the module's state dict on rank 0's host, with whole tensors for parameters; {} on
    other ranks. Collective.

    Args:
        parts, items: the values of all parameters.
    """
    engine.buffers.refuse_own(module, "a whole state dict")
    wholes = _wholes(engine, parts, items)
    if engine.rank != 0:
        return {}
    with disable_torch_function(), torch.no_grad():
        shown = as_parameters(engine, wholes)
        of = {id(param): wholes[entry.name] for entry, param in shown.items()}
        with showing(shown):
            held = own_state_dict(engine, module)
        return {
            name: of[id(value)] if id(value) in of else value.detach().cpu().clone()
            for name, value in held.items()
            if isinstance(value, torch.Tensor)
        }


def _wholes(
    engine: Engine, parts: HeldParts, items: Iterable[StateItem]
) -> dict[str, torch.Tensor]:
    """Return every item whole on rank 0's host, by its parameter's first name; {} on other ranks.
    Collective.
    """
    with disable_torch_function(), torch.no_grad():
        found = [(item.name, to_first(engine.resources, parts, item)) for item in items]
    return {name: whole for name, whole in found if whole is not None}


def load_full_state_dict(
    engine: Engine, module: nn.Module, state: Mapping[str, torch.Tensor] | None, strict: bool
) -> tuple[list[str], list[str]]:
    """Load rank 0's whole tensors into every rank's masters. Returns (missing, unexpected) names.
    See `onefold.load_full_state_dict`.
    """
    engine.refuse_changes("load_full_state_dict")
    engine.masters.about_to_write()
    try:
        held, changed = contents_and_changes(engine, module)
    except ValueError:  # a hook needs values
        held, changed = {}, True
    if changed or _loads_in_its_own_way(module):
        return _load_by_module(engine, module, state, strict)
    expected = {n: v for n, (v, _) in held.items() if isinstance(v, torch.Tensor)}
    named = {n: e for n, (_, e) in held.items() if e is not None}
    shapes = {n: e.shape for n, e in named.items()}
    verdict = _compare(expected, shapes, state, strict) if engine.rank == 0 else None
    missing, unexpected, complaint = tell_all(engine.resources, "load_full_state_dict()", verdict)[
        0
    ]
    if complaint:
        raise ValueError(complaint)
    incoming = {e.name for n, e in named.items() if n not in missing}
    given = {e.name: state[n] for n, e in named.items() if state is not None and n in state}
    with disable_torch_function(), torch.no_grad():
        _load_masters(engine, incoming, given)
        given = {n: v for n, v in expected.items() if n not in shapes and n not in missing}
        _load_buffers(engine, given, state or {})
        engine.make_stale()
        engine.uninitialized.given(
            {
                name
                for n in expected
                if n not in missing
                for name in (n, *(named[n].names if n in named else ()))
            }
        )
        engine.uninitialized.remember()
    return missing, unexpected


def _loads_in_its_own_way(module: nn.Module) -> bool:
    """Whether a module in `module` has code of its own that runs when a state dict is loaded: a
    hook, or a `_load_from_state_dict` that is not torch's.
    """
    for part in module.modules():
        hooks = (
            *part._load_state_dict_pre_hooks.values(),
            *part._load_state_dict_post_hooks.values(),
        )
        # torch wraps some hooks in an object that has the user's callable as `hook`
        if not all(getattr(getattr(hook, "hook", hook), GUARD, False) for hook in hooks):
            return True
        defined_in = getattr(part._load_from_state_dict, "__module__", None) or ""
        if not defined_in.startswith(("torch.", "onefold.")):
            return True
    return False


def _load_by_module(
    engine: Engine, module: nn.Module, state: Mapping[str, torch.Tensor] | None, strict: bool
) -> tuple[list[str], list[str]]:
    """Load `state` by the module's own `load_state_dict`, hooks included, into whole parameters on
    rank 0; then send these to all ranks.
    """
    wholes = _wholes(engine, MasterParts(), master_items(engine.entries))
    verdict = None
    if engine.rank == 0:
        verdict = _taken_over(engine, module, wholes, state, strict)
    missing, unexpected, complaint = tell_all(engine.resources, "load_full_state_dict()", verdict)[
        0
    ]
    if complaint:
        raise ValueError(complaint)
    incoming = {e.name for e in engine.entries}
    buffers = {n: b for n, b in persistent(module).items() if n not in missing}
    with disable_torch_function(), torch.no_grad():
        _load_masters(engine, incoming, wholes)
        _load_buffers(engine, buffers, {})
        engine.buffers.start(engine.resources)  # others may have been written to on rank 0
        engine.make_stale()
        names = {name for e in engine.entries for name in e.names}
        names |= {name for name, _ in module.named_buffers()}
        engine.uninitialized.given(names - set(missing))
        engine.uninitialized.remember()
    return missing, unexpected


def _taken_over(
    engine: Engine, module: nn.Module, wholes: Mapping[str, torch.Tensor],
    state: Mapping[str, torch.Tensor] | None, strict: bool,
) -> tuple[list[str], list[str], str | None]:  # fmt: skip
    """Load `state` into `wholes` by rank 0's module. Returns the same as `_compare`: (missing
    names, unexpected names, complaint or None).
    """
    if (complaint := _no_tensors({}, state)) or state is None:
        return [], [], complaint
    with disable_torch_function(), torch.no_grad():
        shown = as_parameters(engine, wholes)
        engine.full_params_depth += 1
        try:
            with showing(shown):
                missing, unexpected = module.load_state_dict(state, strict=False)
        except Exception as error:
            said = f"{type(error).__name__}: {error}"
            return [], [], f"load_full_state_dict: the model's own load_state_dict failed: {said}"
        finally:
            engine.full_params_depth -= 1
    complaint = _of_names(missing, unexpected) if strict and (missing or unexpected) else None
    return sorted(missing), sorted(unexpected), complaint


def _of_names(missing: Collection[str], unexpected: Collection[str]) -> str:
    return (
        f"load_full_state_dict: {len(missing)} names are missing ({', '.join([*missing][:5])})"
        f" and {len(unexpected)} are unknown to the model ({', '.join([*unexpected][:5])})."
        " Give strict=False to load what fits."
    )


def _compare(
    expected: Mapping[str, Any],
    shapes: Mapping[str, tuple[int, ...]],
    state: Mapping[str, torch.Tensor] | None,
    strict: bool,
) -> tuple[list[str], list[str], str | None]:
    """Return (missing names, unexpected names, complaint or None) of rank 0's state dict."""
    complaint = _no_tensors(expected, state)
    if complaint or state is None:
        return [], [], complaint
    missing = sorted(set(expected) - set(state))
    unexpected = sorted(map(str, set(state) - set(expected)))
    given = {n: tuple(state[n].shape) for n in expected if n in state}
    wanted = {n: shapes.get(n, tuple(expected[n].shape)) for n in given}
    wrong = [f"{n}: given {given[n]}, expected {wanted[n]}" for n in given if given[n] != wanted[n]]
    if wrong:
        return missing, unexpected, "load_full_state_dict: shapes differ. " + "; ".join(wrong[:5])
    complaint = _of_names(missing, unexpected) if strict and (missing or unexpected) else None
    return missing, unexpected, complaint


def _no_tensors(expected: Mapping[str, Any], state: Any) -> str | None:
    """Return a complaint if `state` is not a dict, or holds something other than tensors (or
    complex tensors for real ones) under known names.
    """
    if state is None:
        return (
            "load_full_state_dict: rank 0 was given no state dict; give it the whole one (other"
            " ranks may give None)."
        )
    if not isinstance(state, Mapping):
        return (
            f"load_full_state_dict: rank 0 was given a {type(state).__name__}; expected a dict of"
            " whole tensors, as onefold.full_state_dict(model) returns or torch.load(path) reads."
        )
    known = [n for n in expected if n in state]
    others = [
        f"{n} is a {type(state[n]).__name__}"
        for n in known
        if not isinstance(state[n], torch.Tensor)
    ]
    if others:
        return (
            f"load_full_state_dict: expected tensors, but {'; '.join(others[:5])}. torch.as_tensor"
            " turns arrays into tensors."
        )
    imaginary = [n for n in known if state[n].is_complex() and not expected[n].is_complex()]
    if imaginary:
        return (
            f"load_full_state_dict: {', '.join(imaginary[:5])} would lose their imaginary parts:"
            " give real tensors."
        )
    return None


def _load_masters(
    engine: Engine, incoming: Collection[str], state: Mapping[str, torch.Tensor]
) -> None:
    """Load the parameters that are in `incoming`; the others keep their values.

    `incoming` has the first names of parameters. `state` has rank 0's whole tensors by these names.
    """
    parts = MasterParts()
    for item in master_items(engine.entries):
        if item.name in incoming:
            whole = state[item.name] if engine.rank == 0 else None
            from_first(engine.resources, parts, item, whole)
    parts.finish()


def _load_buffers(
    engine: Engine, buffers: Mapping[str, torch.Tensor], state: Mapping[str, torch.Tensor]
) -> None:
    found = {name: local_of(buffer) for name, buffer in buffers.items()}
    for name, buffer in found.items():
        if engine.rank == 0 and name in state:
            buffer.copy_(state[name])
    engine.group.broadcast(list(found.values()), state_context(engine.resources, "buffers"))
