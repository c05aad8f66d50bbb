"""Where an operation runs if the recipe has tiers: on the device, on the host, or over their link.

    tensors             fake tensors of     an operation on them
    of the device       the CPU             a kernel on the current stream
    of the host         HOST                takes the host's time
    of both: a copy                         takes the link, on the current stream
    of both: others                         refused: nothing like it runs in the engine

The device is a CPU here, as in a simulation without tiers, so that the model runs the same code.
The host needs another torch device, to be told from it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from functools import cache
from typing import Any, Literal

import torch
import torch.optim.optimizer as torch_optimizer

from onefold.machine.kernels import values_in

#: What stands for the host's memory. Every build of torch has this device, and nothing runs on it:
#: fake tensors have no contents.
HOST = torch.device("lazy", 0)
Place = Literal["device", "host", "up", "down"]
#: Operations that copy their second argument into the first one, or their first into a new tensor.
_COPIES = frozenset({"copy_", "_to_copy"})


def place_of(name: str, args: Any, kwargs: Any, out: Any) -> Place:
    """Return where the operation `name` runs.

    Raises:
        ValueError: it works on tensors of both sides, and is no copy.
    """
    tensors = [t for t in values_in((args, kwargs, out)) if isinstance(t, torch.Tensor)]
    sides = {t.device.type == HOST.type for t in tensors}
    if sides != {False, True}:
        return "host" if sides == {True} else "device"
    if name not in _COPIES:
        raise ValueError(
            f"the operation {name} works on tensors of the host and of the device, and a timeline"
            " has a price for copies between them only."
        )
    return "down" if ends_of(args, out)[0].device.type == HOST.type else "up"


def only_engine_calls(args: Any, kwargs: Any) -> bool:
    """Return whether only the engine makes such a call in a forward pass: with a tensor of the host,
    or with a storage.
    """
    for given in values_in((args, kwargs)):
        if isinstance(given, torch.Tensor | torch.device):
            where = given.device if isinstance(given, torch.Tensor) else given
            if where.type == HOST.type:
                return True
        elif isinstance(given, torch.UntypedStorage):
            return True
    return False


def ends_of(args: Any, out: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (where to, where from) of a copy."""
    first: torch.Tensor = args[0]
    copied_into = len(args) > 1 and isinstance(args[1], torch.Tensor)
    return (first, args[1]) if copied_into else (out, first)


def waits_for_it(name: str, args: Any, kwargs: Any) -> bool:
    """Return whether the host waits for the end of a copy: it does unless `non_blocking`."""
    given = args[2] if name == "copy_" and len(args) > 2 else kwargs.get("non_blocking", False)
    return not given


def put_on_host(param: torch.Tensor) -> None:
    """Let a fake parameter say that it is on the host, as its `.data` is.

    A fake tensor says the device that it was made on. It keeps that in its dictionary, which the
    engine shares between the parameter and the whole on the device. So its classes say it instead.
    """
    own = param.__dict__
    for name in ("_onefold_bare", "_onefold_class"):
        own[name] = _saying_host(own[name])
    param.__class__ = own["_onefold_class"]


@cache
def _saying_host(kind: type) -> type:
    return type(f"Host{kind.__name__}", (kind,), {"fake_device": property(lambda _: HOST)})


@contextlib.contextmanager
def fused_there() -> Iterator[None]:
    """Let torch's fused optimizers step tensors of HOST, inside the context."""
    name = "_get_fused_kernels_supported_devices"
    before = getattr(torch_optimizer, name)
    setattr(torch_optimizer, name, lambda: [*before(), HOST.type])
    try:
        yield
    finally:
        setattr(torch_optimizer, name, before)
