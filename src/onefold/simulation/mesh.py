"""Run a step of the real engine as one rank of a mesh of several axes.

    shape of a stage ──► stand-in, its parameters cut by the plan's rules into DTensors over fake tensors
                              │
    fake process group ──► device mesh (pp, dp_replicate, dp, ep, cp, tp) ──► onefold.shard(mesh=, data=)
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

import contextlib
import os
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from onefold.comm.communicators import REPLICATE, mesh_of
from onefold.plan.degrees import AXES, DATA, Degrees, dims_of
from onefold.plan.program import Program
from onefold.plan.rank import (
    Stage,
    divided_along,
    holding,
    local_shape,
    rule_of,
    stages_of,
    units_of,
)
from onefold.plan.schema import Account
from onefold.plan.shapes import ModelShape
from onefold.plan.states import at_rest
from onefold.recipe import Recipe
from onefold.recipe.rows import FLAT
from onefold.runtime.state.checks import with_replicas
from onefold.simulation.refusals import check, check_mesh
from onefold.simulation.simulate import engine_on, one_of, optimizers_of, steps_of
from onefold.simulation.stand_in import stand_in
from onefold.tracing.fake import passing_as_real

_NAMES = ("pp", REPLICATE, *AXES)
_DATA = (REPLICATE, *DATA)


@dataclass(frozen=True)
class MeshSimulation:
    """The ledgers of one rank of a mesh, for one optimizer step in the steady state.

    Attributes:
        rank: the global rank. stage: of the pipeline, whose module it runs.
        account: bytes at rest, the engine's ledger at its peak, and bytes on the wire by move.
        predicted: the same by closed forms and replay.
        sent: bytes that the rank sends, by the axes along which the receivers lie ("dp × cp"): what
            the engine has sent, and along "pp" what torch's schedule has. `closed`: the same by
            closed forms.
        holders: how many ranks hold each part, by the axes along which they lie.
        seconds: wall-clock time of the simulation.
    """

    name: str
    degrees: Degrees
    replicas: int
    rank: int
    stage: int
    micro_batches: int
    account: Account
    predicted: Account
    sent: Mapping[str, int]
    closed: Mapping[str, int]
    holders: Mapping[str, int]
    seconds: float

    @property
    def exact(self) -> bool:
        """Whether the closed forms agree on bytes at rest, and on the wire by move and by axis, to
        the byte.
        """
        ours, told = self.account, self.predicted
        return (ours.rest, ours.wire, self.sent) == (told.rest, told.wire, self.closed)

    def to_json(self) -> dict[str, Any]:
        names = ("dp", "tp", "pp", "cp", "ep")
        return {
            "degrees": {name: getattr(self.degrees, name) for name in names},
            "replicas": self.replicas,
            "rank": self.rank,
            "stage": self.stage,
            "micro_batches": self.micro_batches,
            "account": self.account.to_json(),
            "predicted": self.predicted.to_json(),
            "sent": dict(self.sent),
            "closed": dict(self.closed),
            "holders": dict(self.holders),
            "exact": self.exact,
            "seconds": self.seconds,
        }


def simulate_mesh(
    model: ModelShape,
    recipe: Recipe,
    degrees: Degrees,
    *,
    rank: int = 0,
    replicas: int = 1,
    micro_batches: int = 1,
    micro_batch: int = 1,
    seq: int = 128,
    optimizer: str = "adamw",
    per_node: int | None = None,
) -> MeshSimulation:
    """Run two optimizer steps as one rank of a mesh, and report the ledgers of the second.

    Args:
        rank: the global rank: `pp` is the slowest axis, so it says the stage of the pipeline too.
        replicas: of the data-parallel ranks: state is divided inside each (hybrid sharding).
        micro_batch, seq: samples and tokens of a micro-batch; only what stages hand on depends on
            them.
        per_node: ranks of a node, as a launcher would say; None: all ranks.

    Raises:
        ValueError: an impossible argument, or what has no simulation.
        RuntimeError: a process group is already initialized.
    """
    check(recipe, degrees.ranks, rank, micro_batches, optimizer)
    check_mesh(recipe, degrees, replicas, micro_batches)
    begun = time.perf_counter()
    index, number = divmod(rank, degrees.ranks // degrees.pp)
    stage = stages_of(model, degrees)[index]
    if recipe.inner is None and per_node is None:
        recipe = recipe.replace(group=FLAT)
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.distributed.device_mesh import init_device_mesh

    dtype = _compute_dtype(model, recipe)
    first = index * (degrees.ranks // degrees.pp)
    with (
        torch.random.fork_rng(devices=[]),
        _nodes_of(per_node, degrees.ranks),
        one_of(degrees.ranks, rank),
    ):
        sizes = (
            degrees.pp,
            replicas,
            degrees.sizes["dp"] // replicas,
            *list(degrees.sizes.values())[1:],
        )
        root = init_device_mesh("cpu", sizes, mesh_dim_names=_NAMES)
        ours = mesh_of(root[_NAMES[1:]], _DATA)
        cut = {
            divided: root[tuple(a for a in AXES if a in divided)]
            for divided in {divided_along(p, degrees) for p in stage.parameters}
            if divided
        }
        # Meshes are read before: fake tensors have no values
        with passing_as_real(), FakeTensorMode(allow_non_fake_inputs=True):
            module, names = _cut_stand_in(stage, degrees, cut, number)
            counted, handed = _Sends(), _shape_of_input(model, degrees, micro_batch, seq)
            with (
                engine_on(module, recipe, mesh=ours, units=names) as engine,
                torch.enable_grad(),
                counted if degrees.pp > 1 else contextlib.nullcontext(),
            ):
                step = _step(module, stage, degrees, root, micro_batches, handed, dtype)
                account = steps_of(engine, step, optimizers_of(module, optimizer), counted.reset)
                along = {
                    g.name: _along(g.ranks, degrees, replicas, first)
                    for unit in engine.units
                    for flat in unit.flats
                    for g in (flat.group, flat.group.intra_group, flat.group.inter_group)
                }
                seen: Counter[str] = Counter()
                for event in engine.traffic.events:
                    if event.move in account.wire:
                        seen[along[event.group]] += event.nbytes
                if counted.nbytes:
                    seen["pp"] += counted.nbytes
                del module, step
    said = with_replicas(recipe, ours)
    if degrees.pp > 1 and said.stage in (2, 3):  # a unit is gathered once a step, and reduced once
        held = {"reshard_after_forward": False} if said.stage == 3 else {}
        said = said.replace(reduce_at="boundary", **held)
    units = units_of(stage, said, degrees, number, per_node)
    program = Program(units, said, held=degrees.pp > 1).run(micro_batches)
    closed: Counter[str] = Counter()
    for op, times in program.counted():
        if op.kind == "move":
            closed[_along(op.over, degrees, replicas, 0)] += times * round(op.nbytes)
    if degrees.pp > 1:  # a stage's outputs and gradients, but for the ends of the model
        nbytes = micro_batches * prod(handed) * dtype.itemsize
        closed["pp"] += nbytes * (2 - stage.first - stage.last)
    predicted = Account(rest=at_rest(units, optimizer), ledger=program.peak, wire=program.sent())
    kinds = {divided_along(p, degrees) for p in stage.parameters}
    holders = {_of_axes(_undivided(d, degrees)): len(holding(degrees, d)) for d in kinds}
    return MeshSimulation(
        model.name, degrees, replicas, rank, index, micro_batches, account, predicted, dict(seen), dict(closed), holders,
        time.perf_counter() - begun,
    )  # fmt: skip


# -- the module ------------------------------------------------------------------------------------


def _cut_stand_in(
    stage: Stage, degrees: Degrees, cut: Mapping[tuple[str, ...], Any], number: int
) -> tuple[nn.Module, tuple[str, ...]]:
    """Make a stand-in for a stage whose parameters are the parts of rank `number`, as DTensors where
    an axis divides them. Returns it and the names of its units.

    Args:
        cut: the device mesh of the axes that divide a parameter.
    """
    from torch.distributed.tensor import DTensor, Shard

    root, names = stand_in(ModelShape("stage", stage.units))
    for unit in stage.units:
        module = root if unit.name == "(root)" else root.get_submodule(unit.name)
        for own, p in zip(list(module._parameters), unit.parameters, strict=True):
            part = torch.empty(local_shape(p, degrees, number), dtype=p.torch_dtype, device="cpu")
            if divided := divided_along(p, degrees):
                mesh, dims = cut[divided], rule_of(p.name).axes
                part = DTensor.from_local(
                    part,
                    mesh,
                    [Shard(dims[axis]) for axis in mesh.mesh_dim_names],
                    run_check=False,
                    shape=torch.Size(p.shape),
                    stride=torch.empty(p.shape, device="meta").stride(),
                )
            module._parameters[own] = nn.Parameter(part, requires_grad=p.trainable)
        if isinstance(module, nn.Embedding):
            _look_up_own_rows(module)
    return root.train(), tuple(names)


def _look_up_own_rows(module: nn.Embedding) -> None:
    """Let an embedding look rows up in its own part of the table, without a message."""

    def forward(row: torch.Tensor) -> torch.Tensor:
        own: Any = module.weight
        return F.embedding(row, own.to_local() if hasattr(own, "to_local") else own)

    module.forward = forward  # type: ignore[method-assign,assignment]


def _shape_of_input(
    model: ModelShape, degrees: Degrees, micro_batch: int, seq: int
) -> tuple[int, ...]:
    """Return the shape of what stages hand on: a rank's tokens of a sample, and their width."""
    hidden = dims_of(model).hidden // (degrees.tp if degrees.sequence_divided else 1)
    return micro_batch, seq // degrees.cp, hidden


def _compute_dtype(model: ModelShape, recipe: Recipe) -> torch.dtype:
    own = next(p.torch_dtype for unit in model.units for p in unit.parameters)
    return recipe.parameters.dtype or own


# -- one step --------------------------------------------------------------------------------------


def _step(
    module: nn.Module,
    stage: Stage,
    degrees: Degrees,
    root: Any,
    micro_batches: int,
    shape: tuple[int, ...],
    dtype: torch.dtype,
) -> Callable[[], None]:
    """Return a function that runs the passes of one optimizer step."""
    from onefold.sharding import no_sync

    if degrees.pp > 1:
        return _scheduled(module, stage, degrees, root, micro_batches, shape, dtype)
    given = torch.empty(1, device="cpu")

    def step() -> None:
        for k in range(micro_batches):
            with no_sync(module) if k + 1 < micro_batches else contextlib.nullcontext():
                module(given).sum().backward()

    return step


def _scheduled(
    module: nn.Module,
    stage: Stage,
    degrees: Degrees,
    root: Any,
    micro_batches: int,
    shape: tuple[int, ...],
    dtype: torch.dtype,
) -> Callable[[], None]:
    """Return a function that runs torch's schedule as this rank's stage of the pipeline."""
    from torch.distributed.pipelining import Schedule1F1B, ScheduleGPipe
    from torch.distributed.pipelining.stage import InferenceMode

    from onefold.parallel import PipelineStage

    example = torch.empty(shape, dtype=dtype, device="cpu", requires_grad=True)
    grad = torch.empty(shape, dtype=dtype, device="cpu")
    here = PipelineStage(
        module,
        stage.index,
        degrees.pp,
        torch.device("cpu"),
        grad if stage.first else example,
        example,
        None if stage.last else grad,
        None if stage.first else grad,
        group=root.get_group("pp"),
    )
    kind = ScheduleGPipe if degrees.schedule == "gpipe" else Schedule1F1B
    schedule = kind(here, n_microbatches=micro_batches, loss_fn=lambda out, _: out.sum())

    # Stages vote whether each was given its shapes. No other stage is here: all of them were
    def told(stages: Any, *_: Any) -> None:
        for each in stages:
            each._inference_mode = InferenceMode.STATIC

    schedule._warmup_p2p = told  # type: ignore[method-assign,assignment]
    whole = torch.empty(micro_batches * shape[0], *shape[1:], dtype=dtype, device="cpu")

    given = [whole] if stage.first else []
    target = whole if stage.last else None

    def step() -> None:
        schedule.step(*given, target=target)

    return step


class _Sends(TorchDispatchMode):
    """Counts the bytes of sends to other stages."""

    def __init__(self) -> None:
        super().__init__()
        self.nbytes = 0

    def reset(self) -> None:
        self.nbytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.c10d.send.default:
            self.nbytes += sum(t.numel() * t.element_size() for t in args[0])
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def _nodes_of(per_node: int | None, ranks: int) -> Iterator[None]:
    """Say inside what a launcher would say of the nodes."""
    if per_node is None:
        yield
        return
    said = {"LOCAL_WORLD_SIZE": str(min(per_node, ranks)), "WORLD_SIZE": str(ranks)}
    with mock.patch.dict(os.environ, said):
        yield


# -- axes ------------------------------------------------------------------------------------------


def _of_axes(names: Sequence[str]) -> str:
    return " × ".join(names) or "nobody"


def _undivided(divided: Sequence[str], degrees: Degrees) -> list[str]:
    """Return the axes of several ranks along which the holders of a parameter lie."""
    return [name for name, size in degrees.sizes.items() if size > 1 and name not in divided]


def _along(ranks: Sequence[int], degrees: Degrees, replicas: int, first: int) -> str:
    """Return the axes along which some ranks of a stage lie, whose first rank is `first`."""
    each = degrees.sizes["dp"] // replicas
    seen: dict[str, set[int]] = {name: set() for name in (REPLICATE, *AXES)}
    for rank in ranks:
        at = degrees.coordinates_of(rank - first)
        seen[REPLICATE].add(at["dp"] // each)
        for name in AXES:
            seen[name].add(at[name] % each if name == "dp" else at[name])
    return _of_axes([name for name, places in seen.items() if len(places) > 1])
