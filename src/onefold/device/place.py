"""The device: its index, the current device of a thread, and its random state."""

from __future__ import annotations

import contextlib
import os
from typing import Any

import torch

#: Devices whose tensors are in host memory, or have none.
_HOSTS = ("cpu", "meta")


def available() -> bool:
    """Whether torch has an accelerator that it can use."""
    return bool(torch.accelerator.is_available())


def default_device() -> torch.device:
    """Return this thread's current accelerator, with its index; the CPU if there is none."""
    found = torch.accelerator.current_accelerator() if available() else None
    return (
        torch.device("cpu")
        if found is None
        else torch.device(found.type, torch.accelerator.current_device_index())
    )


def with_index(device: torch.device | str) -> torch.device:
    """Return `device` with an index. "cuda" becomes this thread's current device, and so means the
    same device in every other thread.

    Raises:
        ValueError: there is no such device.
    """
    device = torch.device(device)
    if device.index is not None or device.type in _HOSTS:
        return device
    if (
        available()
        and (found := torch.accelerator.current_accelerator()) is not None
        and found.type == device.type
    ):
        return torch.device(device.type, torch.accelerator.current_device_index())
    try:
        return torch.empty(0, device=device).device  # such as mps
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        here = (
            ", ".join(
                f"{default_device().type}:{i}" for i in range(torch.accelerator.device_count())
            )
            if available()
            else "none"
        )
        raise ValueError(
            f"device={str(device)!r}: torch finds no such device here"
            f" ({str(error).splitlines()[0]}; accelerators: {here}). Give a device that is there,"
            " or 'cpu'."
        ) from None


def of_local_rank(kind: str, local_rank: int) -> torch.device:
    """Return the accelerator of the rank with this number on its host.

    Launchers either show every device to every rank, or one to each (srun --gpus-per-task=1). With
    one device the index is 0 for every rank, hence the remainder.
    """
    return torch.device(kind, local_rank % max(1, torch.accelerator.device_count()))


def device_identity(device: torch.device) -> str:
    """Return what tells this device from all others, the same in every process: its UUID; "" if
    torch does not say, and on a CPU.
    """
    if device.type in _HOSTS:
        return ""
    try:
        found = torch.get_device_module(device).get_device_properties(device)
    except (AttributeError, NotImplementedError):
        return ""
    uuid = getattr(found, "uuid", None)
    # A process sees one part of a divided GPU (MIG), by its name
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    part = visible if visible.startswith("MIG-") else ""
    return "" if uuid is None else f"{uuid}{part}"


def guard(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """Make `device` this thread's current one inside the context: kernels, streams and events that
    name no device use it.
    """
    if device.type in _HOSTS or device.index is None:
        return contextlib.nullcontext()
    return torch.accelerator.device_index(device.index)


def set_default(device: torch.device) -> None:
    """Make `device` this thread's current one from now on."""
    if device.type not in _HOSTS and device.index is not None:
        torch.accelerator.set_device_index(device.index)


def backend_name(device: torch.device | str) -> str:
    """Return torch's default torch.distributed backend for tensors of this device: "nccl", "xccl",
    ...; "gloo" on a CPU.
    """
    kind = torch.device(device).type
    known = getattr(torch.distributed.Backend, "default_device_backend_map", {})
    return str(known.get(kind, "gloo"))


def rng_state(device: torch.device) -> torch.Tensor | None:
    """Return the state of the device's random generator, as uint8 on the host. None on a CPU, which
    uses torch's default generator.
    """
    if device.type in _HOSTS:
        return None
    found: torch.Tensor = torch.get_device_module(device).get_rng_state(with_index(device))
    return found


def set_rng_state(state: torch.Tensor, device: torch.device) -> None:
    """Restore a state that `rng_state` returned."""
    torch.get_device_module(device).set_rng_state(state, with_index(device))
