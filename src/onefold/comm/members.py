"""The ranks of an axis, from a process group, a mesh or None, and the backend that moves their
tensors.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from onefold.device import backend_name, device_count


def format_ranks(ranks: Sequence[int]) -> str:
    """Format ranks in short: "0-7", "0,8,16", "0-3,8-11"."""
    out: list[list[int]] = []
    for rank in ranks:
        if out and rank == out[-1][1] + 1:
            out[-1][1] = rank
        else:
            out.append([rank, rank])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in out)


def members(given: Any) -> tuple[Any, list[int]]:
    """Return the process group for `given`, and its global ranks.

    The group is None for the default group, and for a single process without process groups, whose
    ranks are [0].

    Raises:
        ValueError: `given` is not a process group or a mesh, there are no process groups, or this
            rank is not in it.
    """
    if not (dist.is_available() and dist.is_initialized()):
        if given is not None:
            raise ValueError(
                f"group={given!r} was given, but this process is in no process group: call"
                " torch.distributed.init_process_group() first, or leave group out to run on one"
                " process."
            )
        return None, [0]
    rank, group = dist.get_rank(), given
    outside = f"rank {rank} is not in the given group{{}}: only its members call shard()."
    if isinstance(given, int) and given == dist.GroupMember.NON_GROUP_MEMBER:
        raise ValueError(outside.format(" (new_group returned no group to it)"))
    if hasattr(given, "get_group"):
        if getattr(given, "ndim", 1) != 1:
            raise ValueError(
                f"group is a DeviceMesh of {given.ndim} dimensions {given.mesh_dim_names or ''}:"
                " expected a one-dimensional one, such as mesh['data'] of a mesh with named"
                " dimensions."
            )
        if getattr(given, "get_coordinate", list)() is None:
            raise ValueError(outside.format(f" {given!r}"))
        group = given.get_group()
    if group is None:
        return None, list(range(dist.get_world_size()))
    if not isinstance(group, dist.ProcessGroup):
        raise ValueError(
            f"group={given!r}: expected a torch.distributed ProcessGroup (dist.new_group([0, 1])),"
            " a one-dimensional DeviceMesh, or None for all ranks."
        )
    try:
        ranks = dist.get_process_group_ranks(group)
    except (KeyError, ValueError):
        raise ValueError(
            f"group={given!r} is no process group of this process (any more): it was destroyed, or"
            " made elsewhere."
        ) from None
    if rank not in ranks:
        raise ValueError(outside.format(f" of ranks {ranks}"))
    return group, ranks


def backend_of(process_group: Any, device: torch.device) -> str:
    """Return the backend that moves tensors of `device` in this group: 'gloo', 'nccl', ...

    A group that was made without naming a backend has one for each type of device, chosen by torch.
    If 'gloo' was named, it moves tensors of any device, through the host.

    Raises:
        ValueError: the group has no backend for such tensors.
    """
    backends = dict(
        part.split(":") for part in dist.get_backend_config(process_group).split(",") if ":" in part
    )
    found = backends.get(device.type)
    if found is not None:
        return found
    if str(dist.get_backend(process_group)) == "gloo":
        return "gloo"
    has = ", ".join(f"{name} for {kind}" for kind, name in backends.items())
    wanted = f"cpu:gloo,{device.type}:{backend_name(device)}" if device.type != "cpu" else "gloo"
    raise ValueError(
        f"the model is on {device}, and the process group has no backend for {device.type!r}"
        f" tensors (it has {has or 'none'}): start it with"
        f" torch.distributed.init_process_group({wanted!r}), or give shard() another group or"
        " device."
    )


def refuse_shared_device(places: Mapping[int, bytes], device: torch.device) -> None:
    """Raise ValueError if several ranks compute on one device. NCCL would refuse it too, later, and
    without naming a cure.

    Args:
        places: what identifies each global rank's host and device.
        device: this rank's device.
    """
    sharing: dict[bytes, list[int]] = {}
    for rank, place in places.items():
        sharing.setdefault(place, []).append(rank)
    together = max(sharing.values(), key=len)
    if len(together) == 1:
        return
    count, kind = device_count(), device.type
    cure = (
        f"Give each rank its own before shard(): torch.{kind}.set_device(int(os.environ"
        f"['LOCAL_RANK'])), or shard(..., device=f\"{kind}:{{os.environ['LOCAL_RANK']}}\")"
    )
    if count < len(together):
        cure = (
            f"Rank {dist.get_rank()} sees {count} device{'s' if count > 1 else ''}: start as many"
            " ranks on each host as it has (torchrun --nproc-per-node), or give each task its own"
            " (srun --gpus-per-task=1)"
        )
    raise ValueError(
        f"ranks {format_ranks(sorted(together))} compute on one device ({device} on rank"
        f" {dist.get_rank()}), and the backend needs one for each rank. {cure}."
    )
