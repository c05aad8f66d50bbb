"""A step of the real engine as one rank of N, on one machine: torch's fake process group and fake
tensors.

    module ──► copy of fake tensors ──► onefold.shard as rank r of N ──► forward, backward, step ──► its ledgers
                                                                                                        ║ equal, byte for byte
    shapes ──────────────────────────► closed forms (plan/states.py), replay (plan/replay.py) ──────────╜

Nothing is computed and nothing is sent, so a model of any size on any number of ranks runs here.
Everything else is the engine's own: its layouts, hooks, schedule, pool and ledgers. No step of it
knows that it is a simulation, but that a group of the "fake" backend stays silent ([Note: one rank
stands for all] in comm/moves.py).

With a machine the run is timed as well: the room `device` gives the engine streams of a clock
(plan/timeline.py), and every operation, collective and wait takes its place on them.
"""

from __future__ import annotations

import copy
import dataclasses
import gc
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from onefold.device import clocked
from onefold.memory import nbytes_of
from onefold.plan.fake import Integers, fake_batch, passing_as_real
from onefold.plan.from_module import _quietly, model_shape, module_of
from onefold.plan.hardware import Machine
from onefold.plan.kernels import CudaKernels
from onefold.plan.prices import Prices
from onefold.plan.repeat import Checkpointing, checkpointed
from onefold.plan.replay import Replay
from onefold.plan.schema import MOMENTS, MOVES, Account
from onefold.plan.shapes import ModelShape, architecture, known
from onefold.plan.stand_in import code_of, stand_in
from onefold.plan.states import at_rest, units_of, wire
from onefold.plan.subject import dtype_of, tokens
from onefold.plan.timeline import Clock, Recording, Timeline
from onefold.plan.times import Software
from onefold.plan.trace import backward, call, loss_of
from onefold.recipe import COMPUTE_DTYPES, Placement, Recipe, Tier
from onefold.recipe.rows import FLAT, NODE
from onefold.runtime.forward_writes import FIRST
from onefold.runtime.interval import disable_torch_function

#: Ranks up to which a simulation is asked for; more would work.
MOST_RANKS = 4096
OPTIMIZERS: Mapping[str, tuple[str, dict[str, Any]]] = {
    "adamw": ("AdamW", {}),
    "adam": ("Adam", {}),
    "sgd": ("SGD", {}),
    "sgd-momentum": ("SGD", {"momentum": 0.9}),
}


@dataclass(frozen=True)
class Event:
    """One thing that the engine did.

    Attributes:
        what: a move ("all-gather", "reduce-scatter", "all-reduce"), or a category of memory
            ("gathered units", ...).
        nbytes: payload sent, or the change in bytes held (below 0 where they are given back).
    """

    what: str
    unit: str
    nbytes: int
    moved: bool = False


@dataclass(frozen=True)
class UnitSummary:
    """One unit's step: elements with padding, moves by their kind, bytes sent."""

    elements: int
    moves: Mapping[str, int]
    sent: int


@dataclass(frozen=True)
class Simulation:
    """What the ledgers of rank `rank` of `ranks` said of one optimizer step in the steady state.

    Attributes:
        account: at rest (moments are the optimizer's own tensors), the engine's ledger at its peak,
            the wire by move.
        predicted: the same by closed forms and replay, without an engine.
        events: every move and every change of memory, in order.
        units: by name.
        source: whose forward pass ran: "the module", "transformers' code", "a stand-in of the same
            parameters".
        seconds: that the simulation took, of wall-clock.
        notes: what had to be assumed about values.
        timeline: when everything ran, on the machine that was given; None without one, and where a
            stand-in ran, which computes nothing.
    """

    name: str
    parameters: int
    rank: int
    ranks: int
    micro_batches: int
    account: Account
    predicted: Account
    events: tuple[Event, ...]
    units: Mapping[str, UnitSummary]
    source: str
    seconds: float
    notes: tuple[str, ...] = ()
    timeline: Timeline | None = None

    @property
    def exact(self) -> bool:
        """Whether the closed forms agree on bytes at rest and on the wire, to the byte."""
        return self.account.rest == self.predicted.rest and self.account.wire == self.predicted.wire

    def to_json(self) -> dict[str, Any]:
        """Plain data; events as [what, unit, bytes, is a move]."""
        own = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        own |= {
            "account": self.account.to_json(),
            "predicted": self.predicted.to_json(),
            "exact": self.exact,
        }
        own["timeline"] = self.timeline.to_json() if self.timeline is not None else None
        own["events"] = [list(dataclasses.astuple(e)) for e in self.events]
        own["units"] = {name: dataclasses.asdict(u) for name, u in self.units.items()}
        return own


def simulate(
    model: nn.Module | ModelShape | str | Path,
    recipe: Recipe,
    ranks: int,
    *,
    rank: int = 0,
    micro_batches: int = 1,
    batch: Any = None,
    loss: Callable[[Any], torch.Tensor] | None = None,
    samples: int = 1,
    seq: int = 128,
    checkpointing: Checkpointing = "none",
    optimizer: str = "adamw",
    steps: int = 2,
    machine: Machine | None = None,
    software: Software | None = None,
) -> Simulation:
    """Run `steps` optimizer steps as rank `rank` of `ranks` and tell what the ledgers say of the
    last.

    The module comes back as it was; no process group is left behind.

    Args:
        model: a module (real or on the meta device), a public architecture's name, a folder,
            config.json or `module:factory`, or a shape.
        micro_batches: of a step; all but the last run under `onefold.no_sync`.
        batch, loss: as `plan.trace.trace` takes them. Without a batch: `samples` of `seq` tokens
            (what the engine holds and sends does not depend on them).
        optimizer: one of `OPTIMIZERS`.
        steps: at least 2: the orders of units are learned in the first.
        machine: time the last step on it (`Simulation.timeline`). Where the recipe names no groups,
            its nodes are the groups.
        software: what it makes of the machine; None takes the plan's own.

    Raises:
        ValueError: a figure that cannot be, a model whose forward pass asks for values that nobody
            knows, a machine of another number of ranks, or one or a recipe of which no timeline is
            made.
        RuntimeError: a process group is there already.
    """
    if machine is not None:
        _check_timed(recipe, ranks, machine)
        if recipe.group in (None, NODE):
            recipe = recipe.replace(group=machine.local if machine.nodes > 1 else FLAT)
    from torch._subclasses.fake_tensor import FakeTensorMode

    _check(recipe, ranks, rank, micro_batches, steps, optimizer)
    # A simulation knows no nodes
    recipe = recipe.replace(group=FLAT) if recipe.group is None else recipe
    module, shape, units, source = _subject(model, recipe)
    begun, integers = time.perf_counter(), Integers()
    recipe = dataclasses.replace(recipe, units=units)
    # It is: those of OPTIMIZERS are element-wise
    if recipe.optimizer.placement is Placement.SHARDED:
        recipe = dataclasses.replace(recipe, elementwise_optimizer=True)
    clock = (
        _clock(machine, software, recipe, module, shape, rank, samples * seq)
        if machine is not None and source != _STAND_IN
        else None
    )
    with ExitStack() as stack:
        stack.enter_context(torch.random.fork_rng(devices=[]))
        stack.enter_context(passing_as_real())
        stack.enter_context(_one_of(ranks, rank))
        stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        stack.enter_context(_quietly())
        if clock is not None:
            stack.enter_context(clocked(clock))
        twin = _twin(module, integers).train()
        given = fake_batch(_batch(module, batch, samples, seq, source), None, integers)
        seen = stack.enter_context(_engine_on(twin, recipe))
        stack.enter_context(checkpointed(twin, checkpointing if source != _STAND_IN else "none"))
        stack.enter_context(torch.enable_grad())
        answers = _Answers(integers) if source != _STAND_IN else nullcontext()
        if clock is not None:
            clock.engine = seen
            stack.enter_context(CudaKernels())
            stack.enter_context(Recording(clock))
        account = _steps(
            twin, seen, given, answers, loss or loss_of, optimizer, micro_batches, steps, clock
        )
        timeline = clock.timeline() if clock is not None else None
        events, summaries = _events(seen), _summaries(seen)
        del twin, given
    plans = units_of(shape, recipe, ranks, rank, nccl=clock is not None)
    predicted = Account(
        rest=at_rest(plans, optimizer),
        ledger=Replay(plans, recipe).run(micro_batches).peak,
        wire=wire(plans, recipe, micro_batches),
    )
    seconds = time.perf_counter() - begun
    return Simulation(
        shape.name, shape.numel, rank, ranks, micro_batches, account, predicted, events, summaries, source, seconds, tuple(integers.notes),
        timeline,
    )  # fmt: skip


_MODULE, _CODE, _STAND_IN = "the module", "transformers' code", "a stand-in of the same parameters"


def _check(
    recipe: Recipe, ranks: int, rank: int, micro_batches: int, steps: int, optimizer: str
) -> None:
    codecs = [
        name
        for name in (recipe.parameters.codec, recipe.gradients.codec, recipe.frozen)
        if name is not None
    ]
    if codecs:
        raise ValueError(
            "a simulation computes nothing, so nothing is encoded in it, and the recipe has"
            f" {', '.join(codecs)}: leave codecs out. The plan itself counts their bytes."
        )
    if recipe.group == "node":
        raise ValueError(
            "group='node' in a simulation, which knows no nodes: give the number of ranks of one."
        )
    if not 1 <= ranks <= MOST_RANKS:
        raise ValueError(f"a simulation of {ranks} ranks: expected 1 to {MOST_RANKS}.")
    if not 0 <= rank < ranks:
        raise ValueError(f"rank {rank} of {ranks}: expected 0 to {ranks - 1}.")
    if micro_batches < 1 or steps < 2:
        raise ValueError(
            f"{micro_batches} micro-batches, {steps} steps: expected at least 1 and 2 (the first"
            " step learns the order)."
        )
    if optimizer not in OPTIMIZERS:
        raise ValueError(
            f"optimizer {optimizer!r}: a simulation runs torch's own; expected one of"
            f" {', '.join(OPTIMIZERS)}."
        )
    if dist.is_available() and dist.is_initialized():
        raise RuntimeError(
            "a process group is initialized in this process, and a simulation needs the place for"
            " its own: simulate before init_process_group, or in another process (`onefold plan"
            " --simulate`)."
        )


def _check_timed(recipe: Recipe, ranks: int, machine: Machine) -> None:
    """Refuse what has no timeline."""
    if ranks != machine.ranks:
        raise ValueError(
            f"a simulation of {ranks} ranks on a machine of {machine.ranks}: expected the same"
            " number."
        )
    if machine.shared:
        raise ValueError(
            "a timeline of a CPU, which has no streams: simulate without a machine, or on one with"
            " GPUs."
        )
    tiers = {"parameters": recipe.parameters.tier, "optimizer states": recipe.optimizer.tier}
    named = [kind for kind, tier in tiers.items() if tier is not Tier.DEVICE] + (
        ["activations"] if recipe.offload_activations is not None else []
    )
    if named:
        raise ValueError(
            f"a timeline with {' and '.join(named)} off the device: it has none of the host's work;"
            " leave the machine out."
        )


def _clock(
    machine: Machine,
    software: Software | None,
    recipe: Recipe,
    module: nn.Module,
    shape: ModelShape,
    rank: int,
    tokens: int,
) -> Clock:
    named = {dtype: name for name, dtype in COMPUTE_DTYPES.items()}
    own = recipe.compute_dtype
    precision = named[own] if own is not None else dtype_of(module)
    hidden = shape.transformer.hidden if shape.transformer else 0
    return Clock(Prices(machine, precision, hidden, tokens, software), rank)


def _subject(
    model: Any, recipe: Recipe
) -> tuple[nn.Module, ModelShape, tuple[str | type, ...] | None, str]:
    """The module to run, its shape, its units, and whose code it is."""
    if isinstance(model, str | Path) and known(str(model)):
        code = code_of(str(model)) if recipe.units is None else None
        if code is not None:
            name = architecture(str(model)).name
            return code, dataclasses.replace(model_shape(code), name=name), None, _CODE
        model = architecture(str(model))
    if isinstance(model, str | Path):
        model = module_of(model, as_it_is=recipe.compute_dtype is None)
    if isinstance(model, ModelShape):
        module, names = stand_in(model)
        return module, model, tuple(names), _STAND_IN
    if not isinstance(model, nn.Module):
        raise ValueError(
            f"a simulation was asked for {type(model).__name__}: expected a module, a name, a"
            " folder or a ModelShape."
        )
    return model, model_shape(model, recipe.units), recipe.units, _MODULE


def _batch(module: nn.Module, batch: Any, samples: int, seq: int, source: str) -> Any:
    if source == _STAND_IN:
        return torch.empty(1, device="meta")
    if batch is not None:
        return batch
    return tokens(module, seq, "onefold.plan.simulate.simulate")(samples)


# -- the world of one rank -------------------------------------------------------------------------


@contextmanager
def _one_of(ranks: int, rank: int) -> Iterator[None]:
    """Inside, this process is rank `rank` of a fake process group."""
    if ranks == 1:
        yield
        return
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=ranks)
    try:
        yield
    finally:
        dist.destroy_process_group()


class _Answers(TorchDispatchMode):
    """Inside, questions of a forward pass about contents are answered as in a trace
    (plan/fake.py).
    """

    def __init__(self, integers: Integers) -> None:
        super().__init__()
        self._integers = integers

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self._integers.call(func, args, kwargs or {})


def _twin(module: nn.Module, integers: Integers) -> nn.Module:
    """A copy of the module whose tensors are fake ones on the CPU, shared where they are shared;
    hooks and settings are copied.
    """
    memo: dict[int, Any] = {}
    for inner in module.modules():
        own = (v for v in inner.__dict__.values() if isinstance(v, torch.Tensor | list | tuple))
        held = [*inner._parameters.values(), *inner._buffers.values(), *own]
        for t in tree_leaves(held):
            if isinstance(t, torch.Tensor) and id(t) not in memo:
                memo[id(t)] = _fake_of(t, integers)
    try:
        return copy.deepcopy(module, memo)
    except Exception as error:  # whatever a model's own parts do not bear
        raise ValueError(
            f"{type(module).__name__} cannot be copied for a simulation ({type(error).__name__}:"
            f" {error})."
        ) from error


def _fake_of(t: torch.Tensor, integers: Integers) -> torch.Tensor:
    new = torch.empty_strided(t.size(), t.stride(), dtype=t.dtype)
    if isinstance(t, nn.Parameter):
        return nn.Parameter(new, requires_grad=t.requires_grad)
    if (
        not (t.is_meta or t.dtype.is_floating_point or t.dtype.is_complex)
        and t.layout is torch.strided
    ):
        return fake_batch(t, None, integers)  # with its contents
    return new


@contextmanager
def _engine_on(twin: nn.Module, recipe: Recipe) -> Iterator[Any]:
    """The engine of the sharded twin; closed afterwards, whatever happened."""
    from onefold.optim import unwatch
    from onefold.shard import engine_of, shard

    engine = engine_of(shard(twin, recipe, device="cpu"))
    for flat in (flat for unit in engine.units for flat in unit.flats):
        flat.compared = FIRST  # there are no contents to compare with masters
    try:
        yield engine
    finally:
        unwatch(engine)
        engine.close()
        gc.collect()


def _steps(
    twin: nn.Module,
    engine: Any,
    batch: Any,
    answers: Any,
    loss: Any,
    optimizer: str,
    micro_batches: int,
    steps: int,
    clock: Clock | None,
) -> Account:
    from onefold.shard import no_sync

    kind, options = OPTIMIZERS[optimizer]
    stepper = getattr(torch.optim, kind)(twin.parameters(), lr=1e-3, fused=True, **options)
    for step in range(steps):
        if step + 1 == steps:
            engine.memory.now()
            engine.memory.reset_peak()
            engine.traffic.reset()
            engine.memory.record = True
            if clock is not None:
                clock.begin_step()
        for k in range(micro_batches):
            with no_sync(twin) if k + 1 < micro_batches else nullcontext(), answers:
                backward(loss(call(twin, batch)))
            if clock is not None:
                clock.mark()
        engine.memory.now()  # one rank has no hooks: its ledger sees gradients when it is asked
        with clock.updating() if clock is not None else nullcontext():
            stepper.step()
        stepper.zero_grad()
    left = engine.memory.now()
    engine.memory.record = False
    with disable_torch_function():
        held = [
            t
            for state in stepper.state.values()
            for t in state.values()
            if isinstance(t, torch.Tensor)
        ]
    rest = left | {MOMENTS: sum(map(nbytes_of, held))}
    # Buffers that follow rank 0's are the model's own, and no recipe makes them fewer
    sent = {move: nbytes for move, nbytes in engine.traffic.by_move().items() if move in MOVES}
    return Account(
        rest={k: v for k, v in rest.items() if v}, ledger=engine.memory.peak(), wire=sent
    )


def _events(engine: Any) -> tuple[Event, ...]:
    rows = [(at, Event(kind, unit, nbytes)) for at, kind, unit, nbytes in engine.memory.timeline]
    rows += [(e.launched, Event(e.move, e.unit, e.nbytes, True)) for e in engine.traffic.events]
    return tuple(event for _, event in sorted(rows, key=lambda row: row[0]))


def _summaries(engine: Any) -> dict[str, UnitSummary]:
    moves: dict[str, Counter[str]] = defaultdict(Counter)
    for event in engine.traffic.events:
        moves[event.unit][event.move] += 1
    sent = engine.traffic.by_unit()
    return {
        u.name: UnitSummary(u.numel, dict(moves[u.name]), sum(sent.get(u.name, {}).values()))
        for u in engine.units
    }
