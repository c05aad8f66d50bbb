"""Run a step of the real engine as one rank of N, on one machine, with torch's fake process group
and fake tensors.

    module ──► copy of fake tensors ──► onefold.shard as rank r of N ──► forward, backward, step ──► its ledgers
                                                                                                        ║ equal, byte for byte
    shapes ──────────────────────────► the plan's walk (plan/program.py) ───────────────────────────────╜

Nothing is computed and nothing is sent, so a model of any size on any number of ranks runs here.
Everything else is the engine's own: its layouts, hooks, schedule, pool and ledgers. The engine does
not know that it is simulated, with one exception: a group of the "fake" backend sends nothing
([Note: one rank stands for all] in comm/group.py).
"""

from __future__ import annotations

import dataclasses
import gc
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from onefold.comm import OWNERS, STEP_MOVES
from onefold.machine.flops import values_in
from onefold.memory import nbytes_of
from onefold.offload import stepper as offload_stepper
from onefold.offload.nvme import stores_from
from onefold.plan.architectures import known
from onefold.plan.modules import model_shape, module_of, quietly
from onefold.plan.owned import OwnedMatrices, owned_matrices, place_of, stepped_whole
from onefold.plan.program import Program
from onefold.plan.rank import UnitPlan, units_of
from onefold.plan.schema import ACTIVATIONS, MOMENTS, Account
from onefold.plan.shapes import ModelShape
from onefold.plan.states import at_rest
from onefold.plan.subject import tokens
from onefold.recipe import Recipe
from onefold.recipe.optimizers import SIMULATED
from onefold.recipe.rows import FLAT
from onefold.runtime.parameters.interval import disable_torch_function
from onefold.simulation.refusals import check
from onefold.simulation.result import Simulation, events_of
from onefold.simulation.stand_in import Disk, stand_in
from onefold.tracing.blocks import Checkpointing, recompute
from onefold.tracing.calling import backward, call, loss_of
from onefold.tracing.fake import Integers, fake_batch, fake_tensors, twin_of

#: Steps that are run. The first records the order of units; the last is reported. An optimizer's first
#: step is an ordinary one with `step_in_backward` too, so that the step behind it is not steady yet.
STEPS, STEPS_IN_BACKWARD = 2, 3


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
) -> Simulation:
    """Run two optimizer steps (three with `step_in_backward`) as rank `rank` of `ranks` and report the
    ledgers of the last. The first step records the order of units.

    The module is unchanged afterwards, and no process group is left.

    Args:
        model: a module (real or on the meta device), a public architecture's name, a folder,
            config.json or `module:factory`, or a shape.
        micro_batches: number per step; all but the last run under `onefold.no_sync`.
        batch, loss: as `onefold.tracing.trace.trace` takes them. Without a batch, `samples` of
            `seq` tokens; what the engine holds and sends does not depend on them.
        optimizer: one of `SIMULATED` (recipe/optimizers.py).

    Raises:
        ValueError: an impossible argument, or a forward pass that asks for unknown values.
        RuntimeError: a process group is already initialized.
    """
    if recipe.inner is None:  # no launcher tells the nodes
        recipe = recipe.replace(group=FLAT)
    check(recipe, ranks, rank, micro_batches, optimizer)
    module, shape, units, source = _subject(model, recipe)
    recipe = dataclasses.replace(recipe, units=units)
    begun, integers, own_code = time.perf_counter(), Integers(), source != STAND_IN
    plans = units_of(shape, recipe, ranks, rank)
    names = stepped_whole(shape, optimizer)
    with one_of(ranks, rank), nothing_real(), quietly():
        twin = twin_of(module, integers).train()
        recompute(twin, checkpointing if own_code else "none")
        given = fake_batch(_batch(module, batch, samples, seq, source), None, integers)
        with engine_on(twin, recipe) as engine:
            answers = _Answers(integers) if own_code else nullcontext()
            passes = passes_of(twin, given, micro_batches, answers, loss or loss_of)
            # A stand-in has other names: units, buffers and parameters are in the plan's order
            matrices = [
                entry.param
                for unit, planned in zip(engine.units, plans, strict=True)
                for flat, spec in zip(unit.flats, planned.flats, strict=True)
                for entry, slot in zip(flat.entries, spec.layout.slots, strict=True)
                if slot.name in names
            ]
            account = steps_of(engine, passes, optimizers_of(twin, optimizer, matrices))
            events = events_of(engine)
            del twin, given
    owned = owned_matrices(plans, names, optimizer)
    program = Program(plans, recipe, optimizer=optimizer)
    predicted = predicted_by(program, plans, micro_batches, optimizer, owned)
    seconds = time.perf_counter() - begun
    return Simulation(
        shape.name, rank, ranks, micro_batches, account, predicted, events, source, seconds, tuple(integers.notes)
    )  # fmt: skip


_MODULE, STAND_IN = "the module", "a stand-in of the same parameters"


def predicted_by(
    program: Program,
    plans: Sequence[UnitPlan],
    micro_batches: int,
    optimizer: str,
    owned: OwnedMatrices | None = None,
) -> Account:
    """Return the plan's account of a rank's step, by its program."""
    first = next(flat for unit in plans for flat in unit.flats)
    mine = owned.at(place_of(first)) if owned is not None else None
    program.run(micro_batches, mine.buffers if mine is not None else 0)
    return Account(
        rest=at_rest(plans, optimizer, mine.states if mine is not None else None),
        ledger=program.peak,
        wire=program.sent() | ({OWNERS: mine.sent} if mine is not None and mine.sent else {}),
        moved=program.moved(),
    )


def _subject(
    model: Any, recipe: Recipe
) -> tuple[nn.Module, ModelShape, tuple[str | type, ...] | None, str]:
    """Return the module to run, its shape, its units, and the source of its code."""
    name = ""
    if isinstance(model, str | Path):
        name = row.name if (row := known(model)) else ""
        model = module_of(model, as_it_is=recipe.parameters.dtype is None)
    if isinstance(model, ModelShape):
        module, names = stand_in(model)
        return module, model, tuple(names), STAND_IN
    if not isinstance(model, nn.Module):
        raise ValueError(
            f"a simulation was asked for {type(model).__name__}: expected a module, a name, a"
            " folder or a ModelShape."
        )
    return model, model_shape(model, recipe.units, name=name), recipe.units, _MODULE


def _batch(module: nn.Module, batch: Any, samples: int, seq: int, source: str) -> Any:
    if source == STAND_IN:
        return torch.empty(1, device="meta")
    if batch is not None:
        return batch
    return tokens(module, seq, "onefold.simulation.simulate.simulate")(samples)


# -- the world of one rank -------------------------------------------------------------------------


@contextmanager
def nothing_real() -> Iterator[None]:
    """New tensors are fake, disks are nowhere, and steps in the backward pass run at once, inside the
    context.
    """
    at_once = mock.patch.object(offload_stepper, "ThreadPoolExecutor", _AtOnce)
    with fake_tensors(), stores_from(Disk), at_once:
        yield


@contextmanager
def one_of(ranks: int, rank: int) -> Iterator[None]:
    """Make this process rank `rank` of a fake process group, inside the context."""
    if ranks == 1:
        yield
        return
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=ranks)
    try:
        yield
    finally:
        dist.destroy_process_group()


class _AtOnce:
    """An executor without a thread: fake tensors belong to the thread that made them."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def submit(self, job: Callable[[], Any]) -> Future[Any]:
        done: Future[Any] = Future()
        done.set_result(job())
        return done

    def shutdown(self) -> None:
        pass


class _Answers(TorchDispatchMode):
    """A dispatch mode that answers a forward pass's questions about values as a trace does
    (tracing/fake.py). What only the engine calls has no values.
    """

    def __init__(self, integers: Integers) -> None:
        super().__init__()
        self._integers = integers

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(isinstance(given, torch.UntypedStorage) for given in values_in((args, kwargs))):
            return func(*args, **(kwargs or {}))
        return self._integers.call(func, args, kwargs or {})


@contextmanager
def engine_on(twin: nn.Module, recipe: Recipe, **given: Any) -> Iterator[Any]:
    """Shard the twin and yield its engine; close the engine afterwards, also after an error.
    `given` are further arguments of `shard`.
    """
    from onefold.optim.steps import remove_step_hooks
    from onefold.runtime.hooks import engine_of
    from onefold.sharding import shard

    engine = engine_of(shard(twin, recipe, device="cpu", **given))
    try:
        yield engine
    finally:
        remove_step_hooks(engine)
        engine.close()
        gc.collect()


def passes_of(
    twin: nn.Module, batch: Any, micro_batches: int, answers: Any = None, loss: Any = loss_of
) -> Callable[[], None]:
    """Return a function that runs the passes of one optimizer step."""
    from onefold.sharding import no_sync

    def passes() -> None:
        for k in range(micro_batches):
            with (
                no_sync(twin) if k + 1 < micro_batches else nullcontext(),
                torch.enable_grad(),
                answers or nullcontext(),
            ):
                backward(loss(call(twin, batch)))

    return passes


def optimizers_of(
    twin: nn.Module, optimizer: str, matrices: Sequence[nn.Parameter] = ()
) -> list[torch.optim.Optimizer]:
    """Make the optimizer; if it takes matrices alone, one for `matrices` and one for the rest."""
    from onefold.optim.verdict import tell_verdict
    from onefold.runtime.stepper import GroupVerdict

    known, every = SIMULATED[optimizer], list(twin.parameters())
    parts = [(known, every)]
    if known.rest:
        apart = {id(p) for p in matrices}
        rest = [p for p in every if id(p) not in apart]
        parts = [(known, list(matrices)), (SIMULATED[known.rest], rest)]
    out = []
    for row, params in ((row, params) for row, params in parts if params):
        options = {**row.arguments, **({"fused": True} if row.can_fuse("cpu") else {})}
        out.append(row.load()(params, lr=1e-3, **options))
        tell_verdict(out[-1], GroupVerdict(row.update))  # fake tensors have no values to try it on
    return out


def steps_of(
    engine: Any,
    passes: Callable[[], None],
    optimizers: Sequence[torch.optim.Optimizer],
    begin: Callable[[], object] = lambda: None,
) -> Account:
    """Run optimizer steps, and return the account of the last, by the engine's ledgers.

    Args:
        passes: runs the passes of one step.
        begin: called before the last step.
    """
    steps = STEPS_IN_BACKWARD if engine.recipe.step_in_backward else STEPS
    for step in range(steps):
        if step + 1 == steps:
            engine.memory.now()
            engine.memory.reset_peak()
            engine.traffic.reset()
            engine.transfers.moved.reset()
            engine.memory.record = True
            begin()
        passes()
        engine.memory.now()  # a single rank has no hooks: this call counts its gradients
        for stepper in optimizers:
            stepper.step()
        for stepper in optimizers:
            stepper.zero_grad()
    left = engine.memory.now()
    engine.memory.record = False
    with disable_torch_function():
        elsewhere = {id(e.param) for flat in engine.offloaded_flats for e in flat.entries}
        held = [
            t
            for stepper in optimizers
            for param, state in stepper.state.items()
            for t in state.values()
            if isinstance(t, torch.Tensor) and id(param) not in elsewhere
        ]
    rest = left | {MOMENTS: sum(map(nbytes_of, held))}
    # Leave out broadcasts of rank 0's buffers: they do not depend on the recipe
    by_move = engine.traffic.by_move()
    sent = {move: by_move[move] for move in STEP_MOVES if by_move.get(move)}
    # Activations move as the model has them, which closed forms do not say
    moved = Counter[str]()
    for unit, moves in engine.transfers.moved.by_unit().items():
        moved.update(moves if unit != ACTIVATIONS else {})
    return Account(
        rest={k: v for k, v in rest.items() if v},
        ledger=engine.memory.peak(),
        wire=sent,
        moved=dict(moved),
    )
