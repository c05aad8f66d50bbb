"""Other tensors in the parameters' places: `torch.func.functional_call` puts them there for one
call. Replacing a parameter for good is refused.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import torch

from onefold.runtime.differentiate import TRANSFORMS

if TYPE_CHECKING:
    from onefold.runtime.entry import Entry
    from onefold.runtime.unit import Unit


def swap_in(unit: Unit) -> None:
    """Let the module see the whole parameters of `unit`. Tensors that `functional_call` has put in
    their places stay for the call.

    Raises:
        RuntimeError: other code has put a tensor in a parameter's place, which would be ignored.
        ValueError: functional_call was given a tensor of another shape than the whole parameter.
    """
    for flat in unit.flats:
        for entry in flat.entries:
            if (place := entry.only_place) is not None and place[0].get(place[1]) is entry.param:
                place[0][place[1]] = entry.compute
                continue
            others = [
                t
                for parameters, attribute, _ in entry.places
                if (t := parameters.get(attribute)) is not entry.param
            ]
            if others:
                _look_at(entry, others)
            flat.swap(entry, entry.compute, instead_of=entry.param if others else None)


def swap_out(unit: Unit) -> None:
    """Let the module show the optimizer's parameters again."""
    for flat in unit.flats:
        for entry in flat.entries:
            if (place := entry.only_place) is None:
                flat.swap(entry, entry.param, instead_of=entry.compute)
            elif place[0].get(place[1]) is entry.compute:
                place[0][place[1]] = entry.param


def _look_at(entry: Entry, others: list[Any]) -> None:
    name, shape = entry.slot.name, tuple(entry.slot.shape)
    if any(t is None for t in others) or not _in_functional_call():
        raise RuntimeError(
            f"parameter {name!r} was replaced after shard() (assigned or removed). Write into it"
            " instead: `with onefold.full_params(model, write=True):` for values; for another"
            " structure assign inside `with onefold.unsharded(model):`, or before shard()."
        )
    if any(recurrent is not None for _, _, recurrent in entry.places):
        raise ValueError(
            f"functional_call was given a tensor for {name!r}, a weight of a recurrent layer. The"
            " layer keeps a list of its weights besides, and would compute with the old one. Leave"
            " it out."
        )
    for t in others:
        if tuple(t.shape) != shape:
            raise ValueError(
                f"functional_call was given a tensor of shape {tuple(t.shape)} for {name!r},"
                f" expected the whole parameter's {shape}. torch.func.grad, vmap and the like see"
                f" this rank's interval of a sharded parameter. {TRANSFORMS}"
            )


def _in_functional_call() -> bool:
    frame: Any = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_filename == torch.nn.utils.stateless.__file__:
            return True
        frame = frame.f_back
    return False
