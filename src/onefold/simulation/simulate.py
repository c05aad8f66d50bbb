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
from functools import partial
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
from onefold.observe.memory import DEVICE
from onefold.observe.trace import Recording, measured, record
from onefold.offload import step as offload_step
from onefold.offload.nvme import PAGE, Region, Transfer
from onefold.plan.account import pipelined
from onefold.plan.degrees import AXES, DATA, Degrees
from onefold.plan.modules import known, model_shape, module_of, quietly
from onefold.plan.owned import stepped_whole
from onefold.plan.program import Program, program_of
from onefold.plan.rank import divided_along, handed_on, rule_of, stages_of
from onefold.plan.schema import ACTIVATIONS, MOVED, Account
from onefold.plan.shapes import ModelShape, Parameter, UnitShape
from onefold.plan.subject import tokens
from onefold.recipe import Recipe, Tier
from onefold.recipe.optimizers import SIMULATED
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
        account: of a recording, as of real steps (observe/trace.py): bytes at rest and at peak, on the
            wire and between tiers, without seconds. Activations are left out. Of a mesh also `sent`,
            by the axes along which the receivers lie ("dp × cp"): what the engine has sent, and along
            "pp" what torch's schedule has.
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


def events_of(recording: Recording) -> tuple[Event, ...]:
    """Return every move and every change of the device's memory, in order."""
    held, moves = recording.tiers[DEVICE].changes, recording.moves
    rows = [(at, (kind, unit, nbytes, False)) for at, kind, unit, nbytes in held]
    rows += [(m.launched, (m.move, m.unit, m.nbytes, True)) for m in moves if m.move not in MOVED]
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
    per_node = per_node or degrees.ranks
    _check(recipe, degrees, rank, micro_batches, optimizer)
    begun, name = time.perf_counter(), ""
    if isinstance(model, str | Path):
        name = known(model) or ""
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
                stepper = optimizer_of(twin, optimizer, matrices)
                recording, account = steps_of(engine, twin, passes, stepper)
                events, account = events_of(recording), replace(account, sent=ran.seen(engine))
                del twin, passes, matrices, stepper
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
        self.sent = self.handed = 0
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
        root = stand_in(self.stage.units, self.part)
        names = [name for name, _ in root.named_modules() if name]
        self.batch = torch.empty(1, device="cpu")
        return root.train(), {"mesh": self.mesh, "units": names}

    def part(self, p: Parameter) -> nn.Parameter:
        """Return what this rank has of a parameter."""
        from torch.distributed.tensor import Shard, empty

        part: torch.Tensor
        if divided := divided_along(p, self.degrees):
            dims = rule_of(p.name).axes
            cuts = [Shard(dims[axis]) for axis in AXES if axis in divided]
            part = empty(p.shape, dtype=p.dtype, device_mesh=self.cut[divided], placements=cuts)
        else:
            part = torch.empty(p.shape, dtype=p.dtype, device="cpu")
        return nn.Parameter(part, requires_grad=p.trainable)

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
                out[" × ".join(self.mesh.axes_of(groups[event.group]))] += event.nbytes
        return dict(+out)

    def told(self, program: Program) -> dict[str, int]:
        """Return the same as the plan says."""
        out: Counter[str] = Counter()
        for op, times in program.counted():
            if self.mesh and op.kind == "move":
                along = self.degrees.mesh.axes_of(op.over)
                out[" × ".join(along)] += times * round(op.nbytes)
        out["pp"] = program.micro_batches * self.handed * self.stage.crossings
        return dict(+out)


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
        if func.overloadpacket is torch.ops.aten.set_:  # of a storage
            return func(*args, **(kwargs or {}))
        return self.integers.call(func, args, kwargs or {})

    def twin(self) -> tuple[nn.Module, dict[str, Any]]:
        twin = twin_of(self.module).train()
        recompute(twin, self.checkpointing)
        self.batch = fake_batch(self.batch)
        return twin, {}


# -- stand-ins -------------------------------------------------------------------------------------
#
# A stand-in for a shape is a module with the same parameters:
#
#     ModelShape   (root) | embed | layer 0 | layer 1 | head
#     stand-in     one module per unit, in this order and as they lie in each other; parameters in their order
#     forward      x ─► reads all parameters ─► x    backward     reads them again, gives each a gradient
#
# With a stand-in the engine gathers, reduces and steps exactly what it would with the model. The
# stand-in itself computes nothing.


class _Read(torch.autograd.Function):
    """Returns x unchanged, but needs `parameters` in both passes."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, *parameters: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(*parameters)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        wanted = zip(ctx.saved_tensors, ctx.needs_input_grad[1:], strict=True)
        return grads[0], *(torch.zeros_like(p) if needed else None for p, needed in wanted)


class _Block(nn.Module):
    """A unit's parameters, with the units inside it as children.

    A unit around other units reads its first parameter (an embedding table) before them, and all
    its parameters (a last norm, a tied head) after them.
    """

    def __init__(self, own: Sequence[nn.Parameter]) -> None:
        super().__init__()
        for at, p in enumerate(own):
            self.register_parameter(f"own_{at}", p)
        self.names = [*self._parameters]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        own, inner = [getattr(self, name) for name in self.names], [*self.children()]
        if own and inner:
            x = _Read.apply(x, own[0])
        row = torch.zeros(1, dtype=torch.long, device="cpu")  # any row of an embedding would do
        for module in inner:
            looks_up = type(module) is nn.Embedding
            x = x + module(row).sum() if looks_up else module(x)
        return _Read.apply(x, *own) if own else x


def stand_in(units: Sequence[UnitShape], made: Callable[[Parameter], nn.Parameter]) -> nn.Module:
    """Make a module with the parameters of `units`, as `made` makes each. Units lie in each other as
    they do in the model, all of them in the first, which is returned.

    It takes a tensor [1] that requires no gradient, and returns a tensor [1].
    """
    placed: dict[str, nn.Module] = {}
    for unit in units:
        own = [made(p) for p in unit.parameters]
        module: nn.Module = _Block(own)
        if unit.looks_up_only and own:
            module = nn.Embedding(1, 1, device="meta")
            module.weight = own[0]
            module.forward = partial(_look_up, module)  # type: ignore[method-assign]
        around = unit.name
        while around and around not in placed:
            around = around.rpartition(".")[0]
        if placed:  # inside the innermost unit around it
            placed[around].add_module(unit.name.replace(".", "_"), module)
        placed[unit.name if placed else ""] = module
    return placed[""]


def _look_up(module: nn.Embedding, row: torch.Tensor) -> torch.Tensor:
    """Look rows up in this rank's part of the table, without a message."""
    own: Any = module.weight
    return F.embedding(row, own.to_local() if hasattr(own, "to_local") else own)


# -- a disk ----------------------------------------------------------------------------------------


class Disk:
    """NVMe without a disk: regions by the rules of the real store (offload/nvme.py), whose bytes are
    nowhere. Reads and writes are done at once.
    """

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def region(self, name: str, numel: int, dtype: torch.dtype) -> Region:
        return _Region(self, name, numel, dtype)

    def close(self) -> None:
        pass

    def allocate(self, name: str, nbytes: int) -> tuple[None, int]:
        return None, 0

    def start(self, *_: Any) -> Transfer:
        return Transfer()


class _Region(Region):
    """A region whose tensors have no memory, and so no addresses."""

    def fits(self, tensor: torch.Tensor) -> bool:
        return False

    def _memory(self, start: int, tensor: torch.Tensor) -> int:
        return -(-tensor.nbytes // PAGE) * PAGE


# -- the world of one rank -------------------------------------------------------------------------


@contextmanager
def nothing_real() -> Iterator[None]:
    """New tensors are fake, disks are nowhere, and steps in the backward pass run at once, inside the
    context.
    """
    at_once = mock.patch.object(offload_step, "ThreadPoolExecutor", _AtOnce)
    nowhere = mock.patch("onefold.offload.nvme.Nvme", Disk)
    any_room = mock.patch("onefold.sharding.preflight")
    with fake_tensors(), nowhere, any_room, at_once:
        yield


@contextmanager
def one_of(ranks: int, rank: int, per_node: int) -> Iterator[None]:
    """Make this process rank `rank` of a fake process group, and say what a launcher would say of the
    nodes, inside the context.
    """
    from torch.testing._internal.distributed.fake_pg import FakeStore

    said = {"LOCAL_WORLD_SIZE": str(min(per_node, ranks)), "WORLD_SIZE": str(ranks)}
    with mock.patch.dict(os.environ, said):
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
    from onefold.runtime.hooks import engine_of
    from onefold.sharding import shard

    engine = engine_of(shard(twin, recipe, device="cpu", **given))
    try:
        yield engine
    finally:
        engine.finalizer()
        gc.collect()


def optimizer_of(
    twin: nn.Module, optimizer: str, matrices: list[nn.Parameter]
) -> torch.optim.Optimizer:
    """Make the optimizer; if it takes matrices alone, together with that of the rest."""
    from onefold.optim.muon import MuonWithAdamW
    from onefold.optim.verdict import tell_verdict
    from onefold.runtime.stepper import GroupVerdict

    row, apart = SIMULATED[optimizer], {id(p) for p in matrices}
    plain, rest = (
        SIMULATED[row.rest or optimizer],
        [p for p in twin.parameters() if id(p) not in apart],
    )
    every = (
        {"params": rest, "fused": True, **plain.arguments},
        {"params": matrices, "use_muon": True},
    )
    groups = [group for group in every if group["params"]]
    made: torch.optim.Optimizer = (MuonWithAdamW if row.rest else plain.load())(groups, lr=1e-3)
    # Fake tensors have no values to try an update on
    updates = (row.update if "use_muon" in group else plain.update for group in groups)
    tell_verdict(made, list(map(GroupVerdict, updates)))
    return made


def steps_of(
    engine: Any, twin: nn.Module, passes: Callable[[], None], optimizer: torch.optim.Optimizer
) -> tuple[Recording, Account]:
    """Run optimizer steps, and return a recording of the last, and its account. `passes` runs the passes
    of one step.
    """

    def step() -> None:
        passes()
        engine.memory.now()  # a single rank has no hooks: this call counts its gradients
        optimizer.step()
        optimizer.zero_grad()

    # An optimizer's first step is an ordinary one with `step_in_backward` too, so that the step behind
    # it is not steady yet
    for _ in range(STEPS - 1 + engine.recipe.step_in_backward):
        step()
    with record(twin, optimizer) as recording:
        step()
    # Activations move as the model has them, which closed forms do not say
    recording.moves = [move for move in recording.moves if move.unit != ACTIVATIONS]
    return recording, replace(measured(twin, optimizer, recording), seconds={})


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
