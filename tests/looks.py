"""What a sharded model holds, sends and gathers: the one file of the tests that knows what is inside.

A change of the source that renames an attribute edits this file and no other. Sizes are in bytes.
"""

from __future__ import annotations

import gc
from typing import Any

import torch
from torch import nn

import onefold

#: {tier: {category: bytes}}
Held = dict[str, dict[str, int]]


def engine(model: nn.Module) -> Any:
    """For the functions below, and for tests that hold it weakly."""
    return onefold.engine_of(model)


def is_sharded(model: nn.Module) -> bool:
    try:
        return engine(model) is not None
    except ValueError:
        return False


def watch(model: nn.Module) -> None:
    """Count the wire, the moves between tiers and peaks from here on."""
    of = engine(model)
    of.memory.now()
    of.memory.record = True
    for ledger in (of.memory, of.transfers.host):
        ledger.reset_peak()
    of.traffic.reset()
    of.transfers.moved.reset()


def units(model: nn.Module) -> list[tuple[str, int]]:
    """(name, elements with padding) of each unit, the root first."""
    return [(unit.name, unit.numel) for unit in engine(model).units]


def held(model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> Held:
    """What rests now, with the optimizer's states as "moments" if it is given. Buffers whose number
    depends on how far a disk is are left out.
    """
    of = engine(model)
    tiers = {
        "device": of.memory.now(),
        "host": of.transfers.host.now(),
        "nvme": of.transfers.disk.now(),
    }
    if optimizer is not None:
        from onefold.observe.memory import moments_by_tier

        for tier, nbytes in moments_by_tier(optimizer, of).items():
            tiers[tier] = tiers[tier] | {"moments": tiers[tier].get("moments", 0) + nbytes}
    for category in ("staging buffers", "idle buffers"):
        tiers["host"].pop(category, None)
    found = {tier: {k: n for k, n in what.items() if n} for tier, what in tiers.items()}
    return {tier: what for tier, what in found.items() if what}


def peak(model: nn.Module) -> dict[str, int]:
    """{category: bytes} on the device when they were most since `watch`."""
    return engine(model).memory.peak()


def host_peak(model: nn.Module) -> dict[str, int]:
    return engine(model).transfers.host.peak()


def sent(model: nn.Module) -> dict[str, int]:
    """{move: bytes that this rank sent} since `watch`."""
    return engine(model).traffic.by_move()


def sent_by_link(model: nn.Module) -> dict[str, int]:
    """The same inside a node and between nodes."""
    return engine(model).traffic.by_link()


def moved(model: nn.Module) -> dict[str, int]:
    """{"up", "down", "read", "written": bytes between tiers} since `watch`."""
    return engine(model).transfers.moved.by_move()


def moves(model: nn.Module) -> list[tuple[str, str, str, int]]:
    """(phase, move, unit, bytes) of each message since `watch`, in order."""
    return [(e.phase, e.move, e.unit, e.nbytes) for e in engine(model).traffic.events]


def gathered(model: nn.Module) -> list[str]:
    """Names of the units whose parameters are whole on this rank now, at stage 3."""
    return [unit.name for unit in engine(model).gather.gathered.values()]


def living() -> int:
    """The memory behind every tensor that Python can reach on the CPU, each storage once: it is
    counted without Onefold's own ledgers.
    """
    storages: dict[int, int] = {}
    for thing in gc.get_objects():
        try:
            is_tensor = issubclass(type(thing), torch.Tensor)
        except Exception:  # a proxy whose class raises
            continue
        if is_tensor and thing.device.type == "cpu":
            with torch._C.DisableTorchFunctionSubclass():
                storage = thing.untyped_storage()
                storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


def guarded_at_every_line() -> frozenset[Any]:
    """Code of the functions in which an interrupt may come at any line."""
    import inspect

    from onefold.optim import step_hooks
    from onefold.runtime import stepper
    from onefold.runtime.forward import Forward
    from onefold.runtime.state import dicts, start

    functions = [f for f in vars(step_hooks._Step).values() if inspect.isfunction(f)]
    functions += [dicts.showing, start.full_params, Forward.enter]
    functions += [step_hooks._before, step_hooks._after, stepper.step_parts, stepper.only]
    functions += [stepper.raw_step, stepper.note, stepper.undo, stepper._give, stepper._count_apart]
    codes = [inspect.unwrap(f).__code__ for f in functions]
    return frozenset(code for code in codes if code.co_filename != "<string>")


def say_that_optimizers_can_be_fused_on(device: str) -> None:
    from onefold.runtime import stepper

    stepper.FUSED_ON = frozenset((device,))


class _TwoOwners:
    """Stands for a flat buffer over two ranks, which own the addresses below `CUT` and from there
    on.
    """

    CUT = 1 << 30

    def __init__(self, of: Any) -> None:
        self.engine, self.index, self.alone = of, 3, False
        self.bounds, self.position = ((0, self.CUT), (self.CUT, 2 * self.CUT)), of.rank

    def meet(self, subject: str) -> Any:
        return self.engine.group, self.engine.group

    def wait_before_write(self) -> None:
        """Nothing is copying the addresses."""


def part_of(x: torch.Tensor, model: nn.Module) -> torch.Tensor:
    """This rank's half of `x`, as the `data` of a parameter "x" is at stage 3 on two ranks."""
    from onefold.runtime.parameters.interval import IntervalSpec, dress

    spec = IntervalSpec(_TwoOwners(engine(model)), "x", _TwoOwners.CUT - x.numel() // 2, x.shape)
    return dress(x.detach().reshape(-1)[spec.start : spec.stop].clone(), spec)


def interval(x: torch.Tensor) -> tuple[torch.Tensor, int, int] | None:
    """(the elements that this rank has, from, to) of a part; None of a plain tensor."""
    from onefold.runtime.parameters.interval import local_part, spec_of

    spec = spec_of(x)
    return None if spec is None else (local_part(x).reshape(-1), spec.start, spec.stop)


def say_that_graphs_are_recorded_on(device: str) -> None:
    """As if torch.compile recorded CUDA graphs on `device`."""
    from onefold.runtime import differentiate

    differentiate.GRAPHED = frozenset((device,))


def naming_communicators(model: nn.Module) -> Any:
    """The context in which the model's communicators are made."""
    return engine(model).group.communicators.named()
