"""Run a step of the real engine as one rank of N, or of a mesh of several axes, on one machine, with
torch's fake process group and fake tensors.

    module ──► copy of fake tensors ──► onefold.shard as rank r of N ──► forward, backward, step ──► its ledgers
                                                                                                        ║ equal, byte for byte
    shapes ──────────────────────────► the plan's walk (plan/program.py) ───────────────────────────────╜

Nothing is computed and nothing is sent, so a model of any size on any number of ranks runs here.
Everything else is the engine's own: its layouts, hooks, schedule, pool and ledgers. The engine does
not know that it is simulated, with one exception: a group of the "fake" backend sends nothing
([Note: one rank stands for all] in comm/group.py).

On a mesh of several axes a stand-in of a stage of the pipeline runs:

    shape of a stage ──► stand-in, its parameters cut by the plan's rules into DTensors over fake tensors
                              │
    fake process group ──► device mesh (pp, dp, ep, cp, tp) ──► onefold.shard(mesh=, data=)
                              │
              pp > 1: torch's own schedule runs onefold.parallel.PipelineStage
                              │
                 ledgers of the engine, bytes that torch sends between stages
                              ║ equal, byte for byte
    the plan's walk (plan/rank.py, plan/program.py)

The stand-in reads its parameters and computes nothing. So what tensor, context and expert parallelism
send inside layers is not run: the plan alone counts it.
"""

from __future__ import annotations

import gc
import os
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from onefold.comm import STEP_MOVES
from onefold.comm.communicators import mesh_of
from onefold.machine.flops import values_in
from onefold.memory import nbytes_of
from onefold.offload import step as offload_step
from onefold.offload.nvme import stores_from
from onefold.plan.account import pipelined
from onefold.plan.architectures import known
from onefold.plan.degrees import AXES, DATA, Degrees
from onefold.plan.modules import model_shape, module_of, quietly
from onefold.plan.owned import stepped_whole
from onefold.plan.program import Program, program_of
from onefold.plan.rank import divided_along, handed_on, local_shape, rule_of, stages_of
from onefold.plan.schema import ACTIVATIONS, MOMENTS, Account
from onefold.plan.shapes import ModelShape
from onefold.plan.states import filled
from onefold.plan.subject import tokens
from onefold.recipe import Recipe, Tier
from onefold.recipe.optimizers import SIMULATED
from onefold.recipe.rows import FLAT, NODE
from onefold.runtime.parameters.interval import disable_torch_function
from onefold.simulation.stand_in import Disk, stand_in
from onefold.tracing.blocks import Checkpointing, recompute
from onefold.tracing.calling import backward, call, loss_of
from onefold.tracing.fake import Integers, fake_batch, fake_tensors, twin_of

#: Steps that are run. The first records the order of units; the last is reported.
STEPS = 2
#: What ran.
MODULE, STAND_IN = "the module", "a stand-in of the same parameters"


# -- the result ------------------------------------------------------------------------------------


#: One thing that the engine did: a move ("all-gather", ...) or a category of memory, the unit, the
#: bytes that are sent or by which what is held changes, and whether it is a move.
Event = tuple[str, str, int, bool]


@dataclass(frozen=True)
class Simulation:
    """The ledgers of one rank, for one optimizer step in the steady state.

    Attributes:
        account: bytes at rest on the device (moments are the optimizer's own tensors), the engine's
            ledger at its peak, bytes on the wire and between tiers by move. Activations that move
            are left out. Of a mesh also `sent`, by the axes along which the receivers lie
            ("dp × cp"): what the engine has sent, and along "pp" what torch's schedule has.
        predicted: the same by the plan's walk, without an engine.
        events: every move and every change of memory, in order.
        source: whose forward pass ran: `MODULE` or `STAND_IN`.
        seconds: wall-clock time of the simulation.
        notes: assumptions about values.
        degrees, stage: the mesh, and the stage of its pipeline.
    """

    name: str
    rank: int
    ranks: int
    micro_batches: int
    account: Account
    predicted: Account
    events: tuple[Event, ...]
    source: str
    seconds: float
    notes: tuple[str, ...]
    degrees: Degrees
    stage: int

    @property
    def exact(self) -> bool:
        """Whether the walk agrees on bytes at rest, on the wire and between tiers, to the byte."""
        ours, told = self.account, self.predicted
        return all(getattr(ours, f) == getattr(told, f) for f in ("rest", "wire", "moved", "sent"))

    def to_json(self) -> dict[str, Any]:
        """Return plain data."""
        return {**asdict(self), "exact": self.exact}


def events_of(engine: Any) -> tuple[Event, ...]:
    """Return every move and every change of memory, in order."""
    rows = [(at, (kind, unit, nbytes, False)) for at, kind, unit, nbytes in engine.memory.timeline]
    rows += [(e.launched, (e.move, e.unit, e.nbytes, True)) for e in engine.traffic.events]
    return tuple(event for _, event in sorted(rows, key=lambda row: row[0]))


# -- one rank --------------------------------------------------------------------------------------


def simulate(
    model: nn.Module | ModelShape | str | Path,
    recipe: Recipe,
    ranks: int | Degrees,
    *,
    rank: int = 0,
    micro_batches: int = 1,
    batch: Any = None,
    loss: Callable[[Any], torch.Tensor] | None = None,
    samples: int = 1,
    seq: int = 128,
    checkpointing: Checkpointing = "none",
    optimizer: str = "adamw",
    per_node: int | None = None,
) -> Simulation:
    """Run two optimizer steps (three with `step_in_backward`) as rank `rank` of `ranks` and report the
    ledgers of the last. The first step records the order of units.

    The module is unchanged afterwards, and no process group is left.

    Args:
        model: a module (real or on the meta device), a public architecture's name, a folder,
            config.json or `module:factory`, or a shape. Of a mesh only its shape counts.
        ranks: data-parallel ranks, or a mesh. `pp` is its slowest axis, so the rank says the stage of
            the pipeline too.
        micro_batches: number per step; all but the last run under `onefold.no_sync`.
        batch, loss: as `onefold.tracing.trace.trace` takes them. Without a batch, `samples` of
            `seq` tokens; only what stages of a pipeline hand on depends on them.
        optimizer: one of `SIMULATED` (recipe/optimizers.py).
        per_node: ranks of a node, as a launcher would say; None: all ranks.

    Raises:
        ValueError: an impossible argument, or a forward pass that asks for unknown values.
        RuntimeError: a process group is already initialized.
    """
    degrees = ranks if isinstance(ranks, Degrees) else Degrees(dp=ranks)
    if per_node is None and recipe.inner in (None, NODE):  # one node has them all
        recipe = recipe.in_groups_of(degrees.dp * degrees.cp if recipe.inner == NODE else FLAT)
    _check(recipe, degrees, rank, micro_batches, optimizer)
    begun, name = time.perf_counter(), ""
    if isinstance(model, str | Path):
        name = row.name if (row := known(model)) else ""
        model = module_of(model, as_it_is=recipe.parameters.dtype is None)
    shape = model if isinstance(model, ModelShape) else model_shape(model, recipe.units, name=name)
    with one_of(degrees.ranks, rank, per_node):
        given = shape, recipe, degrees, rank, samples, seq
        if isinstance(model, nn.Module) and degrees.data_only:
            ran: StandIn = OwnCode(model, batch, loss, checkpointing, *given)
        else:
            ran = StandIn(*given)
        program = program_of(
            ran.stage, degrees, ran.recipe, optimizer, micro_batches, per_node, rank=ran.number
        )
        names = stepped_whole(ran.stage, optimizer)
        with nothing_real(), quietly():
            twin, more = ran.twin()
            with engine_on(twin, recipe, **more) as engine:
                # A stand-in has other names: units, buffers and parameters are in the plan's order
                matrices = [
                    entry.param
                    for unit, like in zip(engine.units, program.rank, strict=True)
                    for flat, spec in zip(unit.flats, like.flats, strict=True)
                    for entry, slot in zip(flat.entries, spec.layout.slots, strict=True)
                    if slot.name in names
                ]
                passes = ran.passes(twin, micro_batches)
                optimizers = optimizers_of(twin, optimizer, matrices)
                account = steps_of(engine, passes, optimizers)
                events, account = events_of(engine), replace(account, sent=ran.seen(engine))
                del twin, passes, optimizers, matrices
    predicted = Account(
        rest=program.rest,
        ledger=program.peak,
        wire=program.bytes_of("move"),
        moved=program.bytes_of("copy", "disk"),
        sent=ran.told(program),
    )
    return Simulation(
        shape.name, rank, degrees.ranks, micro_batches, account, predicted, events, ran.source,
        time.perf_counter() - begun, tuple(ran.notes), degrees, ran.stage.index,
    )  # fmt: skip


class StandIn(TorchDispatchMode):
    """What one rank runs: a stand-in of its stage of the pipeline, whose parameters are its parts. As a
    dispatch mode it counts the bytes sent to other stages.

    Attributes:
        stage: what this rank's stage has. number: the rank among those of the stage.
        recipe: as the engine follows it there.
    """

    source: str = STAND_IN
    notes: Iterable[str] = ()

    def __init__(
        self, model: ModelShape, recipe: Recipe, degrees: Degrees, rank: int, samples: int, seq: int
    ) -> None:
        from torch.distributed.device_mesh import init_device_mesh

        super().__init__()
        index, self.number = divmod(rank, degrees.ranks // degrees.pp)
        self.model, self.stage, self.degrees = model, stages_of(model, degrees)[index], degrees
        self.recipe, self.sizes = pipelined(recipe, degrees), (samples, seq)
        # Bytes sent to other stages, and those of one output
        self.first, self.sent, self.handed = rank - self.number, 0, 0
        self.loss: Callable[[Any], torch.Tensor] = loss_of
        self.batch: Any = None
        self.mesh: Any = None
        self.cut: dict[tuple[str, ...], Any] = {}
        if not degrees.data_only:
            sizes = degrees.pp, *degrees.sizes.values()
            # Meshes have values, so they are made outside of the fake tensors
            self.root = init_device_mesh("cpu", sizes, mesh_dim_names=("pp", *AXES))
            self.mesh = mesh_of(self.root[AXES], DATA)
            kinds = {divided_along(p, degrees) for p in self.stage.parameters}
            self.cut = {d: self.root[tuple(a for a in AXES if a in d)] for d in kinds if d}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.c10d.send.default:
            self.sent += sum(t.nbytes for t in args[0])
        return func(*args, **(kwargs or {}))

    def twin(self) -> tuple[nn.Module, dict[str, Any]]:
        """Return what is sharded, whose parameters are DTensors where an axis divides them, and further
        arguments of `shard`.
        """
        from torch.distributed.tensor import DTensor, Shard

        root, *_ = modules = stand_in(self.stage.units)
        for module, unit in zip(modules, self.stage.units, strict=True):
            for own, p in zip(list(module._parameters), unit.parameters, strict=True):
                shape = local_shape(p, self.degrees, self.number)
                part = torch.empty(shape, dtype=p.dtype, device="cpu")
                if divided := divided_along(p, self.degrees):
                    mesh, dims = self.cut[divided], rule_of(p.name).axes
                    stride = torch.empty(p.shape, device="meta").stride()
                    part = DTensor.from_local(
                        part, mesh, [Shard(dims[axis]) for axis in AXES if axis in divided], run_check=False,
                        shape=torch.Size(p.shape), stride=stride,
                    )  # fmt: skip
                module._parameters[own] = nn.Parameter(part, requires_grad=p.trainable)
            if isinstance(module, nn.Embedding):
                _look_up_own_rows(module)
        names = [name for name, _ in root.named_modules() if name]
        self.batch = torch.empty(1, device="cpu")
        return root.train(), {"mesh": self.mesh, "units": names}

    def passes(self, module: nn.Module, micro_batches: int) -> Callable[[], None]:
        """Return a function that runs the passes of one optimizer step: of a pipeline, by torch's
        schedule.
        """
        from onefold.sharding import no_sync

        def step() -> None:
            for k in range(micro_batches):
                following = no_sync(module) if k + 1 < micro_batches else nullcontext()
                with following, torch.enable_grad(), self:
                    backward(self.loss(call(module, self.batch)))

        if self.degrees.pp == 1:
            return step
        from torch.distributed.pipelining import Schedule1F1B
        from torch.distributed.pipelining.stage import InferenceMode

        from onefold.parallel import PipelineStage

        stage, degrees = self.stage, self.degrees
        shape, dtype = handed_on(self.model, degrees, *self.sizes), self.recipe.parameters.dtype
        grad = torch.empty(shape, dtype=dtype or stage.parameters[0].dtype, device="cpu")
        self.handed = grad.nbytes
        example = torch.empty_like(grad, requires_grad=True)
        here = PipelineStage(
            module, stage.index, degrees.pp, torch.device("cpu"), grad if stage.first else example, example,
            None if stage.last else grad, None if stage.first else grad, group=self.root.get_group("pp"),
        )  # fmt: skip
        schedule = Schedule1F1B(
            here, n_microbatches=micro_batches, loss_fn=lambda out, _: out.sum()
        )

        # Stages vote whether each was given its shapes. No other stage is here: all of them were
        def told(stages: Any, *_: Any) -> None:
            for each in stages:
                each._inference_mode = InferenceMode.STATIC

        schedule._warmup_p2p = told  # type: ignore[method-assign,assignment]
        whole = torch.cat([grad] * micro_batches)
        given, target = [whole] if stage.first else [], whole if stage.last else None

        def scheduled() -> None:
            with torch.enable_grad(), self:
                schedule.step(*given, target=target)

        return scheduled

    def seen(self, engine: Any) -> dict[str, int]:
        """Return the bytes that engine and schedule have sent, by the axes along which receivers lie; {} if
        there are data ranks alone.
        """
        out: Counter[str] = Counter(pp=self.sent // STEPS)
        groups = {
            group.name: group.ranks
            for unit in engine.units
            for flat in unit.flats
            for group in (flat.group, flat.group.intra_group, flat.group.inter_group)
        }
        for event in engine.traffic.events:
            if self.mesh and event.move in STEP_MOVES and event.group in groups:
                out[self._along(groups[event.group], self.first)] += event.nbytes
        return dict(+out)

    def told(self, program: Program) -> dict[str, int]:
        """Return the same as the plan says."""
        out: Counter[str] = Counter()
        for op, times in program.counted():
            if self.mesh and op.kind == "move":
                out[self._along(op.over)] += times * round(op.nbytes)
        out["pp"] = program.micro_batches * self.handed * self.stage.crossings
        return dict(+out)

    def _along(self, ranks: Sequence[int], first: int = 0) -> str:
        """Return the axes along which some ranks of a stage lie, whose first rank is `first`."""
        at = [self.degrees.coordinates_of(rank - first) for rank in ranks]
        along = (axis for axis in AXES if len({each[axis] for each in at}) > 1)
        return " × ".join(along) or "nobody"


class OwnCode(StandIn):
    """A copy of the module, on data ranks alone. As a dispatch mode it answers the forward pass's
    questions about values as a trace does (tracing/fake.py). What only the engine calls has no values.
    """

    source = MODULE

    def __init__(
        self, module: nn.Module, batch: Any, loss: Any, checkpointing: Checkpointing, *given: Any
    ) -> None:
        super().__init__(*given)
        self.module, self.checkpointing, self.integers = module, checkpointing, Integers()
        self.loss, self.batch, self.notes = loss or loss_of, batch, self.integers.notes
        if batch is None:
            samples, seq = self.sizes
            self.batch = tokens(module, seq, "onefold.simulation.simulate.simulate")(samples)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(isinstance(given, torch.UntypedStorage) for given in values_in((args, kwargs))):
            return func(*args, **(kwargs or {}))
        return self.integers.call(func, args, kwargs or {})

    def twin(self) -> tuple[nn.Module, dict[str, Any]]:
        twin = twin_of(self.module).train()
        recompute(twin, self.checkpointing)
        self.batch = fake_batch(self.batch)
        return twin, {}


def _look_up_own_rows(module: nn.Embedding) -> None:
    """Let an embedding look rows up in its own part of the table, without a message."""

    def forward(row: torch.Tensor) -> torch.Tensor:
        own: Any = module.weight
        return F.embedding(row, own.to_local() if hasattr(own, "to_local") else own)

    module.forward = forward  # type: ignore[method-assign,assignment]


# -- the world of one rank -------------------------------------------------------------------------


@contextmanager
def nothing_real() -> Iterator[None]:
    """New tensors are fake, disks are nowhere, and steps in the backward pass run at once, inside the
    context.
    """
    at_once = mock.patch.object(offload_step, "ThreadPoolExecutor", _AtOnce)
    with fake_tensors(), stores_from(Disk), at_once:
        yield


@contextmanager
def one_of(ranks: int, rank: int, per_node: int | None) -> Iterator[None]:
    """Make this process rank `rank` of a fake process group, and say what a launcher would say of the
    nodes, inside the context.
    """
    from torch.testing._internal.distributed.fake_pg import FakeStore

    said = {"LOCAL_WORLD_SIZE": str(min(per_node or ranks, ranks)), "WORLD_SIZE": str(ranks)}
    with mock.patch.dict(os.environ, said if per_node else {}):
        if ranks > 1:
            dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=ranks)
        try:
            yield
        finally:
            if ranks > 1:
                dist.destroy_process_group()


class _AtOnce(ThreadPoolExecutor):
    """An executor without a thread: fake tensors belong to the thread that made them."""

    def submit(self, job: Callable[..., Any], /, *given: Any, **named: Any) -> Future[Any]:
        done: Future[Any] = Future()
        done.set_result(job(*given, **named))
        return done


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


def optimizers_of(
    twin: nn.Module, optimizer: str, matrices: list[nn.Parameter]
) -> list[torch.optim.Optimizer]:
    """Make the optimizer; if it takes matrices alone, one for `matrices` and one for the rest."""
    from onefold.optim.verdict import tell_verdict
    from onefold.runtime.stepper import GroupVerdict

    known, apart, out = SIMULATED[optimizer], {id(p) for p in matrices}, []
    rest = [p for p in twin.parameters() if id(p) not in apart]
    parts = (known, matrices), (SIMULATED[known.rest or optimizer], rest)
    for row, params in ((row, params) for row, params in parts if params):
        options = {**row.arguments, **({"fused": True} if row.can_fuse("cpu") else {})}
        out.append(row.load()(params, lr=1e-3, **options))
        tell_verdict(out[-1], GroupVerdict(row.update))  # fake tensors have no values to try it on
    return out


def steps_of(
    engine: Any, passes: Callable[[], None], optimizers: Sequence[torch.optim.Optimizer]
) -> Account:
    """Run optimizer steps, and return the account of the last, by the engine's ledgers. `passes` runs
    the passes of one step.
    """
    # An optimizer's first step is an ordinary one with `step_in_backward` too, so that the step behind
    # it is not steady yet
    for step in range(steps := STEPS + engine.recipe.step_in_backward):
        if step + 1 == steps:
            engine.memory.now()
            engine.memory.reset_peak()
            engine.traffic.reset()
            engine.transfers.moved.reset()
            engine.memory.record = True
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
    # Activations move as the model has them, which closed forms do not say
    moved = Counter[str]()
    for (move, unit), each in engine.transfers.moved.by_move_and_unit.items():
        if unit != ACTIVATIONS:
            moved[move] += each.nbytes
    # Broadcasts of rank 0's buffers are left out: they do not depend on the recipe
    sent = engine.traffic.by_move()
    return Account(
        rest=filled(left | {MOMENTS: sum(map(nbytes_of, held))}),
        ledger=engine.memory.peak(),
        wire=filled({move: sent.get(move, 0) for move in STEP_MOVES}),
        moved=dict(moved),
    )


# -- refusals --------------------------------------------------------------------------------------


def _check(recipe: Recipe, degrees: Degrees, rank: int, micro_batches: int, optimizer: str) -> None:
    """Raise ValueError or RuntimeError for what the simulation does not support."""
    codecs = recipe.parameters.codec, recipe.gradients.codec, recipe.frozen
    if any(codecs):
        raise ValueError(
            "a simulation computes nothing, so nothing is encoded in it, and the recipe has"
            f" {', '.join(filter(None, codecs))}: leave codecs out. The plan itself counts their"
            " bytes."
        )
    if not 0 <= rank < degrees.ranks:
        raise ValueError(f"rank {rank} of {degrees.ranks}: expected a rank below their number.")
    if micro_batches < 1:
        raise ValueError(f"{micro_batches} micro-batches: expected at least 1.")
    if optimizer not in SIMULATED:
        raise ValueError(
            f"optimizer {optimizer!r}: a simulation runs torch's own; expected one of"
            f" {', '.join(SIMULATED)}."
        )
    if dist.is_available() and dist.is_initialized():
        raise RuntimeError(
            "a process group is initialized in this process, and a simulation needs the place for"
            " its own: simulate before init_process_group, or in another process (`onefold plan"
            " --simulate`)."
        )
    if degrees.chunks > 1:
        raise ValueError(
            f"a simulation of {degrees.chunks} chunks a stage: it runs pipelines of one chunk. The plan"
            " counts the bytes of interleaved stages; leave --chunks out to simulate."
        )
    if degrees.pp > micro_batches:
        raise ValueError(
            f"a simulation of {micro_batches} micro-batches in {degrees.pp} stages: torch's 1F1B takes at"
            " least one for each stage. Give more (--global-batch)."
        )
    tiers = {recipe.parameters.tier, recipe.optimizer.tier} - {Tier.DEVICE}
    away = tiers or recipe.offload_activations is not None or recipe.step_in_backward
    if away and not degrees.data_only:
        raise ValueError(
            "offload or steps in the backward pass in a simulation of a mesh: it runs state on"
            " the device only. Leave them out, or simulate data-parallel ranks alone."
        )
