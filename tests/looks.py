"""What a sharded model holds, sends and gathers: the one file of the tests that knows what is inside.

A change of the source that renames an attribute edits this file and no other. Sizes are in bytes.
"""

from __future__ import annotations

import contextlib
import gc
import weakref
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from torch._subclasses import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor

import onefold

#: What a compiler leaves behind.
NO_MEMORY = (FakeTensor, FunctionalTensor)
#: {tier: {category: bytes}}
Held = dict[str, dict[str, int]]
#: What the host keeps for later; how much of it depends on how far a disk or a copy is.
SPARE = ("staging buffers", "idle buffers", "idle slabs")


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
    for category in SPARE:
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
    sent = engine(model).traffic.sent()
    return {"inside": sent.nbytes - sent.between, "between": sent.between}


def moved(model: nn.Module) -> dict[str, int]:
    """{"up", "down", "read", "written": bytes between tiers} since `watch`."""
    return engine(model).transfers.moved.by_move()


def gathered(model: nn.Module) -> list[str]:
    """Names of the units whose parameters are whole on this rank now, at stage 3."""
    return [unit.name for unit in engine(model).gather.gathered.values()]


def known_as_weights(model: nn.Module) -> tuple[set[int], set[int]]:
    """(addresses that are taken for weights, addresses of the weights that are whole now)."""
    flats = [flat for unit in engine(model).units for flat in unit.flats]
    whole = {f.full.untyped_storage()._cdata for f in flats if f.full is not None}
    return set(engine(model).gather.by_storage), whole


def living(places: tuple[str, ...] = ()) -> int:
    """The memory behind every tensor that Python can reach, each storage once: it is counted without
    Onefold's own ledgers.

    `places`: kinds of devices; by default the CPU and the default device.
    """
    storages: dict[int, int] = {}
    places = places or ("cpu", torch.get_default_device().type)
    for thing in gc.get_objects():
        try:
            is_tensor = issubclass(type(thing), torch.Tensor)
        except Exception:  # a proxy whose class raises
            continue
        if is_tensor and not issubclass(type(thing), NO_MEMORY) and thing.device.type in places:
            with torch._C.DisableTorchFunctionSubclass():
                storage = thing.untyped_storage()
                storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


def guarded_at_every_line() -> frozenset[Any]:
    """Code of the functions in which an interrupt may come at any line."""
    import inspect

    from onefold.optim import steps
    from onefold.runtime import stepper
    from onefold.runtime.passes import Passes
    from onefold.runtime.state import dicts, start

    functions = [dicts.standing_in, start.full_params, start.showing, Passes.enter]
    functions += [steps._run, steps._begin, steps._end, steps._written]
    functions += [steps._leave_out, steps._give_back]
    functions += [stepper.step_parts, stepper.only]
    functions += [stepper.raw_step, stepper.note, stepper.undo, stepper.give, stepper._count_apart]
    codes = [inspect.unwrap(f).__code__ for f in functions]
    return frozenset(code for code in codes if code.co_filename != "<string>")


def say_that_optimizers_can_be_fused_on(device: str) -> None:
    from onefold.runtime import stepper

    stepper.FUSED_ON = frozenset((device,))


@contextlib.contextmanager
def init_divides_above(nbytes: int) -> Iterator[None]:
    """`zero.Init` divides a model's parameters once so many bytes of them are whole, 64 MiB
    otherwise.
    """
    from onefold.deepspeed import zero

    before, zero.LIMIT = zero.LIMIT, nbytes
    try:
        yield
    finally:
        zero.LIMIT = before


def nodes(model: nn.Module) -> tuple[int, str, bool]:
    """(groups of ranks, how many nodes there are in words, whether messages cross them flatly)."""
    group = engine(model).group
    return group.topology.outer, group.borders, group.flat_over_nodes


def activations(model: nn.Module) -> Any:
    """The store of the model's activations on the host; None without one."""
    return engine(model).activations


def disk(model: nn.Module) -> Any:
    """The store of the model's state on NVMe."""
    return engine(model).transfers._store


# -- what the plan says of the same ----------------------------------------------------------------


@dataclass
class Planned:
    """What the plan says of a rank's step: bytes that rest (as `held`), that are `sent` (and by
    link, and between nodes by move) and `moved`, and at the `peak` on the device. `host_bound`,
    `spare`: bytes that the host's peak, and what it keeps for later, may not pass. `left`: on the
    device behind the step.
    """

    rest: Held
    sent: dict[str, int]
    by_link: dict[str, int]
    between: dict[str, int]
    moved: dict[str, int]
    peak: int
    host_bound: int
    spare: int
    left: dict[str, int]


def planned(
    module: nn.Module,
    recipe: onefold.Recipe,
    ranks: int,
    rank: int,
    micro_batches: int = 1,
    optimizer: str = "adamw",
    per_node: int = 0,
    native: bool = False,
    streams: bool = False,
) -> Planned:
    """For a model that is not sharded. `native`: collectives are a backend's own, as NCCL's.
    `streams`: the device has some, so that copies end later than they begin.
    """
    from onefold.plan.modules import model_shape
    from onefold.plan.offloaded import offloaded_bytes
    from onefold.plan.program import Program
    from onefold.plan.rank import at_rest, units_of

    shape = model_shape(module, recipe.units)
    units = units_of(shape, recipe, ranks, rank, per_node or None, native)
    program = Program(units, recipe, micro_batches, streams, native, optimizer)
    at_most = offloaded_bytes(program)
    passing = {name: at_most["host"].get(name, 0) for name in ("gradients", "staging buffers")}
    by_link = _by_link(program, per_node, rank)
    host = {name: n for name, n in at_most["host"].items() if name not in passing}
    rest = {**at_most, "device": at_rest(units, optimizer), "host": host}
    return Planned(
        {tier: held for tier, held in rest.items() if held},
        program.bytes_of("move"),
        {link: sum(by.values()) for link, by in by_link.items()},
        {move: n for move, n in by_link["between"].items() if n},
        program.bytes_of("copy", "disk"),
        sum(program.peak.values()),
        sum(at_most["host"].values()),
        sum(passing.values()) if streams else 0,
        program.ledger.now(),
    )


def _by_link(program: Any, per_node: int, rank: int) -> dict[str, Counter[str]]:
    kinds: Counter[Any] = Counter()
    for op, times in program.counted():
        if op.kind == "move":
            kinds[op.move, tuple(op.over)] += times * op.nbytes
    out: dict[str, Counter[str]] = {"inside": Counter(), "between": Counter()}
    for (move, over), nbytes in kinds.items():
        far = sum(other // per_node != rank // per_node for other in over) if per_node else 0
        between = nbytes * far // max(len(over) - 1, 1)
        out["between"][move] += between
        out["inside"][move] += nbytes - between
    return out


def between_nodes(model: nn.Module) -> dict[str, int]:
    """{move: bytes that this rank sent to other nodes} since `watch`."""
    sent = engine(model).traffic.by_move_in_full()
    return {move: each.between for move, each in sent.items() if each.between}


def control(model: nn.Module) -> int:
    """Bytes of messages that carry no tensor of the model, since `watch`."""
    return engine(model).traffic.control_bytes


def gradients(model: nn.Module) -> int:
    """Bytes of gradients on the device now."""
    return engine(model).memory.now().get("gradients", 0)


def spare(model: nn.Module) -> int:
    """Bytes that the host keeps for later use, which `held` leaves out."""
    held = engine(model).transfers.host.now()
    return sum(held.get(name, 0) for name in SPARE)


def groups(model: nn.Module) -> int:
    """How many groups of ranks its moves go over; 1: they are flat."""
    return engine(model).group.topology.outer


def step_on_the_host_with(model: nn.Module, threads: int) -> None:
    """As on a machine with so many cores for this rank."""
    engine(model).transfers.threads = threads


_CUT = 1 << 30


class _Flat:
    """Stands for a flat buffer over two ranks, which own the addresses below `_CUT` and from there
    on.
    """

    index, storage = 3, SimpleNamespace(offloaded=False)

    def __init__(self, of: Any) -> None:
        self.engine, self.owners_group = weakref.ref(of), of.group


def _spec_of_two(x: torch.Tensor, of: Any) -> Any:
    from onefold.runtime.parameters.interval import IntervalSpec

    flat = of.__dict__.setdefault("_flat_of_tests", _Flat(of))  # the spec refers to it weakly
    bounds = (0, _CUT), (_CUT, 2 * _CUT)
    return IntervalSpec(weakref.ref(flat), bounds, of.rank, "x", _CUT - x.numel() // 2, x.shape)


def part_of_two(x: torch.Tensor, of: Any) -> torch.Tensor:
    """This rank's half of `x`, as a parameter 'x' of the engine `of` over two ranks has it."""
    from onefold.runtime.parameters.interval import dress

    spec = _spec_of_two(x, of)
    return dress(x.detach().reshape(-1)[spec.start : spec.stop].clone(), spec)


def part_within(t: torch.Tensor) -> tuple[tuple[int, int] | None, torch.Tensor]:
    """(first and last element of the whole that a part has, None of a whole; its memory)."""
    from onefold.runtime.parameters.interval import local_part, spec_of

    spec = spec_of(t) if t.layout is torch.strided else None
    return (None, t) if spec is None else ((spec.start, spec.stop), local_part(t))


def tensors_among(value: Any) -> Any:
    from onefold.runtime.differentiate import tensors_in

    return tensors_in(value)


@dataclass
class Flat:
    """A flat buffer: of which unit, its elements with padding, the ranks that hold it, and those of
    which each has a share of its own.
    """

    unit: str
    elements: int
    holders: int
    shares: int


def flats(model: nn.Module) -> list[Flat]:
    """In the order of units, the root first."""
    return [
        Flat(unit.path, flat.layout.numel, flat.group.size, flat.group.topology.inner)
        for unit in engine(model).units
        for flat in unit.flats
    ]


def step_in_pieces_of(model: nn.Module, elements: int) -> None:
    """Tiers move and step so many elements at a time, as they do with a large parameter's."""
    engine(model).transfers.chunk = elements


def stepped_whole(model: nn.Module, optimizer: torch.optim.Optimizer) -> set[str]:
    """The parameters that owners step."""
    from onefold.optim.whole import owned_by

    names = {id(p): name for name, p in model.named_parameters()}
    return {names[key] for key in owned_by(optimizer)}


def move_states_in_pieces_of(elements: int) -> None:
    """To and from rank 0, as those of large parameters."""
    from onefold.runtime import parts

    parts.CHUNK = elements
